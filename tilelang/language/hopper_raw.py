"""Raw Hopper instructions (sm_90a): matrix descriptors and wgmma, TMA by a tensor map, cp.async on an mbarrier.

Numbers are those of the hardware: byte offsets in descriptors count units of 16 bytes, and swizzles are 0 none,
1 of 128, 2 of 64, 3 of 32 bytes in a matrix descriptor, 0 none, 1 of 32, 2 of 64, 3 of 128 bytes in a tensor map.
Shared memory that these functions address is laid out row by row unless T.annotate_layout sets another layout.  The
reference interpreter and the CPU backend also run these programs (target/shared_space.py); the address in a descriptor has
another value there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang.arith import Analyzer
from tilelang.ir import (AddressOf, Buffer, Const, Expr, Load, as_bool, as_dim, binary, call, cast, const, convert, is_const,
                         load, BufferFacts, GLOBAL, LOCAL, SHARED, VARIABLE)
from tilelang.ir.record import record
from tilelang.target.mma import PTX_TYPES, operand_dtype
from tilelang.target.tensor_map import STRIDE_ALIGN, TensorMap, unsupported
from tilelang.target.wgmma import WGMMA_ROWS

from .barriers import barrier_of
from .tracing.builder import Emitted, need_builder
from .tracing.flags import flag
from .kernel import need_kernel
from .raw import buffer_at
from .tracing.regions import BufferSlice, operand
from .tracing.state import describe, error, example
from .tensor import dtype_of
from .thread import emit_call

_MATRIX_SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}
_MAP_SWIZZLES = {0: 0, 1: 32, 2: 64, 3: 128}
_MAP_L2 = {0: 0, 1: 64, 2: 128, 3: 256}
_FIELD = 1 << 14  # limit of a 14-bit field of a matrix descriptor
_SHORT = {"fp16": "float16", "f16": "float16", "bf16": "bfloat16", "fp32": "float32", "f32": "float32", "tf32": "tfloat32",
          "e4m3": "float8_e4m3", "e5m2": "float8_e5m2", "s8": "int8", "u8": "uint8", "s32": "int32"}


# ---- matrix descriptors ---------------------------------------------------------------------------------------------


@example('desc = T.alloc_descriptor("wgmma")')
def alloc_descriptor(kind: str = "wgmma", dtype: Any = "uint64") -> Buffer:
    """A variable of each thread that holds a matrix descriptor.  kind: "wgmma"; those of Blackwell raise not-available."""
    b = need_builder("T.alloc_descriptor")
    need_kernel("T.alloc_descriptor")
    if kind != "wgmma":
        raise error("not-available", f"descriptors of ‹kind {kind!r}› are for Blackwell, which is not available yet",
                    expected="descriptors of wgmma")
    dt = dtype_of(dtype, "T.alloc_descriptor")
    if dt != "uint64":
        raise error("descriptor-operand", f"a wgmma descriptor has 64 bits, found {dt}", expected="uint64")
    return b.allocate(Buffer(b.fresh_name("desc"), (1,), dt, VARIABLE, facts=BufferFacts(descriptor=kind), span=b.here()))


@example("desc = T.alloc_wgmma_desc()")
def alloc_wgmma_desc(dtype: Any = "uint64") -> Buffer:
    """T.alloc_descriptor("wgmma")."""
    return alloc_descriptor("wgmma", dtype)


def _descriptor(x: Any, what: str) -> Buffer:
    if not isinstance(x, Buffer) and isinstance(x, Expr) and not isinstance(x, Load):
        x = buffer_at(x)
    if isinstance(x, Load):
        x = x.buffer
    if not isinstance(x, Buffer) or not x.facts.descriptor:
        raise error("descriptor-operand", f"{what} takes a descriptor, found {describe(x)}",
                    expected="a descriptor of T.alloc_wgmma_desc", hint="desc = T.alloc_wgmma_desc()")
    return x


def _shared_address(x: Any, what: str) -> AddressOf:
    """The shared element that a pointer, element, region or buffer starts at."""
    if not isinstance(x, AddressOf):
        if not isinstance(x, (Buffer, Load, BufferSlice)):
            raise error("extern-argument", f"{what} takes «the address of shared memory», found {describe(x)}",
                        hint="S.access_ptr('r'), T.address_of(S[i, j])")
        o = operand(x, f"the address of {what}")
        x = AddressOf(o.buffer, tuple(convert(m) for m in o.mins))
    if x.buffer.scope_name not in SHARED:
        raise error("extern-argument", f"{what} takes «the address of shared memory», `{x.buffer.name}` is "
                    f"{x.buffer.scope_name}", found=f"`{x.buffer.name}` in {x.buffer.scope_name}")
    return x


def _number(x: Any, what: str, limit: int) -> int:
    """A compile-time integer n with 0 <= n < limit."""
    x = x.value if isinstance(x, Const) else x
    if isinstance(x, bool) or not isinstance(x, (int, np.integer)) or not 0 <= x < limit:
        raise error("descriptor-operand", f"{what} is «a number from 0 to {limit - 1} known while compiling», found "
                    f"{describe(x)}")
    return int(x)


@example("desc = T.alloc_wgmma_desc()", 'T.initialize_wgmma_descriptor(desc, T.access_ptr(A_s, "r"), 1, 1, 64)')
def initialize_wgmma_descriptor(desc: Any, addr: Any, layout_type_: int = 0, leading_byte_offset: int = 0,
                                stride_byte_offset: int = 0) -> Emitted:
    """Set a descriptor to the matrix at a shared address (PTX ISA, "Matrix Descriptor Format").

    layout_type_: 0 no swizzle, 1 of 128, 2 of 64, 3 of 32 bytes.  leading_byte_offset, stride_byte_offset: the fields of the
    descriptor, in units of 16 bytes.  Raises descriptor-operand, extern-argument.
    """
    b, what = need_builder("T.initialize_wgmma_descriptor"), "T.initialize_wgmma_descriptor"
    d, at = _descriptor(desc, what), _shared_address(addr, what)
    swizzle = _MATRIX_SWIZZLES[_number(layout_type_, f"layout_type_ of {what}", 4)]
    lbo, sbo = (_number(x, f"{n} of {what}", _FIELD) for x, n in (
        (leading_byte_offset, "leading_byte_offset"), (stride_byte_offset, "stride_byte_offset")))
    value = call("wgmma_descriptor", (at,), "uint64", span=b.here(), lbo=16 * lbo, sbo=16 * sbo, swizzle=swizzle)
    b.store(d, (const(0),), value)
    return Emitted()


def increase_descriptor_offset(desc: Any, off: Any) -> Emitted:
    """Add `off` bytes, a multiple of 16, to a descriptor's address.

    Example:
        desc = T.alloc_wgmma_desc()
        T.initialize_wgmma_descriptor(desc, T.access_ptr(A_s, "r"), 1, 1, 64)
        T.increase_descriptor_offset(desc, 32)
    """
    b = need_builder("T.increase_descriptor_offset")
    d = _descriptor(desc, "T.increase_descriptor_offset")
    if isinstance(off, (int, Const)) and _number(off, "the offset of a descriptor", 1 << 18) % 16:
        raise error("descriptor-operand", f"a descriptor moves by multiples of 16 bytes, found {off}",
                    expected="a multiple of 16 bytes")
    b.store(d, (const(0),), _moved(d, binary("shr", convert(off), const(4, convert(off).dtype))))
    return Emitted()


def _moved(d: Buffer, units: Any) -> Expr:
    """A descriptor's value with its address increased by units of 16 bytes."""
    value = load(d, (const(0),))
    if isinstance(units, int) and units == 0 or isinstance(units, Const) and units.value == 0:
        return value
    return binary("add", value, cast(convert(units), "uint64"))


