"""Programs whose blocks wait for each other: tiles exchanged through global memory, sums of all blocks, the last to come."""

from __future__ import annotations

from typing import Any

from gen_state import Node, Profile, State, node

GRID = Profile("grid", (8, 16, 32), (32, 64, 128, 256), ("int32", "float32", "float16"), (1, 1))
Made = tuple[dict[str, Any], list[dict[str, Any]]]


def is_grid(seed: int) -> bool:
    """Whether the program of a seed is one of these."""
    return seed % 12 == 5


def grid_program(seed: int) -> dict[str, Any]:
    """The program of a seed."""
    st = State(seed, GRID)
    kernel, tensors = st.pick([exchanged, exchanged, exchanged, summed, summed, last, last])(st)
    return {"seed": seed, "profile": "grid", "dims": {}, "symbols": {}, "steps": {}, "tensors": tensors, "configs": {},
            "kernels": [kernel]}


def _tensor(name: str, shape: tuple[int, ...], dt: str, bound: int = 15) -> dict[str, Any]:
    return {"name": name, "shape": [str(n) for n in shape], "dtype": dt, "low": -bound, "high": bound}


def _kernel(st: State, blocks: int, body: list[Node]) -> dict[str, Any]:
    """Blocks in one dimension, or the same number in two."""
    if blocks % 2 == 0 and st.chance(0.3):
        head = [node(f"b = by * {blocks // 2} + bx")]
        return {"grid": [str(blocks // 2), "2"], "blocks": ["bx", "by"], "threads": st.threads, "body": head + body}
    return {"grid": [str(blocks)], "blocks": ["b"], "threads": st.threads, "body": body}


def _sizes(st: State) -> tuple[int, int, int, str]:
    st.threads = st.pick(GRID.threads)
    return st.between(2, 6), st.pick([1, 4, 7, 16]), st.pick([8, 20, 32, 64]), st.pick(GRID.dtypes)


def exchanged(st: State) -> Made:
    """Each block hands its tile to another one, in turns: through a workspace or an output, with one or two places."""
    blocks, rows, cols, dt = _sizes(st)
    steps, away, one = st.between(1, 3), st.between(1, blocks - 1), st.chance(0.5)
    own, got = (st.pick(["shared", "fragment"]) for _ in range(2))
    kept = f"W[b, 0:{rows}, 0:{cols}]" if one else f"W[k % 2, b, 0:{rows}, 0:{cols}]"
    far = f"(b + {away}) % {blocks}"
    shape = (blocks, rows, cols) if one else (2, blocks, rows, cols)
    workspace, wanted = st.chance(0.5), st.between(0, 2)
    barrier = node("T.sync_grid()", None, None, "grid:sync")
    mixed = f"S[i, j] - R[i, {cols - 1} - j]" if got == "shared" else "S[i, j] - R[i, j] + 1"
    loop: list[Node] = [node(f"T.copy(S, {kept})"), barrier]
    if st.chance(0.5):
        loop.append(node(f"T.copy(W[{'' if one else 'k % 2, '}{far}, 0:{rows}, 0:{cols}], R)"))
    else:
        loop.append(node(f"for i, j in T.Parallel({rows}, {cols}):", [
            node(f"R[i, j] = W[{'' if one else 'k % 2, '}{far}, i, {cols - 1} - j]")]))
    if one:
        loop.append(barrier)
    loop.append(node(f"for i, j in T.Parallel({rows}, {cols}):", [node(f"S[i, j] = {mixed}")]))
    if st.chance(0.4):
        w = [node("w = T.alloc_var('int32', init=0)")]
        turns = [*w, node(f"while w < {steps}:", [node("k = w + 0"), *loop, node("w = w + 1")], None, "grid:while")]
    else:
        turns = [node(f"for k in T.serial({steps}):", loop, None, "grid:loop")]
    tensors = [_tensor("A", (blocks, rows, cols), dt), _tensor("B", (blocks, rows, cols), dt)]
    if st.chance(0.35):
        turns = [node(f"if n0 >= {wanted}:", turns, None, "grid:branch")]
        tensors.append({"name": "n0", "shape": [], "dtype": "int32", "low": 0, "high": 2, "scalar": True})
    body = [node(f"S = T.alloc_{own}(({rows}, {cols}), '{dt}')"), node(f"R = T.alloc_{got}(({rows}, {cols}), '{dt}')"),
            node(f"T.copy(A[b, 0:{rows}, 0:{cols}], S)"), *turns, node(f"T.copy(S, B[b, 0:{rows}, 0:{cols}])")]
    if workspace:
        body.insert(0, node(f"W = T.alloc_global({shape}, '{dt}')", None, None, "grid:workspace"))
    else:
        tensors.append(_tensor("W", shape, dt))
    return _kernel(st, blocks, body), tensors


def summed(st: State) -> Made:
    """Sums or largest values of all blocks by atomics, which every block reads behind the barrier."""
    blocks, rows, cols, dt = _sizes(st)
    steps, op = st.between(1, 2), st.pick(["add", "add", "max"])
    if dt != "int32":
        op = "add"
    scope = st.pick(["shared", "fragment"])
    add: list[Node] = [node(f"T.atomic_{op}(G[k, 0:{cols}], S)")] if st.chance(0.5) else [
        node(f"for i in T.Parallel({cols}):", [node(f"T.atomic_{op}(G[k, i], S[i])")])]
    read = "G[k, i]" if st.chance(0.6) else "T.atomic_load(G[k, i], memory_order='acquire')"
    if dt != "int32":
        read = "G[k, i]"
    cap = f"T.max(T.min({read} - S[i], 15), -15)"
    loop = [*add, node("T.sync_grid()", None, None, "grid:sync"),
            node(f"for i in T.Parallel({cols}):", [node(f"S[i] = {cap}")], None, f"grid:atomic-{op}")]
    body = [node(f"S = T.alloc_{scope}(({cols},), '{dt}')"), node(f"T.copy(A[b, 0:{cols}], S)"),
            node(f"for k in T.serial({steps}):", loop), node(f"T.copy(S, B[b, 0:{cols}])")]
    zero = {**_tensor("G", (steps, cols), dt), "low": 0, "high": 0}
    return _kernel(st, blocks, body), [_tensor("A", (blocks, cols), dt), _tensor("B", (blocks, cols), dt), zero]


def last(st: State) -> Made:
    """The block that comes last, as a count says, adds up what all of them left."""
    blocks, rows, cols, dt = _sizes(st)
    kept = st.pick(["shared", "fragment"])
    count = "T.atomic_add(N[0], 1, memory_order='acq_rel', return_prev=True)"
    total: list[Node] = [node("v = 0"), node(f"for k in T.serial({blocks}):", [node("v = v + W[k, i, j]")]),
                         node("B[i, j] = v")]
    body = [node("tx = T.get_thread_binding()"), node(f"S = T.alloc_{kept}(({rows}, {cols}), '{dt}')"),
            node("came = T.alloc_shared((1,), 'int32')"), node(f"v = T.alloc_var('{dt}')"),
            node(f"T.copy(A[b, 0:{rows}, 0:{cols}], S)"),
            node(f"for i, j in T.Parallel({rows}, {cols}):", [node(f"W[b, i, j] = S[i, j] * {st.between(1, 3)}")]),
            node("T.sync_threads()"), node("if tx == 0:", [node(f"came[0] = {count}")], None, "grid:last"),
            node("T.sync_threads()"),
            node(f"if came[0] == {blocks - 1}:", [node(f"for i, j in T.Parallel({rows}, {cols}):", total)])]
    zero = {**_tensor("N", (1,), "int32"), "low": 0, "high": 0}
    return _kernel(st, blocks, body), [_tensor("A", (blocks, rows, cols), dt), _tensor("W", (blocks, rows, cols), dt),
                                       _tensor("B", (rows, cols), dt), zero]
