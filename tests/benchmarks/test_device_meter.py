"""The parts of the harness that speak to a GPU, against stand-ins of torch.cuda and of the management library."""

import contextlib
import math
import sys
import types

import pytest
import torch
from suite import measuring, problems, provider_fa3
from suite.measuring import CudaMeter, Nvml
from suite.provider_torch import CuBlas, Sdpa
from suite.providers import Skip
from suite.workloads import TINY, Attention, Gemm


class Clock:
    """Device time: every call of `work` takes `each` milliseconds."""

    def __init__(self, each):
        self.now, self.each, self.calls = 0.0, each, 0

    def work(self):
        self.calls += 1
        self.now += self.each


@pytest.fixture
def device(monkeypatch):
    clock = Clock(0.5)
    recorded = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock.now

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.at - self.at

    class Graph:
        def replay(self):
            for _ in range(len(recorded)):
                clock.work()

    @contextlib.contextmanager
    def capture(graph):
        before = clock.calls
        yield
        recorded[:] = [None] * (clock.calls - before)

    stream = types.SimpleNamespace(wait_stream=lambda other: None, cuda_stream=1)
    for name, value in dict(Event=Event, CUDAGraph=Graph, graph=capture, Stream=lambda: stream, synchronize=lambda: None,
                            current_stream=lambda: stream, stream=lambda s: contextlib.nullcontext(),
                            current_device=lambda: 0).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(measuring, "Nvml", lambda index: types.SimpleNamespace(clock_mhz=lambda: 1755.0, power_w=lambda: 689.5))
    return clock


def test_long_calls_are_timed_on_the_stream(device):
    meter = CudaMeter(0.0)
    prepared = meter.prepare(device.work)
    assert (prepared.how, prepared.calls) == ("stream", 1) and prepared.each_ms == pytest.approx(0.5)
    window = meter.window(prepared, 12.0)
    assert window.calls == 24 and window.ms == pytest.approx(0.5) and (window.clock_mhz, window.power_w) == (1755.0, 689.5)


def test_short_calls_are_replayed_from_a_graph(device):
    device.each = 0.01
    meter = CudaMeter(0.0)
    prepared = meter.prepare(device.work)
    assert prepared.keep[1] == device.work  # what the call writes to lives as long as the graph that writes there
    assert (prepared.how, prepared.calls) == ("graph", 100) and prepared.each_ms == pytest.approx(0.01)
    window = meter.window(prepared, 12.0)
    assert window.calls == 1200 and window.ms == pytest.approx(0.01)


def test_a_longer_call_is_replayed_from_a_graph_where_that_is_asked(device):
    """A row of forms.py timed one call from a stream and its peer from a graph: launches were part of the ratio."""
    prepared = CudaMeter(0.0).prepare(device.work, math.inf)
    assert (prepared.how, prepared.calls) == ("graph", 2) and prepared.each_ms == pytest.approx(0.5)


def test_what_cannot_be_captured_stays_on_the_stream(device, monkeypatch):
    device.each = 0.01

    def refuse(graph):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    assert CudaMeter(0.0).prepare(device.work).how.startswith("stream (no graph: operation not permitted")


def test_sensors_are_read_through_the_management_library(monkeypatch):
    class Library:
        def nvmlInit_v2(self):
            return 0

        def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
            return 0

        def nvmlDeviceGetClockInfo(self, handle, kind, value):
            value._obj.value = 1980
            return 0

        def nvmlDeviceGetFieldValues(self, handle, count, field):
            assert (count, field._obj.id) == (1, 186)
            field._obj.value = 412_500
            return 0

    monkeypatch.setattr(measuring.ctypes, "CDLL", lambda name: Library())
    sensors = Nvml()
    assert (sensors.clock_mhz(), sensors.power_w()) == (1980.0, 412.5)
    Library.nvmlDeviceGetFieldValues = lambda self, handle, count, field: 3

    def usage(self, handle, value):
        value._obj.value = 100_000
        return 0

    Library.nvmlDeviceGetPowerUsage = usage
    assert sensors.power_w() == 100.0


@pytest.mark.parametrize("name", ["tiny-nt-f16", "tiny-nn-bf16", "tiny-fp8-tensor"])
def test_calls_of_the_vendor_library(name):
    """torch's CPU kernels take the same arguments."""
    problem = problems.make(TINY[name], "cpu")
    for label in CuBlas().labels(TINY[name]):
        assert problem.check(CuBlas().candidate(problem, label).call()).ok


def test_blockwise_scales_lie_as_the_vendor_library_wants_them(monkeypatch):
    w = Gemm("w", (), 64, 256, 512, True, "float8_e4m3fn", "bfloat16", "block")
    seen = {}
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **options: seen.update(options, a=a, b=b))
    CuBlas().candidate(problems.make(w, "cpu"), "_scaled_mm by block").call()
    assert seen["scale_a"].shape == (64, 4) and seen["scale_a"].stride() == (1, 64)
    assert seen["scale_b"].shape == (4, 2) and seen["scale_b"].stride() == (1, 4)
    assert seen["b"].shape == (512, 256) and not seen["use_fast_accum"]


def test_calls_of_attention():
    w = Attention("w", (), 2, 4, 96, 32, True, kv_heads=2)
    problem = problems.make(w, "cpu")
    with pytest.raises(Skip):
        Sdpa("MATH").labels(TINY["tiny-nt-f16"])
    assert problem.check(Sdpa("MATH").candidate(problem, "MATH").call()).ok


def test_flash_attention_3_takes_heads_behind_sequences(monkeypatch):
    w = Attention("w", (), 2, 4, 96, 32, True, dtype="bfloat16")
    problem = problems.make(w, "cpu")

    def attend(q, k, v, causal):
        assert q.shape == (2, 96, 4, 32) and q.stride(-1) == 1
        out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
        return out.transpose(1, 2), None

    build = {"build_flags": {"FLASHATTENTION_DISABLE_FP16": True}}
    monkeypatch.setattr(provider_fa3, "_package", lambda: "fa3_fwd_interface")
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", types.SimpleNamespace(flash_attn_func=attend))
    monkeypatch.setitem(sys.modules, "fa3_fwd_config", types.SimpleNamespace(CONFIG=build))
    provider = provider_fa3.provider()
    assert provider.labels(w) == ("fa3_fwd_interface",)
    with pytest.raises(Skip, match="built without float16"):
        provider.labels(TINY["tiny-fa"])
    assert problem.check(provider.candidate(problem, "fa3_fwd_interface").call()).ok
