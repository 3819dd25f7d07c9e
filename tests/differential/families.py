"""Random legal tile programs, as hypothesis strategies over small descriptions that build Cases."""

from typing import Any

import numpy as np
from hypothesis import strategies as st
from programs import EPS, Case, gemm_case, normal, wide

import tilelang.language as T

FLOATS = ("float16", "bfloat16", "float32")


@st.composite
def gemms(draw) -> dict[str, Any]:
    """A gemm: shapes that need not divide, tiles, threads, dtypes, stages, transposes, policy, epilogue."""
    dtype = draw(st.sampled_from(["float16", "float16", "bfloat16", "float32", "int8"]))
    d = dict(
        m=draw(st.integers(1, 150)), n=draw(st.integers(1, 150)), k=draw(st.integers(1, 150)),
        bm=draw(st.sampled_from([16, 32, 64, 128])), bn=draw(st.sampled_from([16, 32, 64, 128])),
        bk=draw(st.sampled_from([32, 64])), ta=draw(st.booleans()), tb=draw(st.booleans()),
        stages=draw(st.integers(0, 4)), dtype=dtype, epilogue=draw(st.sampled_from(["none", "relu", "bias"])),
        threads=draw(st.sampled_from([32, 64, 128, 256])), swizzle=draw(st.booleans()), dynamic=draw(st.booleans()))
    if dtype == "int8":
        d.update(acc="int32", out="int32")
    else:
        d["out"] = draw(st.sampled_from(["float32", dtype]))
    # A warp computes at least 16 x 8 of the accumulator.
    while d["threads"] // 32 > (d["bm"] // 16) * (d["bn"] // 16):
        d["threads"] //= 2
    return d


def build_gemm(d: dict[str, Any]) -> Case:
    """The Case of a gemm description."""
    return gemm_case("generated", **d)


@st.composite
def elementwise(draw) -> dict[str, Any]:
    """A chain of elementwise steps through fragments and shared memory with masks, broadcasts and in-place updates."""
    steps = draw(st.lists(st.sampled_from(["scale", "add", "max", "abs_mask", "row", "shared", "square", "halve_even",
                                           "transpose_read"]), min_size=1, max_size=4))
    bm, bn = draw(st.sampled_from([8, 16, 32, 24])), draw(st.sampled_from([8, 16, 32, 40]))
    return dict(m=draw(st.integers(1, 80)), n=draw(st.integers(1, 80)), bm=bm, bn=bn, steps=tuple(steps),
                dtype=draw(st.sampled_from(FLOATS)), threads=draw(st.sampled_from([32, 64, 96, 128])))


