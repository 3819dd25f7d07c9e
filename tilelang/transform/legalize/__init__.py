"""Rewrites that all targets share, run before layouts and schedules are chosen."""
