"""Programs on numbers that are not whole: functions, norms, softmax and products, compared within a bound."""

from __future__ import annotations

from typing import Any

from gen_state import Node, Profile, State, node

NEAR = Profile("near", (16, 32, 64), (32, 64, 128, 256), ("float16", "bfloat16", "float32"), (1, 1))
TOLERANCE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 0.03}
Made = tuple[dict[str, Any], list[dict[str, Any]]]


def is_near(seed: int) -> bool:
    """Whether the program of a seed is one of these."""
    return seed % 20 == 13


def near_program(seed: int) -> dict[str, Any]:
    """The program of a seed."""
    st = State(seed, NEAR)
    kernel, tensors = st.pick([chain, attention, row_sums])(st)
    configs = st.pick([{}, {}, {"tl.enable_fast_math": True}, {"tl.disable_warp_specialized": True}])
    return {"seed": seed, "profile": "near", "dims": {}, "symbols": {}, "steps": {}, "tensors": tensors, "configs": configs,
            "kernels": [kernel]}


def _tensor(name: str, shape: tuple[int, ...], dt: str, tol: float) -> dict[str, Any]:
    return {"name": name, "shape": [str(n) for n in shape], "dtype": dt, "low": -2, "high": 2, "normal": True, "tol": tol}


# Of an element x: none stretches differences by more than two.
ELEMENTS = {"gelu": "0.5 * {x} * (1.0 + T.erf({x} * 0.70710678))", "silu": "{x} * T.sigmoid({x})", "tanh": "T.tanh({x})",
            "log1p": "T.log1p(T.abs({x}))", "sin": "T.sin({x})", "cos": "T.cos({x})", "sqrt": "T.sqrt(T.abs({x}) + 1.0)",
            "rsqrt": "T.rsqrt({x} * {x} + 1.0)", "exp2": "T.exp2(-T.abs({x}))", "exp": "T.exp(T.min({x}, 0.5))",
            "log": "T.log(T.abs({x}) + 1.0)", "log2": "T.log2({x} * {x} + 1.0)", "atan": "T.atan({x})", "erf": "T.erf({x})",
            "asinh": "T.asinh({x})", "hypot": "T.hypot({x}, 1.0)", "pow": "T.pow(T.abs({x}) + 1.0, 0.5)",
            "divide": "{x} / (1.0 + {x} * {x})", "__exp": "T.__exp(T.min({x}, 0.5))",
            "fast_rcp": "T.fast_rcp(T.abs({x}) + 1.0)"}


def chain(st: State) -> Made:
    """Rows that go through functions, norms, softmax and products, one after another."""
    rows, cols = st.pick([4, 16, 32, 64]), st.pick([16, 32, 64, 20, 48, 100])
    dt, out = st.pick(NEAR.dtypes), st.pick(NEAR.dtypes)
    threads, blocks = st.pick(NEAR.threads), st.between(1, 3)
    m = rows * blocks - (st.between(0, rows - 1) if st.chance(0.5) else 0)
    tol = max(TOLERANCE[dt], TOLERANCE[out]) if out != "float32" else TOLERANCE["float32"]
    body: list[Node] = [*(node(f"{x} = T.alloc_fragment(({rows}, {cols}), 'float32')") for x in "XY"),
                        *(node(f"{x} = T.alloc_fragment(({rows},), 'float32')") for x in "VU")]
    if st.chance(0.5):
        body += [node(f"S = T.alloc_shared(({rows}, {cols}), '{dt}')"), node(f"T.copy(A[b * {rows}, 0], S)"),
                 node("T.copy(S, X)")]
    else:
        body.append(node(f"T.copy(A[b * {rows}, 0], X)"))
    tensors = [_tensor("A", (m, cols), dt, tol)]
    for _ in range(st.between(3, 5)):
        form = st.pick([elements, elements, softmax, norm, norm, log_sum, product, product])
        if form is product:
            if "P = " in str(body) or rows % 16 or cols % 16:
                continue
            kind = st.pick(["float16", "bfloat16"])
            tol = max(tol, TOLERANCE[kind])
            body += product(st, rows, cols, kind)
            tensors.append(_tensor("Q", (cols, cols), kind, tol))
        else:
            body += form(st, rows, cols)
    body.append(node(f"T.copy(X, O[b * {rows}, 0])"))
    tensors.append(_tensor("O", (m, cols), out, tol))
    for t in tensors:
        t["tol"] = tol
    return {"grid": [str(blocks)], "blocks": ["b"], "threads": threads, "body": body}, tensors


def _each(st: State, rows: int, cols: int, text: str, *features: str) -> Node:
    return node(f"for i, j in T.Parallel({rows}, {cols}):", [node(f"X[i, j] = {text}", None, None, *features)])


