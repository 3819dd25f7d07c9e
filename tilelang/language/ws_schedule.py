"""Objects of warp-specialisation schedules for Blackwell: each says that it is not available."""

from .unavailable import UNAVAILABLE

_NAMES = ["WSInstr", "WSOpRef", "WSPipeline", "WSRole", "WSSchedule", "WSScope", "WSSync", "WSSyncKind",
          "annotate_ws_schedule", "ws_op"]
globals().update({n: UNAVAILABLE[n] for n in _NAMES})
WSID = "ws_id"

__all__ = [*_NAMES, "WSID"]
