"""Passes for flat arrays, offsets in shared memory and short index arithmetic."""
