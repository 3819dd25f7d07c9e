"""Analyses the text of a file: traces and lowers its kernels, and says in JSON what an editor shows.

Runs in a process of its own (worker.py).  Only kernel functions and the statements that they need are executed.  Dimensions
that nothing gives are assumed; an error that depends on an assumed value is reported only where all assumptions lead to one.
"""

from __future__ import annotations

import __future__
import ast
import inspect
import linecache
import re
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tilelang.errors import InternalError, TileLangError, TileLangWarning, _place_of
import tilelang
from tilelang.ir import FRAGMENT, GLOBAL, SHARED, Span, Alloc, Buffer, Const, For, Func, Launch, Parallel, to_text, walk
from tilelang.ir.record import record
from tilelang.jit.artifact import program_of
from tilelang.jit.inspect import sources_of
from tilelang.jit.report import facts_of
from tilelang.layout import Fragment
from tilelang.target import Target, of_arch
from tilelang.transform.framework.observe import PassEvent, PassEventObserver, observing
from tilelang.transform.pipeline import lower

from tilelang.program import Program
from tilelang.program.graph import Graph, text_of
from tilelang.program.run import recipe_of

from .texts import Outline, consts_of, diagnostic, objects_of, outline, package_of, place_in, settings

ASSUMED = (128, 1024)  # values of dimensions that nothing gives: many are head dimensions
Found = dict[str, Any]
_SCOPES = {GLOBAL: "global memory", FRAGMENT: "registers (fragment)"}


class Late(BaseException):
    """Raised in an analysis that has used its time."""


@record
class Request:
    """path: of the file, which need not exist.  text: as it is in the editor."""

    path: str
    text: str


def check(request: Request, tell: Callable[[Found], None]) -> None:
    """Analyse a text.  tell is called with {"diagnostics": ...} when all kernels are traced, with these and {"functions": ...}
    when layouts of a kernel are known, and when all are lowered."""
    diagnostics: list[Found] = []
    functions: list[Found] = []
    traced: list[tuple[ast.FunctionDef, Found, Func | Graph]] = []
    try:
        tree = ast.parse(request.text, request.path)
    except (SyntaxError, ValueError) as e:
        line, column = getattr(e, "lineno", 1) or 1, max(0, (getattr(e, "offset", 1) or 1) - 1)
        found = diagnostic("syntax", getattr(e, "msg", str(e)), line, Span("", line, column, line, column + 1))
        tell({"diagnostics": [found], "functions": []})
        return
    about = outline(tree, request.text)
    names = _run(request, about, diagnostics)
    for node in about.kernels:
        if node.name in names:
            found, func = _traced(request, node, names[node.name], diagnostics)
            functions.append(found)
            if func is not None:
                traced.append((node, found, func))
    tell({"diagnostics": diagnostics})
    known = {"diagnostics": diagnostics, "functions": functions}
    for node, found, func in sorted(traced, key=lambda t: isinstance(t[2], Graph)):  # programs take longest
        errors: list[Found] = []
        if isinstance(func, Graph):
            _kernels(request, node, found, func, diagnostics)
            continue
        with _errors(request, found, errors):
            lowered(func, target_of(request, node), found, partial(tell, known))
        if found["assumed"] and "kernel" not in found:
            other, func2 = _traced(request, node, names[node.name], [], ASSUMED[1:])
            with _errors(request, other, []):
                if func2 is not None:
                    lowered(func2, target_of(request, node), other, lambda: None)
                    errors = []
                    found |= other
        diagnostics += errors
    tell(known)


def _run(request: Request, about: Outline, diagnostics: list[Found]) -> dict[str, Any]:
    """Execute the statements that kernels need, and return the module's names."""
    linecache.cache[request.path] = (len(request.text), None, request.text.splitlines(keepends=True), request.path)
    package, top = package_of(Path(request.path), about.needed)
    stem = Path(request.path).stem
    module = types.ModuleType(".".join(filter(None, (package, "" if package and stem == "__init__" else stem))))
    module.__file__, module.__package__ = request.path, package
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(top))
    later = any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in about.needed)
    flags = __future__.annotations.compiler_flag if later else 0
    # The code of a function depends on which names its module imports, and must be that of the whole text.
    imports = [n for n in about.needed if isinstance(n, (ast.Import, ast.ImportFrom))]
    unseen = [ast.copy_location(ast.If(ast.copy_location(ast.Constant(0), n), [n], []), n) for n in imports
              if getattr(n, "module", "") != "__future__"]
    for n in about.needed:
        with _errors(request, {"line": n.lineno}, diagnostics):
            exec(compile(ast.Module([*unseen, n], []), request.path, "exec", flags, dont_inherit=True), vars(module))
    return vars(module)


