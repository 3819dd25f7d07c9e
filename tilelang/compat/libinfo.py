"""Where the package lies.  It has no native library: what it loads are LLVM, NVRTC and the CUDA driver."""

from __future__ import annotations

from pathlib import Path

from tilelang.version import __version__


def package_path() -> str:
    """Folder of the package."""
    return str(Path(__file__).resolve().parent.parent)


def find_lib_path(name: str | None = None, optional: bool = False) -> list[str]:
    """Libraries this package loads: those of NVRTC, and of the CUDA driver and LLVM where they are.

    name: only those whose file name holds it.  Raises RuntimeError when none is found, unless optional.
    """
    from tilelang.runtime import nvrtc  # 179 ms

    found = [str(c.library) for c in nvrtc.find_nvrtc()]
    try:
        import llvmlite  # 1 ms

        libraries = (Path(llvmlite.__file__).parent / "binding").glob("*llvmlite*.*")
        found += [str(p) for p in sorted(libraries) if p.suffix != ".py"]
    except ImportError:
        pass
    found = [f for f in found if name is None or name in Path(f).name]
    if not found and not optional:
        raise RuntimeError(f"no library{f' {name}' if name else ''} is found: python -m tilelang doctor says what is missing")
    return found


__all__ = ["__version__", "find_lib_path", "package_path"]
