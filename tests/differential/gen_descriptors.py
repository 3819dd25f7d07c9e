"""Programs in the hardware's own words: tensor maps, mbarriers, TMA, matrix descriptors and wgmma, and rings of clusters."""

from __future__ import annotations

from typing import Any

from gen_state import Node, State, node

Made = tuple[dict[str, Any], list[dict[str, Any]]]
SHORT = {"float16": "fp16", "bfloat16": "bf16", "int8": "int8", "float8_e4m3fn": "e4m3"}
BYTES = {"float16": 2, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}
LAYOUT_TYPE, MAP_SWIZZLE = {128: 1, 64: 2, 32: 3}, {32: 1, 64: 2, 128: 3}


def _tensor(name: str, shape: tuple[int, ...], dt: str, bound: int = 3) -> dict[str, Any]:
    return {"name": name, "shape": [str(n) for n in shape], "dtype": dt, "low": -bound, "high": bound}


def written(st: State) -> Made:
    """A B^T: one thread loads by TMA under a swizzle, a warp group multiplies by descriptors, both in the raw names."""
    dt = st.pick(["float16", "bfloat16", "int8", "float8_e4m3fn"])
    acc = "int32" if dt == "int8" else "float32"
    width, stages, steps = st.pick([32, 64, 128]), st.between(1, 3), st.between(1, 4)
    rows, n, size = 64 * st.between(1, 2), 8 * st.between(1, 8) if dt != "int8" else st.pick([16, 32, 64]), BYTES[dt]
    bk, k_elements = width // size, 32 // size
    k_all, slot = steps * bk, f"k % {stages}"

    def tensor_map(name: str, tile: int, extent: int) -> Node:
        return node(f"{name.lower()}_map = T.create_tma_descriptor('{dt}', 2, {name}.data, {k_all}, {extent}, {size}, "
                    f"{size * k_all}, {bk}, {tile}, 1, 1, 0, {MAP_SWIZZLE[width]}, 2, 0)", None, None, "raw:tensor-map")

    def product(j: int) -> Node:
        return node(f"T.ptx_wgmma_ss('{acc}', 'm64n{n}k{k_elements}', True, True, '{SHORT[dt]}', '{SHORT[dt]}', "
                    f"'{'int32' if dt == 'int8' else 'fp32'}', a_desc, {2 * j}, b_desc, {2 * j}, c.data, 0, "
                    f"T.if_then_else(k + {j} > 0, 1, 0))", None, None, "raw:wgmma")

    arrive = [node(f"T.mbarrier_expect_tx(full[{slot}], {(64 + n) * width})"), node(f"T.mbarrier_arrive(full[{slot}])")] \
        if st.chance(0.5) else [node(f"T.ptx_arrive_barrier_expect_tx(full[{slot}], {(64 + n) * width})")]
    loads = [node(f"T.mbarrier_wait_parity(empty[{slot}], k // {stages} % 2 ^ 1)"), *arrive,
             node(f"T.tma_load(a_map, full[{slot}], As[{slot}, 0, 0], k * {bk}, bx * 64)", None, None, "raw:tma-load"),
             node(f"T.tma_load(b_map, full[{slot}], T.address_of(Bs[{slot}, 0, 0]), k * {bk}, 0)")]
    fields = f"{LAYOUT_TYPE[width]}, 1, {width // 2}"
    loop = [node(f"T.mbarrier_wait_parity(full[{slot}], k // {stages} % 2)"),
            *(node(f"T.initialize_wgmma_descriptor({x}_desc, {x.upper()}s[{slot}, 0, 0], {fields})") for x in "ab"),
            node("T.warpgroup_arrive()"), *(product(j) for j in range(width // 32)),
            node("T.warpgroup_commit_batch()"), node(f"T.{st.pick(['warpgroup_wait', 'wait_wgmma'])}(0)"),
            node(f"T.mbarrier_arrive(empty[{slot}])")]
    place = "tx // 32 * 16 + tx % 32 // 4 + 8 * (i // 2 % 2), i // 4 * 8 + tx % 4 * 2 + i % 2"
    body = [node(f"As = T.alloc_shared(({stages}, 64, {bk}), '{dt}')"),
            node(f"Bs = T.alloc_shared(({stages}, {n}, {bk}), '{dt}')"),
            node(f"full = T.alloc_barrier([1] * {stages})"), node(f"empty = T.alloc_barrier([128] * {stages})"),
            tensor_map("A", 64, rows), tensor_map("B", n, n), node("tx = T.get_thread_binding()"),
            node("with T.ws(1):", [node("if tx == 128:", [node(f"for k in T.serial({steps}):", loads)])], None,
                 f"raw:swizzle-{width}"),
            node("with T.ws(0):", [
                node(f"c = T.alloc_local(({n // 2},), '{acc}')"), node("a_desc = T.alloc_wgmma_desc()"),
                node("b_desc = T.alloc_wgmma_desc()"), node(f"for k in T.serial({steps}):", loop),
                node(f"for i in T.serial({n // 2}):", [node(f"C[bx * 64 + {place}] = c[i]")])])]
    kernel = {"grid": [str(rows // 64)], "blocks": ["bx"], "threads": 256, "body": body}
    return kernel, [_tensor("A", (rows, k_all), dt), _tensor("B", (n, k_all), dt), _tensor("C", (rows, n), acc)]


def in_registers(st: State) -> Made:
    """(A + c) B^T of one warp group, A in registers, its product issued and awaited by the raw names."""
    dt, n, k = st.pick(["float16", "bfloat16"]), st.pick([16, 32, 64, 96]), st.pick([16, 32, 64, 128])
    turned = st.chance(0.5)
    b_shape = (n, k) if turned else (k, n)
    body = [node(f"As = T.alloc_shared((64, {k}), '{dt}')"), node(f"Bs = T.alloc_shared({b_shape}, '{dt}')"),
            node(f"Af = T.alloc_fragment((64, {k}), '{dt}')"), node(f"Cf = T.alloc_fragment((64, {n}), 'float32')"),
            node("bar = T.alloc_barrier(128)"), node("T.tma_copy(A, As, barrier=bar)"),
            node("T.tma_copy(B, Bs, barrier=bar[0])"),
            node("T.mbarrier_arrive(bar)"), node("T.mbarrier_wait_parity(bar, 0)"), node("T.copy(As, Af)"),
            node(f"for i, j in T.Parallel(64, {k}):", [node(f"Af[i, j] = Af[i, j] + T.{dt}({st.between(1, 3)})")]),
            node("T.warpgroup_fence_operand(Af)"), node("T.warpgroup_arrive()"),
            node(f"T.wgmma_gemm(Af, Bs, Cf{', transpose_B=True' if turned else ''}, clear_accum=True)", None, None,
                 "raw:registers"),
            node("T.warpgroup_commit_batch()"), node("T.wait_wgmma(0)"), node("T.warpgroup_fence_operand(Cf)"),
            node("T.copy(Cf, C)")]
    kernel = {"grid": ["1"], "blocks": ["bx"], "threads": 128, "body": body}
    return kernel, [_tensor("A", (64, k), dt), _tensor("B", b_shape, dt), _tensor("C", (64, n), "float32")]


def set_up(st: State) -> Made:
    """Rows handed from one warp group to another through barriers that a thread of the program sets up."""
    steps, dt = st.between(1, 6), st.pick(["int32", "float32", "float16"])
    wait = st.pick(["ptx_wait_barrier", "mbarrier_wait_parity"])
    body = [node("tx = T.get_thread_binding()"), node(f"S = T.alloc_shared((128,), '{dt}')"),
            node("bars = T.create_barriers(2)", None, None, "raw:barriers"),
            node("if tx == 0:", [node("T.ptx_init_barrier_thread_count(bars[0], 128)"),
                                 node("T.ptx_init_barrier_thread_count(bars[1], 128)"), node("T.ptx_fence_barrier_init()")]),
            node("T.sync_threads()"),
            node("with T.ws(0):", [node(f"for k in T.serial({steps}):", [
                node(f"T.{wait}(bars[1], (k + 1) % 2)"), node(f"S[tx] = X[k, tx] * {st.between(1, 3)}"),
                node("T.ptx_arrive_barrier(bars[0])")])]),
            node("with T.ws(1):", [node(f"for k in T.serial({steps}):", [
                node(f"T.{wait}(bars[0], k % 2)"), node(f"Y[k, tx - 128] = S[255 - tx] + S[(tx + {st.between(1, 99)}) % 128]"),
                node("T.ptx_arrive_barrier(bars[1])")])])]
    kernel = {"grid": ["1"], "blocks": ["bx"], "threads": 256, "body": body}
    return kernel, [_tensor("X", (steps, 128), dt, 31), _tensor("Y", (steps, 128), dt, 31)]


def cluster_ring(st: State) -> Made:
    """A B in clusters of blocks that share the tile of B: the first loads it for all, when all have room for it."""
    size, stages, steps, dt = st.pick([2, 4]), st.between(1, 3), st.between(1, 5), st.pick(["float16", "bfloat16"])
    bn, bk, columns = st.pick([32, 64]), st.pick([32, 64]), st.between(1, 2)
    slot, parity = f"k % {stages}", f"(k // {stages} + 1) % 2"
    producer = [node(f"T.mbarrier_wait_parity(empty[{slot}], {parity})"),
                node(f"T.tma_copy(A[by * 64, k * {bk}], As[{slot}, :, :], barrier=full[{slot}])"),
                node("if rank == 0:", [node(f"T.mbarrier_wait_parity(free[{slot}], {parity})")]),
                node(f"T.tma_copy(B[k * {bk}, bx * {bn}], Bs[{slot}, :, :], barrier=full[{slot}], cluster_mask={2**size - 1})",
                     None, None, "raw:cluster-ring"),
                node(f"T.mbarrier_arrive(full[{slot}])")]
    consumer = [node(f"T.mbarrier_wait_parity(full[{slot}], k // {stages} % 2)"),
                node(f"T.wgmma_gemm(As[{slot}, :, :], Bs[{slot}, :, :], Cf)"), node("T.wait_wgmma(0)"),
                node(f"T.mbarrier_arrive(empty[{slot}])"), node(f"T.mbarrier_arrive(free[{slot}], cta_id=0)")]
    body = [node(f"As = T.alloc_shared(({stages}, 64, {bk}), '{dt}')"),
            node(f"Bs = T.alloc_shared(({stages}, {bk}, {bn}), '{dt}')"),
            node(f"Cf = T.alloc_fragment((64, {bn}), 'float32')"), node(f"full = T.alloc_barrier([128] * {stages})"),
            node(f"empty = T.alloc_barrier([128] * {stages})"),
            node(f"free = T.alloc_cluster_barrier([{128 * size}] * {stages})"),
            node("rank = T.block_rank_in_cluster()"),
            node("with T.ws(1):", [node(f"for k in T.serial({steps}):", producer)]),
            node("with T.ws(0):", [node("T.clear(Cf)"), node(f"for k in T.serial({steps}):", consumer),
                                   node(f"T.copy(Cf, C[by * 64, bx * {bn}])")])]
    kernel = {"grid": [str(columns), str(size)], "blocks": ["bx", "by"], "threads": 256, "cluster": f"(1, {size})",
              "body": body}
    m, n, k = 64 * size, bn * columns, bk * steps
    return kernel, [_tensor("A", (m, k), dt), _tensor("B", (k, n), dt), _tensor("C", (m, n), "float32")]


def walkers(st: State) -> Made:
    """A B^T by workers whose loading and multiplying warp groups each walk over the tiles; their ring goes on over them."""
    workers, stages, steps, dt = st.between(1, 5), st.between(1, 3), st.between(1, 3), st.pick(["float16", "bfloat16"])
    bn, bk, tm, tn = st.pick([16, 32, 64]), st.pick([32, 64]), st.between(1, 3), st.between(1, 2)
    slots = {x: f"{x} % {stages}" for x in ("it", "at")}

    def walk(name: str, own: str, body: list[Node], after: list[Node]) -> list[Node]:
        loop = [*body, *after, node(f"{name}.next_tile()")]
        return [node(f"{own} = T.alloc_var('int32', init=0)"),
                node(f"{name} = T.PersistentTileScheduler({tm}, {tn}, num_workers={workers}, name='{name}')"),
                node(f"{name}.init(bx)"), node(f"while {name}.valid():", loop)]

    s, a = slots["it"], slots["at"]
    load = [node(f"for k in T.serial({steps}):", [
        node(f"T.mbarrier_wait_parity(empty[{s}], (it // {stages} + 1) % 2)"),
        node(f"T.tma_copy(A[load.m_idx * 64, k * {bk}], As[{s}, :, :], barrier=full[{s}])"),
        node(f"T.tma_copy(B[load.n_idx * {bn}, k * {bk}], Bs[{s}, :, :], barrier=full[{s}])"),
        node(f"T.mbarrier_arrive(full[{s}])"), node("it = it + 1")])]
    compute = [node("T.clear(Cf)"), node(f"for k in T.serial({steps}):", [
        node(f"T.mbarrier_wait_parity(full[{a}], at // {stages} % 2)"),
        node(f"T.wgmma_gemm(As[{a}, :, :], Bs[{a}, :, :], Cf, transpose_B=True)"), node("T.wait_wgmma(0)"),
        node(f"T.mbarrier_arrive(empty[{a}])"), node("at = at + 1")])]
    uneven = "persistent:idle" if workers > tm * tn else "persistent:unequal" if tm * tn % workers else "persistent:equal"
    body = [node(f"As = T.alloc_shared(({stages}, 64, {bk}), '{dt}')"),
            node(f"Bs = T.alloc_shared(({stages}, {bn}, {bk}), '{dt}')"),
            node(f"Cf = T.alloc_fragment((64, {bn}), 'float32')"), node(f"full = T.alloc_barrier([128] * {stages})"),
            node(f"empty = T.alloc_barrier([128] * {stages})"),
            node("with T.ws(1):", walk("load", "it", load, []), None, "raw:walkers", uneven),
            node("with T.ws(0):", walk("place", "at", compute, [
                node(f"T.copy(Cf, C[place.m_idx * 64, place.n_idx * {bn}])")]))]
    kernel = {"grid": [str(workers)], "blocks": ["bx"], "threads": 256, "body": body}
    m, n, k = 64 * tm, bn * tn, bk * steps
    return kernel, [_tensor("A", (m, k), dt), _tensor("B", (n, k), dt), _tensor("C", (m, n), "float32")]
