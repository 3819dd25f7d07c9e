"""The device functions of NVSHMEM that programs call: names and C parameters.  Source: NVSHMEM API documentation."""

from __future__ import annotations

SIZE = "unsigned long long"  # of 64 bits in every header
_MOVED = f"void* dest, const void* source, {SIZE} nbytes"
_SIGNAL = f"void* sig_addr, {SIZE} signal, int sig_op, int pe"
_COLLECTIVES = ("broadcastmem", "fcollectmem")


def _functions() -> dict[str, str]:
    out = {"nvshmem_signal_op": _SIGNAL, "nvshmem_signal_wait_until": f"void* sig_addr, int cmp, {SIZE} cmp_value",
           "nvshmem_int_p": "int* dest, int value, int pe", "nvshmem_quiet": "", "nvshmem_fence": ""}
    for x, form in (("", ""), ("x", "_warp"), ("x", "_block")):
        for move in ("putmem", "putmem_nbi", "getmem", "getmem_nbi"):
            out[f"nvshmem{x}_{move}{form}"] = f"{_MOVED}, int pe"
        for move in ("putmem_signal", "putmem_signal_nbi"):
            out[f"nvshmem{x}_{move}{form}"] = f"{_MOVED}, {_SIGNAL}"
        out[f"nvshmem{x}_broadcastmem{form}"], out[f"nvshmem{x}_fcollectmem{form}"] = f"{_MOVED}, int root", _MOVED
        out |= {f"nvshmem{x}_{meets}_all{form}": "" for meets in ("barrier", "sync")}
    return out


FUNCTIONS = _functions()  # name -> parameters; those of several PEs concern all of them
USED = "tl::nvshmem"  # in the source of a kernel that calls one


def declaration(name: str) -> str | None:
    """The declaration of the function tl::name; None for other names."""
    parameters = FUNCTIONS.get(name)
    return None if parameters is None else f"__device__ void {name}({parameters});\n"


def definition(name: str) -> str:
    """The function tl::name, which calls NVSHMEM's."""
    words = [p.split()[-1] for p in FUNCTIONS[name].split(", ") if p]
    args = ", ".join(f"(uint64_t*){w}" if w == "sig_addr" else w for w in words)
    team = "NVSHMEM_TEAM_WORLD, " if any(c in name for c in _COLLECTIVES) else ""
    called = name.replace("nvshmem_signal_op", "nvshmemx_signal_op")  # an extension of NVSHMEM to its standard
    return f"__device__ __noinline__ void {name}({FUNCTIONS[name]}) {{ ::{called}({team}{args}); }}\n"
