"""Printing of device programs in C-like languages: expressions with precedence, statements, names.

A code generator prints; it does not plan, allocate or optimise.  A backend subclasses CLikePrinter and gives type
names, literals, memory access and calls.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tilelang.arith import Analyzer, extent_bounds, is_large
from tilelang.arith.width import widened
from tilelang.errors import InternalError, error, register
from tilelang.ir import (
    COMPARISONS,
    I32,
    I64,
    Alloc,
    Assert,
    Binary,
    Bind,
    Break,
    Broadcast,
    Buffer,
    Call,
    Cast,
    Const,
    Continue,
    Evaluate,
    Expr,
    For,
    If,
    Load,
    Node,
    Ramp,
    Select,
    Seq,
    Shuffle,
    Span,
    Stmt,
    Store,
    StringConst,
    Unary,
    Var,
    While,
    binary,
    cast,
    const,
    dtype,
    walk,
)
from tilelang.target import INTRINSICS
from tilelang.target.intrinsics import PURE, READS

register("codegen-unsupported", NotImplementedError, "the target's code generator has no form for this construct yet",
         expected="a construct that the target's code generator has a form for")

_OWN_FUNCTION = "write it another way, or call a function of your own through T.import_source and T.call_extern"
# C precedence; a higher number binds tighter.
ATOM, POSTFIX, PREFIX, MUL, ADD, SHIFT, REL, EQ, BAND, BXOR, BOR, LAND, LOR, COND = range(16, 2, -1)
_BINARY = {"add": ("+", ADD), "sub": ("-", ADD), "mul": ("*", MUL), "div": ("/", MUL), "truncdiv": ("/", MUL),
           "truncmod": ("%", MUL), "shl": ("<<", SHIFT), "shr": (">>", SHIFT), "bitand": ("&", BAND),
           "bitxor": ("^", BXOR), "bitor": ("|", BOR), "lt": ("<", REL), "le": ("<=", REL), "gt": (">", REL),
           "ge": (">=", REL), "eq": ("==", EQ), "ne": ("!=", EQ), "and": ("&&", LAND), "or": ("||", LOR)}
_PLAIN = ATOM, POSTFIX, PREFIX, MUL, ADD  # levels that need no parentheses for the reader's sake under << & ^ |

Text = tuple[str, int]  # source text and its precedence


MOST_COPIES = 512  # of a body in the code: what has more elements a thread is in no registers, and compilers choke on it


def _copies(s: Stmt | None) -> int:
    """How often the innermost statements of s stand in the code when the loops in it are unrolled."""
    if isinstance(s, Seq):
        return max(map(_copies, s.stmts), default=1)
    if isinstance(s, If):
        return max(_copies(s.then), _copies(s.orelse))
    if not isinstance(s, For):
        return 1
    unrolled = s.kind in ("unroll", "vectorized") and isinstance(s.extent, Const)
    return _copies(s.body) * (int(s.extent.value) if unrolled else 1)  # type: ignore[attr-defined]


def _only_loads(s: Stmt) -> bool:
    """Whether a loop asks for tiles and waits for room, as a warp with few registers does: copies of it would spill."""
    ops = {n.op for n in walk(s, Call)}
    return "tma_load" in ops and "mbarrier_wait" in ops and not ops & {"wgmma", "wgmma_wait"}


class Namer:
    """Distinct identifiers that a C compiler takes, close to the user's names and stable between runs."""

    def __init__(self, reserved: Iterable[str]) -> None:
        self.used = set(reserved)
        self.names: dict[Any, str] = {}
        self.scopes: list[list[Any]] = [[]]

    def __call__(self, key: Any, wanted: str) -> str:
        """The name of key; chosen at the first call from `wanted`."""
        got = self.names.get(key)
        if got is None:
            base = re.sub(r"[^A-Za-z0-9_]", "_", wanted)  # Python allows letters in names that C compilers refuse
            base = f"v{base}" if not base.strip("_") or base[0].isdigit() else base
            got, n = base, 1
            while got in self.used:
                got, n = f"{base}_{n}", n + 1
            self.used.add(got)
            self.names[key] = got
            self.scopes[-1].append(key)
        return got

    def open_scope(self) -> None:
        self.scopes.append([])

    def close_scope(self) -> None:
        """Free the names that were chosen since open_scope."""
        for key in self.scopes.pop():
            self.used.discard(self.names.pop(key))


