"""Integer kernels: hashes, generators, histograms, and arrays that each thread keeps for itself."""

import tilelang.language as T

from . import program

F32, I32, U32 = "float32", "int32", "uint32"


def elementwise(n, compute):
    @T.prim_func
    def main(X: T.Tensor((n,), U32), Y: T.Tensor((n,), U32)):
        with T.Kernel(T.ceildiv(n, 128), threads=128) as b:
            for i in T.Parallel(128):
                Y[b * 128 + i] = compute(X[b * 128 + i])
    return main


@program("xorshift")
def xorshift():
    """Eight rounds of a generator, each of which uses its value twice."""
    def compute(x):
        for _ in range(8):
            x = x ^ (x << T.uint32(13))
            x = x ^ (x >> T.uint32(17))
            x = x ^ (x << T.uint32(5))
        return x
    return elementwise(1024, compute)


@program("mixed_words")
def mixed_words():
    """The finaliser of a hash, applied twice."""
    def compute(x):
        for _ in range(2):
            x = (x ^ (x >> T.uint32(16))) * T.uint32(0x85EBCA6B)
            x = (x ^ (x >> T.uint32(13))) * T.uint32(0xC2B2AE35)
            x = x ^ (x >> T.uint32(16))
        return x
    return elementwise(1024, compute)


@program("a_long_polynomial")
def a_long_polynomial():
    """150 coefficients, by Horner's rule."""
    def compute(x):
        value = T.uint32(0)
        for k in range(150):
            value = value * x + T.uint32(2 * k + 1)
        return value
    return elementwise(1024, compute)


@program("squares_of_squares")
def squares_of_squares():
    """x*x + x, twenty times."""
    def compute(x):
        for _ in range(20):
            x = x * x + x
        return x
    return elementwise(1024, compute)


@program("rotated_histogram")
def rotated_histogram(n=64):
    """Bins that start at an offset which all threads agree on."""
    @T.prim_func
    def main(X: T.Tensor((n,), F32), S: T.Tensor((1,), I32), Y: T.Tensor((n,), F32)):
        with T.Kernel(1, threads=n):
            bins = T.alloc_shared((n,), F32)
            start = T.alloc_var(I32)
            start = S[0]
            T.copy(X, bins)
            for i in T.Parallel(n):
                bins[(i + start % 67) % n] += 1.0
            T.copy(bins, Y)
    return main


@program("a_temporary_of_one_element")
def a_temporary_of_one_element(n=256):
    """A fragment of one element holds a value inside a parallel loop."""
    @T.prim_func
    def main(X: T.Tensor((n,), F32), Y: T.Tensor((n,), F32)):
        with T.Kernel(1, threads=128):
            t = T.alloc_fragment((1,), F32)
            for i in T.Parallel(n):
                t[0] = X[i] * 2.0
                Y[i] = t[0] * t[0]
    return main


@program("an_array_of_each_thread")
def an_array_of_each_thread(n=128, k=8):
    """Each thread sorts the eight values of its row in registers."""
    @T.prim_func
    def main(X: T.Tensor((n, k), I32), Y: T.Tensor((n, k), I32)):
        with T.Kernel(1, threads=n):
            tx = T.get_thread_binding()
            row = T.alloc_local((k,), I32)
            for j in T.serial(k):
                row[j] = X[tx, j]
            for _ in T.unroll(k):
                for b in T.unroll(k - 1):
                    if row[b] > row[b + 1]:
                        held = row[b]
                        row[b] = row[b + 1]
                        row[b + 1] = held
            for j in T.serial(k):
                Y[tx, j] = row[j]
    return main


@program("eighty_small_tiles")
def eighty_small_tiles(count=80, n=64):
    """A generated kernel with many shared buffers, each with a loop of its own."""
    @T.macro
    def reverse(X, Y, k):
        s = T.alloc_shared((n,), F32)
        for i in T.Parallel(n):
            s[i] = X[k, i]
        for i in T.Parallel(n):
            Y[k, i] = s[n - 1 - i]

    def reverse_all(X, Y):
        for k in range(count):
            reverse(X, Y, k)

    @T.prim_func
    def main(X: T.Tensor((count, n), F32), Y: T.Tensor((count, n), F32)):
        with T.Kernel(1, threads=n):
            reverse_all(X, Y)
    return main
