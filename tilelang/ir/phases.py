"""Names of the phases: sets of invariants over the same nodes (verify.py)."""

TILE, THREADS_BOUND, SYNCED, DEVICE = PHASES = ("TILE", "THREADS_BOUND", "SYNCED", "DEVICE")
