"""Disassembles cubins with nvdisasm, if it is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter

from tilelang.errors import error, register

from .nvrtc import _system_roots, _wheel_roots

register("nvdisasm-missing", RuntimeError, "SASS was asked for and nvdisasm is not installed", expected="a working nvdisasm")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)", re.M)


def find_nvdisasm() -> str | None:
    """Path of nvdisasm: nvidia wheels, CUDA toolkits, PATH."""
    for root, _ in _wheel_roots() + _system_roots():
        path = os.path.join(root, "bin", "nvdisasm")
        if os.access(path, os.X_OK):
            return path
    return shutil.which("nvdisasm")


def disassemble(cubin: bytes, encodings: bool = False) -> str:
    """SASS text of a cubin.  encodings: adds the encoding of each instruction as a comment.

    Raises RuntimeError when nvdisasm is missing or rejects the cubin.
    """
    exe = find_nvdisasm()
    if exe is None:
        raise error("nvdisasm-missing", "nvdisasm was not found",
                    found="none", hint="pip install nvidia-cuda-nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        done = subprocess.run([exe, "-c", *["-hex"] * encodings, f.name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise error("nvdisasm-missing", f"nvdisasm failed: {done.stderr.strip().replace(f.name, 'the cubin')}",
                    found=f"one that ends with {done.returncode}",
                    hint="use an nvdisasm at least as new as the NVRTC that made the cubin")
    return done.stdout


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
