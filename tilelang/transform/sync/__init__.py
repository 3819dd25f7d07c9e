"""Passes that place barriers and fences between conflicting accesses of different threads."""
