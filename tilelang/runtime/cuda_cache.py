"""Cubins kept by the text and options they were compiled from: kernels whose programs differ, or were lowered by another
release, but come to the same CUDA source are compiled once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from tilelang.env import env

from .cache import DiskCache, Entry, digest
from .nvrtc import Cubin, Resources, compile_cubin, compiler_for
from .yield_hints import MIN_RUN, SPACING

_FILE = "kernel.cubin"
_FILES_NAMED = ("-I", "--include-path", "-include", "--pre-include")


class CUDABinaryCache:
    """Compiles through a folder beside the kernel cache's.  What one object has compiled is written by `flush`.

    Sources that include files are compiled each time: nothing here knows what is in those.
    """

    def __init__(self) -> None:
        self.disk = DiskCache("cuda_binaries")
        self.made: list[tuple[str, Cubin]] = []

    def key(self, source: str, arch: str, options: Sequence[str] = ()) -> str | None:
        """Of a source; None for one that is not kept."""
        if "#include" in source or any(o.startswith(_FILES_NAMED) for o in options):
            return None
        nvrtc = compiler_for(arch)
        return digest(["cubin", source, arch, list(options), nvrtc.path, list(nvrtc.version),
                       env.is_yield_hints_enabled() and [MIN_RUN, SPACING]])

    def compile(self, source: str, arch: str, options: Sequence[str] = ()) -> Cubin:
        """The cubin as compile_cubin gives it.  Raises as that does."""
        key = self.key(source, arch, options)
        entry = self.disk.load(key) if key is not None else None
        if entry is not None and _FILE in entry.files:
            facts = dict(entry.meta)
            kernels = {name: Resources(**r) for name, r in facts.pop("kernels").items()}
            return Cubin(entry.files[_FILE], **facts, kernels=kernels)
        cubin = compile_cubin(source, arch, options)
        if key is not None:
            self.made.append((key, cubin))
        return cubin

    def flush(self) -> None:
        """Write what was compiled since the last time."""
        while self.made:
            key, cubin = self.made.pop()
            facts = {name: getattr(cubin, name) for name in ("registers", "spills", "shared_bytes", "log")}
            facts["kernels"] = {name: asdict(r) for name, r in cubin.kernels.items()}
            self.disk.store(key, Entry(facts, {_FILE: cubin.bytes}))

    def clear_cache(self) -> None:
        """Remove every cubin."""
        self.disk.clear()


__all__ = ["CUDABinaryCache"]
