"""Writing LLVM IR as text: functions, blocks, structured loops and branches.

Values are operand strings ("%t3", "5", "0x3FF0000000000000"); the writer of an instruction knows their types.  Integer
literals are folded in the few helpers used for addresses, so that index code stays short.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tilelang.target.llvm_values import Value

_PURE = frozenset({"add", "sub", "mul", "getelementptr", "icmp", "trunc", "sext", "zext", "and", "or", "xor", "shl"})
_NOT_NAME = re.compile(r"[^A-Za-z0-9_]")


def clean(name: str) -> str:
    """The name with every character replaced that LLVM would need quoted."""
    return _NOT_NAME.sub("_", name)


def is_literal(v: str) -> bool:
    """Whether an integer operand is a literal."""
    return v[0] != "%" and v[0] != "@"


@dataclass
class Loop:
    """Labels of an open loop: `step` is where `continue` goes, `exit` where `break` goes."""

    step: str
    exit: str
    parallel: bool = False


@dataclass
class Module:
    """A module under construction: globals, declarations and finished functions, each once by name."""

    name: str
    head: list[str] = field(default_factory=list)
    entries: dict[str, str] = field(default_factory=dict)
    metadata: list[str] = field(default_factory=list)

    def need(self, name: str, text: str | Callable[[], str]) -> str:
        """Add a definition or declaration once; returns its name."""
        if name not in self.entries:
            self.entries[name] = ""  # reserves the position: helpers precede the functions that use them
            self.entries[name] = text if isinstance(text, str) else text()
        return name

    def declare(self, name: str, ret: str, params: str) -> str:
        """Declare an external function once; returns its name with the @."""
        self.need(name, f"declare {ret} @{name}({params})")
        return f"@{name}"

    def string(self, text: str) -> str:
        """A NUL-terminated constant; returns its address."""
        data = text.encode() + b"\0"
        body = "".join(chr(c) if 32 <= c < 127 and c not in (34, 92) else f"\\{c:02X}" for c in data)
        key = f"str:{body}"
        if key not in self.entries:
            name = f"@.str{len(self.entries)}"
            self.entries[key] = f'{name} = private unnamed_addr constant [{len(data)} x i8] c"{body}"'
            self.head.append(key)
            return name
        return self.entries[key].split(" ", 1)[0]

    def loop_metadata(self, *notes: str) -> str:
        """A distinct loop id with notes such as `!"llvm.loop.unroll.disable"`; returns the attachment text."""
        n = len(self.metadata)
        ids = [f"!{n + 1 + k}" for k in range(len(notes))]
        self.metadata.append(f"!{n} = distinct !{{{', '.join([f'!{n}', *ids])}}}")
        self.metadata += [f"{i} = !{{{note}}}" for i, note in zip(ids, notes)]
        return f", !llvm.loop !{n}"

    def text(self) -> str:
        """The module as LLVM assembly."""
        return "\n".join([f"; {self.name}", *self.entries.values(), *self.metadata, ""])


class Fn:
    """A function under construction.  params: (type, name, attributes)."""

    def __init__(self, module: Module, name: str, ret: str, params: list[tuple[str, str, str]], *,
                 linkage: str = "internal", attrs: str = "nounwind") -> None:
        self.module, self.name, self.ret_type, self.linkage, self.attrs = module, name, ret, linkage, attrs
        self.params = params
        self.allocas: list[str] = []
        self.lines: list[str] = []
        self.label = "entry"
        self.ended = False
        self.loops: list[Loop] = []
        self._n = 0
        self._zero = ""  # the register that hides values from the optimiser
        self._seen: dict[str, str] = {}  # pure instructions of the open block

    # ---- instructions -------------------------------------------------------------------------------------------

    def name_of(self, hint: str) -> str:
        self._n += 1
        return f"{hint}{self._n}"

    def let(self, text: str, hint: str = "t") -> str:
        """Emit %new = text. A pure instruction that the block already contains is not repeated (index code has many
        repetitions)."""
        pure = text[:text.find(" ")] in _PURE
        if pure and (v := self._seen.get(text)) is not None:
            return v
        self._n += 1
        v = f"%{hint}{self._n}"
        self.lines.append(f"  {v} = {text}")
        if pure:
            self._seen[text] = v
        return v

    def of(self, ty: str, text: str) -> Value:
        """An operand as a value with operators."""
        return Value.of(text, ty, self.let)

    def do(self, text: str) -> None:
        self.lines.append("  " + text)

    def comment(self, text: str) -> None:
        self.lines.append(f"  ; {text}" if text.isprintable() else "  ;")

    def alloca(self, type_text: str, align: int = 0, hint: str = "a") -> str:
        """Stack storage, allocated once on entry of the function."""
        v = f"%{self.name_of(hint + '.')}"
        self.allocas.append(f"  {v} = alloca {type_text}" + (f", align {align}" if align else ""))
        return v

    def hidden(self, v: str) -> str:
        """An i64 with the value v about which LLVM assumes nothing: v, or'ed with a zero that it cannot see.

        It is for indices that start again within a loop (remainders, masks, narrower integers). LLVM 22's vectoriser assumes
        that they do not, and checks this before the loop; of two indices with different widths it loses the check of the
        narrower. F[i % 4] beside G[(i + j) % 32] is then read past the end of F.
        """
        if is_literal(v):
            return v
        if not self._zero:
            self._zero = f"%{self.name_of('zero')}"
            self.allocas.append(f'  {self._zero} = call i64 asm "", "=r,0"(i64 0)')
        return self.let(f"or i64 {v}, {self._zero}")

    # ---- blocks -------------------------------------------------------------------------------------------------

    def start(self, label: str) -> None:
        """Begin a block; falls through from an open one."""
        if not self.ended:
            self.lines.append(f"  br label %{label}")
        self.lines.append(f"{label}:")
        self.label, self.ended = label, False
        self._seen.clear()

    def end(self, text: str) -> None:
        """Emit a terminator. The code up to the next block is unreachable and gets its own block."""
        self.lines.append("  " + text)
        self.ended = True

    def br(self, label: str, notes: str = "") -> None:
        self.end(f"br label %{label}{notes}")

    def dead(self) -> None:
        """Open an unreachable block, for statements after a jump."""
        self.start(self.name_of("dead"))

    def branch(self, cond: str, then: Callable[[], None], orelse: Callable[[], None] | None = None) -> None:
        """if cond: then() else: orelse()."""
        if cond in ("true", "false"):
            if cond == "true":
                then()
            elif orelse is not None:
                orelse()
            return
        yes, no, out = self.name_of("then"), self.name_of("else"), self.name_of("join")
        self.end(f"br i1 {cond}, label %{yes}, label %{no if orelse else out}")
        self.start(yes)
        then()
        if not self.ended:
            self.br(out)
        if orelse:
            self.start(no)
            orelse()
            if not self.ended:
                self.br(out)
        self.start(out)

    def choose(self, cond: str, ty: str, then: Callable[[], str], orelse: Callable[[], str]) -> str:
        """cond ? then() : orelse(), evaluating only one side."""
        if cond in ("true", "false"):
            return then() if cond == "true" else orelse()
        yes, no, out = self.name_of("then"), self.name_of("else"), self.name_of("join")
        self.end(f"br i1 {cond}, label %{yes}, label %{no}")
        self.start(yes)
        a = then()
        from_a = self.label
        self.br(out)
        self.start(no)
        b = orelse()
        from_b = self.label
        self.br(out)
        self.start(out)
        return self.let(f"phi {ty} [ {a}, %{from_a} ], [ {b}, %{from_b} ]")

    @contextmanager
    def loop(self, start: str, stop: str, step: int = 1, hint: str = "i", notes: tuple[str, ...] = ()) -> Iterator[str]:
        """Print for i in range(start, stop, step) on i64; gives the counter. The body may use loops[-1]."""
        head, body = self.name_of(hint + "_head"), self.name_of(hint + "_body")
        lp = Loop(self.name_of(hint + "_next"), self.name_of(hint + "_exit"))
        i, nxt = f"%{self.name_of(hint + '.')}", f"%{self.name_of(hint + '.n')}"
        before = self.label
        self.start(head)
        self.lines.append(f"  {i} = phi i64 [ {start}, %{before} ], [ {nxt}, %{lp.step} ]")
        c = self.let(f"icmp slt i64 {i}, {stop}")
        self.end(f"br i1 {c}, label %{body}, label %{lp.exit}")
        self.start(body)
        self.loops.append(lp)
        yield i
        self.loops.pop()
        self.start(lp.step)
        self.do(f"{nxt} = add nsw i64 {i}, {step}")
        self.br(head, self.module.loop_metadata(*notes) if notes else "")
        self.start(lp.exit)

    # ---- i64 address arithmetic with folding --------------------------------------------------------------------

    def add(self, a: str, b: str) -> str:
        if is_literal(a) and is_literal(b):
            return str(int(a) + int(b))
        if a == "0":
            return b
        return a if b == "0" else self.let(f"add nsw i64 {a}, {b}")

    def sub(self, a: str, b: str) -> str:
        if is_literal(a) and is_literal(b):
            return str(int(a) - int(b))
        return a if b == "0" else self.let(f"sub nsw i64 {a}, {b}")

    def mul(self, a: str, b: str) -> str:
        if is_literal(a) and is_literal(b):
            return str(int(a) * int(b))
        if a == "1":
            return b
        if b == "1":
            return a
        return "0" if "0" in (a, b) else self.let(f"mul nsw i64 {a}, {b}")

    def smin(self, a: str, b: str) -> str:
        return self._minmax("smin", min, a, b)

    def smax(self, a: str, b: str) -> str:
        return self._minmax("smax", max, a, b)

    def _minmax(self, op: str, fold: Callable[[int, int], int], a: str, b: str) -> str:
        if is_literal(a) and is_literal(b):
            return str(fold(int(a), int(b)))
        fn = self.module.declare(f"llvm.{op}.i64", "i64", "i64, i64")
        return self.let(f"call i64 {fn}(i64 {a}, i64 {b})")

    def both(self, a: str, b: str) -> str:
        """a and b on i1, both evaluated."""
        if "false" in (a, b):
            return "false"
        if a == "true":
            return b
        return a if b == "true" else self.let(f"and i1 {a}, {b}")

    def less(self, a: str, b: str) -> str:
        """a < b, signed i64."""
        if is_literal(a) and is_literal(b):
            return "true" if int(a) < int(b) else "false"
        return self.let(f"icmp slt i64 {a}, {b}")

    def at(self, base: str, elem: str, offset: str) -> str:
        """The address of element `offset` (i64) of an array of `elem` at base."""
        return base if offset == "0" else self.let(f"getelementptr inbounds {elem}, ptr {base}, i64 {offset}", "p")

    # ---- result -------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Put the function into its module."""
        ps = ", ".join(f"{t} {a + ' ' if a else ''}%{n}" for t, n, a in self.params)
        link = self.linkage + " " if self.linkage else ""
        lines = [f"define {link}{self.ret_type} @{self.name}({ps}) {self.attrs} {{", "entry:", *self.allocas,
                 *self.lines, "}"]
        self.module.entries[self.name] = "\n".join(lines)


def widths(count: int, lanes: int) -> list[int]:
    """The widths that divide `count` columns: vectors of `lanes`, then powers of two."""
    out, w = [lanes] * (count // lanes), lanes // 2
    rest = count % lanes
    while rest:
        if rest >= w:
            out.append(w)
            rest -= w
        w //= 2
    return out
