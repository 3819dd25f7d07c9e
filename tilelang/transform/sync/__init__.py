"""Barriers and fences between conflicting accesses of different threads."""