# ---- wgmma ------------------------------------------------------------------------------------------------------------


def _type(name: Any, what: str) -> Any:
    return operand_dtype(dtype_of(_SHORT.get(str(name), name), what))


def _row(what: str, prefix: str, a: Any, b: Any, c: Any) -> Any:
    types = [_type(x, what) for x in (a, b)] + [dtype_of(_SHORT.get(str(c), c), what)]
    row = next((r for r in map(WGMMA_ROWS.get, (_row_name(prefix, types),)) if r is not None), None)
    if row is None:
        raise error("gemm-types", f"{what}: no wgmma instruction ‹{prefix!r} of {types[0]} and {types[1]} into {types[2]}›",
                    expected="an instruction of wgmma", hint="m64nNkK with K of 32 bytes, N a multiple of 8 up to 256")
    return row


def _row_name(prefix: str, types: list[Any]) -> str:
    a, b, c = (PTX_TYPES.get(f"{t}", f"{t}") for t in types)
    return f"wgmma.{prefix}.{c}.{a}.{b}"


def _registers(x: Any, offset: Any, count: int, what: str) -> AddressOf:
    """`count` registers of a thread from element `offset` of a local buffer (or its `.data`)."""
    buffer = x if isinstance(x, Buffer) else buffer_at(x)
    if buffer.scope_name != LOCAL or len(buffer.shape) != 1:
        raise error("descriptor-operand", f"{what} takes registers of T.alloc_local((n,), ...), `{buffer.name}` is "
                    f"{buffer.scope_name} of shape {list(buffer.shape)}", expected="registers of T.alloc_local((n,), …)",
                    found=f"{buffer.scope_name} memory of shape {list(buffer.shape)}")
    first = _number(offset, f"the first register of {what}", 1 << 16)
    if first + count > int(buffer.shape[0]):
        raise error("descriptor-operand", f"{what} uses {count} elements of `{buffer.name}` from {first} on, which has "
                    f"{buffer.shape[0]}", expected=f"at most {buffer.shape[0]} elements", found=f"{count} from {first} on")
    return AddressOf(buffer, (const(first),))


