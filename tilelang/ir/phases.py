"""Names of the phases of the IR, each a set of invariants that verify.py checks.

GPU programs go through TILE, THREADS_BOUND, SYNCED, DEVICE.  CPU programs go from TILE to CPU: tiles stay, and statements of
the CPU backend say how they are executed.
"""

TILE, THREADS_BOUND, SYNCED, DEVICE, CPU = PHASES = ("TILE", "THREADS_BOUND", "SYNCED", "DEVICE", "CPU")
