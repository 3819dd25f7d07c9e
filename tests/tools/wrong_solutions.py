"""Wrong solutions of the puzzles: what is changed in the solution, and what the check must say (a part of its text)."""

IN = " " * 12
MATMUL = {
    "no clear": ("        T.clear(acc)\n", "", "read before written"),
    "the last tile along K is left out": ("T.ceildiv(K, 32)", "K // 32", "without the last, partial tile along K"),
    "the accumulator is cleared in each step": ("            T.gemm(", "            T.clear(acc)\n            T.gemm(",
                                                "the last tile along K alone"),
    "a float16 accumulator": ('alloc_fragment((64, 64), "float32")', 'alloc_fragment((64, 64), "float16")', "float16"),
    "the first tile of A in each step": ("k * 32], As", "0], As", "rule: values"),
    "rows and columns of blocks exchanged": ("as (bx, by)", "as (by, bx)", "rule: "),
}
WRONG: dict[str, dict[str, tuple[str, str, str]]] = {
    "copy": {
        "the last block is missing": ("T.ceildiv(N, 128)", "N // 128", "44 of 300 elements of `B` were not written"),
        "each block copies the first tile": ("A[bx * 128]", "A[0]", "all of them in B[128:256]"),
        "blocks store one element apart": ("B[bx * 128]", "B[bx]", "all that is written lies in B[0:129]"),
        "the tile is never filled": ("        T.copy(A[bx * 128], tile)\n", "", "read before written"),
        "the numbers are doubled": (
            "        T.copy(tile", "        for i in T.Parallel(128):\n            tile[i] = tile[i] * 2\n        T.copy(tile",
            "rule: values"),
        "the tile is read outside": (
            "T.copy(tile, B[bx * 128])", "for i in T.Parallel(128):\n            B[bx * 128 + i] = tile[i + 1]",
            "rule: bounds"),
    },
    "add": {
        "A is added to itself": ("B[by * 16", "A[by * 16", "These are A + A"),
        "the sum is rounded": ("= a + b", '= T.cast(T.cast(a + b, "float16"), "float32")', "sums rounded to float16"),
        "subtraction": ("a + b", "a - b", "These are A - B"),
        "the last rows are missing": ("T.ceildiv(M, 16)", "M // 16", "were not written"),
        "rows and columns of blocks exchanged": ("as (bx, by)", "as (by, bx)", "rule: "),
    },
    "outer": {
        "sums": ("xs[i] * ys[j]", "xs[i] + ys[j]", "x + y instead of x * y"),
        "x from tensors, not from a tile": ("xs[i] * ys", "x[by * 32 + i] * ys", "`x` is read inside T.Parallel"),
        "the same tile of x for all": ("x[by * 32], xs", "x[0], xs", "all of them in C[32:64"),
        "one row of blocks": ("T.ceildiv(M, 32)", "1", "all that is written lies in C[0:32, 0:"),
        "the tile of y is not loaded": ("        T.copy(y[bx * 64], ys)\n", "", "read before written"),
    },
    "row_sums": {
        "no clear": ("        T.clear(s)\n", "", "read before written"),
        "each tile replaces the sum": (", clear=False", "", "the last tile of each row alone"),
        "the last tile is left out": ("T.ceildiv(N, 64)", "N // 64", "without their last, partial tile"),
        "sums in float16": ('s = T.alloc_fragment((4,), "float32")', 's = T.alloc_fragment((4,), "float16")', "rule: values"),
        "sums of columns": ("dim=1", "dim=0", "rule: "),
        "a whole row in the tile": ("(4, 64)", "(4, 600)", "a block must not hold more than 256"),
        "only the first tile": ("T.ceildiv(N, 64)", "1", "the first tile of each row alone"),
    },
    "histogram": {
        "a race of threads": (
            f"for i in T.Parallel(128):\n{IN}    if k * 128 + i < N:\n{IN}        T.atomic_add(count[X[k * 128 + i]], 1)",
            f"i = T.get_thread_binding()\n{IN}if k * 128 + i < N:\n{IN}    count[X[k * 128 + i]] += 1", "rule: race"),
        "a race": ("T.atomic_add(count[X[k * 128 + i]], 1)", "count[X[k * 128 + i]] += 1", "rule: race"),
        "no clear": ("        T.clear(count)\n", "", "read before written"),
        "elements behind the end": ("if k * 128 + i < N:", "if k * 128 + i < N + 128:", "behind the end counted as zeros"),
        "a step too few": ("T.ceildiv(N, 128)", "N // 128", "rule: values"),
        "counts outside of the tile": ("X[k * 128 + i]], 1)", "X[k * 128 + i] + 1], 1)", "rule: bounds"),
    },
    "softmax": {
        "no maximum": ("tile[i, j] - m[i]", "tile[i, j]", "Y[1, "),
        "no division": ("/= s[i]", "/= 1.0", "not divided by their sum"),
        "powers of 2": ("T.exp(", "T.exp2(", "powers of 2"),
        "divided by the maximum": ("T.reduce_sum(tile, s, dim=1)", "T.copy(m, s)", "rule: values"),
        "reduced along the wrong dimension": ("T.reduce_max(tile, m, dim=1)", "T.reduce_max(tile, m, dim=0)", "rule: "),
    },
    "matmul": MATMUL,
    "pipelined": {
        "serial": ("T.Pipelined(T.ceildiv(K, 32), num_stages=3)", "T.serial(T.ceildiv(K, 32))", "no copy is asynchronous"),
        "two stages": ("num_stages=3", "num_stages=2", "at least 3 are asked for"),
        "seven stages": ("num_stages=3", "num_stages=7", "at most 49152 are allowed"),
        "the accumulator is cleared in each step": MATMUL["the accumulator is cleared in each step"],
        "no clear": MATMUL["no clear"],
    },
    "transpose": {
        "rows": ("i * 64 + (j ^ (i % 32))", "i * 64 + j", "read of `tile`"),
        "columns": ("i * 64 + (j ^ (i % 32))", "j * 64 + i", "write of `tile`"),
        "eight columns": ("(i % 32)", "(i % 8)", "lost to bank conflicts"),
        "two elements in one place": ("i * 64 + (j ^ (i % 32))", "i * 32 + j", "rule: "),
        "not transposed": ("tile[j, i]", "tile[i, j]", "rows and columns exchanged"),
    },
    "attention": {
        "no factor": (" / 8", "", "without the factor 1/8"),
        "no mask": ('T.if_then_else(k * 64 + j < S, s[i, j], -T.infinity("float32"))', "s[i, j]",
                    "behind the end of K with a score of 0"),
        "the accumulator is not scaled": ("acc[i, j] *= T.exp((m_old[i] - m[i]) / 8)", "acc[i, j] *= 1.0", "rule: values"),
        "no division": ("acc[i, j] /= l[i]", "acc[i, j] /= 1.0", "rule: values"),
        "a score of 0 behind the end": ('s[i, j], -T.infinity("float32"))', "s[i, j], 0.0)",
                                        "behind the end of K with a score of 0"),
        "no clear of the sums": ("        T.clear(l)\n", "", "read before written"),
    },
    "quantised": {
        "the wrong half": ("(j % 2 * 4)", "(4 - j % 2 * 4)", "the high four bits taken for the even columns"),
        "no zero point": ('T.cast(q, "int32") - 8', 'T.cast(q, "int32")', "q instead of q - 8"),
        "no scales": ("acc[i, n] *= ss[n]", "acc[i, n] *= 1.0", "weights without their scales"),
        "scales of rows": ("acc[i, n] *= ss[n]", "acc[i, n] *= ss[i]", "rule: values"),
        "no clear": ("        T.clear(acc)\n", "", "read before written"),
        "the same bytes in each step": ("P[bx * 64, k * 32]", "P[bx * 64, 0]", "rule: values"),
    },
    "scan": {
        "no carry": ("tile[i, j] += carry[i]", "tile[i, j] += 0", "without a carry"),
        "no clear": ("        T.clear(carry)\n", "", "read before written"),
        "columns": ("dim=1", "dim=0", "rule: values"),
        "the carry is the first element": ("tile[i, 63]", "tile[i, 0]", "all of them in Y[0:4, 64:128]"),
        "a step too few": ("T.ceildiv(N, 64)", "N // 64", "were not written"),
    },
    "stream": {
        "no wait for full": ("                T.mbarrier_wait_parity(full[s], k // 2 % 2)\n", "", "rule: "),
        "no wait for free": ("                T.mbarrier_wait_parity(free[s], (k // 2 + 1) % 2)\n", "", "rule: "),
        "the wrong parity": ("(k // 2 + 1) % 2", "k // 2 % 2", "rule: "),
        "stages are not given back": ("                T.mbarrier_arrive(free[s])\n", "", "rule: "),
        "the producer does not arrive": ("                T.mbarrier_arrive(full[s])\n", "", "rule: "),
        "not doubled": ("2 * ring", "ring", "X itself, not doubled"),
    },
}
