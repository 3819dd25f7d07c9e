"""Writing kernels to files and reading them back: export_library, from_database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tilelang.errors import error
from tilelang.ir.printer import to_text
from tilelang.runtime.cache import digest
from tilelang.runtime.shared_library import export_name, write_library
from tilelang.runtime.signature import signature_of

from .artifact import Artifact, Request
from .kernel_cache import cache_key, disk


def fingerprint(request: Request) -> str:
    """A hash that identifies a saved kernel: the program's text, its outputs and its target."""
    return digest(["library", to_text(request.func), list(signature_of(request.func, request.out_idx).out_idx),
                   "cuda" if request.target.is_cuda else "cpu"])


def export_library(path: Any, request: Request, artifact: Artifact) -> str:
    """Write a kernel as a shared library; returns its path.  Raises kernel-export, kernel-link, ValueError."""
    if not str(path or ""):
        raise ValueError("the path of the library is empty")
    name = export_name(request.func.name)
    if artifact.kind == "cpu" and "kernel.o" in artifact.files:
        write_library(path, name, artifact.host_source, artifact.files["kernel.o"], artifact.meta["entry"],
                      fingerprint(request))
    elif artifact.kind == "cuda" and "library" not in artifact.meta:
        from tilelang.runtime.cuda_library import write_cuda_library  # 20 ms

        kernels = artifact.meta["kernels"]
        images = {k["file"]: artifact.files[k["file"]] for k in kernels}
        write_cuda_library(path, name, artifact.host_source, kernels, images, fingerprint(request))
    else:
        raise error("kernel-export", f"a kernel for {request.target} that was not compiled here cannot be written as a shared "
                    "library",
                    expected="a kernel that was compiled here", found="one that was read from a file",
                    hint="copy the library that it was read from, or compile the program")
    return str(Path(path).resolve())


def saved_artifact(path: Any, request: Request, kernel_source: str, host_source: str) -> Artifact:
    """The artifact of a saved kernel, read from a library of export_library or from a folder of the disk cache.

    Raises FileNotFoundError, and kernel-library when the kernel is of another program, other options or another version.
    """
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(f"{place} does not exist")
    folder = place if place.is_dir() else place.parent if (place.parent / "manifest.json").exists() else None
    if folder is None:
        return Artifact("cuda" if request.target.is_cuda else "cpu", kernel_source, host_source, {},
                        {"kernels": [], "library": str(place.resolve()), "fingerprint": fingerprint(request)})
    entry = disk.read_folder(folder)
    if entry is None or folder.name != cache_key(request):
        raise error("kernel-library", f"{folder} keeps no kernel of this program with these options by this version",
                    found=f"{'no kernel' if entry is None else 'another kernel'} in {folder.name or folder}")
    return Artifact.from_entry(entry)


__all__ = ["export_library", "fingerprint", "saved_artifact"]
