"""Programs written with Hopper's own names: roles with barriers of the user, tiles by TMA, clusters, remote memory."""

from __future__ import annotations

from typing import Any

from gen_descriptors import cluster_ring, in_registers, set_up, walkers, written
from gen_state import Node, Profile, State, node

HOPPER = Profile("hopper", (32, 64), (128, 256, 384), ("float16", "bfloat16"), (1, 1))


def is_hopper(seed: int) -> bool:
    """Whether the program of a seed is one of these: they run as meaning, on sm_90a's simulator, the CPU and a
    device."""
    return seed % 10 == 7 or seed % 40 == 21


def hopper_program(seed: int) -> dict[str, Any]:
    """The program of a seed."""
    st = State(seed, HOPPER)
    form = st.pick([ring, ring, ring, handed, handed, shifted, shifted, shifted, shared_load, shared_load, written, written,
                    in_registers, set_up, cluster_ring, walkers])
    kernel, tensors = form(st)
    return {"seed": seed, "profile": "hopper", "dims": {}, "symbols": {}, "steps": {}, "tensors": tensors, "configs": {},
            "kernels": [kernel]}


def _tensor(name: str, shape: tuple[int, ...], dt: str, bound: int = 3) -> dict[str, Any]:
    return {"name": name, "shape": [str(n) for n in shape], "dtype": dt, "low": -bound, "high": bound}


def ring(st: State) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One warp group loads into a ring of tiles, one or two multiply: C = A B or A B^T, ragged sizes included."""
    dt = st.pick(HOPPER.dtypes)
    groups, stages, steps = st.pick([1, 1, 2]), st.between(1, 4), st.pick([0, 1, 2, 3, 5, 6])
    bm, bn, bk = 64 * groups, st.pick([16, 32, 64, 96]), st.pick([32, 64])
    tb, one = st.chance(0.5), st.chance(0.5)
    m, n, k = bm * st.between(1, 2) - st.pick([0, 0, 8]), bn * st.between(1, 2), max(1, steps) * bk
    threads = 128 * (groups + 1)
    rows, cols = (bn, bk) if tb else (bk, bn)
    at = f"bx * {bn}, k * {bk}" if tb else f"k * {bk}, bx * {bn}"
    slot = f"k % {stages}"
    leader = ", leader_scope_threads=32" if one else ""  # only one thread comes there
    loads: list[Node] = [
        node(f"T.mbarrier_wait_parity(empty[{slot}], (k // {stages} + 1) % 2)"),
        node(f"T.tma_copy(A[by * {bm}, k * {bk}], As[{slot}, :, :], barrier=full[{slot}]{leader})", None, None, "hopper:tma"),
        node(f"T.tma_copy(B[{at}], Bs[{slot}, :, :], barrier=full[{slot}]{leader})"),
        node(f"T.mbarrier_arrive(full[{slot}])")]
    producer: list[Node] = [node(f"for k in T.serial({steps}):", loads)]
    if one:
        producer = [node(f"if tx == {128 * groups}:", producer, None, "hopper:one-thread")]
    late = st.chance(0.4)
    release = [node("if k > 0:", [node("T.wait_wgmma(1)"), node(f"T.mbarrier_arrive(empty[(k - 1) % {stages}])")])] \
        if late and stages > 1 else [node("T.wait_wgmma(0)"), node(f"T.mbarrier_arrive(empty[k % {stages}])")]
    product = f"T.wgmma_gemm(As[k % {stages}, :, :], Bs[k % {stages}, :, :], Cf{', transpose_B=True' if tb else ''})"
    consumer: list[Node] = [
        node("T.clear(Cf)"),
        node(f"for k in T.serial({steps}):",
             [node(f"T.mbarrier_wait_parity(full[k % {stages}], k // {stages} % 2)"),
              node(product, None, None, "hopper:wgmma"), *release]),
        node("T.wait_wgmma(0)")]
    if st.chance(0.5):
        i, j = st.fresh("i"), st.fresh("i")
        consumer.append(node(f"for {i}, {j} in T.Parallel({bm}, {bn}):",
                             [node(f"Cf[{i}, {j}] = T.max(Cf[{i}, {j}] - {j}, -40)")]))
    consumer.append(node(f"T.copy(Cf, C[by * {bm}, bx * {bn}])"))
    registers = st.chance(0.45)
    if registers:
        producer.insert(0, node("T.dec_max_nreg(24)", None, None, "hopper:nreg"))
        consumer.insert(0, node("T.inc_max_nreg(240)"))
    ids = ", ".join(map(str, range(groups)))
    body = [node("tx = T.get_thread_binding()"),
            node(f"As = T.alloc_shared(({stages}, {bm}, {bk}), '{dt}')"),
            node(f"Bs = T.alloc_shared(({stages}, {rows}, {cols}), '{dt}')"),
            node(f"Cf = T.alloc_fragment(({bm}, {bn}), 'float32')"),
            node(f"full = T.alloc_barrier([{1 if one else 128}] * {stages})"),
            node(f"empty = T.alloc_barrier([{128 * groups}] * {stages})"),
            node(f"with T.ws({groups}):", producer, None, "hopper:ws"),
            node(f"with T.ws({ids}):", consumer, None, f"hopper:ring-{stages}", f"hopper:groups-{groups}")]
    kernel = {"grid": [str(-(-n // bn)), str(-(-m // bm))], "blocks": ["bx", "by"], "threads": threads, "body": body}
    return kernel, [_tensor("A", (m, k), dt), _tensor("B", (n, k) if tb else (k, n), dt), _tensor("C", (m, n), "float32")]


def handed(st: State) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A row after row handed from one warp group to another through barriers of the user."""
    steps, slots, dt = st.between(0, 6), st.between(1, 3), st.pick(["int32", "float32", "float16"])
    mix = st.pick(["255 - tx", "(tx - 128 + 37) % 128", "tx - 128"])
    body = [node("tx = T.get_thread_binding()"), node(f"S = T.alloc_shared(({slots}, 128), '{dt}')"),
            node(f"full = T.alloc_barrier([128] * {slots})"), node(f"empty = T.alloc_barrier([128] * {slots})"),
            node("with T.ws(0):", [node(f"for k in T.serial({steps}):", [
                node(f"T.barrier_wait(empty[k % {slots}], (k // {slots} + 1) % 2)"),
                node(f"S[k % {slots}, tx] = X[k, tx] * {st.between(1, 3)} + bx"),
                node(f"T.barrier_arrive(full[k % {slots}])")])], None, "hopper:handed"),
            node("with T.ws(1):", [node(f"for k in T.serial({steps}):", [
                node(f"T.barrier_wait(full[k % {slots}], k // {slots} % 2)"),
                node(f"Y[bx, k, tx - 128] = S[k % {slots}, {mix}] - S[k % {slots}, tx - 128]"),
                node(f"T.barrier_arrive(empty[k % {slots}])")])])]
    kernel = {"grid": ["2"], "blocks": ["bx"], "threads": 256, "body": body}
    n = max(1, steps)
    return kernel, [_tensor("X", (n, 128), dt, 31), _tensor("Y", (2, n, 128), dt, 31)]


