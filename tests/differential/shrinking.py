"""Cuts a program down while it still fails in the same way."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gen_state import Node

Program = dict[str, Any]
Step = Callable[[Program], Iterator[Program]]


def shrink(program: Program, fails: Callable[[Program], bool], budget: int = 400, steps: Sequence[Step] = (),
           tidy: Callable[[Program], Program] | None = None) -> Program:
    """The smallest program found within `budget` trials for which `fails` is true.

    steps: what to try, those of tile programs by default; tidy: leaves out what is no longer used.
    """
    left = [budget]
    best = program
    while left[0] > 0:
        for step in steps or (_without_statements, _without_nesting, _smaller_texts, _smaller_numbers):
            best = _exhaust(best, step, fails, left, tidy or _tidy)
        if best is program:
            break
        program = best
    return best


def _exhaust(program: Program, step: Step, fails: Callable[[Program], bool], left: list[int],
             tidy: Callable[[Program], Program]) -> Program:
    """Take the first smaller program that fails, again and again."""
    again = True
    while again and left[0] > 0:
        again = False
        for candidate in step(program):
            if left[0] <= 0:
                break
            left[0] -= 1
            if fails(candidate):
                program, again = tidy(candidate), True
                break
    return program


def _lists(program: Program) -> Iterator[tuple[Any, ...]]:
    """Where lists of statements are: paths of keys, outermost first."""
    def inside(nodes: list[Node], path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        yield path
        for i, n in enumerate(nodes):
            for key in ("b", "e"):
                if n.get(key):
                    yield from inside(n[key], (*path, i, key))

    for k, kernel in enumerate(program["kernels"]):
        yield from inside(kernel["body"], ("kernels", k, "body"))


def _get(program: Program, path: tuple[Any, ...]) -> Any:
    for key in path:
        program = program[key]
    return program


def _without_statements(program: Program) -> Iterator[Program]:
    if len(program["kernels"]) > 1:
        for k in range(len(program["kernels"])):
            c = copy.deepcopy(program)
            del c["kernels"][k]
            yield c
    for path in list(_lists(program)):
        n = len(_get(program, path))
        size = max(1, n // 2)
        while size >= 1:
            for start in range(0, n, size):
                if size == n and path[-1] == "body":
                    continue
                c = copy.deepcopy(program)
                nodes = _get(c, path)
                del nodes[start:start + size]
                if not nodes and path[-1] == "e":
                    del _get(c, path[:-1])["e"]
                yield c
            size //= 2


def _without_nesting(program: Program) -> Iterator[Program]:
    """Bodies in the place of loops, branches and macros; and plainer surroundings."""
    for path in list(_lists(program)):
        for i, n in enumerate(_get(program, path)):
            for key in ("b", "e"):
                if n.get(key):
                    c = copy.deepcopy(program)
                    nodes = _get(c, path)
                    nodes[i:i + 1] = nodes[i][key]
                    yield c
            if "T.Pipelined" in n["t"]:
                c = copy.deepcopy(program)
                _get(c, path)[i]["t"] = re.sub(r"T\.Pipelined\(([^,()]*).*", r"T.serial(\1):", n["t"])
                yield c
    if program["configs"]:
        yield {**copy.deepcopy(program), "configs": {}}
    if program.get("style"):
        yield {**copy.deepcopy(program), "style": None}
    for k, kernel in enumerate(program["kernels"]):
        if kernel.get("host"):
            c = copy.deepcopy(program)
            del c["kernels"][k]["host"]
            yield c
        for threads in (128, 64, 32):
            if kernel["threads"] != threads:
                c = copy.deepcopy(program)
                c["kernels"][k]["threads"] = threads
                c["kernels"][k].pop("block", None)
                yield c
        for d, text in enumerate(kernel["grid"]):
            if text != "1":
                c = copy.deepcopy(program)
                c["kernels"][k]["grid"][d] = "1"
                yield c


def _groups(text: str) -> Iterator[tuple[int, int]]:
    """Where parenthesised parts begin and end, the longest first."""
    stack, found = [], []
    for i, ch in enumerate(text):
        if ch == "(":
            stack.append(i)
        elif ch == ")" and stack:
            found.append((stack.pop(), i + 1))
    yield from sorted(found, key=lambda x: x[0] - x[1])


def _smaller_texts(program: Program) -> Iterator[Program]:
    """Simpler right-hand sides and conditions."""
    for path in list(_lists(program)):
        for i, n in enumerate(_get(program, path)):
            text = n["t"]
            if "T.alloc" in text or text.startswith("for "):
                continue
            seen = set()
            if " = " in text and "T.view" not in text and "T.reshape" not in text:
                seen.add(text.split(" = ")[0] + " = 1")
            for a, b in _groups(text):
                inner = text[a + 1:b - 1]
                named = a > 0 and (text[a - 1].isalnum() or text[a - 1] in "_.")
                if named:
                    start = a
                    while start > 0 and (text[start - 1].isalnum() or text[start - 1] in "_."):
                        start -= 1
                    if start == 0 and not text.startswith("if"):
                        continue
                    parts = [p for p in _split(inner)]
                    for part in (*parts, "1"):
                        seen.add(text[:start] + part + text[b:])
                else:
                    for part in (*re.split(r" [-+*&|^%] | // | and | or ", inner), "1"):
                        seen.add(text[:a] + part + text[b:])
            for s in sorted((s for s in seen if len(s) < len(text)), key=len):
                if s.count("(") == s.count(")") and s.count("[") == s.count("]"):
                    c = copy.deepcopy(program)
                    _get(c, path)[i]["t"] = s
                    yield c


def _split(text: str) -> list[str]:
    """Arguments at the top level."""
    out, depth, last = [], 0, 0
    for i, ch in enumerate(text):
        depth += ch in "([{"
        depth -= ch in ")]}"
        if ch == "," and depth == 0:
            out.append(text[last:i].strip())
            last = i + 1
    return [*out, text[last:].strip()]


def _smaller_numbers(program: Program) -> Iterator[Program]:
    for table in ("dims", "symbols"):
        for name, value in program[table].items():
            for n in sorted({1, 2, 8, 16, value // 2, value - 1}):
                if 0 < n < value:
                    c = copy.deepcopy(program)
                    c[table][name] = n
                    yield c
    for path in list(_lists(program)):
        for i, n in enumerate(_get(program, path)):
            for m in re.finditer(r"(?<=T\.(?:serial|unroll)\()\d+|(?<=T\.Pipelined\()\d+|(?<=num_stages=)\d+", n["t"]):
                for k in range(int(m.group())):
                    c = copy.deepcopy(program)
                    _get(c, path)[i]["t"] = n["t"][:m.start()] + str(k) + n["t"][m.end():]
                    yield c


def _tidy(program: Program) -> Program:
    """Without tensors nothing names."""
    from gen_text import _texts

    text = " ".join(t for k in program["kernels"] for t in (*_texts(k["body"]), *k["grid"]))
    used = [t for t in program["tensors"] if re.search(rf"\b{t['name']}\b", text)]
    shapes = " ".join(" ".join(t["shape"]) for t in used)
    grid = " ".join(g for k in program["kernels"] for g in k["grid"]) + text
    for name in program["symbols"]:
        if re.search(rf"\b{name}\b", grid) and not re.search(rf"\b{name}\b", shapes):
            return program
    return {**program, "tensors": used}
