"""Turns faults of the package itself into an InternalError that names a report."""

from __future__ import annotations

import traceback

from tilelang.errors import InternalError, TileLangError
from .artifact import Request

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
