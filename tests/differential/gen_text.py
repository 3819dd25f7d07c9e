"""The source text of a program: a Python file that runs by itself and compares the executions."""

from __future__ import annotations

import re
from typing import Any

from gen_state import Node

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"^([A-Za-z_]\w*)(?:, ([A-Za-z_]\w*))? = ")
_REDUCED = re.compile(r"^T\.reduce_\w+\(\w+, (\w+)\)$")
_LOOP = re.compile(r"^for (.+?) in ")


def source(program: dict[str, Any], note: str = "") -> str:
    """The whole file: extents, macros, the program, its inputs, and the comparison when it is run."""
    macros: list[str] = []
    body = [f"    {t['name']} = T.make_tensor({t['name']}_address, ({', '.join(t['shape'])},), '{t['dtype']}')"
            for t in program["tensors"] if t.get("pointer")]
    named = {*program["dims"], *program["symbols"]}
    params = {t["name"] for t in program["tensors"]}
    for k in program["kernels"]:
        blocks = k["blocks"]
        bound = blocks[0] if len(blocks) == 1 else f"({', '.join(blocks)})"
        launch = f"T.ClusterKernel({', '.join(k['grid'])}, cluster_dims={k['cluster']}, " if k.get("cluster") else \
            f"T.Kernel({', '.join(k['grid'])}, "
        deep = 2 if k.get("host") else 1
        host = {m.group(1)} if (m := _LOOP.match(k.get("host", ""))) else set()
        body += [f"    {k['host']}"] if k.get("host") else []
        threads = tuple(k["block"]) if k.get("block") else k["threads"]
        body.append("    " * deep + f"with {launch}threads={threads}) as {bound}:")
        mutable = {m.group(1) for n in k["body"] if (m := _ASSIGNED.match(n["t"])) and "T.alloc_var" in n["t"]}
        _write(k["body"], deep + 1, body, macros, params | set(blocks) | host, named, mutable)
    head = [f'"""{note or "A generated program"}: seed {program["seed"]}, profile {program["profile"]}."""', "",
            *(["import tilelang"] if program.get("style") else []), "import tilelang.language as T"]
    layouts = sorted(x for x in LAYOUTS if any(re.search(rf"\b{x}\(", line) for line in body))
    head += [f"from tilelang.layout import {', '.join(layouts)}", ""] if layouts else [""]
    head += [f"{name} = {value}" for name, value in program["dims"].items() if _uses(body + macros + _shapes(program), name)]
    head += [f"{name} = T.dynamic('{name}')" for name in (*program["symbols"], *program.get("steps", {}))
             if _uses(_shapes(program), name) and not _const(program, name)]
    if any(f"{use}(" in line for use in LIBRARY for line in body + macros):
        head += [x for texts in LIBRARY.values() for x in texts]
    text = "\n".join([*head, "", "", *macros, *_written(program, body)])
    return text + "\n" + _footer(program)


def _written(program: dict[str, Any], body: list[str]) -> list[str]:
    """The program itself: a T.prim_func, one that a factory returns, or an eager function with its sizes as constants."""
    style = program.get("style")
    shapes = [_annotation(t) for t in program["tensors"]]
    params = (",\n" + 12 * " ").join(shapes)
    if style is None:
        return ["@T.prim_func", f"def program({params}):", *body]
    if style == "lazy":
        dims = [f"{name}={value}" for name, value in program["dims"].items()]
        inner = ["@T.prim_func", f"def whole({params}):", *body]
        return ["@tilelang.jit", f"def program({', '.join(dims)}):", *("    " + x for x in inner), "    return whole", "", "",
                "program = program.get_tir()"]
    names = [t["name"] if not t.get("scalar") and not t.get("pointer") else s for t, s in zip(program["tensors"], shapes)]
    own = [f"    {s}" for t, s in zip(program["tensors"], shapes) if not t.get("scalar") and not t.get("pointer")]
    sizes = [f"    {x} = T.const('{x}')" for x in program["symbols"] if _const(program, x)]
    given = [f"{x}={program['symbols'][x]}" for x in program["symbols"] if _const(program, x)]
    return ["@tilelang.jit", f"def program({', '.join(names)}):", *sizes, *own, *body, "", "",
            f"program = program.get_tir({', '.join(given)})"]


def _const(program: dict[str, Any], name: str) -> bool:
    """Whether a size is a constant of an eager function: it must be an extent of a tensor by itself."""
    return program.get("style") == "eager" and any(d == name for t in program["tensors"] for d in t["shape"]
                                                   if not t.get("pointer"))


LAYOUTS = ("Layout", "make_full_bank_swizzled_layout", "make_half_bank_swizzled_layout", "make_linear_layout",
           "make_quarter_bank_swizzled_layout", "make_swizzled_layout", "padded_layout")

# Macros a program may call, and the lines that define them.
_ADDED = ["", "", "@T.macro", "def added(x: T.Ref, v, w=2):", "    x = x + v * w", "    return x, v + 1"]
LIBRARY = {"added": _ADDED,
           "added_twice": ["", "", "@T.macro", "def added_twice(x: T.Ref, v):", "    a, b = added(x, v, w=1)",
                           "    added(x, b - 1)"]}


def _annotation(t: dict[str, Any]) -> str:
    """A parameter: row after row, or with strides."""
    if t.get("scalar"):
        return f"{t['name']}: T.{t['dtype']}"
    if t.get("pointer"):
        return f"{t['name']}_address: T.ptr"
    if "strides" in t:
        return f"{t['name']}: T.StridedTensor(({', '.join(t['shape'])},), ({', '.join(t['strides'])},), '{t['dtype']}')"
    return f"{t['name']}: T.Tensor(({', '.join(t['shape'])},), '{t['dtype']}')"


