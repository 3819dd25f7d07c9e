"""Counts instructions in SASS text."""

from __future__ import annotations

import re
from collections import Counter

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)", re.M)


def opcodes(sass: str) -> Counter[str]:
    """The number of occurrences of each opcode in SASS text, by its first component: HMMA, LDGSTS, LDSM, STL, …"""
    return Counter(m.group(1).split(".")[0] for m in _INSTRUCTION.finditer(sass))


def loops(sass: str) -> list[tuple[int, str]]:
    """Bodies of the backward branches, as (number of instructions, text), largest first.

    A loop is the text from a branch target up to the last branch back to it.
    """
    lines = sass.splitlines()
    labels = {m.group(1): i for i, line in enumerate(lines) if (m := re.match(r"^(\.L_[\w.]+):", line.strip()))}
    ends: dict[int, int] = {}
    for i, line in enumerate(lines):
        m = re.search(r"\bBRA\b.*`\((\.L_[\w.]+)\)", line)
        if m and labels.get(m.group(1), i) < i:
            start = labels[m.group(1)]
            ends[start] = max(i, ends.get(start, 0))
    bodies = ["\n".join(lines[a:b + 1]) for a, b in ends.items() if b - a > 1]
    return sorted(((len(_INSTRUCTION.findall(t)), t) for t in bodies), key=lambda x: -x[0])
