"""`from tilelang import tvm`: the few names of another compiler's package that programs written for it use.

Target, DataType, PassContext(config=…), IRModule, error classes and expression classes are ours under those names.
There is no pass infrastructure behind these names.  `import tvm` by itself finds none of them: libraries that look whether
such a package is installed must not find one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from tilelang import errors, language
from tilelang import ir as _ir
from tilelang.ir.equal import alpha_equal
from tilelang.jit.artifact import program_of
from tilelang.target import Target
from tilelang.transform import PassContext, get_pass_context

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


def post_order_visit(node: Any, fn: Callable[[Any], None]) -> None:
    """Call fn on every node, children first."""
    root = program_of(node)
    start = root.body if root is not None else node

    def visit(n: Any) -> None:
        for c in _ir.children(n):
            visit(c)
        fn(n)

    visit(start)


def decl_buffer(shape: Any, dtype: Any = "float32", name: str = "buffer", scope: str = "global",
                **_: Any) -> _ir.Buffer:
    """A buffer by itself."""
    return _ir.Buffer(name, tuple(shape), _ir.dtype(dtype), scope)


def enabled(name: str) -> bool:
    """Whether a target kind exists here."""
    return name in ("llvm", "cuda", "c", "cpu")


target = SimpleNamespace(Target=Target)
transform = SimpleNamespace(PassContext=PassContext, get_pass_context=get_pass_context)
error = SimpleNamespace(InternalError=errors.InternalError, TVMError=TVMError)
runtime = SimpleNamespace(enabled=enabled, DataType=DataType)
tirx = SimpleNamespace(
    Var=_ir.Var, Buffer=_ir.Buffer, PrimFunc=_ir.Func, Call=_ir.Call, For=_ir.For, BufferStore=_ir.Store,
    BufferLoad=_ir.Load, StringImm=_ir.StringConst, Cast=_ir.Cast, Select=_ir.Select, PrimExpr=_ir.Expr,
    IntImm=lambda dt, v: _ir.const(v, dt), FloatImm=lambda dt, v: _ir.const(v, dt), decl_buffer=decl_buffer,
    stmt_functor=SimpleNamespace(post_order_visit=post_order_visit))
tir = tirx
ir = SimpleNamespace(assert_structural_equal=assert_structural_equal, IRModule=IRModule, PrimExpr=_ir.Expr)
__version__ = "0"


def __getattr__(name: str) -> Any:
    if name == "testing":
        from tilelang import testing  # 2 ms

        return testing
    if name == "script":
        return SimpleNamespace(tirx=language, tir=language, ir=ir)
    raise AttributeError(f"the tvm names of tilelang have no {name!r}")
