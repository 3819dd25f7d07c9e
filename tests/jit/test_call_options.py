"""Options of compile, profilers, targets and layouts that are of another kind are refused by name, not taken for something."""

import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError


@T.prim_func
def clear(A: T.Tensor((8,), "float32")):
    with T.Kernel(1, threads=8):
        T.clear(A)


REFUSED = {
    "verbose as a text": ("compile-option", lambda: tilelang.compile(clear, target="cpu", verbose="loud")),
    "flags that are numbers": ("compile-option", lambda: tilelang.compile(clear, target="cpu", compile_flags=[3])),
    "flags that are a dict": ("compile-option", lambda: tilelang.compile(clear, target="cpu", compile_flags={})),
    "no workers": ("compile-option", lambda: tilelang.par_compile([clear], target="cpu", num_workers=0)),
    "workers that are a text": ("compile-option", lambda: tilelang.par_compile([clear], target="cpu", num_workers="x")),
    "an option no target has": ("target-unknown", lambda: tilelang.compile(clear, target={"kind": "cuda", "zz": 1})),
    "a supply that is a number": ("profiler-supply", lambda: tilelang.compile(clear, target="cpu").get_profiler(3)),
    "a symbol that is a number": ("symbol-name", lambda: T.dynamic(3)),
    "a symbol of a float type": ("symbol-name", lambda: T.dynamic("m", "float32")),
    "a symbol of 8 bits": ("symbol-name", lambda: T.dynamic("m", "int8")),
    "a layout of a text": ("layout-invalid", lambda: T.Layout("x", lambda i: i)),
    "a layout by no function": ("layout-invalid", lambda: T.Layout((4,), 3)),
    "a layout by a function of fewer indices": ("layout-invalid", lambda: T.Layout((4, 4), lambda i: i)),
    "a layout to nowhere": ("layout-invalid", lambda: T.Layout((4,), lambda i: None)),
    "a fragment of threads only": ("layout-invalid", lambda: T.Fragment((8,), forward_fn=lambda i: i)),
    "a fragment without copies": ("layout-invalid", lambda: T.Fragment((8,), forward_thread_fn=lambda i: i, replicate=0)),
    "a fragment by a function of more indices": ("layout-invalid", lambda: T.Fragment((8,), forward_fn=lambda i, j: (i, j))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_of_another_kind_is_refused(name):
    kind, act = REFUSED[name]
    with pytest.raises(TileLangError) as e:
        act()
    shown = str(e.value)
    assert e.value.kind == kind and "^" in shown and __file__ in shown, shown
    assert e.value.expected and e.value.found and e.value.hint, shown


def test_hooks_of_generated_source_are_found_without_an_import_of_their_module():
    import subprocess
    import sys

    code = "import tilelang; print(tilelang.engine.callback.register_cuda_postproc_callback.__name__)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "decorate", out.stderr
