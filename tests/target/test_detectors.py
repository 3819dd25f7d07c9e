"""What "auto" asks, and spellings of targets that users add."""

import pytest

from tilelang.backend import target as T
from tilelang.target import Target


@pytest.fixture
def mine():
    yield "mine"
    T.unregister_target_detector("mine")
    T.unregister_target_normalizer("mine")


@pytest.mark.spec("R11:detectors")
def test_detectors_are_asked_by_priority_then_in_order(mine, monkeypatch):
    monkeypatch.setattr("tilelang.target.target.device_capability", lambda: None)
    assert T.list_target_detectors() == ["cuda", "hip", "cpu"] and T.auto_detect_target() == Target("cpu")
    found = []

    @T.register_target_detector("mine", priority=1)
    def detect():
        return found[0] if found else None

    assert T.list_target_detectors() == ["mine", "cuda", "hip", "cpu"] and T.determine_target() == "cpu"
    found.append({"kind": "cuda", "arch": "sm_90"})
    assert T.auto_detect_target().arch == "sm_90" and T.determine_target("auto") == {"kind": "cuda", "arch": "sm_90"}
    assert T.determine_target("auto", return_object=True) == Target({"kind": "cuda", "arch": "sm_90"})
    with Target("cpu"):
        assert T.auto_detect_target().is_cpu  # the current scope comes first
    with pytest.raises(ValueError, match="registered already"):
        T.register_target_detector("mine", detect)
    T.register_target_detector("mine", lambda: "llvm", priority=1, override=True)
    assert str(T.auto_detect_target().kind) == "llvm"
    T.register_target_detector("mine", lambda: "llvm", priority=-1, override=True)
    assert T.list_target_detectors() == ["cuda", "hip", "mine", "cpu"]
    T.register_target_detector("mine", lambda: "auto", priority=1, override=True)
    with pytest.raises(ValueError, match='answers "auto"'):
        Target("auto")
    for bad in ((3, detect), ("mine2", 4), ("", detect)):
        with pytest.raises(TypeError):
            T.register_target_detector(*bad)
    T.unregister_target_detector("mine")
    T.unregister_target_detector("mine")
    assert T.list_target_detectors() == ["cuda", "hip", "cpu"]


@pytest.mark.spec("R11:detectors")
def test_without_a_machine_auto_names_who_was_asked(monkeypatch):
    from tilelang.target import detect

    monkeypatch.setattr(detect, "_detectors", {k: v for k, v in detect._detectors.items() if k == "cuda"})
    monkeypatch.setattr("tilelang.target.target.device_capability", lambda: None)
    with pytest.raises(ValueError, match="No registered target detector found an available target; asked: cuda"):
        Target("auto")


@pytest.mark.spec("R11:detectors")
def test_normalizers_read_spellings_of_their_own(mine):
    with pytest.raises(AssertionError, match="Target h100 is not supported"):
        Target("h100")
    seen = []

    @T.register_target_normalizer("mine")
    def read(spec):
        seen.append(spec)
        name = spec["kind"] if isinstance(spec, dict) else spec
        return {"kind": "cuda", "arch": "sm_90a"} if name == "h100" else "h200" if name == "gpu" else None

    assert Target("h100") == Target({"kind": "h100"}) == Target({"kind": "cuda", "arch": "sm_90a"})
    assert T.determine_target("h100", return_object=True).has_wgmma and T.list_target_normalizers() == ["mine"]
    seen.clear()
    Target("cuda"), Target("cpu"), Target({"kind": "cuda", "arch": "sm_80"})
    assert seen == []  # what the package knows is not asked for
    with pytest.raises(AssertionError, match="'h200', which a normalizer made of 'gpu'"):
        Target("gpu")
    with pytest.raises(AssertionError, match="Target other is not supported"):
        Target("other")


@pytest.mark.spec("R11:backends")
def test_backends_as_objects():
    from tilelang import backend

    assert {"tvm_ffi", "cython", "nvrtc", "simulator", "tile"} <= set(backend.list_backends())
    assert backend.get_backend("cython").targets == ("cuda", "hip", "cpu") and backend.get_backend("nvrtc").targets == ("cuda",)
    context = backend.create_backend_context("cpu", None, "auto")
    assert context.target == Target("cpu") and context.backend == backend.get_backend("tvm_ffi")
    with pytest.raises(ValueError, match="Invalid execution backend 'x'.*Allowed: .*tvm_ffi.*Tip"):
        backend.get_backend("x")
    with pytest.raises(ValueError, match="Invalid execution backend 'nvrtc' for target 'cpu'"):
        backend.create_backend_context("cpu", backend="nvrtc")
    with pytest.raises(NotImplementedError, match="not available"):
        backend.register_backend(object())
