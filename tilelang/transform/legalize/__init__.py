"""Rewrites that every target shares, before layouts and schedules are chosen."""
