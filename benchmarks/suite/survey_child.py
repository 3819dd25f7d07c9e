"""One file of a surveyed package, in a process of its own (benchmarks/survey.py): run it and record what it compiles."""

from __future__ import annotations

import contextlib
import hashlib
import json
import runpy
import sys
import types
from pathlib import Path
from typing import Any

FILE, FOLDER, OUT = (Path(p) for p in sys.argv[1:4])
requests: list[dict[str, Any]] = []


def cause_of(e: BaseException) -> str:
    """An exception in one short line: its kind, and the first line of its text."""
    kind = getattr(e, "kind", None) or getattr(e, "code", None)
    lines = [line for line in str(e).splitlines() if line.strip()]
    first = next((line for line in lines if not line.startswith("  File")), "")
    return f"{type(e).__name__}{f'[{kind}]' if isinstance(kind, str) else ''}: {first.strip()[:160]}"


def record_requests() -> None:
    """Replace the one function that compiles by one that records, and calls of kernels by ones that compute shapes."""
    import tilelang.jit.kernel as kernels

    home: Any = kernels
    if not hasattr(kernels, "_compile_now"):  # older checkouts
        import tilelang.jit.compiling as home  # type: ignore[no-redef]
    compile_now, kernel_type = home._compile_now, kernels.JITKernel

    def recorded(request: Any, key: str | None) -> Any:
        row = {"name": request.func.name, "error": "",
               "program": hashlib.sha256(str(request.func).encode()).hexdigest()[:16]}
        requests.append(row)
        try:
            return compile_now(request, key)
        except Exception as e:
            row["error"] = cause_of(e)
            from tilelang.jit.artifact import Artifact

            return kernel_type(_request=request, _artifact=Artifact("cuda", "", "", {}, {"kernels": []}))

    home._compile_now = recorded
    kernel_type.__call__ = shapes_only
    import tilelang.profiler as profiler
    from tilelang.jit import profiling

    for name in ("assert_allclose", "manual_assert_close", "assert_consistent"):
        if hasattr(profiler.Profiler, name):
            setattr(profiler.Profiler, name, lambda self, *a, **k: None)
    profiler.Profiler.do_bench = lambda self, *a, **k: 1.0  # type: ignore[method-assign]
    profiler.do_bench = lambda *a, **k: 1.0
    profiling.device_of = lambda kernel: "cuda" if kernel.target.is_gpu else None


def shapes_only(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of a kernel: tensors of its results' shapes."""
    import torch

    sizes: dict[str, int] = {}
    for a, x in zip(self.signature.inputs, args):
        if isinstance(x, torch.Tensor) and hasattr(a, "buffer"):
            sizes.update((d.name, n) for d, n in zip(a.buffer.shape, x.shape) if hasattr(d, "name"))
        elif isinstance(x, int):
            sizes[a.name] = x
    out = [torch.empty([size_of(d, sizes) for d in a.buffer.shape], dtype=a.buffer.dtype.as_torch())
           for a in self.signature.outputs]
    return out[0] if len(out) == 1 else out or None


def size_of(e: Any, sizes: dict[str, int]) -> int:
    """A dimension of a result.  Expressions other than sums, products and quotients of sizes count as 1."""
    if isinstance(e, int):
        return e
    if hasattr(e, "a") and hasattr(e, "b"):
        a, b = size_of(e.a, sizes), size_of(e.b, sizes)
        known = {"add": a + b, "sub": a - b, "mul": a * b, "floordiv": a // (b or 1), "max": max(a, b), "min": min(a, b)}
        return known.get(e.op, 1)
    if hasattr(e, "name"):
        return sizes.get(e.name, 1)
    return size_of(e.value, sizes) if hasattr(e, "value") else 1


@contextlib.contextmanager
def fake_device() -> Any:
    """torch without a device that says it has one H200: fake tensors without contents, and the facts of that device."""
    import torch
    import torch._dynamo  # keeps a table of torch's functions, made before any is replaced
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    facts = types.SimpleNamespace(multi_processor_count=132, name="NVIDIA H200", major=9, minor=0, warp_size=32,
                                  total_memory=139 << 30, shared_memory_per_block_optin=232448, L2_cache_size=50 << 20,
                                  shared_memory_per_multiprocessor=233472, max_threads_per_multi_processor=2048)
    nothing = lambda *a, **k: None  # noqa: E731
    event = lambda *a, **k: types.SimpleNamespace(record=nothing, synchronize=nothing, elapsed_time=lambda e: 1.0)  # noqa: E731
    answers = {"is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0, "synchronize": nothing,
               "set_device": nothing, "get_device_capability": lambda *a: (9, 0), "get_device_name": lambda *a: facts.name,
               "get_device_properties": lambda *a: facts, "manual_seed": nothing, "manual_seed_all": nothing, "Event": event,
               "empty_cache": nothing, "init": nothing, "_lazy_init": nothing}
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.testing.assert_close = nothing
    torch.allclose = lambda *a, **k: True
    torch.equal = lambda *a, **k: True  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[method-assign]
    cuda = lambda x: str(x).startswith("cuda") if isinstance(x, (str, torch.device)) else False  # noqa: E731

    class OnCPU(torch.overrides.TorchFunctionMode):  # torch's own CPU build refuses views of fake CUDA tensors
        def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
                return True
            args = tuple("cpu" if cuda(x) else x for x in args)
            return func(*args, **{k: "cpu" if cuda(x) else x for k, x in (kwargs or {}).items() if k != "pin_memory"})

    with FakeTensorMode(allow_non_fake_inputs=True), OnCPU():
        yield


def run() -> None:
    """Run the file: tests under pytest, members of a package as modules, others as scripts."""
    if FILE.name.startswith("test_"):
        import pytest

        class Found:
            problems: list[str] = []

            def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
                self.problems.append(cause_of(call.excinfo.value))

        pytest.main([str(FILE), "-q", "-p", "no:cacheprovider", "-p", "no:xdist"], plugins=[Found()])
        if Found.problems:
            raise RuntimeError("; ".join(dict.fromkeys(Found.problems)))
    elif (FILE.parent / "__init__.py").exists():
        top = FOLDER.parent if (FOLDER / "__init__.py").exists() else FOLDER
        runpy.run_module(".".join(FILE.relative_to(top).with_suffix("").parts), run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(FILE.parent))
        sys.argv = [str(FILE)]
        runpy.run_path(str(FILE), run_name="__main__")


stopped = ""
try:
    with fake_device():
        record_requests()
        run()
except SystemExit as end:
    stopped = f"SystemExit: {end.code}" if end.code else ""
except BaseException as e:
    stopped = cause_of(e)
OUT.write_text(json.dumps({"requests": requests, "stopped": stopped}))
