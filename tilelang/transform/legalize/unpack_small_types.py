"""Replace element types narrower than a byte (int4, float4_e2m1fn) by ordinary ones; tensors and views of bytes stay packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.arith import known_divisor, Analyzer
from tilelang.errors import error, register
from tilelang.ir import (AddressOf, Binary, Bind, Break, Buffer, Call, Cast, Const, Continue, Expr, For, Func, If, Load, Node,
                         Parallel, Ramp, Region, Shuffle, Stmt, Store, TileOp, Unary, Var, binary, call, cast, const, convert,
                         dtype, fresh, is_const, load, replace, rewrite, select, seq, stmts_of, substitute, walk,
                         FRAGMENT, GLOBAL, PRIVATE)
from tilelang.ops import Copy, Fill, Gemm, Transpose
from tilelang.ops.pairing import TileLoops, iteration_space, lower_elementwise

from ..analysis.statements import renamed
from ..analysis.vectorize import bound_divisors
from ..framework.pass_ import TILE, PassContext, pass_

register("small-type", NotImplementedError, "a use of a type narrower than a byte that is not available",
         "copy the tile to a fragment or shared memory and convert it to int8, float16 or float32 there",
         expected="a use of the type that is available")


@pass_(needs=TILE)
def unpack_small_types(func: Func, cx: PassContext) -> Func:
    """Hold each value of a narrow type in its own element outside global memory; packed tensors become bytes of two values.

    Before:  A: Tensor((M, N), "int4"); S = alloc_shared((8, 16), "int4"); T.copy(A[i, j], S)
    After:   A: Tensor((M, N // 2), "int8"); S = alloc_shared((8, 16), "int8")
             for r, c in Parallel(8, 16): S[r, c] = nibble (j + c) % 2 of A[i + r, (j + c) // 2], sign extended
    Shared and private memory that a T.view shows both as narrow values and as bytes is packed, like a tensor.
    Results are wrapped (int4) or rounded to nearest even (fp4) to the narrow type where they are computed. Elements of
    float4_e2m1fnx2 are bytes in every memory; their values are pairs of float16. Strides of packed tensors count values.

    A byte is stored by one thread: copies store an even number of columns from an even one, and a loop over neighbouring
    elements (T.Parallel, or a loop inside one thread) does two of them in an iteration. Raises small-type for other stores.
    """
    if not any(isinstance(x, Buffer) and x.dtype.base in WIDE or isinstance(x, Expr) and x.dtype.base in WIDE
               for x in walk(func)) and not any(b.dtype.base in WIDE for _, b in func.buffers):
        return func
    return _Unpacking(func).run()


class _Unpacking:
    def __init__(self, func: Func) -> None:
        self.func = func
        self.buffers: dict[Buffer, Buffer] = {}
        self.vars: dict[Var, Var] = {}
        self.narrow: dict[Buffer, dtype] = {}  # new buffer -> its narrow type
        self.pairs: dict[Buffer, dtype] = {}  # new buffer of bytes -> its type of two values
        self.bytes: dict[int, tuple[Expr, Expr]] = {}  # id of the Load of a pair -> (the pair, its byte)
        self.divisors = bound_divisors(func.body)
        self.viewed: set[Var] = set()  # storage outside global memory that is seen both as narrow values and as bytes
        self.pairing = PairedStores(self.divisors)

    def run(self) -> Func:
        for _, b in self.func.buffers:
            if b.dtype.base in WIDE and not is_pair(b.dtype) and b.shape and isinstance(b.shape[-1], Var):
                self.divisors[b.shape[-1]] = 2  # a row is whole bytes: the call checks it
        kinds: dict[Var, set[bool]] = {}
        for x in walk(self.func.body):
            if isinstance(x, Buffer) and x.scope_name != GLOBAL:
                kinds.setdefault(x.data, set()).add(x.dtype.base in WIDE and not is_pair(x.dtype))
        self.viewed = {data for data, found in kinds.items() if len(found) > 1}
        body = rewrite(self.func.body, self.node)
        for x in walk(body, Store):
            if x.buffer in self.pairing.buffers:
                raise error("small-type",
                            f"an element of `{x.buffer.name}` ({x.buffer.dtype}) is stored: two values share a byte",
                            expected="a loop in which one thread stores both values of a byte",
                            found=f"an element of {x.buffer.dtype}", span=x.span, hint="store neighbouring elements in one "
                            "T.Parallel of an even extent, from an even column, or collect a tile and T.copy it")
        buffers = tuple((p, self.buffer(b)) for p, b in self.func.buffers)
        return replace(self.func, body=body, buffers=buffers)

    def node(self, x: Node) -> Node | None:
        match x:
            case Buffer():
                return self.buffer(x)
            case Var() if x.dtype.base in WIDE:
                return self.vars.setdefault(x, Var(x.name, wide(x.dtype), span=x.span))
            case Const() if x.dtype.base in WIDE:
                return const(x.value, wide(x.dtype))
            case Load():
                return self.load(x)
            case Store() if x.buffer in self.pairs:
                return replace(x, value=self.byte_of(x.value))
            case Store() if self.packed(x.buffer):
                return self.pairing.store(x, self.narrow[x.buffer])
            case For() | Parallel():
                return self.pairing.loop(x)
            case AddressOf() if x.buffer in self.narrow:
                raise error("small-type", f"the address of a {self.narrow[x.buffer]} is taken",
                            expected="the address of elements of a byte or more", found=str(self.narrow[x.buffer]), span=x.span,
                            hint="pass a T.view of the tensor as int8")
            case Call() if x.dtype.base in WIDE or x.op == "reinterpret":
                if x.op == "reinterpret" and (x.dtype.bits < 8 or x.args[0].dtype.bits < 8):
                    raise error("small-type", "T.reinterpret of a type narrower than a byte",
                                expected="types of at least 8 bits", found=f"{x.args[0].dtype} to {x.dtype}", span=x.span)
                return fitted(replace(x, dtype=wide(x.dtype)), x.dtype) if x.dtype.base in WIDE else None
            case TileOp():
                return self.tile_op(x)
            case Cast() if x.dtype.base in WIDE:
                return fitted(x.value, x.dtype)
            case Binary() | Unary() if x.dtype.base in WIDE:
                exact = x.op in ("min", "max", "bitand", "bitor", "bitxor", "floormod", "truncmod", "shr")
                out = replace(x, dtype=wide(x.dtype))
                return out if exact else fitted(out, x.dtype)
            case Expr() if x.dtype.base in WIDE:  # Select, Broadcast, Shuffle: the same value in the other type
                return replace(x, dtype=wide(x.dtype))
        return None

    def buffer(self, b: Buffer) -> Buffer:
        if b.dtype.base not in WIDE:
            return b
        got = self.buffers.get(b)
        if got is None:
            if is_pair(b.dtype):
                got = self.buffers[b] = replace(b, dtype=dtype("uint8"))
                self.pairs[got] = b.dtype
                return got
            if b.dtype.lanes != 1:
                raise error("small-type", f"`{b.name}` has elements of type {b.dtype}",
                            expected="scalar elements or float4_e2m1fnx2", found=str(b.dtype), span=b.span,
                            hint="use the scalar type; copies pack it")
            if b.scope_name != GLOBAL and b.data not in self.viewed:
                got = replace(b, dtype=wide(b.dtype))
            else:
                got = self.packed_buffer(b)
            self.buffers[b] = got
            self.narrow[got] = b.dtype
        return got

    def packed_buffer(self, b: Buffer) -> Buffer:
        """The tensor of bytes behind a packed tensor."""
        last = b.shape[-1] if b.shape else 1
        strides = b.strides_ or (1,)
        given = {param for _, param in self.func.buffers}  # of these, a call checks that rows are whole bytes
        even = [x for x in (last, *strides[:-1], b.offset) if known_divisor(convert(x), self.divisors) % 2
                and (isinstance(x, int) or b not in given)]
        if even or not is_const(convert(strides[-1]), 1):
            raise error("small-type", f"`{b.name}` of {b.dtype} is packed two values a byte: its rows need an even length, and "
                        "the two values of a byte are neighbours in a row",
                        expected="an even row length, even strides, and 1 as the last stride",
                        found=f"shape {tuple(b.shape)}, strides {b.strides_}", span=b.span,
                        hint="the dimension that is packed is the last one, with stride 1; pad it to an even length")
        halved = None if b.strides_ is None else (*(_half(s) for s in b.strides_[:-1]), 1)
        return replace(b, dtype=dtype("uint8"), shape=(*b.shape[:-1], _half(last)), strides_=halved, offset=_half(b.offset))

    def packed(self, b: Buffer) -> bool:
        return b in self.narrow and (b.scope_name == GLOBAL or b.data in self.viewed)

    def load(self, x: Load) -> Expr:
        if x.buffer in self.pairs:
            return self.pair(x)
        if x.buffer not in self.narrow:
            return x
        narrow = self.narrow[x.buffer]
        if not self.packed(x.buffer):
            return replace(x, dtype=wide(narrow).with_lanes(x.dtype.lanes))
        return self.unpacked(x.buffer, x.indices, x.span)

    def pair(self, x: Load) -> Expr:
        """The two values of a byte, low nibble first."""
        narrow = self.pairs[x.buffer]
        if any(i.dtype.lanes > 1 for i in x.indices):
            raise error("small-type", f"a vector of `{x.buffer.name}`, whose elements are pairs, is read",
                        expected="an element", found="a vector", span=x.span, hint="T.copy the tile instead")
        byte = replace(x, dtype=dtype("uint8"))
        nibbles = (byte & const(15, "uint8"), byte >> const(4, "uint8"))
        out = Shuffle(tuple(value_of(n, narrow.scalar) for n in nibbles), (0, 1), wide(narrow), span=x.span)
        self.bytes[id(out)] = (out, byte)
        return out

    def byte_of(self, value: Expr) -> Expr:
        """The byte of a pair of narrow values held in float16. A pair that was just read keeps its byte."""
        if id(value) in self.bytes:
            return self.bytes[id(value)][1]
        return _byte_of(*(code_of(v, dtype("float4_e2m1fn")) for v in lanes_of(value)))

    def unpacked(self, b: Buffer, indices: tuple[Expr, ...], span: Any) -> Expr:
        """The value of a packed tensor at logical indices."""
        last = indices[-1]
        if isinstance(last, Ramp) and not any(i.dtype.lanes > 1 for i in indices[:-1]):
            each = [self.unpacked(b, (*indices[:-1], convert(last.base + last.stride * k)), span) for k in range(last.lanes)]
            return Shuffle(tuple(each), tuple(range(last.lanes)), each[0].dtype.with_lanes(last.lanes), span=span)
        if any(i.dtype.lanes > 1 for i in indices):
            raise error("small-type", f"a vector of `{b.name}` is read",
                        expected="an element", found="a vector", span=span, hint="T.copy the tile instead")
        at, bits = _half_byte(indices)  # no branch: bytes are read as vectors
        return value_of(load(b, at, span=span) >> bits & const(15, "uint8"), self.narrow[b])

    # ---- tile operations --------------------------------------------------------------------------------------------

    def tile_op(self, op: TileOp) -> Node | None:
        regions = [r for r in walk(op, Region)]
        paired = [r for r in regions if r.buffer in self.pairs]
        if paired and (len(paired) < len(regions) or not isinstance(op, (Copy, Transpose))):
            b = paired[0].buffer
            raise error("small-type", f"‹T.{op.op_name}› on `{b.name}`, whose elements are pairs ({self.pairs[b]})",
                        expected="a copy between such tiles", span=op.span, hint="read and store its elements in T.Parallel")
        touched = {r.buffer for r in regions if r.buffer in self.narrow}
        if not touched:
            return None
        if isinstance(op, Copy):
            return self.copy(op)
        on_packed = [b for b in touched if self.packed(b)]
        if on_packed and isinstance(op, Fill) and self.even_columns(op.dst):
            code = code_of(fitted(op.value, self.narrow[op.dst.buffer]), self.narrow[op.dst.buffer])
            return replace(op, dst=_bytes_of(op.dst), value=_byte_of(code, code))
        if on_packed or not isinstance(op, (Fill, Gemm, Transpose)):
            b = (on_packed or list(touched))[0]
            raise error("small-type", f"‹T.{op.op_name}› on `{b.name}` ({self.narrow[b]})", expected="a copy", span=op.span)
        return None

    def copy(self, op: Copy) -> Stmt | None:
        src, dst = op.src.buffer, op.dst.buffer
        into = self.narrow.get(dst)

        def converted(v: Expr) -> Expr:
            if into is None:
                return cast(v, dst.dtype)
            return v if self.narrow.get(src) == into else fitted(v, into)  # a value of the narrow type needs no rounding

        if self.packed(dst):
            return self.whole_bytes(op) or self.packed_store(op, src)
        if not self.packed(src):
            if into is None or self.narrow.get(src) == into:
                return None
            return lower_elementwise(_TileLoops(), op.dst, op.src, converted, op.span)

        def unpack(v: Any) -> Expr:
            return converted(self.unpacked(v.buffer, v.indices, op.span))

        return lower_elementwise(_TileLoops(), op.dst, op.src, unpack, op.span)

    def whole_bytes(self, op: Copy) -> Copy | None:
        """The copy as one of bytes, which may be asynchronous; None where the two sides do not surely start at whole bytes."""
        if self.narrow.get(op.src.buffer) != self.narrow[op.dst.buffer] or not self.packed(op.src.buffer):
            return None
        if not (self.even_columns(op.src) and self.even_columns(op.dst)):
            return None
        extents, of_dst, of_src = iteration_space(op.dst, op.src)
        if of_dst[-1] != len(extents) - 1 or of_src[-1] != len(extents) - 1:
            return None
        return replace(op, src=_bytes_of(op.src), dst=_bytes_of(op.dst))

    def even_columns(self, r: Region) -> bool:
        return not any(known_divisor(convert(x), self.divisors) % 2 for x in (r.mins[-1], r.extents[-1]))

    def packed_store(self, op: Copy, src: Buffer) -> Stmt:
        dst, narrow = op.dst.buffer, self.narrow[op.dst.buffer]
        extents, of_dst, _ = iteration_space(op.dst, op.src)
        whole = op.src.is_full or src.scope_name != FRAGMENT
        even = isinstance(extents[-1], int) and extents[-1] % 2 == 0 and of_dst[-1] == len(extents) - 1 and known_divisor(
            convert(op.dst.mins[-1]), self.divisors) % 2 == 0
        if not whole or not even or src.scope_name in PRIVATE:
            raise error("small-type", f"a copy to `{dst.name}` ({narrow}) that does not surely store whole bytes",
                        expected="a copy of whole bytes", found="one that may start or end inside a byte", span=op.span,
                        hint="copy an even number of columns that starts at an even one, from a whole fragment or from shared "
                        "memory")

        def fits(v: Any) -> Expr:
            value = self.unpacked(src, v.indices, op.span) if self.packed(src) else v
            return value if self.narrow.get(src) == narrow else fitted(value, narrow)

        loop = lower_elementwise(_TileLoops(), op.dst, op.src, fits, op.span)
        marked = rewrite(loop, lambda x: self.pairing.store(x, narrow), Store)
        return self.pairing.loop(marked)  # type: ignore[return-value]


class _TileLoops(TileLoops):
    def private(self, extents: tuple[Any, ...], body: Callable[..., Stmt], span: Any = None) -> Stmt:
        raise error("small-type", "a copy between packed and private memory", expected="shared memory or a fragment",
                    found="private memory", span=span, hint="use a fragment, or loop over the elements")


def _bytes_of(r: Region) -> Region:
    """The bytes of a region that starts and ends at whole ones."""
    return replace(r, mins=(*r.mins[:-1], _half(r.mins[-1])), extents=(*r.extents[:-1], _half(r.extents[-1])))


def _half(x: Any) -> Any:
    return x // 2 if isinstance(x, int) else x // const(2, x.dtype)


def _half_byte(indices: tuple[Expr, ...]) -> tuple[tuple[Expr, ...], Expr]:
    """(indices of the byte of a value, the number of its lowest bit there)."""
    last = indices[-1]
    return (*indices[:-1], _half(last)), cast(last % const(2, last.dtype) * const(4, last.dtype), "uint8")


def _byte_of(low: Expr, high: Expr) -> Expr:
    """The byte of two codes."""
    return low | high << const(4, "uint8")


def _with_code(x: Store, b: Buffer, at: tuple[Expr, ...], bits: Expr, narrow: dtype) -> Store:
    """A store of a value as a change of its half of a byte, which one thread changes whole."""
    kept = load(b, at, span=x.span) & const(240, "uint8") >> bits
    return replace(x, buffer=b, indices=at, value=kept | code_of(x.value, narrow) << bits)


# ---- paired stores ----------------------------------------------------------------------------------------------------------
# Element stores to packed tensors: a loop over neighbouring elements stores the two values of a byte in one iteration.


class PairedStores:
    """Turns stores of elements into stores of bytes.  divisors: known divisors of variables.

    `store` takes a store of one value at its logical indices and marks it; `loop` resolves the marked stores of a loop.
    buffers: the marks; a store to one of them that is left when all loops are done stores half a byte.
    """

    def __init__(self, divisors: dict[Expr, int]) -> None:
        self.divisors = divisors
        self.buffers: dict[Buffer, Buffer] = {}  # mark -> tensor of bytes
        self._marks: dict[Buffer, Buffer] = {}

    def store(self, x: Store, narrow: dtype) -> Stmt:
        """The store of a value of the narrow type, to be resolved by a loop around it.

        Resolved at once are vectors of whole bytes, and elements of private memory: one thread changes all of its bytes.
        """
        if x.buffer.scope_name in PRIVATE and x.value.dtype.lanes == 1:
            return _with_code(x, x.buffer, *_half_byte(x.indices), narrow)
        mark = self._marks.get(x.buffer)
        if mark is None:
            mark = self._marks[x.buffer] = replace(x.buffer, dtype=narrow, data=Var(x.buffer.name, x.buffer.data.dtype))
            self.buffers[mark] = x.buffer
        last = x.indices[-1]
        if not (isinstance(last, Ramp) and is_const(last.stride, 1) and last.lanes % 2 == 0 and self._even(last.base)):
            return replace(x, buffer=mark)
        value = Var("lanes", x.value.dtype)
        lanes = lanes_of(value)
        lows = [replace(x, buffer=mark, indices=(*x.indices[:-1], convert(last.base + k)), value=lanes[k])
                for k in range(0, len(lanes), 2)]
        stores = [self._byte(low, high) for low, high in zip(lows, lanes[1::2])]
        return seq(Bind(value, x.value, span=x.span), *stores, span=x.span)

    def loop(self, x: For | Parallel) -> Stmt | None:
        """The loop with the marked stores of its body resolved; None where it has none, or they are no pairs of its loop."""
        marked = [s for s in walk(x.body, Store) if s.buffer in self.buffers]
        if not marked or any(isinstance(s, (Break, Continue)) for s in walk(x.body)):
            return None
        if isinstance(x, For):
            if x.kind not in ("serial", "unroll", "vectorized") or not self._even(x.start) or not self._even(x.extent):
                return None
            vars: tuple[Var, ...] = (x.var,)
        else:
            if x.plan.loop_layout is not None:
                return None
            vars = tuple(v for v, e in zip(x.vars, x.extents) if self._even(e))
        var = next((v for v in vars if all(self._pairs(s, v) for s in marked)), None)
        if var is None:
            return None
        half = fresh(var.name, var.dtype)
        first, second = substitute(x.body, {var: half * 2}), renamed(substitute(x.body, {var: half * 2 + 1}))
        body = self._merged(first, second)
        if body is None:
            body = seq(self._by_halves(first, 0), self._by_halves(second, 1), span=x.span)
        if isinstance(x, For):
            return replace(x, var=half, start=_halved(x.start), extent=_halved(x.extent), body=body)
        extents = tuple(_halved(e) if v is var else e for v, e in zip(x.vars, x.extents))
        return replace(x, vars=tuple(half if v is var else v for v in x.vars), extents=extents, body=body,
                       plan=x.plan.having(coalesced_width=None))

    def _even(self, e: Expr) -> bool:
        return known_divisor(e, self.divisors) % 2 == 0

    def _pairs(self, s: Store, v: Var) -> bool:
        """Whether iterations 2k and 2k + 1 of v store the two values of one byte."""
        if any(v in walk(i, Var) for i in s.indices[:-1]):
            return False
        last = s.indices[-1]
        return last.dtype.lanes == 1 and Analyzer().linear(last).terms.get(v) == 1 and self._even(
            Analyzer().simplify(binary("sub", last, v)))

    def _merged(self, first: Stmt, second: Stmt) -> Stmt | None:
        """One statement that stores both values of each byte; None where one may be stored without the other."""
        a, b = stmts_of(first), stmts_of(second)
        if len(a) > 1 and len(a) == len(b):
            last = self._merged(a[-1], b[-1])
            before = (*a[:-1], *b[:-1])
            read = {y.buffer.data for s in before for y in walk(s, Load)}
            if last is None or not all(isinstance(s, Bind) for s in before) or any(
                    s.buffer.data in read for s in walk(last, Store)):
                return None
            return seq(*before, last, span=first.span)
        if isinstance(first, If) and isinstance(second, If) and first.cond.same(second.cond) and not (
                first.orelse or second.orelse):
            inside = self._merged(first.then, second.then)
            return None if inside is None else replace(first, then=inside)
        if isinstance(first, Store) and isinstance(second, Store) and first.buffer in self.buffers:
            return self._byte(first, second.value)
        return None

    def _byte(self, low: Store, high: Expr) -> Stmt:
        """The store of a byte: its first value as a marked store, and its second value."""
        narrow = low.buffer.dtype
        byte = _byte_of(code_of(low.value, narrow), code_of(high, narrow))
        return replace(low, buffer=self.buffers[low.buffer], indices=self._place(low), value=byte)

    def _by_halves(self, body: Stmt, which: int) -> Stmt:
        """body with each marked store as a change of the low (0) or high (1) half of its byte; one thread changes both."""
        bits = const(4 * which, "uint8")
        return rewrite(body, lambda s: _with_code(s, self.buffers[s.buffer], self._place(s), bits, s.buffer.dtype)
                       if s.buffer in self.buffers else None, Store)

    def _place(self, s: Store) -> tuple[Expr, ...]:
        return *s.indices[:-1], _halved(s.indices[-1])


def _halved(e: Expr) -> Expr:
    return Analyzer().simplify(_half(e))


# ---- values of types narrower than a byte: the type that holds one, and its 4-bit code --------------------------------

# The type that holds one value outside packed memory; it represents every value of the narrow type.
WIDE = {"int4": "int8", "uint4": "uint8", "float4_e2m1fn": "float16"}
_FP4_STEPS = (("gt", 0.25, 0.5), ("ge", 0.75, 0.5), ("gt", 1.25, 0.5), ("ge", 1.75, 0.5), ("gt", 2.5, 1.0), ("ge", 3.5, 1.0),
              ("gt", 5.0, 2.0))  # each step of the rounding to nearest even, and how much it adds


def is_pair(dt: dtype) -> bool:
    """Whether an element is a byte of two fp4 values."""
    return dt.base == "float4_e2m1fn" and dt.lanes == 2


def lanes_of(value: Expr) -> tuple[Expr, ...]:
    """The values of a vector."""
    return tuple(Shuffle((value,), (k,), value.dtype.scalar) for k in range(value.dtype.lanes))


def wide(dt: dtype) -> dtype:
    """The type that holds a narrow one's values."""
    return dtype(WIDE[dt.base]).with_lanes(dt.lanes)


def value_of(nibble: Expr, narrow: dtype) -> Expr:
    """The value of a 4-bit code (uint8, 0..15)."""
    if narrow == "uint4":
        return nibble
    if narrow == "int4":
        return _signed(nibble)
    # e2m1 as the top bits of a float16 whose exponent is 14 too small: subnormals come out right.
    code = cast(nibble, "uint16")
    bits = (code & const(7, "uint16")) << const(9, "uint16") | (code & const(8, "uint16")) << const(12, "uint16")
    return call("reinterpret", (bits,), dtype("float16")) * const(16384.0, "float16")


def code_of(value: Expr, narrow: dtype) -> Expr:
    """The 4-bit code (uint8, 0..15) of a value of the narrow type, held in its wide type."""
    if narrow.is_int:
        return cast(value, "uint8") & const(15, "uint8")
    bits = call("reinterpret", (value * const(1 / 16384.0, "float16"),), dtype("uint16"))
    return cast(bits >> const(9, "uint16") & const(7, "uint16") | bits >> const(12, "uint16") & const(8, "uint16"), "uint8")


def _signed(nibble: Expr) -> Expr:
    """The lowest four bits as an int8."""
    return cast(nibble, "int8") << const(4, "int8") >> const(4, "int8")


def fitted(value: Expr, narrow: dtype) -> Expr:
    """A value converted to the range of the narrow type: wrapped (integers; floats truncate first), or rounded to nearest even
    and saturated (fp4; NaN becomes zero)."""
    out = wide(narrow)
    if narrow.lanes > 1:
        whole = value if value.dtype.lanes > 1 else None
        each = lanes_of(whole) if whole is not None else (value,) * narrow.lanes
        return Shuffle(tuple(fitted(v, narrow.scalar) for v in each), tuple(range(narrow.lanes)), out)
    if isinstance(value, Const) and narrow.base != "float4_e2m1fn":
        value = const(int(value.value), "int64")
    if narrow.base == "int4":
        return _signed(value)
    if narrow.base == "uint4":
        return cast(value, out) & const(15, out)
    x = cast(value, "float32")
    size = call("fabs", (x,), dtype("float32"))
    total: Expr = const(0.0, "float32")
    for op, limit, step in _FP4_STEPS:
        total = total + select(binary(op, size, const(limit, "float32")), const(step, "float32"), const(0.0, "float32"))
    return cast(call("copysign", (total, x), dtype("float32")), out)
