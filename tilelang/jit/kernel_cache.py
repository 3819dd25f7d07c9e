"""Finds the artifact of a request in the disk cache, or builds it and stores it there."""

from __future__ import annotations

import traceback
from pathlib import Path

from tilelang.env import env
from tilelang.errors import WARNED, InternalError, TileLangError
from tilelang.ir.printer import to_text
from tilelang.log import logger
from tilelang.runtime.cache import DiskCache, compiler_stamp, digest
from tilelang.runtime.signature import resolve_out_idx
from tilelang.transform.framework.observe import is_watched

from .artifact import INTERPRETED, KERNEL_SEPARATOR, Artifact, Request, written_parameters
from .hooks import has_hook
from .toolchain import toolchain_stamp

disk = DiskCache("kernels")


def cache_key(request: Request) -> str:
    """SHA-256 of everything that the compiled artifact depends on."""
    out = resolve_out_idx(request.func, request.out_idx)
    return digest(["kernel", compiler_stamp(), to_text(request.func), request.func.name, list(out), str(request.target),
                   request.backend in INTERPRETED and request.backend,
                   {str(k): v for k, v in request.config.items()}, list(request.flags),
                   toolchain_stamp(request.target)])


def is_cached(request: Request) -> bool:
    """Whether a request may use the cache: not when a hook edits the sources, nor while an observer watches the passes."""
    hook = str(request.target.kind) if request.target.is_gpu else "c"
    return env.is_cache_enabled() and not has_hook(hook) and not is_watched()


def produce(request: Request, key: str | None = None) -> tuple[Artifact, str]:
    """(artifact, where it came from: "disk" or "compiled")."""
    caching = is_cached(request) and request.backend not in INTERPRETED
    if caching:
        key = key or cache_key(request)
        entry = disk.load(key)
        if entry is not None:
            try:
                artifact = Artifact.from_entry(entry)
            except (KeyError, UnicodeDecodeError):
                logger.warning("cache entry %s is of an unknown form: it is rebuilt", key)
            else:
                keep_sources(request, artifact)
                return artifact, "disk"
    warned = WARNED.total()
    artifact = _built(request)
    keep_sources(request, artifact)
    if caching and key is not None and WARNED.total() == warned:  # a kernel that is found on disk gives no warning
        disk.store(key, artifact.to_entry())
    return artifact, "compiled"


def _built(request: Request) -> Artifact:
    """Build the artifact of a request.  A fault of the compiler raises an InternalError with a report."""
    from .building import build  # 12 ms, which kernels found on disk do not need

    try:
        artifact = build(request)
        artifact.meta["written"] = written_parameters(request.func)
        return artifact
    except Exception as e:
        fault = internal(request, "the compiler", e)
        if fault is None:
            raise
        raise fault from e


def keep_sources(request: Request, artifact: Artifact) -> None:
    """Write the device compiler's input and output into the folder of cuda.kernels_output_dir, and into TILELANG_TMP_DIR
    when TILELANG_CLEANUP_TEMP_FILES is 0."""
    folders = [request.config.get("cuda.kernels_output_dir") or "",
               "" if env.should_cleanup_temp_files() else env.TILELANG_TMP_DIR]
    if artifact.kind not in ("cuda", "hip") or not any(folders):
        return
    sources = artifact.kernel_source.split(KERNEL_SEPARATOR)
    for folder in (Path(f) for f in folders if f):
        folder.mkdir(parents=True, exist_ok=True)
        for facts, source in zip(artifact.meta["kernels"], sources):
            for end, data in ((Path(artifact.SOURCES[artifact.kind]).suffix, source.encode()),
                              (Path(facts["file"]).suffix, artifact.files[facts["file"]])):
                (folder / f"{facts['name']}{end}").write_bytes(data)


# ---- faults of the package itself ------------------------------------------------------------------------------------

# These modules reject arguments with Python's built-in exceptions.
_SETTINGS = ("tilelang.env", "tilelang.transform.framework.config", "tilelang.runtime.nvrtc")
_CALL_USERS = ("tilelang.jit.hooks", "tilelang.transform.framework.observe", "tilelang.transform.framework.scope",
               "tilelang.tools.instrumentation")


def internal(request: Request, what: str, e: Exception) -> InternalError | None:
    """The InternalError for an exception, with its report; None for errors that have a kind and for errors of the system, of
    a setting or of a function of the user.

    what: the component that failed; the message starts with it.
    """
    if isinstance(e, (TileLangError, InternalError, OSError, MemoryError)):
        return None
    names, at = [], e.__traceback__
    while at is not None:
        names.append(str(at.tb_frame.f_globals.get("__name__", "")))
        at = at.tb_next
    if not names or names[-1] in _SETTINGS or any(n.startswith(_CALL_USERS) for n in names):
        return None
    from tilelang.transform.framework.pass_ import PassContext, save_report  # 12 ms: the verifier of programs

    text = "".join(traceback.format_exception(e))
    folder = save_report((request.func, "legalize"), "build", PassContext(request.target, dict(request.config)), text)
    said = (str(e).splitlines() or [""])[0][:200]
    return InternalError(f"{what} failed on `{request.func.name}` for {request.target}: {type(e).__name__}: {said}\n"
                         f"report: {folder}")
