"""`from tilelang import tvm`: the few names of another compiler's package that programs written for it use.

DataType, IRModule and error classes are ours under those names; the submodules (target, transform, tirx, ir, ...) stand in
`table.py`.  There is no pass infrastructure behind these names.  Where no package `tvm` is installed, `import tvm` gives
the same modules (`finder.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilelang import ir as _ir
from tilelang.ir.equal import alpha_equal
from tilelang.jit.artifact import program_of
from tilelang.jit.hooks import register_hook
from tilelang.language.tracing.state import error
from tilelang.transform import get_pass_context

DataType = _ir.dtype
TVMError = RuntimeError


class IRModule:
    """Named programs."""

    def __init__(self, functions: Mapping[str, Any] | None = None) -> None:
        self.functions = dict(functions or {})

    @classmethod
    def from_expr(cls, func: Any) -> IRModule:
        """A module that holds one program."""
        return cls({getattr(func, "name", "main"): func})

    def __getitem__(self, name: str) -> Any:
        return self.functions[name]

    def __str__(self) -> str:
        return "\n\n".join(str(f) for f in self.functions.values())


def assert_structural_equal(a: Any, b: Any, map_free_vars: bool = False) -> None:
    """Raises AssertionError when two programs, statements, expressions or modules differ in more than names of variables.

    Modules are equal when the same names hold equal programs.
    """
    if isinstance(a, IRModule) and isinstance(b, IRModule):
        if a.functions.keys() != b.functions.keys():
            raise AssertionError(f"the modules hold {sorted(a.functions)} and {sorted(b.functions)}")
        for name in a.functions:
            assert_structural_equal(a.functions[name], b.functions[name], map_free_vars)
        return
    x, y = (program_of(v) or v for v in (a, b))
    if not alpha_equal(x, y):
        raise AssertionError(f"the programs differ:\n{_ir.to_text(x)}\n---\n{_ir.to_text(y)}")


def enabled(name: str) -> bool:
    """Whether a target kind exists here."""
    return name in ("llvm", "cuda", "c", "cpu")


def prim_func_pass(pass_func: Any = None, opt_level: int = 0, name: str | None = None, **_: Any) -> Any:
    """Decorator of a function of (program, module, context) that returns a program: it becomes one of modules."""
    def decorate(fn: Any) -> Any:
        def run(mod: IRModule) -> IRModule:
            return IRModule({n: fn(f, mod, get_pass_context()) for n, f in mod.functions.items()})

        return run

    return decorate if pass_func is None else decorate(pass_func)


def register_func(func_name: str, f: Any = None, override: bool = False) -> Any:
    """Registers, or is the decorator of, the hooks that edit the source of kernels: "tilelang_callback_cuda_postproc"."""
    kind = {f"tilelang_callback_{k}_postproc": k for k in ("c", "cuda", "hip")}.get(func_name)
    if kind is None:
        raise error("not-available", f"nothing here calls a function by the name ‹{func_name!r}›")
    return (lambda fn: register_hook(kind, fn, override)) if f is None else register_hook(kind, f, override)


__version__ = "0"
__all__ = ["DataType", "IRModule", "TVMError", "assert_structural_equal", "enabled", "register_func"]
