"""Random control flow per thread: both simulators against a plain Python interpreter of the same program."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_text import alloc, program

from tilelang.simulator import run_device, run_tile

THREADS = 40
NAMES = ("a", "b")
KINDS = ("set", "set", "set", "if", "for", "while", "leave")
RETURN = 'T.evaluate(T.call("thread_return", "void"))'


@st.composite
def expressions(draw, loops: tuple[str, ...]) -> str:
    """An int32 expression of the thread, the variables and the loops around it."""
    leaf = st.sampled_from(["tx", "a[0]", "b[0]", "1", "3", *loops])
    x, y, op = draw(leaf), draw(leaf), draw(st.sampled_from(["+", "-", "*", "%"]))
    return f"({x} % 5)" if op == "%" else f"({x} {op} {y})"


@st.composite
def conditions(draw, loops: tuple[str, ...]) -> str:
    x, y = draw(expressions(loops)), draw(expressions(loops))
    return f"{x} {draw(st.sampled_from(['<', '==', '>=']))} {y}"


@st.composite
def blocks(draw, depth: int, loops: tuple[str, ...]) -> list[str]:
    """Lines of a statement list."""
    out: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(KINDS if depth else ["set", "leave"]))
        if kind == "set":
            out.append(f"{draw(st.sampled_from(NAMES))}[0] = {draw(expressions(loops))} % 97")
        elif kind == "leave":
            what = [*(["break", "continue"] if loops else []), RETURN]
            out += [f"if {draw(conditions(loops))}:", f"    {draw(st.sampled_from(what))}"]
        elif kind == "if":
            out += [f"if {draw(conditions(loops))}:", *indent(draw(blocks(depth - 1, loops)))]
            if draw(st.booleans()):
                out += ["else:", *indent(draw(blocks(depth - 1, loops)))]
        elif kind == "for":
            name = f"k{len(loops)}"
            extent = draw(st.sampled_from(["3", "tx % 4", "a[0] % 4"]))
            out += [f"for {name} in T.serial({extent}):", *indent(draw(blocks(depth - 1, (*loops, name))))]
        else:
            name = f"w{len(loops)}[0]"
            out += [f"{name} = 0", f"while {name} < {draw(st.integers(1, 4))} and {draw(conditions(loops))}:",
                    *indent([f"{name} = {name} + 1", *draw(blocks(depth - 1, (*loops, name)))])]
    return out


def indent(lines: list[str]) -> list[str]:
    return ["    " + s for s in lines]


def by_python(lines: list[str], tx: int) -> list[int]:
    """One thread of the program, as Python runs it."""
    text = "\n".join(["def thread(tx, a, b, w0, w1, w2):", *indent(lines)])
    text = text.replace(RETURN, "return").replace("T.serial", "range")
    scope: dict = {}
    exec(text, scope)
    state = {n: [0] for n in ("a", "b", "w0", "w1", "w2")}
    scope["thread"](tx, **state)
    return [state["a"][0], state["b"][0]]


@settings(max_examples=60, deadline=None)
@given(blocks(3, ()))
def test_divergent_control_flow(lines):
    # What a thread has computed leaves it at once, since it may return.
    stores = {"a": "A", "b": "B"}
    spread = []
    for line in lines:
        spread.append(line)
        name = line.strip()[:1]
        if line.strip()[1:5] == "[0] " and name in stores:
            pad = line[: len(line) - len(line.lstrip())]
            spread.append(f"{pad}{stores[name]}[tx] = {name}[0]")
    f = program({"A": ((THREADS,), "int32"), "B": ((THREADS,), "int32")}, "\n".join(
        [alloc(n, (1,), "int32", "local.var") for n in ("a", "b", "w0", "w1", "w2")] + spread), threads=THREADS)
    want = np.array([by_python(lines, t) for t in range(THREADS)])
    zero = np.zeros(THREADS, np.int32)
    tile, device = run_tile(f, [zero, zero]), run_device(f, [zero, zero]).outputs
    for out in (tile, device):
        assert np.array_equal(np.stack([out["A"], out["B"]], 1), want)
