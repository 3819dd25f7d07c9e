"""Less trodden parts of the language, as people combine them: packed types, mixed products, macros, classes, schedulers."""

import numpy as np

import tilelang
import tilelang.language as T

from .catalogue import EXACT, Bound, Program, drawn, dtype, integers, pack4, uniform, wide, zeros

F16, BF16, F32, I32, E4, E5, FP4 = "float16", "bfloat16", "float32", "int32", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"


def product_t(a, b, *_):
    a, b = wide(a, b)
    return a @ b.T


class Tiles:
    """Tile sizes and types of a product: a factory takes one object, as generators of kernels do."""

    def __init__(self, m, n, k, a=F16, b=F16, c=F32, out=F16, stages=2, threads=128):
        self.m, self.n, self.k, self.a, self.b, self.c, self.out, self.stages, self.threads = (
            m,
            n,
            k,
            a,
            b,
            c,
            out,
            stages,
            threads,
        )

    def shared(self, dt, *shape):
        return T.alloc_shared(shape, dt)


@T.macro
def load_pair(A, B, a, b, row, col, k):
    T.copy(A[row, k], a)
    T.copy(B[col, k], b)


@T.macro
def epilogue(acc, out: T.Tensor, row, col, bias=None, activation=None):
    for i, j in T.Parallel(acc.shape[0], acc.shape[1]):
        x = acc[i, j] if bias is None else acc[i, j] + bias[col + j]
        acc[i, j] = x if activation is None else activation(x)
    T.copy(acc, out[row, col])


@tilelang.jit(out_idx=[-1])
def product(M, N, K, t, bias=False, activation=None):
    @T.prim_func
    def main(A: T.Tensor((M, K), t.a), B: T.Tensor((N, K), t.b), bias_: T.Tensor((N,), F32), C: T.Tensor((M, N), t.out)):
        with T.Kernel(T.ceildiv(N, t.n), T.ceildiv(M, t.m), threads=t.threads) as (bx, by):
            a = t.shared(t.a, t.m, t.k)
            b = t.shared(t.b, t.n, t.k)
            acc = T.alloc_fragment((t.m, t.n), t.c)
            T.clear(acc)
            for k in T.Pipelined(T.ceildiv(K, t.k), num_stages=t.stages):
                load_pair(A, B, a, b, by * t.m, bx * t.n, k * t.k)
                T.gemm(a, b, acc, transpose_B=True)
            epilogue(acc, C, by * t.m, bx * t.n, bias_ if bias else None, activation)

    return main


def relu2(x):
    return T.max(x, 0) * T.max(x, 0)


@tilelang.jit(out_idx=[2])
def register_operands(M, N, K, which):
    """A or B of the product lies in registers, loaded from global memory or scaled on the way."""

    @T.prim_func
    def main(A: T.Tensor((M, K), F16), B: T.Tensor((N, K), F16), C: T.Tensor((M, N), F32)):
        with T.Kernel(T.ceildiv(N, 64), T.ceildiv(M, 64), threads=128) as (bx, by):
            a = T.alloc_fragment((64, 32), F16) if "a" in which else T.alloc_shared((64, 32), F16)
            b = T.alloc_fragment((64, 32), F16) if "b" in which else T.alloc_shared((64, 32), F16)
            c = T.alloc_fragment((64, 64), F32)
            T.clear(c)
            for k in T.serial(T.ceildiv(K, 32)):
                T.copy(A[by * 64, k * 32], a)
                T.copy(B[bx * 64, k * 32], b)
                T.gemm(a, b, c, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            T.copy(c, C[by * 64, bx * 64])

    return main


@tilelang.jit(out_idx=[2])
def transposed_both(M, N, K):
    @T.prim_func
    def main(A: T.Tensor((K, M), BF16), B: T.Tensor((N, K), BF16), C: T.Tensor((N, M), BF16)):
        with T.Kernel(T.ceildiv(N, 64), T.ceildiv(M, 64), threads=256) as (bx, by):
            a = T.alloc_shared((32, 64), BF16)
            b = T.alloc_shared((64, 32), BF16)
            c = T.alloc_fragment((64, 64), F32)
            turned = T.alloc_shared((64, 64), BF16)
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, 32), num_stages=3):
                T.copy(A[k * 32, by * 64], a)
                T.copy(B[bx * 64, k * 32], b)
                T.gemm(a, b, c, True, True)
            c_s = T.alloc_shared((64, 64), BF16)
            T.copy(c, c_s)
            T.transpose(c_s, turned)
            T.copy(turned, C[bx * 64, by * 64])

    return main


