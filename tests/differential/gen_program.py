"""Whole programs: tensors, launches, what they start from and what they write at the end."""

from __future__ import annotations

from typing import Any

from gen_bits import bits_program, is_bits
from gen_control import assign, block, condition
from gen_grid import grid_program, is_grid
from gen_hopper import hopper_program, is_hopper
from gen_near import is_near, near_program
from gen_state import Buf, Node, Profile, Scope, State, counter, node
from gen_tiles import new_buffer
from gen_values import BITS, EXACT

FEW = ("float16", "float32", "int32")
ANY = (*FEW, *FEW, "float16", "float32", "bfloat16", "int8", "uint8", "float8_e4m3fn", "float8_e5m2", "int16", "float64",
       "int64", "uint16", "uint32")
PROFILES = (
    Profile("small", (1, 2, 3, 4, 5, 7, 8, 12, 13, 16), (32, 64, 64, 96, 128, 1, 16, 48, 100), ANY, (3, 9)),
    Profile("middle", (4, 8, 16, 16, 20, 24, 32, 32, 40, 48, 64), (32, 64, 96, 128, 128, 160, 256), ANY, (3, 8)),
    Profile("loops", (4, 8, 12, 16, 32), (32, 64, 128), FEW, (3, 8),
            {"serial": 3.0, "pipelined": 3.0, "while": 1.5, "branch": 2.0, "ordered": 1.5, "assign": 1.5, "gemm": 1.0}),
    Profile("products", (16, 16, 32, 32, 48, 64, 64, 8, 24, 40), (64, 128, 128, 256),
            ("float16", "float16", "bfloat16", "int8", "float32", "float8_e4m3fn", "float8_e5m2", "float64", "uint8"), (2, 6),
            {"gemm": 5.0, "pipelined": 2.5, "ordered": 1.2, "thread": 0.3}),
    Profile("tensor", (64, 64, 128, 64, 32), (128, 128, 256, 384),
            ("float16", "float16", "bfloat16", "int8", "float8_e4m3fn", "float32"), (2, 6),
            {"gemm": 5.0, "pipelined": 4.0, "ordered": 1.2, "inner": 0.2, "scan": 0.2, "atomic": 0.4}),
)
_CONFIGS = (*[{}] * 10, {"tl.disable_warp_specialized": True}, {"tl.enable_hopper": False},
            {"tl.disable_wgmma": True}, {"tl.persistent": False}, {"tl.persistent": 2},
            {"tl.disable_shared_memory_reuse": True},
            {"tl.global_alignment": 1}, {"tl.config_index_bitwidth": 64}, {"tl.enable_aggressive_shared_memory_merge": True},
            {"tl.cluster": 2}, {"tl.enable_fast_math": True}, {"tl.disable_tma_lower": True}, {"tirx.disable_vectorize": True},
            {"tl.enable_async_copy": False}, {"tl.enable_lower_ldgstg": True}, {"tirx.merge_static_smem": True},
            {"tirx.noalias": False}, {"tl.disable_loop_unswitching": True}, {"tl.reducer_force_baseline": True},
            {"tl.layout_cost_model": "io-aware"}, {"tirx.disable_cse_tir": True}, {"tl.disable_vectorize_256": True})

Program = dict[str, Any]
"""seed, profile, dims {name: extent}, symbols {name: extent}, tensors [{name, shape, dtype, low, high}], configs, kernels
[{grid [text], blocks [name], threads, body [Node]}]."""


def make_program(seed: int, profile: str | None = None) -> Program:
    """The program of a seed."""
    if profile == "hopper" or profile is None and is_hopper(seed):
        return hopper_program(seed)
    if profile == "near" or profile is None and is_near(seed):
        return near_program(seed)
    if profile == "grid" or profile is None and is_grid(seed):
        return grid_program(seed)
    if profile == "bits" or profile is None and is_bits(seed):
        return bits_program(seed)
    st = State(seed, PROFILES[0])
    st.profile = next(p for p in PROFILES if p.name == profile) if profile else st.rng.choices(PROFILES, (4, 5, 4, 4, 2))[0]
    st.inputs, kernels = [], []
    if st.chance(0.15):
        st.parameter()
    for _ in range(2 if st.chance(0.12) else 1):
        kernels.append(_kernel(st, kernels))
    return {"seed": seed, "profile": st.profile.name, "dims": st.dims, "symbols": st.symbols, "steps": st.steps,
            "tensors": st.tensors, "configs": dict(st.pick(_CONFIGS)), "kernels": kernels,
            "style": st.pick([None] * 6 + ["eager", "eager", "lazy"])}