def shifted(st: State) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Tiles moved from each block of a cluster to another one's shared memory."""
    size, away = st.pick([2, 4]), st.between(1, 3)
    rows, cols, dt = st.pick([8, 16, 32]), st.pick([32, 64]), st.pick(["float16", "int32", "float32"])
    blocks = size * st.between(1, 2)
    width = {"float16": 2}.get(dt, 4)
    target = f"dst_block=(rank + {away}) % {size}"
    body = [node(f"S = T.alloc_shared(({rows}, {cols}), '{dt}')"), node(f"R = T.alloc_shared(({rows}, {cols}), '{dt}')"),
            node("rank = T.block_rank_in_cluster()"), node(f"T.copy(A[bx, 0:{rows}, 0:{cols}], S)")]
    if st.chance(0.5):
        body += [node("T.cluster_sync()"), node(f"T.copy_cluster(S, R, {target})", None, None, "hopper:cluster-elements"),
                 node("T.cluster_arrive()"), node("T.cluster_wait()")]
    else:
        body[2:2] = [node("bar = T.alloc_cluster_barrier(128)")]
        body += [node("T.fence_proxy_async()"), node("T.sync_threads()"),
                 node("if T.get_thread_binding() == 0:", [node(f"T.mbarrier_expect_tx(bar, {rows * cols * width})")]),
                 node("T.cluster_sync()"),
                 node(f"T.copy_cluster(S, R, {target}, remote_barrier=bar)", None, None, "hopper:cluster-bulk"),
                 node("T.mbarrier_arrive(bar)"), node("T.mbarrier_wait_parity(bar, 0)")]
    body += [node(f"for i, j in T.Parallel({rows}, {cols}):", [node(f"B[bx, i, j] = R[i, j] + S[i, {cols - 1} - j]")])]
    if "remote_barrier" in str(body):
        body.append(node("T.cluster_sync()"))
    kernel = {"grid": [str(blocks)], "blocks": ["bx"], "threads": 128, "cluster": size, "body": body}
    return kernel, [_tensor("A", (blocks, rows, cols), dt, 31), _tensor("B", (blocks, rows, cols), dt, 31)]


def shared_load(st: State) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One load of a tile for all blocks of a cluster, in a loop."""
    size, times, rows = st.pick([2, 4]), st.between(1, 3), st.pick([16, 32, 64])
    clusters = st.between(1, 2)
    body = [node(f"S = T.alloc_shared(({rows}, 64), 'float16')"),
            node(f"for k in T.serial({times}):", [
                node(f"T.copy_cluster(A[bx // {size} + {clusters} * k, 0:{rows}, 0:64], S, cluster_mask={2 ** size - 1})",
                     None, None, "hopper:multicast"),
                node(f"T.copy(S, B[bx + {clusters * size} * k, 0:{rows}, 0:64])")])]
    kernel = {"grid": [str(clusters * size)], "blocks": ["bx"], "threads": 128, "cluster": size, "body": body}
    return kernel, [_tensor("A", (clusters * times, rows, 64), "float16", 31),
                    _tensor("B", (clusters * size * times, rows, 64), "float16", 31)]
