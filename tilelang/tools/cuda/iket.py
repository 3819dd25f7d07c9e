"""Tracing of events inside kernels.  It is not available: each name raises not-available."""

from tilelang.language.unavailable import unavailable_names

_NAMES = """session enable disable is_enabled mark range range_push range_pop range_start range_end payload event_table
    profile_command output_dir output_path trace_files reset"""
_REASON = ("of iket: tracing of events inside kernels is not available; T.print shows values, kernel.report() the "
           "schedule")
globals().update(unavailable_names(_REASON, _NAMES))
__all__ = sorted(_NAMES.split())
