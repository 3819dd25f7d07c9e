"""Targets: the machine that a kernel is compiled for, and its features.

A Target is a value.  `Target("cuda")`, `Target("sm_80")`, `Target({"kind": "cuda", "arch": "sm_80"})`, `Target("hip")`,
`Target({"kind": "hip", "mcpu": "gfx942"})`, `Target("cpu")`, `Target("auto")`; `with Target(...):` makes it the current one for
"auto".  `str` gives a text that is read back.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilelang.errors import error, register

from .detect import detected, normalized, register_target_detector
from .hip import DEFAULT_ARCH as DEFAULT_HIP_ARCH
from .hip import HIP_CHIPS, NOUNS, WAVE, HipChip, blocks_by_registers, check_gfx
from .machine import LIMITS, DeviceLimits
from .probe import device_capability, hip_device_arch

register("target-unknown", AssertionError, "the target is no kind this version compiles for, or its options are bad")
register("target-arch", ValueError, "the architecture of a target is malformed or not supported")

CPU_KINDS = ("cpu", "llvm", "c")
KINDS = ("cuda", "hip", *CPU_KINDS)
DEFAULT_CUDA_ARCH = "sm_80"  # used without a device: the oldest architecture that supports all of cp.async
_ARCH = re.compile(r"^sm_(\d{2,3})([af]?)$")


class TargetKind(str):
    """Name of a target kind: a string with the attribute `.name`."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return str(self)


# Options that a target's dict may have in addition to kind and arch: those of upstream's target configurations.
_OPTIONS = frozenset((
    "code", "device", "host", "keys", "l2_cache_size_bytes", "libs", "max_num_threads", "max_shared_memory_per_block",
    "max_threads_per_block", "mattr", "mcpu", "model", "mtriple", "num-cores", "opt-level", "registers_per_block", "system-lib",
    "tag", "thread_warp_size", "vector-width"))
_LISTS = ("code", "keys", "libs", "mattr")  # options that hold a list
_CPU_SHARED = 64 * 1024 * 1024  # shared memory of a CPU block is ordinary memory; this only rejects excessively large tiles


def _since(arch_number: int) -> Any:
    """A feature that CUDA architectures have from this number on."""
    return property(lambda target: target.at_least(arch_number))


