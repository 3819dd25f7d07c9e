"""HIP C++ for kernels in phase DEVICE. `print_kernel(kernel)` is the public function.

The text of expressions and statements is that of codegen/device, which other GPU targets print as well; what differs is the
prelude, which calls functions by the names that CUDA's headers give them: prelude_base.hip defines these by clang's builtins,
and the sections of prelude_own.hip take the place of those that hold PTX.  No header is read.  All LDS of a kernel is one
dynamic array: with two, the compiler waits for every copy into either before a read.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache

from tilelang.arith import flat_index, vector_base
from tilelang.ir import (AddressOf, Binary, Broadcast, Call, Const, Expr, If, Launch, Load, Node, PRIVATE, SHARED, Select,
                         Store, TRUE, Var, const, dtype, is_const, logical, walk)
from tilelang.target.instructions import call_fields, function_name
from tilelang.target.mma import MmaRow, row
from tilelang.target.thread_calls import BLOCK_VOTES

from ..device.memory import Memory
from ..device.page import Expressions, Page
from ..device.prelude import FLOATS, THREADS, VALUES, needed, sections_of, words_of
from ..device.printer import BasePrinter, DeviceKernel
from ..device.text import POSTFIX, Text
from ..device.types import TYPES, lane_args, unsupported

# Calls whose text other targets do not have.
_TEXTS = {"wait_loads": "tl::wait_loads<{n}>()", "wait_shared": "tl::wait_shared<{n}>()",
          "wave_priority": "__builtin_amdgcn_s_setprio({n})", "loads_between": "tl::loads_between<{first}, {n}, {each}>()"}
_UNSUPPORTED = {"printf": "kernels of this target print nothing: store the values to a tensor",
            "named_barrier": "a workgroup of this target has one barrier: T.sync_threads() without arguments",
            "in_warp_groups": "leave T.ws, or the branch of some warps, out: T.Pipelined moves loads ahead without",
            **dict.fromkeys(("world_rank", "world_size", "remote_address", "wait_signal", "rank_barrier", "nvshmem"),
                            "programs of several ranks run on CUDA devices")}
_NARROWER = "compute it in float32: T.cast(x, 'float32')"


def print_kernel(kernel: DeviceKernel, *, fast_math: bool = False, line_directives: bool = False) -> str:
    """The HIP C++ source of a kernel: header, user's injected source, kernel.

    fast_math, line_directives: as codegen.cuda.print_kernel.  Raises NotImplementedError at the user's line for what this
    target has no form for.
    """
    page, plan = Page(kernel.name, line_directives), kernel.launch.plan
    injected = "".join(t.rstrip() + "\n" for t in plan.import_source if t)
    if plan.cuda_source:
        raise unsupported("a kernel of CUDA source", kernel.launch, "compile it for a CUDA target")
    for s in walk(kernel.launch.body, If):
        for x in walk(s.cond, Call):
            if x.op in _UNSUPPORTED:  # at the branch: conditions that passes make have no place
                raise _unsupported(x, s)
    body = KernelPrinter(kernel, page, fast_math, words_of(injected)).text()
    rows = [row(name) for name in sorted({x.options.row for x in walk(kernel.launch.body, Call) if x.op == "mma"})]
    return kernel_header(page, body, injected, [r for r in rows if r is not None]) + injected + body


def _unsupported(e: Call, at: Node) -> Exception:
    what = "a warp role" if e.op == "in_warp_groups" else f"the function `{e.op}`"
    return unsupported(what, at, _UNSUPPORTED[e.op])


class LdsMemory(Memory):
    """Elements of LDS as functions give and take them, where copies into LDS are in flight (see `load` in the prelude)."""

    def __init__(self, x: Expressions, launch: Launch) -> None:
        super().__init__(x, launch)
        self._copied = any(c.op == "cp_async" for c in walk(launch.body, Call))

    def _load(self, e: Load) -> Text:
        text, level = super()._load(e)
        return (f"tl::loaded(&{text})", POSTFIX) if self._by_function(e) else (text, level)

    def _store_element(self, s: Store) -> None:
        if self._by_function(s):
            self.page.emit(f"tl::stored(&{self.element(s.buffer, s.indices)}, {self.x.top(s.value)});")
        else:
            super()._store_element(s)

    def _moved(self, s: Store) -> str | None:
        return None if self._copied else super()._moved(s)

    def _by_function(self, e: Load | Store) -> bool:
        return self._copied and e.buffer.scope_name in SHARED and all(i.dtype.lanes == 1 for i in e.indices)


class KernelPrinter(BasePrinter):
    """Prints the function of one kernel."""

    memory = LdsMemory
    smem = "extern __attribute__((shared, aligned(1024))) unsigned char smem[];"

    def __init__(self, kernel: DeviceKernel, page: Page, fast_math: bool, injected: set[str]) -> None:
        super().__init__(kernel, page, fast_math, injected | available())
        self._plain_call, self._plain_select, self._injected = self.x.forms[Call], self.x.forms[Select], injected
        self.x.forms[Call], self.x.forms[Select], self.x.condition = self._call, self._select, self._condition

    def text(self) -> str:
        """The kernel's signature and body."""
        launch, params = self._launch, ", ".join([*self.parameters(), *self.workspaces()])
        threads, blocks = launch.num_threads, launch.plan.min_blocks_per_sm
        attributes = f"amdgpu_flat_work_group_size({threads}, {threads})"
        if blocks > 1:  # waves of a SIMD, of which a compute unit has four
            attributes += f", amdgpu_waves_per_eu({max(1, blocks * -(-threads // 64) // 4)})"
        signature = f'extern "C" __attribute__((global)) __attribute__(({attributes})) void {self._kernel.name}({params})'
        self.body()
        return "\n".join([signature + " {", *self.page.lines, "}"]) + "\n"

    def _condition(self, e: If | Select, text: str) -> str:
        """The condition of a branch or a selection, hidden from LLVM where it depends on data.

        LLVM 22.1 joins such a branch with the one around a guarded load of the condition.  Its pass StructurizeCFG then moves
        what costs nothing in front of both (an element of a vector of registers, an address), and one of the two paths gets
        the other's value.  The empty asm prevents it.  Branches that leave no value are right, as are selections
        whose condition does not branch itself.
        """
        if isinstance(e, If):
            harmed = e.orelse is not None or any(x.buffer.scope_name in PRIVATE for x in walk(e.then, Store))
        else:
            harmed = any(isinstance(x, Select) or x.op in ("and", "or") for x in walk(e.cond, Select, Binary))
        reads = harmed and any(isinstance(x, (Load, Call)) or isinstance(x, Var) and self.x.facts.from_data(x)
                               for x in walk(e.cond))
        return f"tl::tested({text})" if reads else text

    def _select(self, e: Select) -> Text:
        """A selection; a guarded load has no branch, as the descriptor of the tensor gives zeros beyond it."""
        cond, x = e.cond, e  # type: Expr, Expr
        while isinstance(x, Select) and x.lazy and _gives_zero(x) and x.cond.dtype.lanes == 1:
            cond, x = cond if x.cond.same(cond) else logical("and", cond, x.cond), x.a
        if x is not e and isinstance(x, Load) and x.dtype.bits % 8 == 0:
            base = vector_base(x.buffer, x.indices) if x.dtype.lanes > 1 else x.indices
            if base is not None and (within := self._within(AddressOf(x.buffer, base), cond)):
                text = f"tl::load_within<{lane_args(x.dtype)}>({within})"
                return text if x.dtype.lanes > 1 else f"{text}.v[0]", POSTFIX
        return self._plain_select(e)  # type: ignore[no-any-return]

    def _within(self, e: AddressOf, cond: Expr) -> str:
        """Arguments that stand for an element where a condition holds: the tensor, its bytes, the element's, the condition.

        "" for tensors whose bytes are not known to have numbers of 31 bits, and where an index or the condition may not be
        evaluated in all lanes.
        """
        b, parts = e.buffer, [*walk(cond), *(x for i in e.indices for x in walk(i))]
        sizes = (*b.shape, *(b.strides_ or ()))
        if b not in self._kernel.params or not all(isinstance(n, int) or isinstance(n, Const) for n in sizes) or \
                not is_const(b.offset, 0) or any(isinstance(x, (Load, Call)) for x in parts):
            return ""
        shape, strides = ([int(getattr(n, "value", n)) for n in x] for x in (b.shape, b.strides))
        size = b.dtype.bytes * (1 + sum((n - 1) * s for n, s in zip(shape, strides))) if all(shape) else 0
        at = f"(unsigned)({self.x.top(flat_index(b, e.indices))}) * {b.dtype.bytes}u"
        first = self._memory.address(b, tuple(const(0) for _ in shape))
        return f"{first}, {size}u, {at}, {self.x.top(cond)}" if size < 1 << 31 else ""

    def _call(self, e: Call) -> Text:
        """The text of a call, all of whose functions are in the prelude."""
        if e.op in _UNSUPPORTED:
            raise _unsupported(e, e)
        if e.op in _TEXTS:
            return _TEXTS[e.op].format(**call_fields(e)), POSTFIX
        x = e.args[0] if e.op == "lanes_transposed" else None
        if isinstance(x, Load) and (base := vector_base(x.buffer, x.indices)) is not None:
            return f"tl::load_transposed<{lane_args(x.dtype)}>({self._memory.address(x.buffer, base)})", POSTFIX
        if e.op in BLOCK_VOTES:
            waves = -(-self._launch.num_threads // 64)
            return f"tl::{e.op}<{waves}>({self.x.top(e.args[0])}, smem + {e.options.place})", POSTFIX
        source = e.args[1] if e.op == "cp_async" else None
        if isinstance(source, AddressOf) and (within := self._within(source, e.args[2] if len(e.args) > 2 else TRUE)):
            return f"tl::cp_async_within<{e.options.bytes}>({self.x.top(e.args[0])}, {within})", POSTFIX
        text, level = self._plain_call(e)
        if any(x.op in _OTHERS for x in walk(e, Call)):
            return text, level
        known = available() | self._injected | _WORDS
        for name in _CALLED.findall(text):
            if name not in known and not name.startswith("__builtin"):
                of = f" on {e.args[0].dtype}" if e.args else ""
                raise unsupported(f"the function `{e.op}`{of}", e, _NARROWER if of == " on float64" else "")
        return text, level


def _gives_zero(e: Select) -> bool:
    """Whether a selection otherwise gives zeros, as a descriptor does: not -0.0."""
    zero = e.b.value if isinstance(e.b, Broadcast) else e.b
    return isinstance(zero, Const) and not zero.value and not str(zero.value).startswith("-")


_OTHERS = ("mma", "call_extern", "call_pure_extern")  # their functions are made for the kernel, or the user's
_CALLED = re.compile(r"\b(\w+)(?:<[^()<>]*(?:<[^()<>]*>)?[^()<>]*>)?\(")
# What stands in front of a parenthesis and is no function of the prelude: types, keywords, a member.
_WORDS = {*(t.split("::")[-1].split()[-1] for t in TYPES.values()), "reinterpret_cast", "volatile", "pick", "printf"}


_BASE, _OWN = (os.path.join(os.path.dirname(__file__), f"prelude_{name}.hip") for name in ("base", "own"))
_FILES = (_BASE, FLOATS, VALUES, THREADS, _OWN)
_ELEMENTS = {"half_t": "typedef _Float16 half_t;", "bfloat16_t": "typedef __bf16 bfloat16_t;"}
# Spellings of the source that users inject.
_MACROS = {"__device__": "__attribute__((device))", "__global__": "__attribute__((global))",
           "__shared__": "__attribute__((shared))", "__forceinline__": "inline __attribute__((always_inline))"}


def sections() -> dict[str, str]:
    """The text of each section by name."""
    return sections_of(_FILES)


@lru_cache(maxsize=1)
def available() -> frozenset[str]:
    """The sections without PTX: the functions that this target has."""
    return frozenset(name for name, text in sections().items() if "asm" not in words_of(text) or "v_cvt_" in text
                     or '"+v"' in text or 'asm volatile("" ::: "memory")' in text)


def kernel_header(page: Page, body: str, injected: str, rows: list[MmaRow]) -> str:
    """The text in front of a kernel.  injected: the user's source.  rows: the matrix instructions it uses."""
    words = words_of(body) | words_of(injected) | page.sections
    defined = "".join([*needed(_FILES, words, ordered=False), *map(mfma_wrapper, rows)])
    words |= words_of(defined)
    out = [text for name, text in _ELEMENTS.items() if name in words or "__h" in defined]
    out += [f"#define {name} {text}" for name, text in _MACROS.items() if name in words_of(injected)]
    out.append("#define TL_DEVICE inline __attribute__((device, always_inline))")
    if defined:
        out += ["namespace tl {", defined.rstrip(), "}  // namespace tl", "using namespace tl;"]
    return "\n".join(out) + "\n\n"


def _vector(dt: dtype, bits: int, builtin: str) -> tuple[str, int]:
    """(element, number) of the vector in which a builtin takes an operand of so many bits a lane."""
    if dt.bits <= 8:  # bytes come in words
        words = bits // 32
        return ("long", 1) if words == 2 else ("int", words)
    name = {"float16": "_Float16", "bfloat16": "short" if builtin.endswith("_1k") else "__bf16"}.get(dt.base, TYPES[dt.base])
    return name, bits // dt.bits


def mfma_wrapper(row: MmaRow) -> str:
    """The device function of a row.  It takes pointers to the first register of c, a and b, which stay in registers once
    inlined."""
    types, more = [], "0, 0, 0"
    if row.instruction.endswith("f8f6f4"):  # formats of a and b; byte 0 of a scale of 1 for each
        formats = ", ".join(str(int(dt == "float8_e5m2")) for dt in (row.a_dtype, row.b_dtype))
        more = f"{formats}, 0, 0x7f7f7f7f, 0, 0x7f7f7f7f"
    for letter, fragment, dt in (("A", row.a, row.a_dtype), ("B", row.b, row.b_dtype), ("C", row.c, row.c_dtype)):
        element, n = _vector(dt, fragment.registers * dt.bits, row.instruction)
        types.append(f"typedef {element} {letter}" + (f" __attribute__((ext_vector_type({n})))" if n > 1 else "") + ";")
    ta, tb, tc = (TYPES[d.base].removeprefix("tl::") for d in (row.a_dtype, row.b_dtype, row.c_dtype))
    return (f"TL_DEVICE void {function_name(row)}({tc}* c, const {ta}* a, const {tb}* b) {{\n  {' '.join(types)}\n"
            f"  *(C*)c = {row.instruction}(*(const A*)a, *(const B*)b, *(C*)c, {more});\n}}\n")
