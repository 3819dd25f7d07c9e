"""What the delta rules share (gated_delta.py, kda.py and their gradients): triangular systems, products over the value
columns, the reference and the checks.

The recurrence, with a decay alpha_t of one number, or of one for every channel of the key:
    w_t = v_t - (diag(alpha_t) state_(t-1))^T k_t,      the value that is missing under k_t
    state_t = diag(alpha_t) state_(t-1) + beta_t k_t w_t^T,      o_t = state_t^T q_t.
"""

import attention_harness as harness
import numpy as np

import tilelang.language as T


@T.macro
def solve(L, W, chunk, columns):
    """W <- (I + L)^-1 W by forward substitution: L (chunk, chunk) strictly lower, W (chunk, columns), both float32 in
    shared memory.  Columns are independent: a thread has one."""
    for i in T.serial(1, chunk):
        for j in T.Parallel(columns):
            for r in T.serial(i):
                W[i, j] -= L[i, r] * W[r, j]


@T.macro
def solve_transposed(L, R, chunk, columns):
    """R <- (I + L)^-T R by back substitution."""
    for step in T.serial(1, chunk):
        i = chunk - 1 - step
        for j in T.Parallel(columns):
            for r in T.serial(step):
                R[i, j] -= L[i + 1 + r, i] * R[i + 1 + r, j]


@T.macro
def products_of_values(dOs, dVs, Us, beta, rw, Ss, Gs, A, B, dq, read, write, dbeta, edges):
    """Everything that gradients of a chunk sum over the value columns, for one part of these columns.

    In shared memory dO and dV, w in Us, which becomes U = beta w, the states Ss before and Gs after the chunk (dim_k, columns);
    in registers R in rw, which is used up.  Added to are A = dO U^T, B = dV U^T, dq = dO Ss^T, read = dV Ss^T,
    write = U Gs^T, dbeta = the rows of R * w, edges = the rows of Ss * Gs.
    """
    both = T.alloc_fragment(Ss.shape, "float32")
    for i, j in T.Parallel(*rw.shape):
        rw[i, j] *= Us[i, j]
    T.reduce_sum(rw, dbeta, dim=1, clear=False)
    for i, j in T.Parallel(*rw.shape):
        Us[i, j] *= beta[i]
    for i, j in T.Parallel(*Ss.shape):
        both[i, j] = T.cast(Ss[i, j], "float32") * Gs[i, j]
    T.reduce_sum(both, edges, dim=1, clear=False)
    T.gemm(dOs, Us, A, transpose_B=True)
    T.gemm(dVs, Us, B, transpose_B=True)
    T.gemm(dOs, Ss, dq, transpose_B=True)
    T.gemm(dVs, Ss, read, transpose_B=True)
    T.gemm(Us, Gs, write, transpose_B=True)


def inputs(batch, heads, seq, dim_k, dim_v, dtype, seed, channels):
    """q, k, v, log_alpha, beta, and the gradient of o.  Rows of q and k are normalised.

    log_alpha: (batch, heads, seq), or with channels (batch, seq, heads, dim_k).
    """
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((batch, seq, heads, dim_k)) for _ in range(2))
    q, k = ((x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32).astype(harness.NUMPY[dtype]) for x in (q, k))
    v, do = (harness.random(rng, (batch, seq, heads, dim_v), dtype) for _ in range(2))
    decays = (batch, seq, heads, dim_k) if channels else (batch, heads, seq)
    log_alpha = -np.abs(harness.random(rng, decays, "float32", 0.1 if channels else 0.05))
    beta = rng.random((batch, heads, seq)).astype(np.float32)
    return q, k, v, log_alpha, beta, do