@dataclass(frozen=True, init=False, repr=False)
class Target:
    """The target of a compilation: an architecture or processor, and its features.

    kind: TargetKind, one of KINDS ("cpu", "llvm" and "c" all name the CPU).  arch: "sm_XX[a|f]" for cuda, "gfx…" for hip, ""
    otherwise.
    options: further entries of the dict form, sorted by key.  host: the host's target kind.
    Raises AssertionError for an unknown kind or options of the wrong form, ValueError for a bad arch.

    >>> Target({"kind": "cuda", "arch": "sm_90a"}).has_stmatrix
    True
    """

    kind: TargetKind
    arch: str
    options: tuple[tuple[str, Any], ...]

    def __init__(self, spec: Any = "auto") -> None:
        kind, arch, options = _parse(spec)
        object.__setattr__(self, "kind", TargetKind(kind))
        object.__setattr__(self, "arch", arch)
        object.__setattr__(self, "options", options)

    # ---- properties for user code -------------------------------------------------------------------------------
    @property
    def attrs(self) -> dict[str, Any]:
        """Options as a dict, with `arch` (for hip `mcpu`) where the target has one."""
        out = dict(self.options)
        if self.arch:
            out[self._arch_key] = self.arch
        return out

    @property
    def _arch_key(self) -> str:
        return "mcpu" if self.is_hip else "arch"

    @property
    def keys(self) -> tuple[str, ...]:
        return (str(self.kind), "gpu") if self.is_gpu else ("cpu",)

    @property
    def ffi_device(self) -> str:
        """TVM-FFI's name of the devices; torch says "cuda" for both kinds of GPU."""
        return {"cuda": "cuda", "hip": "rocm"}.get(self.kind, "cpu")

    @property
    def host(self) -> str:
        return "llvm"

    def __str__(self) -> str:
        parts = [str(self.kind)]
        if self.arch:
            parts.append(f"-{self._arch_key}={self.arch}")
        parts += [f"-{k}={','.join(v) if isinstance(v, tuple) else v}" for k, v in self.options]
        return " ".join(parts)

    def __repr__(self) -> str:
        return f"Target({str(self)!r})"

    def __enter__(self) -> Target:
        _local.stack.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _local.stack.pop()

    @staticmethod
    def current(allow_none: bool = True) -> Target | None:
        """The innermost `with Target(...)`.  Raises ValueError when there is none and allow_none is False."""
        if _local.stack:
            return _local.stack[-1]
        if not allow_none:
            raise ValueError("Target context required: no `with Target(...)` is active")
        return None

    @property
    def nouns(self) -> dict[str, str]:
        """The nouns of reports -> those of this machine, where they differ."""
        return NOUNS if self.is_hip else {}

    # ---- features -----------------------------------------------------------------------------------------------
    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def is_hip(self) -> bool:
        return self.kind == "hip"

    @property
    def is_gpu(self) -> bool:
        return self.is_cuda or self.is_hip

    @property
    def is_cpu(self) -> bool:
        return self.kind in CPU_KINDS

    @property
    def arch_number(self) -> int:
        """80 for sm_80, 90 for sm_90 and sm_90a; 0 for other kinds."""
        m = _ARCH.match(self.arch)
        return int(m.group(1)) if m else 0

    @property
    def machine(self) -> int | str:
        """The key of target/machine.py's tables: 90 for sm_90 and sm_90a, "gfx942"; "" for a CPU."""
        return self.arch_number or self.arch

    @property
    def arch_suffix(self) -> str:
        """"a" or "f" where the arch has one (features of exactly that architecture or family)."""
        m = _ARCH.match(self.arch)
        return m.group(2) if m else ""

    @property
    def limits(self) -> DeviceLimits:
        """Hardware limits; those of a CPU target have a large bound of shared memory."""
        if self.is_cpu:
            return DeviceLimits(_CPU_SHARED, _CPU_SHARED, self.max_threads)
        return self.chip.limits if self.chip is not None else LIMITS[self.arch_number]

    @property
    def max_shared_bytes(self) -> int:
        """Shared memory a block may use, bytes."""
        return self.limits.shared_per_block

    @property
    def max_threads(self) -> int:
        """Threads a block may have."""
        return 1024

    @property
    def warp_size(self) -> int:
        """Lanes that execute one instruction together."""
        return WAVE if self.is_hip else 32

    @property
    def chip(self) -> HipChip | None:
        """The record of an AMD chip; None for other kinds."""
        return HIP_CHIPS.get(self.arch)

    def blocks_by_registers(self, registers: int, threads: int) -> int:
        """Blocks that the registers of an SM or compute unit hold.  registers: of a thread."""
        if self.chip is not None:
            return blocks_by_registers(registers, threads)
        return self.limits.registers_per_sm // (-(-registers // 8) * 8 * -(-threads // 32) * 32)

    @property
    def has_mfma(self) -> bool:
        """Matrix instructions of a wavefront: all chips of the kind hip."""
        return self.is_hip

    @property
    def loads_by_registers(self) -> bool:
        """Whether tiles that are copied ahead are in flight in registers of threads: only narrow loads reach LDS past them."""
        return self.is_hip

    @property
    def fuses_in_text(self) -> bool:
        """Whether the text says which multiplications and additions are one instruction; else the device compiler decides."""
        return self.is_hip

    @property
    def async_load_bytes(self) -> tuple[int, ...]:
        """Bytes that a lane may copy from global to shared memory past the registers, all lanes of a wave to one run of bytes;
        () where there is no such instruction, or each lane gives its own address (`has_cp_async`)."""
        return self.chip.async_load_bytes if self.chip is not None else ()

    @property
    def transposed_loads(self) -> tuple[int, ...]:
        """Bits of the elements that loads of shared memory transpose among 16 lanes (`lanes_transposed`)."""
        return self.chip.transposed_loads if self.chip is not None else ()

    @property
    def counts_in_shared(self) -> bool:
        """Whether the threads of a block vote through shared memory: no instruction counts them (bar.red)."""
        return self.is_hip

    def at_least(self, arch_number: int) -> bool:
        return self.is_cuda and self.arch_number >= arch_number

    @property
    def has_wgmma(self) -> bool:
        """wgmma and setmaxnreg: exactly sm_90a."""
        return self.arch_number == 90 and self.arch_suffix == "a"

    @property
    def has_fp8_mma(self) -> bool:
        """Matrix instructions of float8_e4m3fn and float8_e5m2."""
        return self.at_least(89) or self.chip is not None and self.chip.fp8 == "ocp"

    has_ldmatrix, has_cp_async, has_tf32, has_fp8_pairs, has_stmatrix, has_tma = map(_since, (75, 80, 80, 89, 90, 90))
    has_bfloat16_pairs = _since(80)