def target_of(request: Request, node: ast.FunctionDef) -> Target:
    """The GPU that a kernel is analysed for: of a comment `# tilelang: arch=sm_80`, else sm_90a."""
    return of_arch(str(settings(request.text, node).get("arch", "sm_90a")))


def _traced(request: Request, node: ast.FunctionDef, value: Any, diagnostics: list[Found],
            sizes: tuple[int, ...] = ASSUMED) -> tuple[Found, Any]:
    """(what is known of a kernel, its program or None).  Assumes values where nothing gives them.

    Of a whole-tensor program, its graph.
    """
    given = settings(request.text, node)
    found: Found = {"name": node.name, "line": node.lineno, "end": node.end_lineno, "buffers": [], "variables": []}
    if isinstance(value, Program):
        found["assumed"], graph = {}, None
        with _errors(request, found, diagnostics):
            graph = _graph(node, value, given)
            found["buffers"] = list(_tensors(graph, node, request.path))
        return found, graph
    for size in sizes:
        errors: list[Found] = []
        found["assumed"] = {}
        with _errors(request, found, errors):
            func = program(node, value, given, size, found["assumed"])
            found |= _facts(func, request.path)
            return found, func
        if not found["assumed"] or size == sizes[-1]:
            diagnostics += errors
            break
    return found, None


def program(node: ast.FunctionDef, value: Any, given: dict[str, Any], size: int, assumed: dict[str, Any]) -> Func:
    """The program of a kernel function.  assumed: receives the values that nothing gave.

    Raises LookupError for an argument whose value cannot be assumed.
    """
    if program_of(value) is not None:
        return getattr(value, "func", value)
    fn = inspect.unwrap(getattr(value, "func", value))
    lazy = not hasattr(value, "is_lazy_mode") or value._has_prim_func()
    wanted: dict[str, Any] = {}
    objects = objects_of(node)
    tensors = {n.target.id for n in ast.walk(node) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    for name, p in inspect.signature(fn).parameters.items():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) or not lazy and (name in tensors or p.annotation is not p.empty
                                                                        and p.annotation not in (int, "int")):
            continue
        if name in given:
            wanted[name] = _named(given[name], fn.__globals__) if name in objects else given[name]
        elif p.default is p.empty:
            if not lazy or p.annotation not in (int, "int", p.empty) or "dtype" in name or name in objects:
                raise LookupError(f"`{name}` of `{node.name}` has no value: write a default, or the comment "
                                  f"`# tilelang: {name}=...`")
            wanted[name] = assumed[name] = size
    for name in () if lazy else consts_of(node):
        if name not in given:
            assumed[name] = size
        wanted[name] = given.get(name, size)
    out = value.get_tir(**wanted) if hasattr(value, "get_tir") else value(**wanted)
    func = program_of(out)
    if func is None:
        raise LookupError(f"`{node.name}` returns {type(out).__name__}, not a program")
    return func


def _graph(node: ast.FunctionDef, value: Program, given: dict[str, Any]) -> Graph:
    """The graph of a whole-tensor program.  Raises LookupError for a parameter without a shape."""
    values: dict[str, Any] = {}
    for p in value.parameters:
        said = re.fullmatch(r"(\w+)\[([\dx]*)\]", str(given.get(p.name)))  # float32[64x128]
        if said and p.shape is None:
            values[p.name] = types.SimpleNamespace(shape=tuple(map(int, filter(None, said[2].split("x")))), dtype=said[1])
        elif p.name in given:
            values[p.name] = given[p.name]
        elif p.shape is None and value.signature.parameters[p.name].default is inspect.Parameter.empty:
            raise LookupError(f"`{p.name}` of `{node.name}` has no shape: annotate it by T.Tensor(shape, dtype), or write the "
                              f"comment `# tilelang: {p.name}=float32[64x128]`")
    return value.graph(**values)