def _kernel(st: State, before: list[dict[str, Any]]) -> dict[str, Any]:
    st.threads = st.pick(st.profile.threads)
    st.sides = sides = _sides(st) if st.chance(0.1) else None
    st.allocs, st.prologue, st.top, st.mutable = [], [], [], []
    st.shared_bytes = st.register_bits = 0
    if before:  # what the first kernel wrote is read by the second
        st.inputs = [*st.inputs, *[Buf(o.name, "global", o.shape, o.dims, o.dtype, o.low, o.high, writable=False)
                                   for o in st.outputs if not o.atomic]]
    tm, tn = st.extent(), st.extent()
    persistent = st.chance(0.14)
    gm, gn = (st.between(2, 4), st.between(1, 2)) if persistent else (st.between(1, 3), st.between(1, 2))
    st.outputs = []
    m = tm * gm - (st.between(0, tm - 1) if st.chance(0.5) else 0)
    n = tn * gn - (st.between(0, tn - 1) if st.chance(0.5) else 0)
    mt, nt = st.dim(tm), st.dim(tn)
    tiled = st.between(0, 2)
    rows, columns = (_size(st, m), _size(st, n)) if tiled else (str(m), str(n))
    head: list[Node] = []
    if persistent:
        workers = st.between(1, gm * gn + 1)
        uneven = ["persistent:idle"] if workers > gm * gn else ["persistent:unequal"] if gm * gn % workers else []
        names, grid, bm, bn = ["bx"], [str(workers)], st.fresh("b"), st.fresh("b")
        grid_values = [counter(bm, gm), counter(bn, gn)]
        st.blocks = gm * gn
    else:
        names, grid = ["bx", "by"], [f"T.ceildiv({columns}, {nt})", f"T.ceildiv({rows}, {mt})"]
        bm, bn = "by", "bx"
        grid_values = [counter("bx", gn), counter("by", gm)]
        st.blocks = gm * gn
        if not tiled and st.chance(0.3):
            gz = st.between(1, 2)
            names.append("bz")
            grid.append(str(gz))
            st.blocks *= gz
    grid_values += st.given
    host = _host(st, grid_values)
    st.grid_values = grid_values
    flat = f"({bm} * {gn} + {bn})" if len(names) < 3 else f"((bz * {gm} + {bm}) * {gn} + {bn})"
    st.flat, st.workspaces = flat, []
    s = Scope([*st.inputs], list(grid_values), [])
    if len(names) < 3 or tiled == 0:
        for _ in range(tiled):
            dt = st.pick(st.profile.dtypes)
            o = st.tensor((m, n), (rows, columns), dt, prefix="O", base=(f"{bm} * {mt}", f"{bn} * {nt}"), part=(tm, tn))
            st.outputs.append(o)
            s.buffers.append(o)
    if st.chance(0.4):
        dt = st.pick(["int32", "float32", "float32", "int32", "float16", "int64"])
        op = st.pick(["add", "add", "max", "min"])
        shape = (st.pick([5, 16, 32]), st.pick([8, 16, 33])) if st.chance(0.7) else (st.pick([7, 64]),)
        low, high = (-(EXACT[dt] // 4), EXACT[dt] // 4) if dt != "int64" else (-2**24, 2**24)
        o = st.tensor(shape, tuple(map(str, shape)), dt, prefix="O", zero=True, atomic=op, readable=False, writable=False,
                      room=high // 2)
        o.low, o.high = low, high
        st.outputs.append(o)
        s.buffers.append(o)
    for _ in range(st.between(1, 3)):
        shape = (st.extent(), st.extent()) if st.chance(0.68) else (st.extent(),) if st.chance(0.55) else (
            st.between(1, 4), st.extent(), st.extent())
        size = 1
        for e in shape:
            size *= e
        if size <= 8192:
            new_buffer(st, s, st.pick(["shared", "shared", "fragment", "fragment"]), shape, st.pick(st.profile.dtypes))
    if st.chance(0.25):
        shape = (st.extent(),) if st.chance(0.5) else (st.extent(), st.extent())
        new_buffer(st, s, st.pick(["shared", "shared", "fragment"]), shape, st.pick(["int32", "float32"]), room=0)
    if st.chance(0.3):
        assign(st, s)
    body = block(st, s, st.between(*st.profile.statements))
    if st.chance(0.03) and not persistent:
        at = st.between(0, len(body))
        plain = Scope([], list(grid_values), [])
        body.insert(at, node(f"if {condition(st, plain)}:", [node("T.thread_return()")], None, "return"))
    tail = _results(st, s, flat)
    options: list[Node] = []
    if st.chance(0.1) and len(names) > 1:
        order = st.pick(["", ", order='column'"])
        options.append(node(f"T.use_swizzle({st.between(1, 3)}{order})", None, None, "use_swizzle"))
    if any("tx" in str(x) for x in (*st.prologue, *body)):
        head.append(node("tx = T.get_thread_binding()" if sides is None else f"tx = {_thread(sides)}"))
    whole = [*st.prologue, *body, *tail]
    if persistent and st.chance(0.3):
        whole = _scheduled(st, (bm, bn), (gm, gn), grid[0], whole, uneven)
    elif persistent:
        group = st.pick(["", f", group_size={st.between(1, 4)}"])
        line = f"for {bm}, {bn} in T.Persistent([{gm}, {gn}], {grid[0]}, bx{group}):"
        whole = [node(line, whole, None, "loop:T.Persistent", *uneven)]
    hints = _hints(st)
    made = {"grid": grid, "blocks": names, "threads": st.threads, "body": [*options, *head, *st.allocs, *hints, *whole]}
    if any(o.atomic for o in [*st.outputs, *st.top_outputs]) and host.startswith("for"):
        host = host.replace("(2)", "(1)")  # sums stay in the range they were drawn for
    return {**made, **({"host": host} if host else {}), **({"block": sides} if sides else {})}


def _host(st: State, values: list[Any]) -> str:
    """What the host does around the launch: nothing, a choice by a number of the call, a loop."""
    if st.given and st.chance(0.3):
        return f"if {st.given[0].text} >= {st.between(0, 4)}:"
    if not st.chance(0.05):
        return ""
    name = st.fresh("h")
    values.append(counter(name, 2))
    return f"for {name} in {st.pick(['range', 'T.serial'])}(2):"


def _sides(st: State) -> list[int] | None:
    """Threads of a block in two or three dimensions."""
    good = [a for a in (2, 4, 8, 16, 32) if st.threads % a == 0 and st.threads > a]
    if not good:
        return None
    a = st.pick(good)
    rest = st.threads // a
    return [a, 2, rest // 2] if rest % 2 == 0 and st.chance(0.3) else [a, rest]


def _thread(sides: list[int]) -> str:
    """A thread's number among all of its block."""
    if len(sides) == 2:
        return f"T.get_thread_binding(0) + T.get_thread_binding(1) * {sides[0]}"
    return f"T.get_thread_binding(0) + (T.get_thread_binding(1) + T.get_thread_binding(2) * {sides[1]}) * {sides[0]}"


def _scheduled(st: State, tile: tuple[str, str], counts: tuple[int, int], workers: str, body: list[Node],
               uneven: list[str]) -> list[Node]:
    """The loop over tiles by a tile scheduler."""
    more = st.pick(["", ", column_major=False", f", swizzle_size={st.between(1, 3)}"])
    loop = [node(f"{tile[0]} = sched.m_idx"), node(f"{tile[1]} = sched.n_idx"), *body, node("sched.next_tile()")]
    return [node(f"sched = T.PersistentTileScheduler({counts[0]}, {counts[1]}, {workers}{more})"), node("sched.init(bx)"),
            node("while sched.valid():", loop, None, "loop:scheduler", *uneven)]


def _hints(st: State) -> list[Node]:
    """Layouts of shared tiles, and values for reads outside of tensors."""
    out: list[Node] = []
    tiles = [b for b in st.top if b.scope == "shared" and len(b.shape) == 2 and b.root is b]
    if tiles and st.chance(0.2):
        b = st.pick(tiles)
        name, text = _layout(st, b)
        out.append(node(f"T.annotate_layout({{{b.name}: {text}}})", None, None, "hint:layout", f"layout:{name}"))
    plain = {t["name"] for t in st.tensors if not t.get("scalar") and t["dtype"] not in ("int4", "uint4", "float4_e2m1fn")}
    inputs = [b for b in st.inputs if b.name in plain and b.name.startswith("A") and b.dtype != "bool"]
    if inputs and st.chance(0.06):
        b = st.pick(inputs)
        out.append(node(f"T.annotate_safe_value({{{b.name}: {st.between(max(b.low, -5), min(b.high, 5))}}})", None, None,
                        "hint:safe-value"))
    return out


def _layout(st: State, b: Buf) -> tuple[str, str]:
    """A layout of a shared tile of two dimensions: what it is called, and its text."""
    n, width = b.shape[1], b.shape[1] * BITS[b.dtype] // 8
    banks = [x for x, nbytes in (("full", 128), ("half", 64), ("quarter", 32)) if width % nbytes == 0]
    kind = st.pick(["swizzled", "swizzled", "linear", "padded", "turned", "rotated", *(["bank"] if banks else [])])
    match kind:
        case "bank": return kind, f"make_{st.pick(banks)}_bank_swizzled_layout({b.name})"
        case "padded": return kind, f"padded_layout({b.shape}, {st.pick([1, 4, 8, 16])})"
        case "turned": return kind, f"Layout({b.shape}, lambda i, j: (j, i))"
        case "rotated": return kind, f"Layout({b.shape}, lambda i, j: (i, (j + i * {st.between(1, 9)}) % {n}))"
    return kind, f"make_{kind}_layout({b.name})"


def _size(st: State, n: int) -> str:
    """The text of a tensor's extent: a number or a symbol of run time."""
    if st.chance(0.25):
        name = st.fresh("M")
        st.symbols[name] = n
        return name
    return str(n)


def _results(st: State, s: Scope, flat: str) -> list[Node]:
    """Everything a block holds at its end goes to tensors of its own."""
    out: list[Node] = []
    live = [b for b in st.top if b.scope in ("shared", "fragment")]
    st.rng.shuffle(live)
    for b in live[:5]:
        o = st.tensor((st.blocks, *b.shape), (str(st.blocks), *b.dims), b.dtype, b.bound if b.bound < 5000 else 31, prefix="O")
        o.low, o.high = b.low, b.high
        st.outputs.append(o)
        if st.chance(0.6):
            slices = ", ".join(f"0:{d}" if st.chance(0.5) else ":" for d in b.dims)
            out.append(node(f"T.copy({b.name}, {o.name}[{flat}, {slices}])", None, None, f"copy:{b.scope}->global"))
        else:
            vars = [st.fresh("i") for _ in b.shape]
            out.append(node(f"for {', '.join(vars)} in T.Parallel({', '.join(b.dims)}):",
                            [node(f"{o.name}[{flat}, {', '.join(vars)}] = {b.name}[{', '.join(vars)}]")]))
    if st.mutable:
        k = len(st.mutable)
        o = st.tensor((st.blocks, k), (str(st.blocks), str(k)), "int32", prefix="O")
        st.outputs.append(o)
        for j, v in enumerate(st.mutable):
            i = st.fresh("i")
            out.append(node(f"for {i} in T.Parallel(1):", [node(f"{o.name}[{flat}, {j}] = {v.text}")]))
    local = [b for b in st.top if b.scope == "local"]
    for b in local[:2]:
        o = st.tensor((st.blocks, st.threads, b.shape[0]), (str(st.blocks), str(st.threads), b.dims[0]), b.dtype, 7, prefix="O")
        st.outputs.append(o)
        r = st.fresh("r")
        out.append(node(f"for {r} in T.serial({b.dims[0]}):", [node(f"{o.name}[{flat}, tx, {r}] = {b.name}[{r}]")]))
    return out