class _Local(threading.local):
    """Thread-local state: the targets of the open `with` blocks."""

    def __init__(self) -> None:
        self.stack: list[Target] = []


_local = _Local()


def _bad(what: Any, advice: str, hint: str = "") -> Exception:
    return error("target-unknown", f"Target {what} is not supported. {advice}",
                 expected=f"one of {', '.join(KINDS)}, or \"auto\"", found=what, hint=hint or _target_hint(str(what)))


def _target_hint(what: str) -> str:
    arch = what.replace("sm", "sm_").replace("__", "_")
    if re.fullmatch(r"sm_\d+[a-z]?", arch):
        return f'write target={{"kind": "cuda", "arch": "{arch}"}}'
    if what.lower() in ("rocm", "amd", "amdgpu", "hip:0"):
        return f'write target="hip", or {{"kind": "hip", "mcpu": "{DEFAULT_HIP_ARCH}"}}'
    if what.lower() in ("gpu", "nvidia", "cuda:0", "ptx"):
        return 'write target="cuda"'
    return f"this version compiles for {', '.join(KINDS)}, or \"auto\""


def _parse(spec: Any) -> tuple[str, str, tuple[tuple[str, Any], ...]]:
    """(kind, arch, options) of a target in any accepted form."""
    if isinstance(spec, Target):
        return spec.kind, spec.arch, spec.options
    if isinstance(spec, Mapping):
        known = spec.get("kind") in KINDS
        other = None if known else normalized(dict(spec))
        return _parse_once(other, spec) if other is not None else _parse_dict(dict(spec))
    if not isinstance(spec, str):
        return _parse_foreign(spec)
    if spec == "auto":
        return _detect()
    if spec not in KINDS:
        other = normalized(spec)
        if other is not None:
            return _parse_once(other, spec)
        read = _read_text(spec)
        if read is None:
            raise _bad(spec, "Pass target options as a dict when the target needs attributes.",
                       'for example {"kind": "cuda", "arch": "sm_80"}' if spec.startswith("cuda") else
                       f'for example {{"kind": "hip", "mcpu": "{DEFAULT_HIP_ARCH}"}}' if spec.startswith("hip ") else "")
        return _parse_dict(read)
    return _parse_dict({"kind": spec})