def _tensors(graph: Graph, node: ast.FunctionDef, path: str) -> Iterator[Found]:
    """The parameters of a whole-tensor program, and the names that are given to results of operations."""
    places = {(s.line, s.col, s.end_line, s.end_col): n for n in graph.nodes if n.span is not None
              for s in n.span.chain() if s.file == path}
    for x in graph.inputs:
        yield {"name": x.attrs["name"], "line": node.lineno, "text": f"{text_of(x.shape)} {x.dtype}, given at the call"}
    for a in ast.walk(node):
        if isinstance(a, ast.Assign) and isinstance(a.targets[0], ast.Name):
            v = a.value
            if n := places.get((v.lineno, v.col_offset, v.end_lineno or 0, v.end_col_offset or 0)):
                yield {"name": a.targets[0].id, "line": a.lineno, "text": f"{text_of(n.shape)} {n.dtype}, a whole tensor"}


def _kernels(request: Request, node: ast.FunctionDef, found: Found, graph: Graph, diagnostics: list[Found]) -> None:
    """Adds the kernels of a whole-tensor program, where the time is enough to choose them."""
    target = target_of(request, node)
    try:
        with _errors(request, found, diagnostics):
            steps = recipe_of(graph, None, target).steps
            found |= {"kernel": [f"kernel {k}({', '.join(reads)}) gives {', '.join(gives)}" for k, reads, gives in steps],
                      "target": str(target)}
    except Late:
        pass


def _named(value: Any, names: dict[str, Any]) -> Any:
    """The function or object that the text of a setting names: T.exp; the value itself where it names none."""
    try:
        return eval(value, names) if isinstance(value, str) else value
    except (NameError, AttributeError, SyntaxError):
        return value


def lowered(func: Func, target: Target, found: Found, tell: Callable[[], None]) -> None:
    """Adds layouts, stages and resources of a program.  tell: called when layouts are known; proofs may take longer."""
    class Layouts(PassEventObserver):
        def on_pass(self, event: PassEvent) -> None:
            if event.name == "infer_layouts":
                launches = [n for n in walk(event.after.body) if isinstance(n, Launch)]
                found["stages"] = {k: n for x in launches for k, n in x.plan.stages}
                found["layouts"] = {b.name: _layout(b, x, found["stages"].get(b.name, 1))
                                    for n in launches for b, x in n.plan.layouts}
                tell()

    with observing(Layouts()):
        out = lower(func, target)
    found |= {"kernel": [_kernel(f) for f in facts_of(out, func, target)], "target": str(target)}


