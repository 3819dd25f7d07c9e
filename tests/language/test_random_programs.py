"""Random programs of the language's Python subset give in a kernel what plain Python gives."""

import linecache
import random

import numpy as np
import pytest

import tilelang.language as T
from tilelang.simulator.reference.run import run_tile

VARS = ("a", "b", "c", "d")


class Writer:
    """Writes a random body over the mutable variables VARS; every loop ends and values stay below 1000."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.lines: list[str] = []
        self.serial = 0

    def expr(self, names, depth=2) -> str:
        r = self.r
        if depth == 0 or r.random() < 0.3:
            return r.choice([*names, str(r.randint(-5, 9))])
        x, y = self.expr(names, depth - 1), self.expr(names, depth - 1)
        kind = r.randrange(8)
        if kind < 4:
            return f"({x} {r.choice(['+', '-', '*'])} {y})"
        if kind == 4:
            return f"({x} // {r.randint(2, 5)})"
        if kind == 5:
            return f"({x} % {r.randint(2, 7)})"
        if kind == 6:
            return f"({x} if {self.cond(names, depth - 1)} else {y})"
        return f"(({x}) & 15 | ({y}) % 4)"

    def cond(self, names, depth=1) -> str:
        r = self.r
        x, y, z = (self.expr(names, depth) for _ in range(3))
        op = lambda: r.choice(["<", "<=", ">", ">=", "==", "!="])  # noqa: E731
        return r.choice([f"{x} {op()} {y}", f"not {x} {op()} {y}", f"{x} < {y} <= {z}", f"({x} {op()} {y} and {y} {op()} {z})",
                         f"({x} {op()} {y} or not {z} {op()} {x})", f"({x} and {y})", "True", "1 > 2"][:6 + (depth > 1)])

    def block(self, indent: int, depth: int, names, in_loop: bool) -> None:
        r = self.r
        names = list(names)
        for _ in range(r.randint(1, 4)):
            self.statement(indent, depth, names, in_loop)

    def statement(self, indent, depth, names, in_loop) -> None:
        r, pad = self.r, " " * indent
        kind = r.randrange(10 if depth else 5)
        if kind < 2:
            self.lines.append(f"{pad}{r.choice(VARS)} = {self.expr(names)} % 997")
        elif kind == 2:
            self.lines.append(f"{pad}{r.choice(VARS)} {r.choice(['+=', '-=', '^='])} {self.expr(names)} % 31")
        elif kind == 3:
            self.serial += 1
            name = f"t{self.serial}"
            self.lines.append(f"{pad}{name} = {self.expr(names)} + a % 997")
            names.append(name)
        elif kind == 4:
            x, y = r.sample(VARS, 2)
            self.lines.append(f"{pad}{x}, {y} = {y}, {self.expr([x, y])} % 97")
        elif kind < 7:
            self.lines.append(f"{pad}if {self.cond(names)}:")
            self.block(indent + 4, depth - 1, names, in_loop)
            if r.random() < 0.5:
                self.lines.append(f"{pad}elif {self.cond(names)}:")
                self.block(indent + 4, depth - 1, names, in_loop)
            if r.random() < 0.5:
                self.lines.append(f"{pad}else:")
                self.block(indent + 4, depth - 1, names, in_loop)
            if in_loop and r.random() < 0.5:
                self.lines.append(f"{pad}if {self.cond(names)}: {r.choice(['break', 'continue'])}")
        elif kind < 9:
            self.serial += 1
            i = f"i{self.serial}"
            bounds = r.choice([f"{r.randint(0, 4)}", f"{r.randint(-3, 2)}, {r.randint(0, 4)}",
                               f"{r.randint(3, 6)}, {r.randint(-2, 2)}, {r.choice([-1, -2])}", f"a % 4, {r.randint(2, 5)}"])
            self.lines.append(f"{pad}for {i} in range({bounds}):")
            self.block(indent + 4, depth - 1, [*names, i], True)
        else:
            self.serial += 1
            n = f"n{self.serial}"
            self.lines.append(f"{pad}{n} = VAR(0)")
            self.lines.append(f"{pad}while {n} < {r.randint(1, 4)}:")
            self.lines.append(f"{pad}    {n} += 1")
            self.block(indent + 4, depth - 1, [*names, n], True)


def program(seed: int) -> str:
    w = Writer(seed)
    w.block(12, 3, VARS, False)
    body = "\n".join(w.lines)
    start = "\n".join(f"            {v} = VAR({k + 1})" for k, v in enumerate(VARS))
    end = "\n".join(f"            O[{k}] = {v}" for k, v in enumerate(VARS))
    return f"def f(O: T.Tensor((4,), 'int32')):\n        with T.Kernel(1, threads=1):\n{start}\n{body}\n{end}\n"


class PlainLanguage:
    """What the program's text means in plain Python."""

    class Tensor:
        def __init__(self, *_):
            pass

    class Kernel:
        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            return 0

        def __exit__(self, *_):
            return None


@pytest.mark.parametrize("seed", range(60))
def test_kernel_equals_python(seed):
    text = program(seed)
    plain = {"T": PlainLanguage, "VAR": lambda x: x}
    exec(text, plain)
    want = [0] * 4
    plain["f"](want)
    name = f"<random {seed}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    traced = {"T": T, "VAR": lambda x: T.alloc_var("int32", init=x)}
    exec(compile(text, name, "exec"), traced)
    f = T.prim_func(traced["f"])
    got = run_tile(f.func, [np.zeros(4, np.int32)])["O"].tolist()
    assert got == want, text