def _shapes(program: dict[str, Any]) -> list[str]:
    return [" ".join((*t["shape"], *t.get("strides", ()))) for t in program["tensors"]]


def _uses(lines: list[str], name: str) -> bool:
    return any(re.search(rf"\b{name}\b", x) for x in lines)


def _footer(program: dict[str, Any]) -> str:
    rows = []
    for t in program["tensors"]:
        more = {k: t[k] for k in ("normal", "tol", "scalar", "pointer", "nibbles", "full") if k in t}
        if "strides" in t:
            more["strides"] = tuple(_number(program, d) for d in t["strides"])
        row = (t["name"], tuple(_number(program, d) for d in t["shape"]), t["dtype"], t["low"], t["high"])
        rows.append(repr((*row, more) if more else row))
    table = (",\n" + 11 * " ").join(rows)
    return f"""

SEED = {program["seed"]}
CONFIGS = {program["configs"]!r}
# name, shape, dtype, lowest and highest value of the inputs
TENSORS = [{table}]

if __name__ == "__main__":
    import sys

    sys.path.insert(0, "tests/differential")
    from backends import main

    main(program.func, SEED, TENSORS, CONFIGS)
"""


def _number(program: dict[str, Any], d: str) -> int:
    """The value of an extent or stride: arithmetic on numbers and names."""
    steps = program.get("steps", {})
    known = {**program["dims"], **program["symbols"]}
    return int(eval(steps.get(d, d), {"__builtins__": {}}, known))


def _write(nodes: list[Node], depth: int, out: list[str], macros: list[str], known: set[str], named: set[str],
           mutable: set[str]) -> None:
    """Lines of the statements.  known: names bound so far; mutable: those of T.alloc_var."""
    pad = "    " * depth
    known = set(known)
    if not nodes:
        out.append(pad + "pass")
    for n in nodes:
        if n["t"] == "#macro":
            _macro(n, depth, out, macros, known, named, mutable)
            continue
        out.append(pad + n["t"])
        if "b" in n:
            inner = set(known)
            if m := _LOOP.match(n["t"]):
                inner |= {x.strip() for x in m.group(1).split(",")}
            _write(n["b"], depth + 1, out, macros, inner, named, mutable)
            if n.get("e"):
                _else(n["e"], depth, out, macros, known, named, mutable)
        elif m := _ASSIGNED.match(n["t"]):
            known.add(m.group(1))


def _else(nodes: list[Node], depth: int, out: list[str], macros: list[str], known: set[str], named: set[str],
          mutable: set[str]) -> None:
    pad = "    " * depth
    if len(nodes) == 1 and nodes[0]["t"].startswith("if "):
        n = nodes[0]
        out.append(pad + "el" + n["t"])
        _write(n["b"], depth + 1, out, macros, known, named, mutable)
        if n.get("e"):
            _else(n["e"], depth, out, macros, known, named, mutable)
        return
    out.append(pad + "else:")
    _write(nodes, depth + 1, out, macros, known, named, mutable)


def _macro(n: Node, depth: int, out: list[str], macros: list[str], known: set[str], named: set[str], mutable: set[str]) -> None:
    lines: list[str] = []
    _write(n["b"], 1, lines, macros, known, named, mutable)
    used = []
    for name in _NAME.findall("\n".join(lines)):
        if name in known and name not in used and name not in named:
            used.append(name)
    assigned = {m.group(1) for t in _texts(n["b"]) if (m := _REDUCED.match(t)) and m.group(1) in mutable}
    assigned |= {g for t in _texts(n["b"]) if (m := _ASSIGNED.match(t)) for g in m.groups() if g in mutable}
    name = f"part{sum(x == '@T.macro' for x in macros)}"
    params = [f"{x}: T.Ref" if x in assigned else x for x in used]
    macros += ["@T.macro", f"def {name}({', '.join(params)}):", *lines, "", ""]
    out.append("    " * depth + f"{name}({', '.join(used)})")


def _texts(nodes: list[Node]) -> list[str]:
    """The texts of all statements inside."""
    return [t for n in nodes for t in (n["t"], *_texts(n.get("b", [])), *_texts(n.get("e", [])))]


def features(program: dict[str, Any]) -> list[str]:
    """What a program contains, by the names its statements carry."""
    def inside(nodes: list[Node]) -> set[str]:
        return {f for n in nodes for f in (*n.get("f", ()), *inside(n.get("b", [])), *inside(n.get("e", [])))}

    out: set[str] = set()
    for k in program["kernels"]:
        out |= inside(k["body"]) | {f"grid:{len(k['grid'])}d"}
        out |= {f"host:{k['host'].split()[0]}"} if k.get("host") else set()
        out |= {f"threads:{len(k['block'])}d"} if k.get("block") else set()
        if k["threads"] % 32:
            out.add("threads:odd")
    if len(program["kernels"]) > 1:
        out.add("kernels:2")
    if program.get("style"):
        out.add(f"style:{program['style']}")
        if any(_const(program, x) for x in program["symbols"]):
            out.add("style:const")
    if any(not d.isdigit() and d in program["symbols"] for t in program["tensors"] for d in t["shape"]):
        out.add("shape:dynamic")
    out |= {f"param:{k}" for t in program["tensors"] for k in ("scalar", "pointer") if t.get(k)}
    for t in program["tensors"]:
        if "strides" in t:
            out.add(f"strides:{'dynamic' if any(d in program.get('steps', {}) for d in t['strides']) else 'static'}"
                    f":{'input' if t['name'][0] == 'A' else 'output'}")
            if t["strides"][-1] != "1":
                out.add("strides:inner")
    out |= {f"config:{k}" for k in program["configs"]} | {f"dtype:{t['dtype']}" for t in program["tensors"]}
    return sorted(out)