def _layout(b: Buffer, x: Any, stages: int) -> Found:
    if isinstance(x, Fragment):
        registers = -(-x.registers * b.dtype.bits // 32)
        return {"short": f"{registers} registers a thread", "text": f"{registers} registers a thread, {x!r}"}
    size = -(-int(x.size) * b.dtype.bits // 8) if isinstance(x.size, int) else 0
    swizzle = ", swizzled" if getattr(x, "swizzle", None) is not None else ""
    many = f"{stages} stages, " if stages > 1 else ""
    return {"short": f"{many}{size} bytes{swizzle}", "text": f"{many}{size} bytes of shared memory, {x!r}"}


def _kernel(f: Found) -> str:
    mma = ", ".join(f["instructions"].get("MMAs", {}))
    return f"{f['threads']} threads, {f['shared_bytes'] or 0} bytes of shared memory" + (f", {mma}" if mma else "") + (
        f"; {f['schedule']}" if f["schedule"] else "")


def _facts(func: Func, path: str) -> Found:
    """Buffers and variables of a program, with the lines of their definitions."""
    buffers = [_buffer(b, None, path) for _, b in func.buffers]
    buffers += [_buffer(n.buffer, n.span, path) for n in walk(func.body, Alloc)]
    variables = []
    for n in walk(func.body):
        if isinstance(n, Launch):
            variables += [_variable(v, n, g, "block index", path) for v, g in zip(n.block_vars, n.grid)]
        elif isinstance(n, For):
            variables.append(_variable(n.var, n, n.extent, f"{n.kind} loop", path))
        elif isinstance(n, Parallel):
            variables += [_variable(v, n, e, "parallel loop", path) for v, e in zip(n.vars, n.extents)]
    return {"buffers": buffers, "variables": variables}


def _buffer(b: Buffer, span: Any, path: str) -> Found:
    shape = ", ".join(str(d.value) if isinstance(d, Const) else str(d) for d in b.shape)
    scope = "shared memory" if b.scope() in SHARED else _SCOPES.get(b.scope(), b.scope())
    line = span.line if span is not None and span.file == path else 0
    return {"name": b.name, "line": line, "text": f"({shape}) {b.dtype} in {scope}"}


def _variable(v: Any, n: Any, extent: Any, what: str, path: str) -> Found:
    line = n.span.line if n.span is not None and n.span.file == path else 0
    most = extent.value if isinstance(extent, Const) else extent
    return {"name": v.name, "line": line, "kind": getattr(n, "kind", ""), "text": f"{v.dtype}, {what} of {most} steps"
            if what != "block index" else f"{v.dtype}, {what} below {most}"}


def _assumed(values: Found) -> str:
    return f"with {', '.join(f'{k}={v}' for k, v in values.items())} assumed"


# ---- diagnostics ----------------------------------------------------------------------------------------------------
class _errors:
    """Errors and warnings inside become diagnostics.  found: what is analysed; its line stands for places elsewhere."""

    def __init__(self, request: Request, found: Found, into: list[Found]) -> None:
        self.request, self.found, self.into = request, found, into
        self.caught = warnings.catch_warnings(record=True)

    def __enter__(self) -> None:
        self.given = self.caught.__enter__()
        warnings.simplefilter("always", TileLangWarning)

    def __exit__(self, kind: Any, e: BaseException | None, trace: Any) -> bool:
        self.caught.__exit__(kind, e, trace)
        for w in self.given or ():
            if isinstance(w.message, TileLangWarning) and w.filename == self.request.path:
                self.into.append(diagnostic(w.message.code, str(w.message).partition(": ")[2], w.lineno, severity=2))
        if isinstance(e, Exception):
            self.into.append(self._of(e))
        return isinstance(e, Exception)

    def _of(self, e: Exception) -> Found:
        """The diagnostic of an error: at its place in this file, else at the call that led to it, else at the function."""
        line, about = self.found["line"], self.found.get("assumed")
        note = f"\n{_assumed(about)}; the comment `# tilelang: NAME=VALUE` gives others" if about else ""
        if isinstance(e, TileLangError):
            text = "\n".join([e.message, *(f"{k}: {v}" for k, v in (
                ("expected", e.expected), ("found", e.found), ("hint", e.hint)) if v)]) + note
            places = e.span.chain() if hasattr(e.span, "chain") else [e.span or e.call and _place_of(e.call)]
            own = [p for p in places if p is not None and p.file == self.request.path]
            related = [(p, label) for p, label in e.notes if p is not None and p.file == self.request.path]
            return diagnostic(e.kind, text, line, own[0] if own else None, related=[
                {**place_in(p.line, p), "text": label} for p, label in related])
        if isinstance(e, LookupError) and not isinstance(e, (KeyError, IndexError)):
            return diagnostic("not-analysed", str(e), line, severity=3)
        if isinstance(e, InternalError):
            return diagnostic("compiler", f"{str(e).splitlines()[0]}{note}", line)
        own_frames = [f for f in traceback.extract_tb(e.__traceback__) if f.filename == self.request.path]
        return diagnostic("python", f"{type(e).__name__}: {e}{note}", own_frames[-1].lineno or line if own_frames else line)


# ---- pages ----------------------------------------------------------------------------------------------------------
def page(request: Request, function: str, what: str) -> str:
    """Text of a page: what is "tile" (the tile program), "source" (the generated code) or "report"."""
    about = outline(ast.parse(request.text, request.path), request.text)
    diagnostics: list[Found] = []
    names = _run(request, about, diagnostics)
    node = next((n for n in about.kernels if n.name == function and n.name in names), None)
    if node is None:
        return "\n".join([f"{function} cannot be shown", *(d["text"] for d in diagnostics)])
    assumed: dict[str, Any] = {}
    target, given, value = target_of(request, node), settings(request.text, node), names[function]
    if isinstance(value, Program):
        recipe = recipe_of(_graph(node, value, given), None, target)
        if what == "tile":
            return recipe.source
        funcs = [f.func for f in recipe.functions()]
    else:
        funcs = [program(node, value, given, ASSUMED[0], assumed)]
    head = [f"{'//' if what == 'source' else '#'} {function} {_assumed(assumed)}"] if assumed else []
    shows: dict[str, Callable[[Func], str]] = {"tile": to_text, "source": lambda f: sources_of(f, target)[0],
                                               "report": lambda f: str(tilelang.compile(f, target=target).report())}
    return "\n".join([*head, *map(shows[what], funcs)])
