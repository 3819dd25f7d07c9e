"""Disk cache of cubins, keyed by CUDA source and compiler options.

Different programs, or different releases of this package, that produce the same CUDA source are compiled only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields


from tilelang.target.nvshmem import USED

from .cache import DiskCache, Entry, digest
from .nvshmem import stamp
from .nvrtc import Cubin, Resources, compile_cubin, compiler_for

_FILE = "kernel.cubin"
_FILES_NAMED = ("-I", "--include-path", "-include", "--pre-include")


class CUDABinaryCache:
    """Compiles CUDA source with a cache in a folder next to the kernel cache.  `flush` writes the new cubins of this object.

    Sources that include files are not cached, because the contents of the files are not part of the key.
    """

    def __init__(self) -> None:
        self.disk = DiskCache("cuda_binaries")
        self.made: list[tuple[str, Cubin]] = []

    def key(self, source: str, arch: str, options: Sequence[str] = ()) -> str | None:
        """The key of a source; None if it is not cached."""
        if "#include" in source or any(o.startswith(_FILES_NAMED) for o in options):
            return None
        nvrtc = compiler_for(arch, USED in source)
        facts = [f.name for f in fields(Resources)]  # an entry of a release with other facts is not this one's
        return digest(["cubin", facts, source, arch, list(options), nvrtc.path, list(nvrtc.version),
                       *([stamp()] if USED in source else ())])

    def compile(self, source: str, arch: str, options: Sequence[str] = ()) -> Cubin:
        """The cubin that compile_cubin returns, from the cache if possible.  Raises as compile_cubin does."""
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
        """Write the cubins that were compiled since the last flush."""
        while self.made:
            key, cubin = self.made.pop()
            facts = {name: getattr(cubin, name) for name in ("registers", "spills", "shared_bytes", "log")}
            facts["kernels"] = {name: asdict(r) for name, r in cubin.kernels.items()}
            self.disk.store(key, Entry(facts, {_FILE: cubin.bytes}))

    def clear_cache(self) -> None:
        """Remove all cubins."""
        self.disk.clear()