def elements(st: State, rows: int, cols: int) -> list[Node]:
    """A function of each element."""
    name = st.pick(list(ELEMENTS))
    return [_each(st, rows, cols, ELEMENTS[name].format(x="X[i, j]"), f"near:{name}")]


def softmax(st: State, rows: int, cols: int) -> list[Node]:
    """Each row's share of the sum of its exponentials."""
    base2 = st.chance(0.5)
    power = "T.exp2((X[i, j] - V[i]) * 1.44269504)" if base2 else "T.exp(X[i, j] - V[i])"
    return [node("T.reduce_max(X, V, dim=1)"), _each(st, rows, cols, power), node("T.reduce_sum(X, U, dim=1)"),
            _each(st, rows, cols, "X[i, j] / U[i]", "near:softmax")]


def norm(st: State, rows: int, cols: int) -> list[Node]:
    """Each row without its mean, over the root of its variance and one."""
    square = node(f"for i, j in T.Parallel({rows}, {cols}):", [node("Y[i, j] = (X[i, j] - V[i]) * (X[i, j] - V[i])")])
    mean = node(f"for i in T.Parallel({rows}):", [node(f"V[i] = V[i] / {cols}.0")])
    root = node(f"for i in T.Parallel({rows}):", [node(f"U[i] = T.rsqrt(U[i] / {cols}.0 + 1.0)")])
    return [node("T.reduce_sum(X, V, dim=1)"), mean, square, node("T.reduce_sum(Y, U, dim=1)"), root,
            _each(st, rows, cols, "(X[i, j] - V[i]) * U[i]", "near:norm")]


def log_sum(st: State, rows: int, cols: int) -> list[Node]:
    """Each row less the logarithm of the sum of its exponentials, a quarter of it."""
    power = node(f"for i, j in T.Parallel({rows}, {cols}):", [node("Y[i, j] = T.exp(X[i, j] - V[i])")])
    return [node("T.reduce_max(X, V, dim=1)"), power, node("T.reduce_sum(Y, U, dim=1)"),
            _each(st, rows, cols, "0.25 * (X[i, j] - V[i] - T.log(U[i]))", "near:log-sum")]


def product(st: State, rows: int, cols: int, kind: str) -> list[Node]:
    """The rows times a square matrix, scaled so that they stay in range."""
    scope = st.pick(["shared", "fragment"])
    return [node(f"P = T.alloc_{scope}(({rows}, {cols}), '{kind}')"), node(f"Qs = T.alloc_shared(({cols}, {cols}), '{kind}')"),
            node("T.copy(Q, Qs)"), node("T.copy(X, P)"),
            node(f"T.gemm(P, Qs, Y{st.pick(['', ', transpose_B=True'])}, clear_accum=True)"),
            _each(st, rows, cols, f"Y[i, j] * {1 / cols!r}", "near:product")]


# Of a total L, a part N that is added to it, a factor U between 0 and 1 and another row V: linear in the sums and not.
TERMS = ("L[i] * 0.5", "L[i] * U[i]", "L[i]", "N[i]", "N[i] * U[i]", "N[i] / 8.0", "V[i] * 0.5", "N[i] / (1.0 + U[i])",
         "U[i] / (1.0 + N[i] * N[i])", "N[i] * (N[i] * 0.01 + 1.0)", "L[i] / (1.0 + T.abs(N[i]))", "1.0 / (2.0 + T.abs(L[i]))",
         "N[i] * T.exp2(-T.abs(N[i]))", "V[i] * U[i] * N[i]", "T.max(L[i], N[i])")
BESIDE = ("V[i] = N[i] * 0.125", "V[i] = V[i] * 0.5 + N[i] * 0.25", "U[i] = 1.0 / (1.0 + T.abs(N[i]))", "V[i] = L[i] * 0.5",
          "V[i] = U[i] - V[i] * 0.5")