def _wgmma(what: str, row: Any, a: tuple[Any, bool], b: tuple[Any, bool], c: AddressOf, scale_out: Any,
           scales: tuple[Any, Any]) -> Emitted:
    """Emit one wgmma.  a, b: the operand, and whether it is contiguous along k."""
    for x in scales:
        if not isinstance(x, (int, np.integer, Const)) or int(getattr(x, "value", x)) != 1:
            raise error("not-available", f"{what} with scale_in ‹{describe(x)}›: operands are taken as they are (1)",
                        expected="scale_in 1")
    majors = ["k" if m else "mn" for _, m in (a, b)]
    if any(m not in row.majors for m in majors):
        raise error("gemm-types", f"{what}: {row.name} takes «operands with k contiguous» only",
                    found=f"{' and '.join(majors)} contiguous")
    keep = scale_out if isinstance(scale_out, bool) else as_bool(binary("ne", convert(scale_out), const(0)))
    return emit_call("wgmma", (c, a[0], b[0], as_bool(keep)), "void", row=row.name, a_major=majors[0], b_major=majors[1])


def ptx_wgmma_ss(dtype: Any, prefix: str, a_is_k_major: bool, b_is_k_major: bool, a_abbrv: Any, b_abbrv: Any,
                 acc_abbrv: Any, A_desc: Any, A_off: Any, B_desc: Any, B_off: Any, C_data: Any, C_off: Any,
                 scale_out: Any, scale_in_a: Any = 1, scale_in_b: Any = 1) -> Emitted:
    """One wgmma of a warp group with both operands in shared memory: C = A @ B + (C if scale_out).

    prefix: "m64n128k16".  A_desc, B_desc: descriptors of the (M, K) and (K, N) tiles in shared memory.
    A_off, B_off: added to the descriptors, in units of 16 bytes.  C_data: `.data` of a local buffer of M*N/128
    elements from C_off on; registers as in PTX ISA, "Register Fragments".  T.warpgroup_arrive
    comes before it, T.warpgroup_commit_batch and T.warpgroup_wait after it.  Before that wait, the program must not access
    the operands or registers.
    Raises gemm-types, descriptor-operand; not-available for scale_in other than 1.

    Example:
        T.ptx_wgmma_ss("float32", "m64n64k16", True, True, "fp16", "fp16", "fp32", desc[0], 0, desc[0], 0, r32.data, 0, True)
    """
    what = "T.ptx_wgmma_ss"
    need_kernel(what)
    row = _row(what, prefix, a_abbrv, b_abbrv, acc_abbrv)
    c = _registers(C_data, C_off, row.c.registers, what)
    a, b = (_moved(_descriptor(d, what), o) for d, o in ((A_desc, A_off), (B_desc, B_off)))
    major = flag(a_is_k_major, "a_is_k_major"), flag(b_is_k_major, "b_is_k_major")
    return _wgmma(what, row, (a, major[0]), (b, major[1]), c, scale_out, (scale_in_a, scale_in_b))