class CLikePrinter:
    """Prints statements and expressions; one instance a kernel."""

    reserved: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0
        self.namer = Namer(self.reserved)
        self.facts = Analyzer()
        self.data_vars: set[Var] = set()  # variables whose value comes from memory: their arithmetic may wrap
        self._data: dict[int, tuple[Expr, bool]] = {}
        self._printed_place: tuple[str, int] | None = None
        self.line_directives = False  # print #line directives of the user's file

    # ---- given by the backend -------------------------------------------------------------------------------------
    def type_name(self, dt: dtype, span: Span | None = None) -> str:
        raise NotImplementedError

    def literal(self, e: Const) -> Text:
        raise NotImplementedError

    def load(self, e: Load) -> Text:
        raise NotImplementedError

    def store(self, s: Store) -> None:
        raise NotImplementedError

    def alloc(self, s: Alloc) -> None:
        raise NotImplementedError

    def call(self, e: Call) -> Text:
        raise NotImplementedError

    def convert(self, e: Cast) -> Text:
        raise NotImplementedError

    def device_assert(self, s: Assert) -> None:
        raise NotImplementedError

    def minmax(self, e: Binary) -> Text:
        raise NotImplementedError

    def vector(self, e: Expr) -> Text:
        """Ramp, Broadcast, Shuffle and vector Select."""
        raise NotImplementedError

    # ---- lines ------------------------------------------------------------------------------------------------------
    def emit(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    def source_comment(self, span: Span | None) -> None:
        """The user's line as a comment, once for a run of statements that came from it."""
        if span is None or (span.file, span.line) == self._printed_place:
            return
        self._printed_place = (span.file, span.line)
        text = linecache.getline(span.file, span.line).strip().replace("\\", "/")
        where = f"{os.path.basename(span.file)}:{span.line}"
        self.emit(f"// {text}  ({where})" if text else f"// {where}")
        if self.line_directives and text:
            file = span.file.replace("\\", "/").replace('"', "'")
            self.lines.append(f'#line {span.line} "{file}"')

    def unsupported(self, what: str, n: Node | None, hint: str = "", span: Span | None = None) -> Exception:
        """The error for a construct without a form on this target, at the node's place or the span."""
        return error("codegen-unsupported", f"{what} is not supported by this target's code generator", found=what,
                     span=span or getattr(n, "span", None), hint=hint or _OWN_FUNCTION)

    # ---- statements -------------------------------------------------------------------------------------------------
    def stmt(self, s: Stmt | None) -> None:
        if s is None:
            return
        if isinstance(s, Seq):
            self.sequence(s.stmts)
            return
        method = _STATEMENTS.get(type(s))
        if method is None:
            raise InternalError(f"a {type(s).__name__} reached the code generator: the program is not in phase DEVICE")
        self.source_comment(s.span)
        getattr(self, method)(s)

    def sequence(self, stmts: Sequence[Stmt]) -> None:
        for x in stmts:
            self.stmt(x)

    def block(self, header: str, body: Stmt) -> None:
        self.emit(f"{header} {{")
        self.depth += 1
        self.namer.open_scope()
        self.stmt(body)
        self.namer.close_scope()
        self.depth -= 1
        self.emit("}")

    def _bind(self, s: Bind) -> None:
        value = self.top(s.value)
        if s.var.dtype.is_int and s.var.dtype.lanes == 1:
            known = s.value.args[0] if isinstance(s.value, Call) and s.value.op == "opaque_copy" else s.value
            low, high = self.facts.interval(known)
            if (low, high) != (None, None) or s.var in self.facts.env:
                self.facts = self.facts.bind(s.var, low, high)
        if self.from_data(s.value):
            self.data_vars.add(s.var)
        kind = self.type_name(s.var.dtype, s.span)
        kind = f"{kind} const" if s.var.dtype.is_handle else f"const {kind}"
        self.emit(f"{kind} {self.namer(s.var, s.var.name)} = {value};")

    def _evaluate(self, s: Evaluate) -> None:
        self.emit(f"{self.top(s.call)};")

    def _for(self, s: For) -> None:
        self.facts = self.facts.bind(s.var, *extent_bounds(self.facts, s.start, s.extent))
        if s.kind not in ("serial", "unroll", "vectorized"):
            raise InternalError(f"a {s.kind} loop reached the code generator: the program is not in phase DEVICE")
        end = self._once(binary("add", s.start, s.extent), s)
        start = self.top(s.start)
        self.namer.open_scope()
        name = self.namer(s.var, s.var.name)
        self.loop_pragma(s)
        self.block(f"for ({self.type_name(s.var.dtype)} {name} = {start}; {name} < {end}; ++{name})", s.body)
        self.namer.close_scope()

    def _once(self, end: Expr, s: For) -> str:
        """The end of a loop as text that is evaluated once: constants and variables as they are."""
        if isinstance(end, (Const, Var)):
            return self.top(end)
        name = self.namer(s, f"{s.var.name}_end")
        self.emit(f"const {self.type_name(end.dtype)} {name} = {self.top(end)};")
        return self.namer(s, name)

    def loop_pragma(self, s: For) -> None:
        if s.kind in ("unroll", "vectorized"):
            factor = s.plan.factor or (1 if _copies(s) > MOST_COPIES else None)
            self.emit(f"#pragma unroll {factor}" if factor else "#pragma unroll")
        elif s.kind == "serial" and _only_loads(s.body):
            self.emit("#pragma unroll 1")

    def _while(self, s: While) -> None:
        self.block(f"while ({self.top(s.cond)})", s.body)

    def _if(self, s: If) -> None:
        self.block(f"if ({self.top(s.cond)})", s.then)
        if s.orelse is not None:
            self.lines.pop()
            self.block("} else", s.orelse)

    def _break(self, s: Break) -> None:
        self.emit("break;")

    def _continue(self, s: Continue) -> None:
        self.emit("continue;")

    # ---- expressions ------------------------------------------------------------------------------------------------
    def top(self, e: Expr) -> str:
        """Text of an expression where no parentheses are ever needed."""
        return self.expr(e)[0]

    def at(self, e: Expr, level: int) -> str:
        """Text of an operand of an operator of this precedence."""
        text, own = self.expr(e)
        return text if own >= level else f"({text})"

    def expr(self, e: Expr) -> Text:
        return getattr(self, _EXPRESSIONS[type(e)])(e)

    def _var(self, e: Var) -> Text:
        return self.namer(e, e.name), ATOM

    def _string(self, e: StringConst) -> Text:
        return quote(e.value), ATOM

    def _unary(self, e: Unary) -> Text:
        if e.op == "neg" and e.dtype.is_int and e.dtype.bits >= 32 and self.from_data(e):
            return self._wrapping(binary("sub", const(0, e.dtype), e.a), "-", const(0, e.dtype), e.a)
        text = {"neg": "-", "not": "!", "bitnot": "~"}[e.op] + self.at(e.a, POSTFIX)
        return self._narrow(text, e.dtype) if e.dtype.is_int else (text, PREFIX)

    def _binary(self, e: Binary) -> Text:
        if e.op in ("min", "max"):
            return self.minmax(e)
        if e.op in ("floordiv", "floormod"):
            return self._floor(e)
        symbol, level = _BINARY[e.op]
        if e.op in ("add", "sub", "mul", "shl") and e.dtype.is_signed and e.dtype.bits >= 32 and e.dtype.lanes == 1 \
                and self.from_data(e):
            return self._wrapping(e, symbol, e.a, e.b)
        if level in (SHIFT, BAND, BXOR, BOR, LAND):
            a, b = (self._clear(x, level) for x in (e.a, e.b))
        else:
            a, b = self.at(e.a, level), self.at(e.b, level + 1)
        if symbol in ("/", "%") and e.dtype.is_int:
            b = self.divisor(e.b, b)
        text = f"{a} {symbol} {b}"
        if e.dtype.is_int and e.op not in COMPARISONS:
            return self._narrow(text, e.dtype, level)
        return text, level

    def divisor(self, e: Expr, text: str) -> str:
        """The text of an integer that is divided by."""
        return text

    def _clear(self, e: Expr, level: int) -> str:
        """An operand of a shift or bit operator: anything but a simple operand in parentheses, for the reader."""
        text, own = self.expr(e)
        if level == LAND:
            return text if own >= BOR or own == LAND else f"({text})"
        return text if own in (ATOM, POSTFIX, PREFIX) else f"({text})"

    def _narrow(self, text: str, dt: dtype, level: int = PREFIX) -> Text:
        """C computes 8- and 16-bit integers as int: bring the result back to its type, so that it wraps."""
        if dt.bits >= 32 or dt.lanes > 1:
            return text, level
        return f"({self.type_name(dt)})({text})", PREFIX

    def _wrapping(self, e: Expr, symbol: str, a: Expr, b: Expr) -> Text:
        """Signed arithmetic on data: C leaves overflow undefined, ours wraps, so it is done unsigned."""
        u = self.type_name(dtype(f"uint{e.dtype.bits}"))
        right = self.at(b, PREFIX) if symbol == "<<" else f"({u}){self.at(b, PREFIX)}"
        return f"({self.type_name(e.dtype)})(({u}){self.at(a, PREFIX)} {symbol} {right})", PREFIX

    def _floor(self, e: Binary) -> Text:
        """Floor division and remainder: shift and mask by powers of two (right for any sign), C's operators where the
        operands are known not to be negative, a function otherwise."""
        quotient = e.op == "floordiv"
        if e.dtype.lanes == 1 and isinstance(e.b, Const) and e.b.value > 0 and e.b.value & (e.b.value - 1) == 0:
            shift = e.b.value.bit_length() - 1
            other = const(shift if quotient else e.b.value - 1, e.dtype)
            return self._binary(Binary("shr" if quotient else "bitand", e.a, other, e.dtype))
        if e.dtype.lanes == 1 and (e.dtype.is_unsigned or (self._not_negative(e.a) and self._not_negative(e.b))):
            return self._binary(Binary("truncdiv" if quotient else "truncmod", e.a, e.b, e.dtype))
        return self.floor_call(e)

    def floor_call(self, e: Binary) -> Text:
        raise NotImplementedError

    def _not_negative(self, e: Expr) -> bool:
        low = self.facts.interval(e)[0]
        return low is not None and low >= 0

    def _select(self, e: Select) -> Text:
        if e.cond.dtype.lanes > 1:
            return self.vector(e)
        if not e.lazy and (_acts(e.a) or _acts(e.b)):
            return self.select_both(e)
        return f"{self.at(e.cond, LOR)} ? {self.at(e.a, LOR)} : {self.at(e.b, COND)}", COND

    def select_both(self, e: Select) -> Text:
        """A selection whose sides are both executed: `?:` would leave lanes out of a shuffle, which then waits for them."""
        raise NotImplementedError

    # ---- facts ------------------------------------------------------------------------------------------------------
    def _may_wrap(self, e: Expr) -> bool:
        """Whether e is the arithmetic of a hash or a generator of random numbers, which wraps."""
        if not (isinstance(e, Binary) and e.op in ("add", "sub", "mul") and e.dtype.is_signed and e.dtype.lanes == 1):
            return False
        if not any(isinstance(x, Const) and is_large(x.value, e.op, e.dtype) for x in (e.a, e.b)):
            return False  # what follows is dear, and this text is half of compiling
        return not self.facts.exact(self.facts.linear(e), e.dtype)

    def from_data(self, e: Expr) -> bool:
        """Whether a value depends on memory or a call, or is a hash: nothing is known of its size, and it may wrap around."""
        hit = self._data.get(id(e))
        if hit is not None:
            return hit[1]
        if isinstance(e, Call) and e.op == "opaque_copy":
            out = self.from_data(e.args[0])
        elif isinstance(e, (Load, Call)):
            out = True
        elif isinstance(e, Var):
            return e in self.data_vars
        elif isinstance(e, (Binary, Unary, Cast, Select, Ramp, Broadcast)):
            out = any(self.from_data(x) for x in (getattr(e, f, None) for f in ("a", "b", "value", "base", "stride"))
                      if isinstance(x, Expr)) or self._may_wrap(e)
        else:
            out = isinstance(e, Shuffle) and any(map(self.from_data, e.vectors))
        self._data[id(e)] = (e, out)
        return out

    def flat_index(self, buffer: Buffer, indices: tuple[Expr, ...]) -> Expr:
        """Element offset of buffer[indices] from the start of its storage: 64 bits wide unless it surely fits in 32."""
        if len(indices) == 1 and not isinstance(buffer.offset, Expr) and buffer.strides[0] == 1:
            return binary("add", indices[0], const(buffer.offset, indices[0].dtype)) if buffer.offset else indices[0]
        small = buffer.is_static and all(isinstance(x, int) for x in (*buffer.strides, buffer.offset)) and \
            buffer.offset + sum((int(d) - 1) * abs(int(x)) for d, x in zip(buffer.shape, buffer.strides)) < 2**31
        wide = I32 if small and not any(i.dtype.bits > 32 for i in indices) else I64
        out: Expr = const(0, wide)
        for i, step in zip(indices, buffer.strides):
            step_expr = widened(step) if isinstance(step, Expr) else const(step, wide)  # dynamic: wide is I64
            out = binary("add", out, binary("mul", _widen(i, wide), step_expr))
        offset = buffer.offset
        return binary("add", out, widened(offset) if isinstance(offset, Expr) else const(offset, wide))


def _widen(i: Expr, dt: dtype) -> Expr:
    return i if i.dtype == dt else cast(i, dt)


def quote(text: str) -> str:
    """A C string literal."""
    out = []
    for ch in text:
        if ch in '"\\':
            out.append("\\" + ch)
        elif ch == "\n":
            out.append("\\n")
        elif ch == "\t":
            out.append("\\t")
        elif " " <= ch <= "~":
            out.append(ch)
        else:
            out.extend(f"\\{b:03o}" for b in ch.encode())
    return '"' + "".join(out) + '"'


def _acts(e: Expr) -> bool:
    """Whether evaluating e does more than compute a value: exchanges it between lanes, writes, synchronises."""
    rows = (INTRINSICS.get(x.op) for x in walk(e, Call))
    return any(row is None or row.effect not in (PURE, READS) for row in rows)


_STATEMENTS = {Bind: "_bind", Alloc: "alloc", Store: "store", Evaluate: "_evaluate", For: "_for", While: "_while",
               If: "_if", Break: "_break", Continue: "_continue", Assert: "device_assert"}
_EXPRESSIONS: dict[type, str] = {Var: "_var", Const: "literal", StringConst: "_string", Cast: "convert",
                                 Binary: "_binary", Unary: "_unary", Select: "_select", Load: "load", Call: "call",
                                 Ramp: "vector", Broadcast: "vector", Shuffle: "vector"}