def _read_text(spec: str) -> dict[str, Any] | None:
    """The dict form of "sm_90a", "gfx942" or of the text that `str` gives of a target; None for other texts."""
    if _ARCH.match(spec):
        return {"kind": "cuda", "arch": spec}
    if re.match(r"gfx\d", spec):
        return {"kind": "hip", "mcpu": spec}
    kind, *parts = re.split(r"\s+-(?=[a-z])", spec.strip())
    if kind not in KINDS or not all("=" in p for p in parts):
        return None
    out: dict[str, Any] = {"kind": kind}
    for key, value in (p.split("=", 1) for p in parts):
        plain = {"True": True, "False": False}.get(value, int(value) if value.isdigit() else value)
        out[key] = value.split(",") if key in _LISTS else plain
    return out


def _parse_once(found: Any, spec: Any) -> tuple[str, str, tuple[tuple[str, Any], ...]]:
    """Parse the result of a normalizer for `spec`, which must be in a form that the package knows."""
    if isinstance(found, str) and found not in KINDS or isinstance(found, Mapping) and found.get("kind") not in KINDS:
        raise _bad(f"{found!r}, which a normalizer made of {spec!r},", "Pass a valid target config dict.")
    return _parse(found)


def _parse_dict(d: dict[str, Any]) -> tuple[str, str, tuple[tuple[str, Any], ...]]:
    kind = d.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS or not all(isinstance(k, str) for k in d):
        raise _bad({"kind": kind, **d}, "Pass a valid target config dict.", _target_hint(str(kind)))
    arch = ""
    if kind == "cuda":
        if str(d.get("mcpu")).startswith("gfx"):
            raise error("target-arch", f"CUDA target mcpu {d['mcpu']!r} is an architecture of AMD", expected="no mcpu",
                        found=repr(d["mcpu"]), hint=f'write {{"kind": "hip", "mcpu": {d["mcpu"]!r}}}')
        arch = d.pop("arch", None)
        arch = check_arch(arch) if arch is not None else device_arch() or DEFAULT_CUDA_ARCH
        if "code" in d:
            d["code"] = _check_code(d["code"])
    elif kind == "hip":
        arch = _hip_arch(d)
    elif "arch" in d:
        raise _bad({"kind": kind, **d}, "Pass a valid target config dict.", "a CPU target takes no arch")
    unknown = sorted(set(d) - _OPTIONS)
    if unknown:
        raise _bad({"kind": kind, **d}, f"Unknown option {unknown[0]!r}. Pass a valid target config dict.",
                   f"options are {', '.join(sorted(_OPTIONS))}")
    d.pop("keys", None)
    d.pop("host", None)
    try:
        hash(tuple(d.values()))
    except TypeError:
        d = {k: tuple(v) if isinstance(v, list) else repr(v) if isinstance(v, dict) else v for k, v in d.items()}
    return kind, arch, tuple(sorted(d.items()))


def _hip_arch(d: dict[str, Any]) -> str:
    """The architecture of the dict form of a HIP target, whose entry "mcpu", or "arch", is taken out."""
    names = [chip for key in ("mcpu", "arch") if (chip := d.pop(key, None)) is not None]
    if len({*map(str, names)}) > 1:
        raise error("target-arch", f"a HIP target names two chips: mcpu {names[0]!r} and arch {names[1]!r}",
                    expected="one of them", found=f"{names[0]!r} and {names[1]!r}",
                    hint=f'write {{"kind": "hip", "mcpu": {names[0]!r}}}')
    lanes = d.pop("thread_warp_size", WAVE)
    if lanes != WAVE:
        raise error("target-arch", f"wavefronts of HIP targets have «{WAVE}» lanes, found thread_warp_size ‹{lanes!r}›",
                    hint="leave thread_warp_size out")
    return check_gfx(names[0]) if names else hip_arch() or DEFAULT_HIP_ARCH


def _parse_foreign(spec: Any) -> tuple[str, str, tuple[tuple[str, Any], ...]]:
    """Parse a target object of another package (any object with .kind.name and .attrs)."""
    name = getattr(getattr(spec, "kind", None), "name", None)
    if not isinstance(name, str):
        raise _bad(repr(spec), "Pass a valid target config dict.")
    attrs = getattr(spec, "attrs", None) or {}
    d: dict[str, Any] = {"kind": name}
    for key in ("arch", "mcpu"):
        if name in ("cuda", "hip") and key in attrs:
            d[key] = str(attrs[key])
    return _parse_dict(d)


