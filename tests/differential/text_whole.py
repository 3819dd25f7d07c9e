"""The source text of a random whole-tensor program, and smaller programs made of it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

from shrinking import shrink

Program = dict[str, Any]
_WORD = re.compile(r"[A-Za-z_]\w*")


def _words(*texts: str) -> set[str]:
    return {w for t in texts for w in _WORD.findall(t)}


def tidy(program: Program) -> Program:
    """Without statements, inputs and extents that no result needs; sizes that no input shows are numbers."""
    needed, lines = _words(*program["outputs"]), []
    for line in reversed(program["lines"]):
        if needed & set(line["names"]):
            lines.append(line)
            needed |= _words(line["text"])
    inputs = [i for i in program["inputs"] if i["name"] in needed]
    used = _words(*(line["text"] for line in lines), *(s for i in inputs for s in i["shape"]), *(i["high"] for i in inputs))
    shown = {s for i in inputs for s in i["shape"]}
    dynamic = [n for n in program["dynamic"] if n in used and n in shown]
    sizes = [{n: v for n, v in s.items() if n in used} for s in program["sizes"]]
    sizes = [sizes[0], *({**sizes[0], **{n: s[n] for n in dynamic}} for s in sizes[1:] if dynamic)]
    return {**program, "lines": lines[::-1], "inputs": inputs, "dynamic": dynamic, "sizes": sizes}


def whole_source(program: Program, note: str = "") -> str:
    """The file: extents, the function, its inputs, and the comparison when it is run."""
    used = program["sizes"][0]
    head = [
        f'"""{note or "A generated program"}: seed {program["seed"]}, profile {program["profile"]}."""',
        "",
        "import tilelang.language as T",
        "",
    ]
    head += [f"{n} = T.dynamic('{n}')" if n in program["dynamic"] else f"{n} = {v}" for n, v in used.items()]
    parameters = ", ".join(
        f"{i['name']}: T.Tensor(({', '.join([*i['shape'], ''])}), '{i['dtype']}')" if program["declared"] else i["name"]
        for i in program["inputs"]
    )
    body = [f"{n} = {_where(program, n)}" for n in program["dynamic"]]
    body += [f"{', '.join(line['names'])} = {line['text']}" for line in program["lines"]]
    body.append(f"return {', '.join(program['outputs'])}")
    foot = [f"SEED = {program['seed']}", f"SIZES = {program['sizes']!r}", "INPUTS = ["]
    foot += [f"    {tuple(i.values())!r}," for i in program["inputs"]]
    foot += [
        "]",
        "",
        "if __name__ == '__main__':",
        "    import sys",
        "",
        "    from run_whole import main",
        "",
        "    main(sys.modules['__main__'])",
    ]
    return "\n".join([*head, "", "", f"def program({parameters}):", *(f"    {b}" for b in body), "", "", *foot]) + "\n"


def _where(program: Program, name: str) -> str:
    return next(f"{i['name']}.shape[{k}]" for i in program["inputs"] for k, s in enumerate(i["shape"]) if s == name)


def whole_features(program: Program) -> list[str]:
    """What was drawn."""
    return list(program["drawn"])


# ---- smaller programs ------------------------------------------------------------------------------------------------


def shrink_whole(program: Program, fails: Callable[[Program], bool], budget: int = 400) -> Program:
    """The smallest program found for which `fails` is true."""
    steps = (_fewer_results, _earlier_results, _inputs_for_values, _plainer, _smaller_extents)
    return shrink(program, lambda p: fails(tidy(p)), budget, steps, tidy)


def _fewer_results(program: Program) -> Iterator[Program]:
    if len(program["outputs"]) > 1:
        for name in program["outputs"]:
            yield {**program, "outputs": [name]}
        for k in range(len(program["outputs"])):
            yield {**program, "outputs": program["outputs"][:k] + program["outputs"][k + 1 :]}


def _earlier_results(program: Program) -> Iterator[Program]:
    """What a result was made of in its place."""
    made = {n for line in program["lines"] for n in line["names"]}
    for line in program["lines"]:
        for k, name in enumerate(program["outputs"]):
            if name in line["names"]:
                for word in sorted(_words(line["text"]) & made):
                    if word not in program["outputs"]:
                        yield {**program, "outputs": [*program["outputs"][:k], word, *program["outputs"][k + 1 :]]}


def _inputs_for_values(program: Program) -> Iterator[Program]:
    """A value as a parameter, without the statement that made it."""
    for k, line in enumerate(program["lines"]):
        if any(dt not in ("float32", "float16", "bfloat16", "bool", "int32") for dt in line["dtypes"]):
            continue
        if set(line["names"]) & set(program["outputs"]):
            continue
        c = copy.deepcopy(program)
        del c["lines"][k]
        c["inputs"] += [
            {"name": n, "shape": shape, "dtype": dt, "kind": "whole" if dt == "int32" else "normal", "high": ""}
            for n, shape, dt in zip(line["names"], line["shapes"], line["dtypes"])
        ]
        yield c


def _plainer(program: Program) -> Iterator[Program]:
    """Simpler expressions, float32, no open sizes."""
    if program["dynamic"]:
        yield {**program, "dynamic": [], "sizes": program["sizes"][:1]}
        yield {**program, "dynamic": [], "sizes": program["sizes"][1:]}
    if program["declared"] and not program["dynamic"]:
        yield {**program, "declared": False}
    for k, line in enumerate(program["lines"]):
        for text in _simpler(line["text"]):
            c = copy.deepcopy(program)
            c["lines"][k]["text"] = text
            yield c
    for k, i in enumerate(program["inputs"]):
        if i["dtype"] in ("float16", "bfloat16"):
            c = copy.deepcopy(program)
            c["inputs"][k]["dtype"] = "float32"
            yield c
        if i["kind"] == "special":
            c = copy.deepcopy(program)
            c["inputs"][k]["kind"] = "normal"
            yield c


def _simpler(text: str) -> list[str]:
    """Texts with a call or a group of parentheses replaced by what stands inside."""
    found = set()
    for m in re.finditer(r"(T\.\w+|T\.min)?\(([^()]*)\)", text):
        for piece in m.group(2).split(", "):
            found.add(text[: m.start()] + piece.split("=")[-1] + text[m.end() :])
    for m in re.finditer(r" [-+*/&|] ([\w.]+)", text):
        found.add(text[: m.start()] + text[m.end() :])
    return sorted((t for t in found if len(t) < len(text) and t.count("(") == t.count(")") and t.strip()), key=len)


def _smaller_extents(program: Program) -> Iterator[Program]:
    for n, v in program["sizes"][0].items():
        for smaller in sorted({1, 2, 4, 8, 16, v // 2, v - 1}):
            if 0 < smaller < v:
                yield {**program, "sizes": [{**s, n: min(s[n], smaller)} for s in program["sizes"]]}