@example('T.ptx_wgmma_rs("float32", "m64n64k16", True, "fp16", "fp16", "fp32", r16.data, 0, desc[0], 0, r32.data, 0, True)')
def ptx_wgmma_rs(dtype: Any, prefix: str, b_is_k_major: bool, a_abbrv: Any, b_abbrv: Any,
                 acc_abbrv: Any, A_buf: Any, A_off: Any, B_desc: Any, B_off: Any, C_data: Any, C_off: Any,
                 scale_out: Any, scale_in_a: Any = 1, scale_in_b: Any = 1) -> Emitted:
    """T.ptx_wgmma_ss with A in registers.

    A_buf: `.data` of a local buffer of A's elements from A_off on.  B_desc: descriptor of a tile in shared memory, of
    (K, N) elements.  C_data: `.data` of a local buffer of M*N/128 elements from C_off on.
    """
    what = "T.ptx_wgmma_rs"
    need_kernel(what)
    row = _row(what, prefix, a_abbrv, b_abbrv, acc_abbrv)
    c = _registers(C_data, C_off, row.c.registers, what)
    a = _registers(A_buf, A_off, row.a.registers, what)
    b = _moved(_descriptor(B_desc, what), B_off)
    return _wgmma(what, row, (a, True), (b, flag(b_is_k_major, "b_is_k_major")), c, scale_out, (scale_in_a, scale_in_b))


# ---- TMA --------------------------------------------------------------------------------------------------------------


@record
class TmaDescriptor:
    """The tensor map that T.create_tma_descriptor returns, for T.tma_load.  It exists only while the program is traced."""

    map: TensorMap