def check_arch(arch: Any) -> str:
    """Return the arch token if this version knows it.  Raises ValueError otherwise."""
    m = _ARCH.match(arch) if isinstance(arch, str) else None
    if m is None:
        raise error("target-arch", f"CUDA target arch ‹{arch!r}› is malformed: expected «a token like sm_80 or sm_90a»",
                    hint='write {"kind": "cuda", "arch": "sm_80"}')
    number = int(m.group(1))
    if number not in LIMITS:
        raise error("target-arch", f"CUDA target arch ‹{arch}› is not supported",
                    expected=f"one of {', '.join(f'sm_{n}' for n in LIMITS)}",
                    hint="known: " + ", ".join(f"sm_{n}" for n in LIMITS))
    if m.group(2) and number < (90 if m.group(2) == "a" else 100):
        raise error("target-arch", f"CUDA target arch ‹{arch}› does not exist: «sm_{number}» has no {m.group(2)!r} variant",
                    hint=f"write sm_{number}")
    return arch


def _check_code(code: Any) -> tuple[str, ...]:
    if not isinstance(code, (list, tuple)) or not code or not all(
            isinstance(c, str) and re.match(r"^(sm|compute|lto)_\d{2,3}[af]?$", c) for c in code):
        raise error("target-arch", f"CUDA target code must be a list of exact tokens such as ['sm_90a'], found {code!r}",
                    expected="a list of tokens such as 'sm_90a'",
                    hint='write {"kind": "cuda", "arch": "sm_90a", "code": ["sm_90a"]}')
    return tuple(code)


def device_arch() -> str | None:
    """Arch token of device 0 with its architecture-specific features ("sm_90a"), None without a device."""
    cc = device_capability()
    if cc is None:
        return None
    number = cc[0] * 10 + cc[1]
    known = max((n for n in LIMITS if n <= number and n // 10 == cc[0]), default=None)
    if known is None:
        return None
    return f"sm_{known}a" if known >= 90 and known == number else f"sm_{known}"


def _detect() -> tuple[str, str, tuple[tuple[str, Any], ...]]:
    current = Target.current()
    if current is not None:
        return current.kind, current.arch, current.options
    return _parse(detected())


@register_target_detector("cuda")
def _find_cuda() -> Target | None:
    arch = device_arch()
    return Target({"kind": "cuda", "arch": arch}) if arch else None


def of_arch(arch: str) -> Target:
    """The GPU target of an architecture: "sm_90a", "gfx942".  Raises target-arch."""
    return Target({"kind": "hip", "mcpu": arch} if arch.startswith("gfx") else {"kind": "cuda", "arch": arch})


def hip_arch() -> str | None:
    """Architecture of the AMD GPU of this machine, None where it has none that this version compiles for."""
    arch = hip_device_arch()
    return arch if arch in HIP_CHIPS else None


@register_target_detector("hip")
def _find_hip() -> Target | None:
    arch = hip_arch()
    return Target({"kind": "hip", "mcpu": arch}) if arch else None


register_target_detector("cpu", lambda: "cpu", priority=-100)


def determine_target(target: Any = "auto", return_object: bool = False) -> Any:
    """Resolve a target.  "auto" is the target of the current `with` block, else the CUDA or AMD GPU here, else the CPU.

    Returns a Target if return_object, else the argument itself, with "auto" resolved to a kind name or dict.
    """
    t = Target(target)
    if return_object:
        return t
    if isinstance(target, str) and target == "auto":
        return {"kind": str(t.kind), t._arch_key: t.arch} if t.is_gpu else str(t.kind)
    return target
