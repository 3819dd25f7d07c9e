"""Shows the time of a process: phases of imports and compilations by thread, as text bars.

    TILELANG_TIMELINE=1 python program.py       phases of 1 ms and more, on stderr, when the process ends

Each line gives the elapsed time and the time for which the phase's thread ran.  The difference was spent waiting, for the
GIL, a disk or another thread.  `tilelang.log` records the phases.
"""

from __future__ import annotations

from tilelang.log import phases

WIDTH = 40  # characters of a full bar


def text(least_ms: float = 1.0) -> str:
    """Bars of the phases that took at least this long, by thread.  The number after an import counts the loaded modules."""
    shown = [p for p in phases() if p.end - p.begin >= least_ms]
    if not shown:
        return f"timeline: no phase of {least_ms:g} ms"
    whole = max(p.end for p in shown)
    lines = [f"timeline of {whole:.1f} ms   (from, took, thread ran; pages read from a disk)"]
    for thread in dict.fromkeys(p.thread for p in shown):
        lines.append(f"{thread}:")
        for p in (p for p in shown if p.thread == thread):
            at = int(p.begin / whole * WIDTH)
            bar = (" " * at + "█" * max(1, round((p.end - p.begin) / whole * WIDTH)))[:WIDTH]
            reads = f", {p.reads} read" if p.reads else ""
            lines.append(f"{p.begin:8.1f} {p.end - p.begin:7.1f} {p.cpu:7.1f} |{bar:<{WIDTH}}| {'  ' * p.depth}{p.name}{reads}")
    return "\n".join(lines)