@example('desc = T.create_tma_descriptor("float16", 2, A.data, 512, 512, 2, 1024, 64, 128, 1, 1, 0, 3, 2, 0)')
def create_tma_descriptor(*args: Any) -> TmaDescriptor:
    """The tensor map of a tensor parameter; the arguments have the order of cuTensorMapEncodeTiled.

    (type, rank, A.data, extents, strides in bytes, box, element strides, interleave, swizzle, L2 promotion, fill): `rank`
    values each of extents, strides, box and element strides, innermost first.  type: a dtype, or the driver's number.  Extents
    and strides are those of the tensor; element strides are 1 and interleave is 0.  Raises tma-descriptor; tensor-map for a
    box that TMA cannot move.
    """
    what = "T.create_tma_descriptor"
    need_builder(what)
    rank = args[1].value if len(args) > 1 and isinstance(args[1], Const) else args[1] if len(args) > 1 else None
    if not isinstance(rank, int) or not 1 <= rank <= 5 or len(args) != 3 + 4 * rank + 4:
        raise error("tma-descriptor", f"{what} takes a type, a rank of 1 to 5, an address, 4 values a dimension and 4 options, "
                    f"found {len(args)} arguments", expected="3 values, 4 a dimension and 4 options")
    buffer = args[2] if isinstance(args[2], Buffer) else buffer_at(args[2])
    groups = [list(args[3 + k * rank:3 + (k + 1) * rank]) for k in range(4)]
    interleave, swizzle, l2, fill = (_number(x, n, 4) for x, n in zip(args[-4:], (
        "interleave", "swizzle", "the L2 promotion", "the fill")))
    box = tuple(_number(x, "an extent of a box", 257) for x in groups[2])
    m = TensorMap(f"{buffer.name}_raw_map", buffer, box, _MAP_SWIZZLES[swizzle], "nan" if fill else "zero", _MAP_L2[l2])
    _check_tensor(m, args[0], groups)
    if interleave or any(_number(x, "an element stride", 9) != 1 for x in groups[3]):
        raise error("tma-descriptor", f"{what}: element strides are 1 and interleave is 0",
                    expected="element strides 1 and interleave 0", found="others")
    why = unsupported(buffer, box, m.swizzle, m.fill, m.l2)
    if why is not None:
        raise error("tensor-map", f"TMA cannot move boxes {box} of `{buffer.name}`: ‹{why}›")
    return TmaDescriptor(m)


def _check_tensor(m: TensorMap, kind: Any, groups: list[list[Any]]) -> None:
    """Check that the arguments of a tensor map agree with the tensor's declaration."""
    buffer, size = m.buffer, m.buffer.dtype.bytes
    if isinstance(kind, Const):
        kind = kind.value
    number = isinstance(kind, (int, np.integer))
    same = kind == m.codes[0] if number else dtype_of(kind, "T.create_tma_descriptor") == buffer.dtype
    if buffer.scope_name != GLOBAL or len(buffer.shape) != m.rank or not same:
        raise error("tma-descriptor", f"`{buffer.name}` is a {len(buffer.shape)}-dimensional {buffer.scope_name} tensor of "
                    f"{buffer.dtype}, described as {kind} with {m.rank} dimensions",
                    expected=f"{m.rank} dimensions of {kind} in global memory",
                    found=f"{len(buffer.shape)} of {buffer.dtype} in {buffer.scope_name} memory")
    strides = [as_dim(binary("mul", convert(s), convert(size))) if isinstance(s, Expr) else s * size
               for s in (1, *m.strides())]
    for given, want, name in ((groups[0], m.extents(), "extents"), (groups[1], strides, "strides in bytes")):
        for g, w in zip(given, want):
            if not _equal(g, w):
                raise error("tma-descriptor", f"the {name} of `{buffer.name}` are «{_shown(want)}» innermost first, found "
                            f"{_shown(given)}")


def _equal(x: Any, y: Any) -> bool:
    x, y = (v.value if isinstance(v, Const) else v for v in (x, y))
    if isinstance(x, Expr) and isinstance(y, Expr):
        return is_const(Analyzer().simplify(binary("sub", cast(x, "int64"), cast(y, "int64"))), 0)
    return bool(x == y) if not isinstance(x, Expr) and not isinstance(y, Expr) else False


def _shown(values: Any) -> str:
    return "(" + ", ".join(str(v) for v in values) + ")"


