"""Random chains of branches by whole warps, each with tile operations of its own, against NumPy on every execution."""

import linecache

import numpy as np
import pytest
from everywhere import WITH_HOPPER, run

import tilelang

# Work of a branch on row {k} of A (n integers) into row {k} of B: statements, and what they give.
WORK = [
    ("f = T.alloc_fragment(({n},), 'int32')\nT.copy(A[{k}, :], f)\nfor i in T.Parallel({n}):\n    f[i] = f[i] * 3 + i\n"
     "T.copy(f, B[{k}, :])",
     lambda a: a * 3 + np.arange(len(a))),
    ("s = T.alloc_shared(({n},), 'int32')\nT.copy(A[{k}, :], s)\nfor i in T.Parallel({n}):\n    B[{k}, i] = s[{n} - 1 - i]",
     lambda a: a[::-1]),
    ("f = T.alloc_fragment(({n},), 'int32')\nm = T.alloc_fragment((1,), 'int32')\nT.copy(A[{k}, :], f)\n"
     "T.reduce_max(f, m, dim=0)\nfor i in T.Parallel({n}):\n    B[{k}, i] = f[i] - m[0]", lambda a: a - a.max()),
    ("s = T.alloc_shared(({n},), 'int32')\nT.copy(A[{k}, :], s)\nT.cumsum(s, dim=0)\nT.copy(s, B[{k}, :])",
     lambda a: a.cumsum()),
    ("h = T.alloc_shared(({n},), 'int32')\nT.fill(h, 2)\nfor i in T.Parallel({n}):\n    T.atomic_add(h[i // 2], A[{k}, i])\n"
     "T.copy(h, B[{k}, :])", lambda a: 2 + np.concatenate([a.reshape(-1, 2).sum(1), 0 * a[len(a) // 2:]])),
    ("r = T.alloc_reducer((1,), 'int32', op='sum')\nq = T.alloc_fragment((1,), 'int32')\nT.reducer_init(r)\n"
     "for i in T.Parallel({n}):\n    T.reducer_update(r[0], A[{k}, i])\nT.finalize_reducer(r, q)\n"
     "for i in T.Parallel({n}):\n    B[{k}, i] = q[0] + i", lambda a: a.sum() + np.arange(len(a))),
    ("s = T.alloc_shared((2, {n}), 'int32')\nf = T.alloc_fragment(({n},), 'int32')\nT.clear(f)\nfor t in T.serial(4):\n"
     "    T.copy(A[{k}, :], s[t % 2, :])\n    for i in T.Parallel({n}):\n        f[i] = f[i] + s[t % 2, (i + t) % {n}]\n"
     "T.copy(f, B[{k}, :])", lambda a: sum(np.roll(a, -t) for t in range(4))),
    ("g = T.alloc_fragment(({n} // 16, 16), 'int32')\nz = T.alloc_fragment(({n} // 16,), 'int32')\n"
     "for i, j in T.Parallel({n} // 16, 16):\n    g[i, j] = A[{k}, i * 16 + j]\nT.reduce_sum(g, z, dim=1)\n"
     "for i, j in T.Parallel({n} // 16, 16):\n    B[{k}, i * 16 + j] = z[i] + g[i, j]",
     lambda a: (a.reshape(-1, 16).sum(1, keepdims=True) + a.reshape(-1, 16)).reshape(-1)),
]


def indented(text, by):
    return "".join(" " * by + line + "\n" for line in text.splitlines())


def program(seed):
    """(the program, A, what B must be): the warps are cut into runs, and some runs into runs again."""
    rng = np.random.default_rng(seed)
    warps, n = int(rng.choice([2, 3, 4, 5, 8, 9])), int(rng.choice([32, 64, 96, 256]))
    want, rows, text = {}, 0, ""
    a = rng.integers(-50, 50, (16, n)).astype(np.int32)

    def work(by):
        nonlocal rows
        statements, meaning = WORK[rng.integers(len(WORK))]
        k, rows = rows, rows + 1
        want[k] = meaning(a[k])
        return indented(statements.format(k=k, n=n), by)

    def cut(lo, hi, by, depth):
        """Statements for warps lo .. hi - 1."""
        out = work(by) if rng.random() < 0.5 or hi - lo < 2 or depth > 1 else ""
        if hi - lo < 2 or depth > 1 or rows > 9:
            return out or work(by)
        most = min(hi - lo - 1, int(rng.integers(1, 4)))
        at = sorted(rng.choice(np.arange(lo + 1, hi), size=most, replace=False).tolist())
        edges = [lo, *at, hi]
        for j, (x, y) in enumerate(zip(edges, edges[1:])):
            last = y == hi
            form = int(rng.integers(3))
            test = (f"tx >= {32 * x} and tx < {32 * y}", f"{32 * x} <= tx and tx // 32 < {y}",
                    f"tx // 32 == {x}" if y == x + 1 else f"tx < {32 * y} and tx > {32 * x - 1}")[form]
            head = "else:" if last and j and rng.random() < 0.6 else f"{'el' if j else ''}if {test}:"
            out += indented(head, by) + cut(x, y, by + 4, depth + 1)
        return out + (work(by) if rng.random() < 0.3 else "")

    body = cut(0, warps, 8, 0)
    text = ("@T.prim_func\n"
            f"def main(A: T.Tensor((16, {n}), 'int32'), B: T.Tensor((16, {n}), 'int32')):\n"
            f"    with T.Kernel(1, threads={32 * warps}):\n        tx = T.get_thread_binding()\n{body}")
    return text, a, want


def compiled(text, seed):
    name, space = f"<warp sets {seed}>", {"T": tilelang.language}
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    exec(compile(text, name, "exec"), space)
    return space["main"]


def check(seed, on):
    text, a, want = program(seed)
    main = compiled(text, seed)
    for name in on:
        try:
            got = run(main, a, on=name)[1]
        except Exception as e:
            raise AssertionError(f"{name}:\n{text}") from e
        for k, w in want.items():
            assert np.array_equal(got[k], w), f"{name}, row {k}:\n{text}"


@pytest.mark.parametrize("seed", range(6))
def test_branches_by_whole_warps_agree_with_numpy(seed):
    check(seed, WITH_HOPPER)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 250))
def test_many_branches_by_whole_warps_agree_with_numpy(seed):
    check(seed, WITH_HOPPER)
