"""Names of the phases of the IR, each a set of invariants that verify.py checks."""

TILE, THREADS_BOUND, SYNCED, DEVICE = PHASES = ("TILE", "THREADS_BOUND", "SYNCED", "DEVICE")