@tilelang.jit
def cast_to_fp4_rows(X, Y, S):
    """e2m1 rows of an odd number of bytes, scaled by the row's maximum, each element stored by itself."""
    m = T.dynamic("m")
    N = T.const("N")
    X: T.Tensor((m, N), F32)
    Y: T.Tensor((m, N), FP4)
    S: T.Tensor((m,), F32)
    with T.Kernel(m, threads=32) as r:
        f = T.alloc_fragment((N,), F32)
        mx = T.alloc_fragment((1,), F32)
        for j in T.Parallel(N):
            f[j] = X[r, j]
        T.reduce_absmax(f, mx)
        for j in T.Parallel(N):
            Y[r, j] = T.cast(f[j] / mx[0] * 6.0, FP4)
        if T.get_thread_binding() == 0:
            S[r] = mx[0]


def cast_to_fp4_rows_reference(x, y, s):
    mx = np.abs(x).max(1)
    return pack4((x / mx[:, None]).astype(np.float32) * np.float32(6)), mx


@tilelang.jit
def fp4_view_of_bytes(W, Y):
    """Bytes of a tensor seen as e2m1 pairs, and as 32-bit words."""
    m = T.dynamic("m")
    N = T.const("N")
    W: T.Tensor((m, N), "uint8")
    Y: T.Tensor((m, 2 * N), F32)
    with T.Kernel(m, threads=64) as r:
        raw = T.alloc_shared((N,), "uint8")
        T.copy(W[r, 0], raw)
        values = T.view(raw, (2 * N,), FP4)
        words = T.view(raw, (N // 4,), "uint32")
        for j in T.Parallel(2 * N):
            Y[r, j] = T.cast(values[j], F32) + T.cast(T.popcount(words[j // 8]), F32)


def fp4_view_reference(w, y):
    codes = np.stack([w & 15, w >> 4], -1).reshape(len(w), -1).astype(np.uint8)
    bits = np.unpackbits(w.reshape(len(w), -1, 4), axis=2).sum(2)
    return codes.view(dtype(FP4)).astype(np.float64) + np.repeat(bits, 8, 1)


@tilelang.jit(out_idx=[1])
def scheduler(M, N, workers):
    """The tile scheduler's coordinates, tile by tile."""
    tm, tn = -(-M // 32), -(-N // 32)

    @T.prim_func
    def main(A: T.Tensor((M, N), F32), O: T.Tensor((M, N), F32)):
        with T.Kernel(workers, threads=128) as w:
            s = T.PersistentTileScheduler(tm, tn, num_workers=workers, swizzle_size=2)
            s.init(w)
            while s.valid():
                t = T.alloc_fragment((32, 32), F32)
                T.copy(A[s.m_idx * 32, s.n_idx * 32], t)
                for i, j in T.Parallel(32, 32):
                    t[i, j] = t[i, j] * 2.0
                T.copy(t, O[s.m_idx * 32, s.n_idx * 32])
                s.next_tile()

    return main


@T.macro
def butterfly(x: T.Ref, distance):
    x = T.max(x, T.shfl_xor(x, distance))


@T.macro
def tree(x: T.Ref, distance):
    butterfly(x, distance)
    if distance > 1:
        tree(x, distance // 2)


@tilelang.jit
def recursive_macro(X):
    N = T.const("N")
    X: T.Tensor((N, 32), F32)
    Y = T.empty((N,), F32)
    with T.Kernel(T.ceildiv(N, 4), threads=128) as bx:
        row = bx * 4 + T.get_warp_idx()
        v = T.alloc_var(F32, init=-T.infinity(F32))
        if row < N:
            v = X[row, T.get_lane_idx()]
        tree(v, 16)
        if row < N and T.get_lane_idx() == 0:
            Y[row] = v
    return Y


@tilelang.jit
def sampled_rows(X, rows, limits, default: T.float32 = -1.0, step: T.int32 = 1):
    """Rows picked by a table, with while, continue, break, chained comparisons and steps known at run time."""
    m, k = T.dynamic("m k")
    N = T.const("N")
    X: T.Tensor((m, N), F32)
    rows: T.Tensor((k,), I32)
    limits: T.Tensor((2,), I32)
    Y = T.empty((k, N), F32)
    with T.Kernel(k, threads=64) as b:
        r = rows[b]
        if not 0 <= r < m:
            for j in T.Parallel(N):
                Y[b, j] = default
        else:
            tx = T.get_thread_binding()
            for c in range(T.ceildiv(N, 64)):
                j = c * 64 + tx
                if j >= N:
                    continue
                acc = T.alloc_var(F32, init=0.0)
                at = T.alloc_var(I32, init=j)
                while at >= 0:
                    acc += X[r, at]
                    at -= step
                    if at < limits[0] and at > limits[1]:
                        break
                Y[b, j] = acc
    return Y


def sampled_rows_reference(x, rows, limits, default, step):
    (x,) = wide(x)
    out = np.full((len(rows), x.shape[1]), default, float)
    for b, r in enumerate(rows):
        if 0 <= r < len(x):
            for j in range(x.shape[1]):
                at, total = j, 0.0
                while at >= 0:
                    total += x[r, at]
                    at -= step
                    if limits[1] < at < limits[0]:
                        break
                out[b, j] = total
    return out


@tilelang.jit
def many_types(X, threads: int = 64):
    """A row of conversions: saturation, truncation, bit casts, bool masks, 64-bit integers."""
    N = T.const("N")
    X: T.Tensor((N,), F32)
    A = T.empty((N,), "int8")
    B = T.empty((N,), "uint16")
    C = T.empty((N,), "bool")
    D = T.empty((N,), "int64")
    E = T.empty((N,), E5)
    with T.Kernel(T.ceildiv(N, threads), threads=threads) as bx:
        for i in T.Parallel(threads):
            if bx * threads + i < N:
                x = X[bx * threads + i]
                A[bx * threads + i] = T.cast(x * 10.0, "int8")
                B[bx * threads + i] = T.reinterpret(T.cast(x, F16), "uint16")
                C[bx * threads + i] = (x > 0) & (x < 5.0) | (x < -8.0)
                D[bx * threads + i] = T.cast(x, "int64") * T.int64(10**12) // 7
                E[bx * threads + i] = T.cast(x, E5)
    return A, B, C, D, E


def many_types_reference(x):
    half = x.astype(np.float16)
    ten = (x * np.float32(10)).astype(np.int8)
    return (
        ten,
        half.view(np.uint16),
        (x > 0) & (x < 5) | (x < -8),
        x.astype(np.int64) * 10**12 // 7,
        x.astype(dtype(E5)).astype(float),
    )


@tilelang.jit
def wide_math(X, Y):
    """A kernel per element of the less common functions."""
    N = T.const("N")
    X: T.Tensor((N,), F32)
    Y: T.Tensor((N,), F32)
    out = T.empty((4, N), F32)
    with T.Kernel(T.ceildiv(N, 128)) as bx:
        for i in T.Parallel(128):
            if bx * 128 + i < N:
                x, y = X[bx * 128 + i], Y[bx * 128 + i]
                out[0, bx * 128 + i] = T.atan2(y, x) + T.hypot(x, y)
                out[1, bx * 128 + i] = T.log1p(T.abs(x)) * T.cosh(y) - T.copysign(T.sqrt(T.abs(y)), x)
                out[2, bx * 128 + i] = T.ieee_fmaf(x, y, x, "rz") + T.fmod(x, T.abs(y) + 0.25)
                out[3, bx * 128 + i] = T.floor(x * 4.0) + T.round(y * 4.0) + T.trunc(x - y)
    return out


def wide_math_reference(x, y):
    x, y = wide(x, y)
    return np.stack(
        [
            np.arctan2(y, x) + np.hypot(x, y),
            np.log1p(abs(x)) * np.cosh(y) - np.copysign(np.sqrt(abs(y)), x),
            x * y + x + np.fmod(x, abs(y) + 0.25),
            np.floor(x * 4) + np.round(y * 4) + np.trunc((x - y).astype(np.float32)),
        ]
    )


@tilelang.jit
def workspace(X, parts: int = 3):
    """A global workspace of the launch, cooperative: blocks leave sums, meet at the grid's barrier, and all read the total."""
    N = T.const("N")
    X: T.Tensor((N,), F32)
    Y = T.empty((N,), F32)
    with T.Kernel(parts, threads=128) as bx:
        sums = T.alloc_global((parts,), F32)
        f = T.alloc_fragment((128,), F32)
        s = T.alloc_fragment((1,), F32)
        T.copy(X[bx * 128], f)
        T.reduce_sum(f, s)
        for i in T.Parallel(1):
            sums[bx + i] = s[0]
        T.sync_grid()
        total = T.alloc_var(F32, init=0.0)
        for p in T.serial(parts):
            total += sums[p]
        for i in T.Parallel(128):
            if bx * 128 + i < N:
                Y[bx * 128 + i] = X[bx * 128 + i] / total
    return Y


@tilelang.jit
def dynamic_shared(X, width: T.int32):
    """Shared memory whose size is known at the call."""
    m, n = T.dynamic("m, n")
    X: T.Tensor((m, n), F32)
    Y = T.empty((m, n), F32)
    with T.Kernel(m, threads=64) as r:
        s = T.alloc_shared((width,), F32)
        for j in T.Parallel(width):
            s[j] = T.if_then_else(j < n, X[r, j], 0.0)
        for j in T.Parallel(n):
            Y[r, j] = s[n - 1 - j]
    return Y


@tilelang.jit(out_idx=[2, 3])
def pipelined_prologue(M, K):
    """A staged loop whose bounds start later, with a conditional copy, a scan of stages and two outputs."""

    @T.prim_func
    def main(A: T.Tensor((M, K), F16), flags: T.Tensor((K // 32,), I32), S: T.Tensor((M,), F32), C: T.Tensor((1,), I32)):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((M, 32), F16)
            f = T.alloc_fragment((M, 32), F32)
            acc = T.alloc_fragment((M,), F32)
            part = T.alloc_fragment((M,), F32)
            count = T.alloc_var(I32, init=0)
            T.clear(acc)
            for k in T.Pipelined(1, K // 32, num_stages=3):
                if flags[k] != 0:
                    T.copy(A[0, k * 32], a)
                    T.copy(a, f)
                    T.reduce_sum(f, part, dim=1)
                    for i in T.Parallel(M):
                        acc[i] += part[i]
                    count += 1
            T.copy(acc, S)
            if T.get_thread_binding() == 0:
                C[0] = count

    return main


def pipelined_prologue_reference(a, flags):
    (a,) = wide(a)
    used = flags.copy()
    used[0] = 0
    return (a * np.repeat(used, 32)).sum(1), np.array([used.sum()])


@tilelang.jit(out_idx=[-1], pass_configs={"tl.disable_safe_memory_legalize": True})
def four_dimensions(B, H, S, D):
    """Axes permuted by copies of slices, blocks in three dimensions, threads in two."""

    @T.prim_func
    def main(X: T.Tensor((B, S, H, D), BF16), Y: T.Tensor((B, H, D, S), BF16)):
        with T.Kernel(B, H, S // 16, threads=(32, 4)) as (b, h, s):
            tile = T.alloc_shared((16, D), BF16)
            T.copy(X[b, s * 16 : (s + 1) * 16, h, 0:D], tile)
            tx, ty = T.get_thread_binding(0), T.get_thread_binding(1)
            for d in T.serial(D // 4):
                if tx < 16:
                    Y[b, h, d * 4 + ty, s * 16 + tx] = tile[tx, d * 4 + ty]

    return main


def mixed(a, b):
    return Tiles(64, 64, 64, a=a, b=b, out=F32)


PROGRAMS = [
    Program(
        "product_relu2",
        product,
        dict(M=70, N=136, K=96, t=Tiles(64, 64, 32), bias=True, activation=relu2),
        drawn(uniform((70, 96), F16), uniform((136, 96), F16), uniform((136,))),
        lambda a, b, c: np.maximum(product_t(a, b) + wide(c)[0], 0) ** 2,
        Bound(F16, 96, 96.0 * 32),
    ),
    Program(
        "product_fp8_mixed",
        product,
        dict(M=70, N=72, K=128, t=mixed(E4, E5)),
        drawn(uniform((70, 128), E4), uniform((72, 128), E5), uniform((72,))),
        product_t,
        Bound(F32, 128, 128.0, absolute=128 * 2**-11),
    ),
    Program(
        "product_half_accumulator",
        product,
        dict(M=70, N=72, K=64, t=Tiles(64, 64, 32, c=F16)),
        drawn(uniform((70, 64), F16), uniform((72, 64), F16), uniform((72,))),
        product_t,
        Bound(F16, 64, 32.0, acc=F16),
    ),
    Program(
        "product_tf32",
        product,
        dict(M=70, N=72, K=64, t=Tiles(64, 64, 32, a=F32, b=F32, out=F32)),
        drawn(uniform((70, 64)), uniform((72, 64)), uniform((72,))),
        product_t,
        Bound(F32, via=((F16, 64.0),)),
    ),
    Program(
        "register_operand_a",
        register_operands,
        dict(M=70, N=72, K=96, which="a"),
        drawn(uniform((70, 96), F16), uniform((72, 96), F16)),
        product_t,
        Bound(F32, 96, 96.0),
    ),
    Program(
        "register_operand_b",
        register_operands,
        dict(M=70, N=72, K=96, which="b"),
        drawn(uniform((70, 96), F16), uniform((72, 96), F16)),
        product_t,
        Bound(F32, 96, 96.0),
    ),
    Program(
        "register_operands",
        register_operands,
        dict(M=70, N=72, K=96, which="ab"),
        drawn(uniform((70, 96), F16), uniform((72, 96), F16)),
        product_t,
        Bound(F32, 96, 96.0),
    ),
    Program(
        "transposed_both",
        transposed_both,
        dict(M=72, N=80, K=96),
        drawn(uniform((96, 72), BF16), uniform((80, 96), BF16)),
        lambda a, b: wide(b)[0] @ wide(a)[0],
        Bound(BF16, 96, 96.0),
    ),
    Program(
        "cast_to_fp4_rows",
        cast_to_fp4_rows,
        dict(N=30),
        drawn(uniform((5, 30)), zeros((5, 15), "int8"), zeros((5,))),
        cast_to_fp4_rows_reference,
        EXACT,
        changed=(1, 2),
    ),
    Program(
        "fp4_view_of_bytes",
        fp4_view_of_bytes,
        dict(N=32),
        drawn(integers((4, 32), 0, 256, "uint8"), zeros((4, 64))),
        fp4_view_reference,
        EXACT,
        changed=(1,),
    ),
    Program("scheduler", scheduler, dict(M=100, N=70, workers=4), drawn(uniform((100, 70))), lambda a: wide(a)[0] * 2, EXACT),
    Program("recursive_macro", recursive_macro, dict(N=10), drawn(uniform((10, 32))), lambda x: x.max(1), EXACT),
    Program(
        "sampled_rows",
        sampled_rows,
        dict(N=70),
        drawn(uniform((6, 70)), np.array([0, -1, 5, 6, 3], np.int32), np.array([20, 10], np.int32), -1.0, 3),
        sampled_rows_reference,
        Bound(F32, 30, 30.0),
    ),
    Program("many_types", many_types, dict(N=100), drawn(uniform((100,), low=-12, high=12)), many_types_reference, EXACT),
    Program(
        "wide_math",
        wide_math,
        dict(N=100),
        drawn(uniform((100,), low=0.01, high=2), uniform((100,), low=-2, high=2)),
        wide_math_reference,
        Bound(F32, 16, 8.0),
    ),
    Program(
        "workspace",
        workspace,
        dict(N=350),
        drawn(uniform((350,), low=0.5)),
        lambda x: wide(x)[0] / wide(x)[0].sum(),
        Bound(F32, 350, 0.01),
    ),
    Program("dynamic_shared", dynamic_shared, {}, drawn(uniform((4, 50)), 64), lambda x, w: x[:, ::-1].astype(float), EXACT),
    Program(
        "pipelined_prologue",
        pipelined_prologue,
        dict(M=64, K=224),
        drawn(uniform((64, 224), F16), np.array([1, 0, 1, 1, 0, 0, 1], np.int32)),
        pipelined_prologue_reference,
        (Bound(F32, 224, 224.0), EXACT),
    ),
    Program(
        "four_dimensions",
        four_dimensions,
        dict(B=2, H=3, S=32, D=24),
        drawn(uniform((2, 32, 3, 24), BF16)),
        lambda x: x.transpose(0, 2, 3, 1).astype(float),
        EXACT,
    ),
]
