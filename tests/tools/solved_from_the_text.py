"""Solutions of the first three puzzles as one writes them with nothing but the printed statement at hand."""

FIRST = {
    "copy": '''
@tilelang.jit
def copy(A):
    N = T.const("N")
    A: T.Tensor((N,), "float32")
    B = T.empty((N,), "float32")
    blocks = T.ceildiv(N, 128)
    with T.Kernel(blocks, threads=128) as bx:
        tile = T.alloc_shared((128,), "float32")
        first = bx * 128
        T.copy(A[first], tile)
        T.copy(tile, B[first])
    return B
''',
    "add": '''
@tilelang.jit
def add(A, B):
    M, N = T.const("M N")
    A: T.Tensor((M, N), "float16")
    B: T.Tensor((M, N), "float16")
    C = T.empty((M, N), "float32")
    with T.Kernel(T.ceildiv(N, 64), T.ceildiv(M, 16), threads=128) as (bx, by):
        for i, j in T.Parallel(16, 64):
            row = by * 16 + i
            column = bx * 64 + j
            C[row, column] = T.cast(A[row, column], "float32") + T.cast(B[row, column], "float32")
    return C
''',
    "outer": '''
@tilelang.jit
def outer(x, y):
    M, N = T.const("M N")
    x: T.Tensor((M,), "float32")
    y: T.Tensor((N,), "float32")
    C = T.empty((M, N), "float32")
    with T.Kernel(T.ceildiv(N, 64), T.ceildiv(M, 32), threads=128) as (bx, by):
        xs = T.alloc_shared((32,), "float32")
        ys = T.alloc_shared((64,), "float32")
        T.copy(x[by * 32], xs)
        T.copy(y[bx * 64], ys)
        for i, j in T.Parallel(32, 64):
            C[by * 32 + i, bx * 64 + j] = xs[i] * ys[j]
    return C
''',
}