def reference(q, k, v, log_alpha, beta, do, rough=lambda x: x):
    """o and the gradients of q, k, v, log_alpha and beta, in float64, by one system of equations over all steps.

    w solves (I + N beta) w = v, where N_ts = sum over channels of k_t k_s exp(g_t - g_s) for s < t and g is the running sum of
    log_alpha; o = scores beta w.  `rough` rounds what the kernels round: scores, and the solutions, whose error in
    one step goes on to all later ones.
    """
    channels = log_alpha.ndim == 4
    q, k, v, do = (x.transpose(0, 2, 1, 3) for x in (q, k, v, do))
    g = np.cumsum(log_alpha.transpose(0, 2, 1, 3) if channels else log_alpha[..., None], -2)
    middle = g[:, :, g.shape[2] // 2, None]
    later, earlier = np.exp(g - middle), np.exp(middle - g)  # of decays between two steps, what each brings
    decay = 1.0 if channels else np.exp(np.minimum(g - g.swapaxes(-1, -2), 0))
    if not channels:
        later = earlier = 1.0
    beta = beta[..., None]

    def solved(matrix, right):
        exact = np.linalg.solve(matrix, right)
        return np.linalg.solve(matrix, right + rough(exact) - exact)

    q_reads, k_reads, k_writes = rough(q * later), rough(k * later), rough(k * earlier)
    one = np.eye(q.shape[2])
    scores = rough(np.tril(q_reads @ k_writes.swapaxes(-1, -2) * decay))
    N = rough(np.tril(k_reads @ k_writes.swapaxes(-1, -2) * decay, -1))
    w = solved(one + N * beta.swapaxes(-1, -2), v)
    u = beta * w
    o = scores @ u
    r = solved(one + (beta * N).swapaxes(-1, -2), scores.swapaxes(-1, -2) @ do)  # the gradient of u
    dv = beta * r
    w, r, written, read_by = rough(w), rough(r), rough(beta * rough(w)), rough(dv)
    by_q = rough(np.tril(do @ written.swapaxes(-1, -2)) * decay)
    by_k = rough(np.tril(-read_by @ written.swapaxes(-1, -2), -1) * decay)
    dq = later * (by_q @ k_writes)
    read = later * (by_k @ k_writes)  # the gradient of k_t as the key that reads, and as the one that writes
    write = earlier * (by_q.swapaxes(-1, -2) @ q_reads + by_k.swapaxes(-1, -2) @ k_reads)
    steps = q * dq + k * read - k * write  # the gradient of g: exp(g) stands beside what reads, exp(-g) beside what writes
    dlog = np.flip(np.cumsum(np.flip(steps, -2), -2), -2)
    back = [x.transpose(0, 2, 1, 3) for x in (o, dq, read + write, dv)]
    return [*back, dlog.transpose(0, 2, 1, 3) if channels else dlog.sum(-1), (r * w).sum(-1)]


def check_forward(name, kernel, sizes, chunk, dtype, seed, on, channels=False):
    """sizes: batch, heads, seq, dim_k, dim_v.  channels: a decay for every channel of the key."""
    *operands, do = inputs(*sizes, dtype=dtype, seed=seed, channels=channels)
    chunk = on.fitting(lambda chunk: kernel(*sizes, chunk=chunk, dtype=dtype), chunk, chunk // 2)
    got, *_ = harness.run(kernel(*sizes, chunk=chunk, dtype=dtype), operands, [5, 6, 7], on)
    exact = [harness.wide(x) for x in (*operands, do)]
    want, *_ = reference(*exact)
    samples = [reference(*exact, rough=harness.rounding(dtype, scale))[:1] for scale in (1.17, 1.73)]
    return harness.compare_rough([name], [got], [want], samples, [dtype])


def check_backward(name, forward, backward, sizes, chunk, dtype, seed, on, channels=False):
    """The gradients, from what the forward kernel keeps."""
    q, k, v, log_alpha, beta, do = inputs(*sizes, dtype=dtype, seed=seed, channels=channels)
    for kernel in (forward, backward):
        chunk = on.fitting(lambda chunk, k=kernel: k(*sizes, chunk=chunk, dtype=dtype), chunk, chunk // 2)
    kernel = on.compile(forward(*sizes, keep=True, chunk=chunk, dtype=dtype), out_idx=[5, 6, 7])
    _, before, w = kernel(q, k, v, log_alpha, beta)
    program = backward(*sizes, chunk=chunk, dtype=dtype)
    _, _, *got = harness.run(program, [q, k, log_alpha, beta, before, w, do], range(7, 14), on)
    exact = [harness.wide(x) for x in (q, k, v, log_alpha, beta, do)]
    _, *wants = reference(*exact)
    samples = [reference(*exact, rough=harness.rounding(dtype, scale))[1:] for scale in (1.17, 1.73)]
    names = [f"{name}, {gradient}" for gradient in ("dq", "dk", "dv", "dlog_alpha", "dbeta")]
    # the last two come in float32, but may be one large term that is a product of rounded numbers
    return harness.compare_rough(names, got, wants, samples, [dtype] * 5)
