"""What the delta rules share (gated_delta.py, kda.py and their gradients): triangular systems, inputs, the reference.

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
