"""Flat arrays, offsets in shared memory, short index arithmetic."""
