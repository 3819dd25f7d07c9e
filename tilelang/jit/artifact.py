"""The result of compiling a program for one target: sources, binaries and metadata, in the form of the disk cache."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Any, ClassVar

from tilelang.ir import Func
from tilelang.ir.record import record, state
from tilelang.runtime.cache import Entry
from tilelang.target import Target


def program_of(x: Any) -> Func | None:
    """The ir.Func of a program: itself, or what a language.PrimFunc holds; None for anything else."""
    if isinstance(x, Func):
        return x
    inner = getattr(x, "func", None)
    return inner if isinstance(inner, Func) else None


def without_outputs(func: Func) -> Func:
    """The program whose results, if it returns some, are parameters as the others."""
    return replace(func, facts=replace(func.facts, out_idx=None))


INTERPRETED = ("tile", "simulator")  # execution backends without binaries
KERNEL_SEPARATOR = "\n\n// ---- next kernel ----\n\n"  # between the sources of a program's device kernels


@record
class Request:
    """One compilation.  backend: execution backend, resolved.  config: normalised pass configs.  flags: device compiler
    options."""

    func: Func
    out_idx: Any
    target: Target
    backend: str
    config: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    verbose: bool = False
    given: Any = None  # the PrimFunc the user passed


def disjoint_parameters(request: Request) -> tuple[tuple[tuple[str, str], ...], dict[str, Any]]:
    """Pairs of tensor parameters that the compiled kernel assumes to be disjoint though a call may pass overlapping memory
    for them (see JITKernel.in_order), and the tensors that the program makes from pointers."""
    from tilelang.transform.legalize.aliasing import made_of_pointers, read_after_write  # 5 ms

    pairs = () if request.config.get("tirx.noalias") is False else read_after_write(request.func)
    return pairs, made_of_pointers(request.func) if pairs else {}


def written_parameters(func: Func) -> list[str]:
    """Names of the tensor and pointer parameters that a program may write."""
    from tilelang.transform.analysis.effects import effects  # 2 ms

    stored = {e.storage for e in effects(func.body) if e.writes}
    buffers = {p: func.buffer_of(p) for p in func.params}
    return sorted(p.name if b is None else b.name for p, b in buffers.items() if (p if b is None else b.data) in stored)


@record
class Artifact:
    """A compiled program.  kind: "cpu", "cuda" or "hip".  files: binaries by name.  meta: JSON facts (kernels, resources,
    reports).  lowered: the program an interpreter runs, for kind "interpreted" (never stored)."""

    kind: str
    kernel_source: str
    host_source: str
    files: dict[str, bytes]
    meta: dict[str, Any]
    lowered: Func | None = None

    SOURCES: ClassVar[dict[str, str]] = {"cuda": "device_kernel.cu", "hip": "device_kernel.hip", "cpu": "device_kernel.ll"}

    def to_entry(self) -> Entry:
        return Entry({"kind": self.kind, **self.meta}, {
            self.SOURCES[self.kind]: self.kernel_source.encode(), "host_kernel.ll": self.host_source.encode(),
            **self.files})

    @classmethod
    def from_entry(cls, entry: Entry) -> Artifact:
        """Raises KeyError or UnicodeDecodeError for an entry that is not one of these."""
        meta = dict(entry.meta)
        kind = meta.pop("kind")
        files = dict(entry.files)
        source = files.pop(cls.SOURCES[kind]).decode()
        host = files.pop("host_kernel.ll").decode()
        return cls(kind, source, host, files, meta)


@state
class CompiledArtifact:
    """The result of tilelang.lower: programs, parameters and source.  Only with runtime_only it contains a callable."""

    host_mod: Any
    device_mod: Any
    params: list[Any]
    kernel_source: str
    rt_mod: Any = None
    target: Any = None
    target_host: Any = None