def build_elementwise(d: dict[str, Any]) -> Case:
    """The Case of an elementwise description."""
    m, n, bm, bn, dt = d["m"], d["n"], d["bm"], d["bn"], d["dtype"]

    def program():
        steps = d["steps"]

        @T.macro
        def apply(step, F, S, R):
            if step == "scale":
                for i, j in T.Parallel(bm, bn):
                    F[i, j] = F[i, j] * T.float32(1.5)
            elif step == "add":
                for i, j in T.Parallel(bm, bn):
                    F[i, j] += T.cast(i, "float32") - T.cast(j, "float32")
            elif step == "max":
                for i, j in T.Parallel(bm, bn):
                    F[i, j] = T.max(F[i, j], T.float32(0.25))
            elif step == "abs_mask":
                for i, j in T.Parallel(bm, bn):
                    if F[i, j] < T.float32(0):
                        F[i, j] = -F[i, j]
            elif step == "row":
                T.reduce_max(F, R, dim=1)
                for i, j in T.Parallel(bm, bn):
                    F[i, j] = F[i, j] - R[i]
            elif step == "shared":
                T.copy(F, S)
                T.copy(S, F)
            elif step == "square":
                for i, j in T.Parallel(bm, bn):
                    F[i, j] = F[i, j] * F[i, j]
            elif step == "halve_even":
                for i, j in T.Parallel(bm, bn):
                    F[i, j] = T.if_then_else((i + j) % 2 == 0, F[i, j] * T.float32(0.5), F[i, j])
            elif step == "transpose_read":
                T.copy(F, S)
                for i, j in T.Parallel(bm, bn):
                    F[i, j] = S[(i * bn + j) % bm, (i + j) % bn]

        @T.macro
        def apply_all(rest, F, S, R):
            apply(rest[0], F, S, R)
            if len(rest) > 1:
                apply_all(rest[1:], F, S, R)

        @T.prim_func
        def chain(X: T.Tensor((m, n), dt), Y: T.Tensor((m, n), "float32")):
            with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=d["threads"]) as (bx, by):
                F = T.alloc_fragment((bm, bn), "float32")
                S = T.alloc_shared((bm, bn), "float32")
                R = T.alloc_fragment((bm,), "float32")
                T.copy(X[by * bm, bx * bn], F)
                apply_all(steps, F, S, R)
                T.copy(F, Y[by * bm, bx * bn])

        return chain

    def reference(x):
        gm, gn = -(-m // bm), -(-n // bn)
        pad = np.zeros((gm * bm, gn * bn), np.float32)
        pad[:m, :n] = np.asarray(x).astype(np.float32)
        i, j = np.meshgrid(np.arange(bm), np.arange(bn), indexing="ij")
        for by in range(gm):
            for bx in range(gn):
                f = pad[by * bm:(by + 1) * bm, bx * bn:(bx + 1) * bn]
                for s in d["steps"]:
                    f = _apply_numpy(s, f, i, j, bm, bn)
                pad[by * bm:(by + 1) * bm, bx * bn:(bx + 1) * bn] = f
        return [wide(pad[:m, :n])]

    def bound(x):
        # Each step rounds once; squaring doubles a relative error, at most four times.
        return 64 * EPS["float32"] * float(np.abs(reference(x)[0]).max(initial=1.0))

    return Case("generated", program, lambda rng: [normal(rng, (m, n), dt)], reference, [1], bound)


def _apply_numpy(step, f, i, j, bm, bn):
    f32 = np.float32
    match step:
        case "scale": return f * f32(1.5)
        case "add": return f + (i.astype(f32) - j.astype(f32))
        case "max": return np.maximum(f, f32(0.25))
        case "abs_mask": return np.where(f < 0, -f, f)
        case "row": return f - f.max(1, keepdims=True)
        case "shared": return f
        case "square": return f * f
        case "halve_even": return np.where((i + j) % 2 == 0, f * f32(0.5), f)
        case "transpose_read": return f[(i * bn + j) % bm, (i + j) % bn]
    raise KeyError(step)


@st.composite
def reductions(draw) -> dict[str, Any]:
    """A reduction of a 2-D tile along either dimension, with or without clear, from fragment or shared."""
    dtype = draw(st.sampled_from([*FLOATS, "int32"]))
    return dict(m=draw(st.integers(1, 60)), n=draw(st.integers(1, 60)), bm=draw(st.sampled_from([4, 16, 32, 12])),
                bn=draw(st.sampled_from([8, 32, 64, 20])), dim=draw(st.sampled_from([0, 1])), dtype=dtype,
                kind=draw(st.sampled_from(["sum", "max", "min", "abssum", "absmax"])), clear=draw(st.booleans()),
                threads=draw(st.sampled_from([32, 64, 128, 160])), shared=draw(st.booleans()))


def build_reduction(d: dict[str, Any]) -> Case:
    """The Case of a reduction description: Y[block, row or column] = reduction of the block's tile."""
    m, n, bm, bn, dt, dim = d["m"], d["n"], d["bm"], d["bn"], d["dtype"], d["dim"]
    acc = "int32" if dt == "int32" else "float32"
    keep = bn if dim == 0 else bm
    gm, gn = -(-m // bm), -(-n // bn)
    clear = d["clear"] or d["kind"] == "abssum"
    start = 3
    reduce = {"sum": T.reduce_sum, "max": T.reduce_max, "min": T.reduce_min, "abssum": T.reduce_abssum,
              "absmax": T.reduce_absmax}[d["kind"]]
    options = {} if d["kind"] == "abssum" else {"clear": clear}

    def program():
        @T.prim_func
        def reduce_tiles(X: T.Tensor((m, n), dt), Y: T.Tensor((gm, gn, keep), acc)):
            with T.Kernel(gn, gm, threads=d["threads"]) as (bx, by):
                F = T.alloc_fragment((bm, bn), acc)
                S = T.alloc_shared((bm, bn), acc)
                R = T.alloc_fragment((keep,), acc)
                T.copy(X[by * bm, bx * bn], F)
                T.fill(R, start)
                if d["shared"]:
                    T.copy(F, S)
                    reduce(S, R, dim=dim, **options)
                else:
                    reduce(F, R, dim=dim, **options)
                T.copy(R, Y[by, bx, :])

        return reduce_tiles

    def reference(x):
        pad = np.zeros((gm * bm, gn * bn))
        pad[:m, :n] = wide(x)
        t = pad.reshape(gm, bm, gn, bn).transpose(0, 2, 1, 3)
        t = np.abs(t) if d["kind"].startswith("abs") else t
        r = {"sum": np.sum, "max": np.max, "min": np.min}[d["kind"].removeprefix("abs")](t, axis=2 + dim)
        if not clear:
            r = {"sum": np.add, "max": np.maximum, "min": np.minimum}[d["kind"].removeprefix("abs")](r, start)
        return [r]

    def bound(x):
        return 0.0 if dt == "int32" else 8 * EPS["float32"] * float(np.abs(wide(x)).max() * max(bm, bn) + 3)

    return Case("generated", program, lambda rng: [normal(rng, (m, n), dt)], reference, [1], bound)


FAMILIES = {"gemm": (gemms, build_gemm), "elementwise": (elementwise, build_elementwise),
            "reduction": (reductions, build_reduction)}
