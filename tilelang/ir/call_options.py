"""Options of intrinsics: records of the compile-time parameters of a Call, one class for each family of intrinsics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .options import Options, options

CALL_OPTIONS: dict[str, type[CallOptions]] = {}  # by name of the intrinsic; intrinsics without options have no entry


class CallOptions(Options):
    """Base class of the option records of intrinsics.  The fields depend on the intrinsic."""

    if TYPE_CHECKING:  # all fields of all records, so that code that knows the intrinsic need not name its record class
        a_major: str
        arriving: int
        b_major: str
        based: bool
        by_group: bool | None
        bytes: int
        cache_hint: str | int | None
        count: int
        first: int
        high: int
        inc: bool
        joined: bool
        key: int | None
        lbo: int
        low: int
        map: str
        mask: int
        move: str | None
        multicast: bool
        n: int
        noinc: bool
        num: int
        number: int | None
        offset: int
        order: str | None
        read: bool
        registers: tuple[str, ...]
        relaxed: bool
        rounding_mode: str
        row: str
        sbo: int
        size: int
        swizzle: int
        trans: bool
        width: int


def options_of(op: str, given: dict[str, Any]) -> CallOptions | None:
    """The record of an intrinsic with these options; None if it has no options.  Raises TypeError for unknown options."""
    record = CALL_OPTIONS.get(op)
    if record is not None:
        return record(**given)
    if given:
        raise TypeError(f"{op} has no options, found {', '.join(given)}")
    return None


def _of(*ops: str) -> Callable[[type], Any]:
    """Class decorator: registers a class as the option record of these intrinsics."""

    def wrap(cls: type) -> Any:
        record = options(cls)
        CALL_OPTIONS.update(dict.fromkeys(ops, record))
        return record

    return wrap


@_of(*(f"ieee_{op}" for op in ("add", "sub", "mul", "fdiv", "fmaf", "frcp", "fsqrt")))
class Rounding(CallOptions):
    """rounding_mode: rn, rz, ru or rd."""

    rounding_mode: str = "rn"


@_of("call_extern")
class ExternOptions(CallOptions):
    """number: distinguishes calls of functions with effects; None for functions without effects."""

    number: int | None = None


@_of("sync_threads")
class BlockBarrierOptions(CallOptions):
    """number: the named barrier that replaces the block barrier where each warp role has its own barrier.

    by_group: threads wait for those of their own warp group only.
    """

    number: int | None = None
    by_group: bool | None = None


@_of("syncthreads_count", "syncthreads_and", "syncthreads_or", "warp_role_barrier")
class VoteOptions(CallOptions):
    """key: the number of the first barrier of the warp roles, where each warp role runs as a coroutine (CPU).

    arriving: how many warp roles meet there; 0: all of the block that have not ended.
    """

    key: int | None = None
    arriving: int = 0


@_of("shfl_xor", "shfl_up", "shfl_down", "shfl_idx")
class ShuffleOptions(CallOptions):
    """width: number of consecutive lanes that exchange values among themselves."""

    width: int = 32


@_of(*(f"atomic_{op}" for op in ("add", "max", "min", "or", "and", "xor", "inc", "dec", "cas", "exchange", "load", "store")))
class AtomicOptions(CallOptions):
    """order: the C++ name of the memory order, None for the default of the intrinsic."""

    order: str | None = None


@_of("cp_async")
class CpAsyncOptions(CallOptions):
    """bytes: 4, 8 or 16."""

    bytes: int


@_of("cp_async_wait", "wgmma_wait")
class WaitOptions(CallOptions):
    """n: groups that may still run."""

    n: int = 0


@_of("bulk_wait")
class BulkWaitOptions(CallOptions):
    """n: groups that may still run.  read: wait only until the sources are read, not until the destinations are written."""

    n: int = 0
    read: bool = False


@_of("ldmatrix", "stmatrix")
class MatrixMoveOptions(CallOptions):
    """num: 1, 2 or 4 matrices of 8 x 8.  trans: each transposed.  bytes: four matrices are 32 x 16 bytes, which ldmatrix
    transposes (then trans is true) and stmatrix stores transposed (ops/ldmatrix.py)."""

    num: int
    trans: bool = False
    bytes: bool = False


@_of("mma")
class MmaOptions(CallOptions):
    """row: name of the instruction in MMA_ROWS."""

    row: str


@_of("wgmma")
class WgmmaOptions(CallOptions):
    """row: name of the instruction in WGMMA_ROWS.  a_major, b_major: "k" or "mn".  registers: which of "c" and "a" are named
    PTX registers.  joined, based: how wgmma are printed as one asm (transform/registers/join_wgmmas.py)."""

    row: str
    a_major: str = "k"
    b_major: str = "k"
    registers: tuple[str, ...] = ()
    joined: bool = False
    based: bool = False


@_of("wgmma_descriptor")
class DescriptorOptions(CallOptions):
    """lbo, sbo, swizzle, offset: bytes.  count: number of elements of the tile, starting at the address."""

    lbo: int = 0
    sbo: int = 0
    swizzle: int = 0
    offset: int = 0
    count: int = 1


@_of("wgmma_pin", "wgmma_hold")
class PinOptions(CallOptions):
    """count: 32-bit registers of the array, 0 where the lowering computes the number.  move: "in" copies the array into its
    named PTX registers, "out" copies the registers into the array."""

    count: int = 0
    move: str | None = None


@_of("tma_load", "tma_store", "tma_reduce_add", "tma_prefetch", "tensor_map")
class TmaOptions(CallOptions):
    """map: name of a tensor map of the launch.  multicast: the copy writes the CTAs of a mask.  cache_hint: a name of
    CACHE_HINTS, or the number of a cache policy."""

    map: str
    multicast: bool = False
    cache_hint: str | int | None = None


@_of("cp_async_mbarrier_arrive")
class CpAsyncArriveOptions(CallOptions):
    """noinc: the arrival is included in the count that the barrier was initialised with."""

    noinc: bool = False


@_of("small_int_to_float")
class SmallIntOptions(CallOptions):
    """low: the least value that the integer may have, at most 0."""

    low: int


@_of("codes_taken")
class TableOptions(CallOptions):
    """high: the low bytes of all entries are zero."""

    high: bool = False


@_of("dequantise_pair")
class PairOptions(CallOptions):
    """low, high: the bit positions in the byte where the two weights start.  mask: the bit mask of one weight."""

    low: int
    high: int
    mask: int


@_of("cluster_arrive")
class ClusterArriveOptions(CallOptions):
    """relaxed: the arrival does not order memory accesses."""

    relaxed: bool = False


@_of("in_warp_groups")
class WarpGroupOptions(CallOptions):
    """Groups first .. first + count - 1 of `size` threads: 128 for warp groups, 32 for warps."""

    first: int
    count: int
    size: int = 128


@_of("set_max_nreg")
class RegisterCountOptions(CallOptions):
    """n: registers per thread.  inc: True raises the number of registers, False lowers it."""

    n: int
    inc: bool
