"""Options of intrinsics: records of the compile-time parameters of a Call, one class for each family of intrinsics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .options import Options, options

CALL_OPTIONS: dict[str, type[CallOptions]] = {}  # by name of the intrinsic; intrinsics without options have no entry


class CallOptions(Options):
    """Base class of the option records of intrinsics.  The fields depend on the intrinsic."""

    if TYPE_CHECKING:  # fields of all records: code that knows the intrinsic need not name its record class
        def __getattr__(self, name: str) -> Any: ...


def options_of(op: str, given: dict[str, Any]) -> CallOptions | None:
    """The record of an intrinsic with these options; None if it has no options.  Raises TypeError for unknown options."""
    record = CALL_OPTIONS.get(op)
    if record is not None:
        return record(**given)
    if given:
        raise TypeError(f"{op} has no options, found {', '.join(given)}")
    return None


_ROWS: tuple[tuple[str, str, str, dict[str, tuple[Any, ...]]], ...] = (
    # class, its intrinsics, what the fields mean, and the type of each field with its default, if it has one
    ("Rounding", "ieee_add ieee_sub ieee_mul ieee_fdiv ieee_fmaf ieee_frcp ieee_fsqrt",
     "rounding_mode: rn, rz, ru or rd.", {"rounding_mode": ("str", "rn")}),
    ("ExternOptions", "call_extern",
     "number: distinguishes calls of functions with effects; None for functions without effects.",
     {"number": ("int | None", None)}),
    ("BlockBarrierOptions", "sync_threads",
     "number: the named barrier that replaces the block barrier where each warp role has its own barrier. by_group: threads "
     "wait for those of their own warp group only.", {"number": ("int | None", None), "by_group": ("bool | None", None)}),
    ("VoteOptions", "syncthreads_count syncthreads_and syncthreads_or warp_role_barrier",
     "key: the number of the first barrier of the warp roles, where each warp role runs as a coroutine (CPU). arriving: how "
     "many warp roles meet there; 0: all of the block that have not ended. place: the byte of shared memory from which on the "
     "waves leave their counts, None where the hardware counts.",
     {"key": ("int | None", None), "arriving": ("int", 0), "place": ("int | None", None)}),
    ("ShuffleOptions", "shfl_xor shfl_up shfl_down shfl_idx",
     "width: number of consecutive lanes that exchange values among themselves.", {"width": ("int", 32)}),
    ("AtomicOptions", "atomic_add atomic_max atomic_min atomic_or atomic_and atomic_xor atomic_inc atomic_dec atomic_cas "
     "atomic_exchange atomic_load atomic_store",
     "order: the C++ name of the memory order, None for the default of the intrinsic. scope: \"sys\" orders with other devices "
     "as well, None with the threads of this one.", {"order": ("str | None", None), "scope": ("str | None", None)}),
    ("SignalOptions", "wait_signal",
     "compare: eq, ne, ge, le, gt or lt: the value there, and the one that is waited for. line: of the program, for reports.",
     {"compare": ("str",), "line": ("int", 0)}),
    ("RankBarrierOptions", "rank_barrier", "words: of the row, two for each rank. line: of the program, for reports.",
     {"words": ("int",), "line": ("int", 0)}),
    ("NvshmemOptions", "nvshmem", "name: of the function of NVSHMEM.", {"name": ("str",)}),
    ("CpAsyncOptions", "cp_async", "bytes: 4, 8 or 16.", {"bytes": ("int",)}),
    ("WaitOptions", "cp_async_wait wgmma_wait", "n: groups that may still run.", {"n": ("int", 0)}),
    ("WaitLoadsOptions", "wait_loads", "n: loads into LDS of this wave that may still be in flight.", {"n": ("int", 0)}),
    ("PriorityOptions", "wave_priority", "n: 0 to 3.", {"n": ("int", 0)}),
    ("BetweenOptions", "loads_between", "first: loads in front of all matrix instructions. n: those behind them, each in front "
     "of so many matrix instructions.", {"first": ("int", 0), "n": ("int", 0), "each": ("int", 0)}),
    ("BulkWaitOptions", "bulk_wait",
     "n: groups that may still run. read: wait only until the sources are read, not until the destinations are written.",
     {"n": ("int", 0), "read": ("bool", False)}),
    ("MatrixMoveOptions", "ldmatrix stmatrix",
     "num: 1, 2 or 4 matrices of 8 x 8. trans: each transposed. bytes: four matrices are 32 x 16 bytes, which ldmatrix "
     "transposes (then trans is true) and stmatrix stores transposed (ops/ldmatrix.py).",
     {"num": ("int",), "trans": ("bool", False), "bytes": ("bool", False)}),
    ("MmaOptions", "mma", "row: name of the instruction in target/mma.py.", {"row": ("str",)}),
    ("WgmmaOptions", "wgmma",
     'row: name of the instruction in WGMMA_ROWS. a_major, b_major: "k" or "mn". registers: which of "c" and "a" are named '
     "PTX registers. selector: which lanes have the metadata of a sparse row.",
     {"row": ("str",), "a_major": ("str", "k"), "b_major": ("str", "k"), "registers": ("tuple[str, ...]", ()),
      "selector": ("int", 0)}),
    ("DescriptorOptions", "wgmma_descriptor",
     "lbo, sbo, swizzle, offset: bytes. count: number of elements of the tile, starting at the address.",
     {"lbo": ("int", 0), "sbo": ("int", 0), "swizzle": ("int", 0), "offset": ("int", 0), "count": ("int", 1)}),
    ("PinOptions", "wgmma_pin wgmma_hold wgmma_used",
     'count: 32-bit registers of the array, 0 where the lowering computes the number. move: "in" copies the array into its '
     'named PTX registers, "out" copies the registers into the array.', {"count": ("int", 0), "move": ("str | None", None)}),
    ("TmaOptions", "tma_load tma_store tma_reduce_add tma_prefetch tensor_map",
     "map: name of a tensor map of the launch. multicast: the copy writes the CTAs of a mask. cache_hint: a name of "
     "CACHE_HINTS, or the number of a cache policy. in_group: copies of cp.async that follow are waited for with it.",
     {"map": ("str",), "multicast": ("bool", False), "cache_hint": ("str | int | None", None), "in_group": ("bool", False)}),
    ("CpAsyncArriveOptions", "cp_async_mbarrier_arrive",
     "noinc: the arrival is included in the count that the barrier was initialised with.", {"noinc": ("bool", False)}),
    ("SmallIntOptions", "small_int_to_float", "low: the least value that the integer may have, at most 0.", {"low": ("int",)}),
    ("TableOptions", "codes_taken", "high: the low bytes of all entries are zero.", {"high": ("bool", False)}),
    ("PairOptions", "dequantise_pair",
     "low, high: the bit positions in the byte where the two weights start. mask: the bit mask of one weight.",
     {"low": ("int",), "high": ("int",), "mask": ("int",)}),
    ("ClusterArriveOptions", "cluster_arrive",
     "relaxed: the arrival does not order memory accesses.", {"relaxed": ("bool", False)}),
    ("WarpGroupOptions", "in_warp_groups",
     "Groups first .. first + count - 1 of `size` threads: 128 for warp groups, 32 for warps.",
     {"first": ("int",), "count": ("int",), "size": ("int", 128)}),
    ("RegisterCountOptions", "set_max_nreg",
     "n: registers per thread. inc: True raises the number of registers, False lowers it.", {"n": ("int",), "inc": ("bool",)}),
)

for _name, _ops, _about, _fields in _ROWS:
    globals()[_name] = _record = options(type(_name, (CallOptions,), {
        "__doc__": _about, "__module__": __name__, "__annotations__": {k: v[0] for k, v in _fields.items()},
        **{k: v[1] for k, v in _fields.items() if len(v) > 1}}))
    CALL_OPTIONS.update(dict.fromkeys(_ops.split(), _record))
