"""Fragments: tiles distributed over the registers of the threads of a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tilelang.arith import simplify
from tilelang.ir import Expr, Var, const, convert, logical

from . import draw
from .fitted import IndexMap, fit_functions, index_vars, leading_extents, outer, static_extents
from .mode import REGISTER, THREAD, Mode, Modes, covered, digit_sum, error, merged, offsets, text_of_modes


class Fragment(IndexMap):
    """Maps each element of a tile to threads and to a register in them.

    Fragment(shape, modes, replicate=(), threads=n): modes holds, per dimension, the digits of its index from the
    outermost to the innermost.  The thread (register) of an element is the sum of its thread (register) digits times
    their strides.  The digits of a dimension may count beyond its extent; such elements are predicated off.
    replicate: thread digits over which copies of every element are held.  threads: size of the block (default: the
    smallest that contains all threads of the digits).

    Fragment(shape, forward_fn=None, forward_thread_fn=None, replicate=1, forward_index_fn=None): the form of the
    language.  forward_fn(*indices[, rep]) returns (thread, register); alternatively one function returns each of them.
    The functions are evaluated to a table, to which digits are fitted.

    Raises layout-not-injective, layout-no-structure, layout-invalid (ValueError).

    >>> f = Fragment((4, 8), ((Mode(4, "thread", 8),), (Mode(8, "thread", 1),)))
    >>> f.threads, f.registers, f.thread_of((2, 3))
    (32, 1, 19)
    """

    def __init__(self, shape: Sequence[int], modes: Any = None, forward_thread_fn: Callable[..., Any] | None = None,
                 replicate: Any = (), forward_index_fn: Callable[..., Any] | None = None, *,
                 threads: int | None = None, forward_fn: Callable[..., Any] | None = None) -> None:
        self.shape = static_extents(shape, "Fragment")
        if callable(modes):
            forward_fn, modes = modes, None
        if modes is None:
            count = replicate if isinstance(replicate, int) else 1
            if count < 1:
                raise error("layout-invalid", f"a fragment holds every element at least once, found replicate=‹{count}›",
                            expected="replicate from 1")
            modes, replicate = fit_functions(self.shape, forward_fn, forward_thread_fn, forward_index_fn, count)
        self.modes: tuple[Modes, ...] = tuple(merged(tuple(m)) for m in modes)
        self.copies: Modes = merged(tuple(replicate))
        self._check()
        top = 1 + sum((m.size - 1) * m.stride for m in self._all_modes(THREAD))
        self.threads = top if threads is None else int(threads)
        if top > self.threads:
            raise error("layout-invalid", f"fragment {self.shape} reaches ‹thread {top - 1}›, the block has {self.threads}",
                        expected=f"threads below {self.threads}")

    def _check(self) -> None:
        if len(self.modes) != len(self.shape):
            raise error("layout-invalid", f"a fragment of {len(self.shape)} dimensions needs as many groups of digits, found "
                        f"{len(self.modes)}", expected=f"{len(self.shape)} groups of digits")
        for d, (n, modes) in enumerate(zip(self.shape, self.modes)):
            if covered(modes) < n:
                raise error("layout-invalid", f"dimension {d} of a fragment has {n} indices, its digits count "
                            f"‹{covered(modes)}›", expected=f"digits that count {n}")
        for to in (THREAD, REGISTER):
            at = 1
            for m in sorted(self._all_modes(to), key=lambda m: m.stride):
                if m.stride < at:
                    raise error("layout-not-injective", f"fragment {self.shape}: {to} digits overlap at stride {m.stride} "
                                f"({self.modes}, copies {self.copies}) (Loop layout is not injective, where a loop has it)",
                                found=f"{to} digits that overlap at stride {m.stride}")
                at = m.stride * m.size

    def _all_modes(self, to: str) -> list[Mode]:
        out = [m for d in self.modes for m in d if m.to == to]
        return out + list(self.copies) if to == THREAD else out

    # ---- sizes ----------------------------------------------------------------------------------------------------

    @cached_property
    def registers(self) -> int:
        """Number of registers of each thread, counted in elements."""
        return 1 + sum((m.size - 1) * m.stride for m in self._all_modes(REGISTER))

    @cached_property
    def replicas(self) -> int:
        """Number of copies of each element."""
        return covered(self.copies)

    @cached_property
    def is_padded(self) -> bool:
        """Whether the digits count some (thread, register) pair that holds no element of the tile."""
        return any(covered(m) != n for m, n in zip(self.modes, self.shape))

    @property
    def vector_width(self) -> int:
        """Number of elements along the last dimension that lie in consecutive registers, aligned to this number."""
        last = self.modes[-1] if self.modes else ()
        return last[-1].size if last and last[-1].to == REGISTER and last[-1].stride == 1 else 1

    # ---- the map --------------------------------------------------------------------------------------------------

    def thread_of(self, idx: Sequence[Any], rep: Any = 0) -> Any:
        """Thread that holds copy `rep` of an element; int when all indices are ints."""
        terms = [digit_sum(i, m, THREAD) for i, m in zip(idx, self.modes)]
        return _total([*terms, digit_sum(rep, self.copies, THREAD)])

    def register_of(self, idx: Sequence[Any]) -> Any:
        """Register that holds an element, the same in all of its threads; int when all indices are ints."""
        return _total([digit_sum(i, m, REGISTER) for i, m in zip(idx, self.modes)])

    def owners(self) -> np.ndarray:
        """int64[replicas, *shape]: the threads that hold each element."""
        return self._owners

    def register_table(self) -> np.ndarray:
        """int64[*shape]: the register of each element."""
        return self._registers

    @cached_property
    def _owners(self) -> np.ndarray:
        base = outer([offsets(m, THREAD, n) for m, n in zip(self.modes, self.shape)])
        return offsets(self.copies, THREAD, self.replicas).reshape(-1, *([1] * self.ndim)) + base

    @cached_property
    def _registers(self) -> np.ndarray:
        return outer([offsets(m, REGISTER, n) for m, n in zip(self.modes, self.shape)])

    # ---- inverse --------------------------------------------------------------------------------------------------

    def index_at(self, thread: Any, register: Any) -> tuple[tuple[Any, ...], Expr | None]:
        """The element in a register of a thread: (indices, predicate).

        thread: Expr (or int) in [0, threads); register: Expr or int in [0, registers).  The predicate is None when
        every such pair holds an element, otherwise it says whether this pair does.
        """
        digits, holds = self._digits(thread, register)
        env = {v: (0, n - 1) for v, n in ((thread, self.threads), (register, self.registers)) if isinstance(v, Var)}
        indices = []
        for n, modes in zip(self.shape, self.modes):
            at = _number(digits, modes)
            at = simplify(at, env) if isinstance(at, Expr) else at
            indices.append(at)
            if covered(modes) != n:
                holds.append(at < n)
        return tuple(indices), _all(holds, env)

    def _digits(self, thread: Any, register: Any) -> tuple[dict[Mode, Any], list[Any]]:
        """The value of every digit at a (thread, register), and the conditions under which the digits reach this pair."""
        digits: dict[Mode, Any] = {}
        holds: list[Any] = []
        for to, value, limit in ((THREAD, thread, self.threads), (REGISTER, register, self.registers)):
            modes = sorted(self._all_modes(to), key=lambda m: m.stride)
            at = 1
            for k, m in enumerate(modes):
                if m.stride != at:  # no digit reaches the values in between
                    holds.append(value // at % (m.stride // at) == 0)
                d = value // m.stride
                # The topmost digit needs no remainder: values beyond it do not occur, or are predicated off below.
                digits[m] = d if k == len(modes) - 1 else d % m.size
                at = m.stride * m.size
            if at < limit:
                holds.append(value < at)
        return digits, holds

    # ---- derived fragments ----------------------------------------------------------------------------------------

    def reduce(self, dim: int, keep: bool = False) -> Fragment:
        """The fragment of a reduction over a dimension: all threads along it hold the result.  keep: the extent becomes 1."""
        dims = [d for d in range(self.ndim) if d != dim % self.ndim]
        out = self.project(dims)
        if not keep:
            return out
        d = dim % self.ndim
        return out._derived((*out.shape[:d], 1, *out.shape[d:]), (*out.modes[:d], (), *out.modes[d:]))

    def project(self, dims: Sequence[int]) -> Fragment:
        """The fragment of these dimensions, in this order.  Threads along the others hold copies; registers are renumbered."""
        lost = [m for d in range(self.ndim) if d not in dims for m in self.modes[d] if m.to == THREAD]
        modes = _compact(tuple(self.modes[d] for d in dims))
        copies = tuple(sorted((*self.copies, *lost), key=lambda m: -m.stride))
        return self._derived([self.shape[d] for d in dims], modes, copies)

    def expand(self, leading: Sequence[int] | int) -> Fragment:
        """The fragment with additional leading dimensions (an integer: one), the slowest in the register order.

        Raises as Layout.expand.
        """
        leading = leading_extents(leading, "Fragment.expand")
        modes = list(self.modes)
        stride = self.registers
        for n in reversed(leading):
            modes.insert(0, (Mode(int(n), REGISTER, stride),))
            stride *= int(n)
        return self._derived((*leading, *self.shape), modes)

    def permuted(self, dims: Sequence[int]) -> Fragment:
        """The same tile with its dimensions in another order."""
        return self._derived([self.shape[d] for d in dims], [self.modes[d] for d in dims])

    def cut(self, shape: Sequence[int]) -> Fragment:
        """The fragment of the elements below `shape`, at unchanged places.  The surplus of the digits is padding."""
        return self if tuple(shape) == self.shape else self._derived(shape, self.modes)

    def reshape(self, shape: Sequence[int], old_bits: int = 1, new_bits: int = 1) -> Fragment:
        """The same registers seen as a tile of another shape (row-major order of elements), or of other element bits.

        Raises layout-no-structure when a digit would span two dimensions of the new shape, or an element two threads.
        """
        digits = list(merged(tuple(m for d in self.modes for m in d)))
        what = f"Fragment {self.shape} seen as {tuple(shape)}"
        if self.is_padded:
            raise error("layout-no-structure", f"{what}: a padded fragment has no row-major order of digits",
                        expected="a fragment without padding", found="a padded one")
        if old_bits > new_bits:
            k = old_bits // new_bits
            digits = [Mode(m.size, m.to, m.stride * k) if m.to == REGISTER else m for m in digits]
            digits.append(Mode(k, REGISTER, 1))
        elif old_bits < new_bits:
            k = new_bits // old_bits
            last = digits.pop() if digits else Mode(1, THREAD, 1)
            if last.to != REGISTER or last.stride != 1 or last.size % k or any(
                    m.stride % k for m in digits if m.to == REGISTER):
                raise error("layout-no-structure", f"{what}: {k} elements that become one lie in different threads",
                            found=f"{k} elements in different threads")
            digits = [Mode(m.size, m.to, m.stride // k) if m.to == REGISTER else m for m in digits]
            digits.append(Mode(last.size // k, REGISTER, 1))
        return self._derived(shape, _regrouped(digits, tuple(shape), what))

    def with_threads(self, threads: int) -> Fragment:
        """The same fragment in a block of `threads` threads."""
        return self._derived(self.shape, self.modes, threads=threads)

    def _derived(self, shape: Sequence[int], modes: Any, copies: Modes | None = None, threads: int | None = None) -> Fragment:
        """The fragment of other digits, with the copies and threads of this one unless they are given."""
        return Fragment(shape, modes, replicate=self.copies if copies is None else copies, threads=threads or self.threads)

    def repeat(self, repeats: Sequence[int], repeat_on_thread: bool = False, lower_dim_first: bool = True) -> Fragment:
        """The tile repeated along each dimension, in additional registers or (repeat_on_thread) additional threads.

        lower_dim_first: the repeats of the first dimension change fastest.  Raises layout-invalid for a padded tile, TypeError
        and ValueError for factors that are no positive integers.
        """
        repeats = leading_extents(repeats, "Fragment.repeat")
        if len(repeats) != self.ndim:
            raise error("layout-invalid", f"repeat of a {self.ndim}-D fragment needs «{self.ndim} factors», found "
                        f"{len(repeats)}")
        if self.is_padded:
            raise error("layout-invalid", f"a padded fragment {self.shape} cannot be repeated",
                        expected="a fragment without padding", found="a padded one")
        to, step = (THREAD, self.threads) if repeat_on_thread else (REGISTER, self.registers)
        modes = list(self.modes)
        order = range(self.ndim) if lower_dim_first else reversed(range(self.ndim))
        for d in order:
            modes[d] = (Mode(int(repeats[d]), to, step), *modes[d])
            step *= int(repeats[d])
        return self._derived([n * r for n, r in zip(self.shape, repeats)], modes, threads=step if repeat_on_thread else None)

    def replicate(self, n: int) -> Fragment:
        """The tile with n copies, in additional threads."""
        copies = (Mode(int(n), THREAD, self.threads), *self.copies)
        return self._derived(self.shape, self.modes, copies, self.threads * int(n))

    def condense_rep_var(self) -> Fragment:
        """The fragment itself, because copies are always stored in condensed form."""
        return self

    # ---- comparison -----------------------------------------------------------------------------------------------

    def _sorted_owners(self) -> np.ndarray:
        return self._owners if self.replicas == 1 else np.sort(self._owners, axis=0)

    def same_owners(self, other: Fragment) -> bool:
        """Whether every element lies in the same set of threads in both fragments."""
        if self.shape != other.shape or self.replicas != other.replicas:
            return False
        return (self.modes == other.modes and self.copies == other.copies) or \
            np.array_equal(self._sorted_owners(), other._sorted_owners())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fragment):
            return NotImplemented
        if self is other:
            return True
        return self.same_owners(other) and (self.modes == other.modes or
                                            np.array_equal(self._registers, other._registers))

    def __hash__(self) -> int:
        return hash((self.shape, self.replicas, self.registers))

    # ---- methods of the language ----------------------------------------------------------------------------------

    def get_thread_size(self) -> int:
        return self.threads

    def get_output_shape(self) -> list[int]:
        return [self.registers]

    def map_forward_thread(self, indices: Sequence[Any]) -> Any:
        """Thread of an element; with one index more than dimensions, the last is the copy."""
        rep = indices[self.ndim] if len(indices) > self.ndim else 0
        return simplify(convert(self.thread_of(indices[: self.ndim], rep)))

    def map_forward_index(self, indices: Sequence[Any]) -> list[Expr]:
        """[register] of an element."""
        return [simplify(convert(self.register_of(indices[: self.ndim])))]

    @cached_property
    def _symbolic(self) -> tuple[tuple[Var, ...], Expr, Expr]:
        """The index variables, and the thread and the register as expressions of them; `_rep` is the copy."""
        vs = index_vars(self.ndim)
        rep = Var("_rep", const(0).dtype)
        env: dict[Var, Any] = {v: (0, n - 1) for v, n in zip(vs, self.shape)} | {rep: (0, self.replicas - 1)}
        return (vs, simplify(convert(self.thread_of(vs, rep)), env), simplify(convert(self.register_of(vs)), env))

    @property
    def thread(self) -> Expr:
        """The thread of an element as an expression of get_forward_vars() and, where there are copies, of `_rep`."""
        return self._symbolic[1]

    @property
    def index(self) -> list[Expr]:  # type: ignore[override]
        """[the register of an element as an expression of get_forward_vars()]."""
        return [self._symbolic[2]]

    def __repr__(self) -> str:
        return (f"Fragment({self.shape} -> ({self.registers},), replicate: {self.replicas}, thread: {self.threads}, "
                f"forward_thread: {self.thread!r}, forward_index: ({self.index[0]!r},))")

    def __str__(self) -> str:
        copies = f"  {self.replicas} copies" if self.replicas > 1 else ""
        return draw.fragment(self.shape, f"{self.threads} threads x {self.registers} registers{copies}", self.owners(),
                             self.register_table())

    def __tilelang_text__(self) -> str:
        """The text T.fragment(...), which `text.read_fragment` parses."""
        modes = " | ".join(map(text_of_modes, self.modes))
        return f'T.fragment({self.shape!r}, "{modes}", "{text_of_modes(self.copies)}", {self.threads})'


class PartialFragment(Fragment):
    """The layout of a reducer's partial results, for T.annotate_layout({reducer: …}); arguments as of Fragment.

    combine: of the `replicate` threads that hold an element, those numbered alike modulo combine hold equal copies, and the
    `combine` different ones are still to be combined; it divides replicate, its default.  This compiler's reducers add up every
    copy alike, so results are the same for each.  Raises layout-invalid.

    >>> PartialFragment((4,), lambda i, r: (r * 4 + i, 0), replicate=8, combine=2).combine
    2
    """

    def __init__(self, shape: Sequence[int], forward_fn: Callable[..., Any] | None = None,
                 forward_thread_fn: Callable[..., Any] | None = None, replicate: int = 1,
                 forward_index_fn: Callable[..., Any] | None = None, combine: int | None = None) -> None:
        super().__init__(shape, forward_fn, forward_thread_fn, replicate, forward_index_fn)
        self.combine = replicate if combine is None else combine
        if isinstance(self.combine, bool) or not isinstance(self.combine, int) or self.combine < 1 or replicate % self.combine:
            raise error("layout-invalid", f"combine divides the {replicate} replicas of a partial fragment, found {combine!r}",
                        expected=f"a divisor of {replicate}")


def _number(digits: dict[Mode, Any], modes: Modes) -> Any:
    """The index with these digits, outermost first."""
    out: Any = 0
    right = 1
    for m in reversed(modes):
        out = digits[m] * right + out
        right *= m.size
    return out


def _total(terms: list[Any]) -> Any:
    out: Any = 0
    for p in terms:
        out = p if isinstance(out, int) and out == 0 else out if isinstance(p, int) and p == 0 else out + p
    return out


def _all(conditions: list[Any], env: dict[Any, tuple[int, int]]) -> Expr | None:
    """Conjunction, simplified; None when it always holds."""
    out: Expr | None = None
    for c in conditions:
        c = simplify(convert(bool(c)) if isinstance(c, (bool, np.bool_)) else c, env)
        if hasattr(c, "value") and c.value is True:
            continue
        out = c if out is None else logical("and", out, c)
    return out


def _compact(dims: tuple[Modes, ...]) -> tuple[Modes, ...]:
    """The modes with register strides renumbered without gaps, in the same order."""
    stride = 1
    new: dict[int, int] = {}
    for m in sorted((m for d in dims for m in d if m.to == REGISTER), key=lambda m: m.stride):
        new[m.stride] = stride
        stride *= m.size
    return tuple(tuple(Mode(m.size, m.to, new[m.stride]) if m.to == REGISTER else m for m in d) for d in dims)


def _regrouped(digits: list[Mode], shape: tuple[int, ...], what: str) -> list[Modes]:
    """A sequence of digits (outermost first) divided among the dimensions of a shape."""
    left = [m for m in digits if m.size > 1]
    out: list[Modes] = []
    for n in reversed(shape):
        group: list[Mode] = []
        while n > 1:
            m = left.pop() if left else Mode(1, THREAD, 1)
            if m.size > n and m.size % n == 0:
                left.append(Mode(m.size // n, m.to, m.stride * n))
                m = Mode(n, m.to, m.stride)
            if m.size == 1 or n % m.size:
                raise error("layout-no-structure", f"{what}: ‹{n}› indices cut a digit of {m.size}",
                            expected=f"a multiple of {m.size} indices")
            group.insert(0, m)
            n //= m.size
        out.insert(0, tuple(group))
    if left:
        raise error("layout-no-structure", f"{what}: the numbers of elements differ",
                    expected="as many elements as before", found=f"{left} times as many")
    return out