def row_sums(st: State) -> Made:
    """Sums of rows, tile after tile, and what a loop makes of them: a compiler may put the additions over lanes off."""
    rows, cols, steps = st.pick([16, 32, 64]), st.pick([16, 32, 64, 20]), st.between(2, 4)
    loop: list[Node] = [node("T.copy(A[k, 0, 0], X)"), node(f"T.reduce_{st.pick(['sum', 'sum', 'abssum'])}(X, N, dim=1)")]
    for _ in range(st.between(1, 2)):
        terms = [st.pick(["L[i]", "L[i] * 0.5", "L[i] * U[i]", *TERMS]), *(st.pick(TERMS) for _ in range(st.between(1, 2)))]
        text = f" {st.pick(['+', '+', '-'])} ".join(terms)
        body = [node(f"L[i] = {text}", None, None, "near:row-sums")]
        if st.chance(0.4):
            body.insert(st.between(0, 1), node(st.pick(BESIDE), None, None, "near:row-sums-beside"))
        loop.append(node(f"for i in T.Parallel({rows}):", body))
    if st.chance(0.3):
        loop.append(node(f"for i in T.Parallel({rows}):", [node(st.pick(BESIDE))]))
    head = st.pick(["T.serial({n})", "T.Pipelined({n}, num_stages=2)"]).format(n=steps)
    made = [node(f"X = T.alloc_fragment(({rows}, {cols}), 'float32')"),
            *(node(f"{x} = T.alloc_fragment(({rows},), 'float32')") for x in "LNUV"),
            node("T.clear(L)"), node("T.fill(U, 0.5)"), node("T.fill(V, 1)"), node(f"for k in {head}:", loop),
            *(node(f"T.copy({x}, O[{n}, 0])") for n, x in enumerate(st.pick(["LUV", "LUV", "LNUV"])))]
    tensors = [_tensor("A", (steps, rows, cols), "float32", 1e-3), _tensor("O", (4, rows), "float32", 1e-3)]
    return {"grid": ["1"], "blocks": ["b"], "threads": st.pick([32, 64, 128, 256]), "body": made}, tensors


def attention(st: State) -> Made:
    """Softmax of products over keys in a pipelined loop, the running maximum and sum carried along."""
    d, bm, bn = st.pick([16, 32, 64]), st.pick([16, 32, 64, 128]), st.pick([16, 32, 64])
    steps, kind, causal = st.between(1, 4), st.pick(["float16", "bfloat16"]), st.chance(0.5)
    threads, stages, heads = st.pick([64, 128, 128, 256]), st.between(0, 3), st.between(1, 2)
    n = bn * steps - (st.between(0, bn - 1) if st.chance(0.4) else 0)
    m = bm * st.between(1, 2)
    keep = f"k * {bn} + j < {n}" + (f" and k * {bn} + j <= bx * {bm} + i" if causal else "")
    scale = 1.44269504 / d**0.5
    loop: list[Node] = [
        node(f"T.copy(K[by, k * {bn}, 0], Ks)"), node("T.gemm(Qs, Ks, X, transpose_B=True, clear_accum=True)"),
        node(f"for i, j in T.Parallel({bm}, {bn}):", [node(f"X[i, j] = T.if_then_else({keep}, X[i, j] * {scale!r}, -1e30)")]),
        node("T.copy(V, U)"), node("T.reduce_max(X, V, dim=1, clear=False)"),
        node(f"for i in T.Parallel({bm}):", [node("U[i] = T.exp2(U[i] - V[i])")]),
        node(f"for i, j in T.Parallel({bm}, {bn}):", [node("X[i, j] = T.exp2(X[i, j] - V[i])")]),
        node("T.reduce_sum(X, N, dim=1)"), node(f"for i in T.Parallel({bm}):", [node("L[i] = L[i] * U[i] + N[i]")]),
        node(f"for i, j in T.Parallel({bm}, {d}):", [node("C[i, j] = C[i, j] * U[i]")]),
        node(f"T.copy(B[by, k * {bn}, 0], Bs)"), node("T.copy(X, P)"), node("T.gemm(P, Bs, C)")]
    body = [node(f"Qs = T.alloc_shared(({bm}, {d}), '{kind}')"), node(f"Ks = T.alloc_shared(({bn}, {d}), '{kind}')"),
            node(f"Bs = T.alloc_shared(({bn}, {d}), '{kind}')"), node(f"X = T.alloc_fragment(({bm}, {bn}), 'float32')"),
            node(f"P = T.alloc_fragment(({bm}, {bn}), '{kind}')"), node(f"C = T.alloc_fragment(({bm}, {d}), 'float32')"),
            *(node(f"{x} = T.alloc_fragment(({bm},), 'float32')") for x in "VULN"),
            node(f"T.copy(Q[by, bx * {bm}, 0], Qs)"), node("T.clear(C)"), node("T.clear(L)"), node("T.fill(V, -1e29)"),
            node(f"for k in T.Pipelined({steps}, num_stages={stages}):", loop, None, "near:attention",
                 f"near:attention-{'causal' if causal else 'full'}"),
            node(f"for i, j in T.Parallel({bm}, {d}):", [node("C[i, j] = C[i, j] / L[i]")]),
            node(f"T.copy(C, O[by, bx * {bm}, 0])")]
    tol = TOLERANCE[kind]
    tensors = [_tensor("Q", (heads, m, d), kind, tol), _tensor("K", (heads, n, d), kind, tol),
               _tensor("B", (heads, n, d), kind, tol), _tensor("O", (heads, m, d), kind, tol)]
    return {"grid": [str(m // bm), str(heads)], "blocks": ["bx", "by"], "threads": threads, "body": body}, tensors