def tma_load(*args: Any) -> Emitted:
    """Load one TMA box: (descriptor, barrier, shared address, coordinates innermost first).  Each executing thread loads it.

    descriptor: of T.create_tma_descriptor.  The box is written to the address without gaps, swizzled as in the descriptor.
    Its bytes are counted on the barrier, which must expect them (T.mbarrier_expect_tx).  The first coordinate is a multiple
    of 16 bytes.  An optional last argument is a cache policy: 0 evict_normal, 1 evict_first, 2 evict_last.
    Raises tma-descriptor, barrier-operand, extern-argument.

    Example:
        desc = T.create_tma_descriptor("float16", 2, A.data, 512, 512, 2, 1024, 64, 128, 1, 1, 0, 3, 2, 0)
        if tx == 0:
            T.mbarrier_expect_tx(bar[0], 128 * 64 * 2)
            T.tma_load(desc, bar[0], T.access_ptr(A_s, "w"), 0, by * 128)
        T.mbarrier_arrive(bar[0])
        T.mbarrier_wait_parity(bar[0], 0)
    """
    what = "T.tma_load"
    k = need_kernel(what)
    if len(args) < 3 or not isinstance(args[0], TmaDescriptor):
        raise error("tma-descriptor", f"{what} takes «(descriptor, barrier, shared address, coordinates)», found "
                    f"{describe(args[0]) if args else 'nothing'}", hint="descriptor = T.create_tma_descriptor(...)")
    m, at = args[0].map, args[3:]
    if len(at) not in (m.rank, m.rank + 1):
        raise error("tma-descriptor", f"{what} takes «{m.rank} coordinates» for `{m.buffer.name}`, found {len(at)}")
    policy = {} if len(at) == m.rank else {
        "cache_hint": ("evict_normal", "evict_first", "evict_last")[_number(at[-1], "a cache policy", 3)]}
    bar, dst = barrier_of(args[1], what), _shared_address(args[2], what)
    coordinates = tuple(cast(convert(c), "int32") for c in at[:m.rank])
    first, unit = coordinates[0], STRIDE_ALIGN * 8 // m.buffer.dtype.bits
    if isinstance(first, Const) and first.value % unit:  # an H200 reports "illegal instruction" for it
        raise error("tma-descriptor", f"{what} at element ‹{first.value}› of a row of `{m.buffer.name}`: boxes start at "
                    f"multiples of {STRIDE_ALIGN} bytes, which are {unit} elements", expected=f"a multiple of {unit}")
    return emit_call("tma_load", (dst, bar, *coordinates), "void", map=registered_map(k, m), **policy)


def registered_map(k: Any, m: TensorMap) -> str:
    """The name of a tensor map in the launch; it is added when it is new."""
    maps = k.plan.tensor_maps
    for entry in maps:
        if entry[1:] == m.entry[1:]:
            return str(entry[0])
    taken = {e[0] for e in maps}
    name, n = m.name, 1
    while name in taken:
        name, n = f"{m.name}_{n}", n + 1
    k.set(tensor_maps=(*maps, (name, *m.entry[1:])))
    return name


# ---- cp.async on an mbarrier ------------------------------------------------------------------------------------------


@example("T.async_copy(A[by * 128, 0], A_s)", "T.cp_async_barrier_noinc(bar[0])")
def cp_async_barrier_noinc(b: Any) -> Emitted:
    """Arrive on the barrier once this thread's earlier cp.async copies have completed; it counts like T.mbarrier_arrive."""
    return emit_call("cp_async_mbarrier_arrive", (barrier_of(b, "T.cp_async_barrier_noinc"),), noinc=True)


@example("T.async_copy(A[by * 128, 0], A_s)", "T.ptx_cp_async_barrier(bar[0])")
def ptx_cp_async_barrier(b: Any) -> Emitted:
    """Delay the barrier's phase until this thread's earlier cp.async copies have completed.  It does not use up an arrival."""
    return emit_call("cp_async_mbarrier_arrive", (barrier_of(b, "T.ptx_cp_async_barrier"),), noinc=False)


__all__ = ["alloc_descriptor", "alloc_wgmma_desc", "cp_async_barrier_noinc", "create_tma_descriptor",
           "increase_descriptor_offset", "initialize_wgmma_descriptor", "ptx_cp_async_barrier", "ptx_wgmma_rs", "ptx_wgmma_ss",
           "tma_load"]
