"""Statements for products of parts of tiles, old values of global atomics, tickets, and reducers of every form."""

from __future__ import annotations

from gen_expr import Point
from gen_parallel import Nodes, header, readable, writable
from gen_state import Scope, State, node
from gen_tile_ops import PRODUCTS
from gen_tiles import new_buffer, refill
from gen_values import EXACT, is_float


def _taken(p: Point) -> Nodes:
    pre, p.pre = p.pre, []
    return pre


def gemm_regions(st: State, s: Scope) -> Nodes | None:
    """T.gemm of parts of larger shared tiles, at offsets, turned or not; some offsets are of run time."""
    dts = [d for d in st.profile.dtypes if d in PRODUCTS and not d.startswith("float8")]
    if not dts:
        return None
    dt = st.pick(dts)
    acc = st.pick(PRODUCTS[dt])
    step = {"float32": 8, "float64": 8, "int8": 32, "uint8": 32}.get(dt, 16)
    m, n, k = (st.pick([16, 32, 64]), st.pick([8, 16, 32, 64]), step * st.pick([1, 2, 4]))
    if m * n * k > 70000:
        return None
    flags = [st.chance(0.5), st.chance(0.5)]
    shapes = [(k, m) if flags[0] else (m, k), (n, k) if flags[1] else (k, n)]
    c = new_buffer(st, s, "fragment", (m, n), acc, room=0)
    if c is None:
        return None
    limit = 3 if acc == "float16" else 7
    if k * limit * limit * s.times > min(c[0].room or 0, EXACT[acc]):
        return None
    texts, nodes = [], [*c[1]]
    for shape in shapes:
        grown = [e + st.pick([0, 16, e, 2 * e]) for e in shape]
        lead = st.pick([0, 0, 2])
        b = new_buffer(st, s, "shared", (*([lead] if lead else []), *grown), dt, bound=max(x for x in (1, 3, 7) if x <= limit))
        if b is None or b[0].bound > limit:
            return None
        nodes += b[1]
        if st.chance(0.4):
            nodes += refill(st, s, b[0])
        parts = [st.uniform_index(s, lead)] if lead else []
        for e, whole in zip(shape, grown):
            spare = (whole - e) // 8
            start = f"{st.uniform_index(s, spare + 1)} * 8" if st.chance(0.4) else str(8 * st.between(0, spare))
            parts.append(f"{start}:{start} + {e}" if not start.isdigit() else f"{start}:{int(start) + e}")
        texts.append(f"{b[0].name}[{', '.join(parts)}]")
    c[0].room -= k * limit * limit * s.times
    options = [f"{x}=True" for x, f in zip(("transpose_A", "transpose_B"), flags) if f]
    turned = f"gemm:region:{'T' if flags[0] else 'N'}{'T' if flags[1] else 'N'}"
    return [*nodes, node(f"T.gemm({', '.join([*texts, c[0].name, *options])})", None, None, "gemm:region", turned)]


RETURNED = ("int32", "uint32", "int64", "float32", "float64", "float16", "bfloat16")


def returned_global(st: State, s: Scope) -> Nodes | None:
    """The old values that atomics on a tensor return, where each element is changed once in the whole launch."""
    if s.times > 1 or s.in_loop or s.depth:
        return None
    dt, n = st.pick(RETURNED), st.extent()
    kept = new_buffer(st, s, st.pick(["fragment", "shared"]), (n,), "float32" if is_float(dt) else "int32", bound=31)
    if kept is None:
        return None
    low = 0 if dt == "uint32" else -7
    o = st.tensor((st.blocks, n), (str(st.blocks), str(n)), dt, 7, prefix="O", readable=False, writable=False)
    i = st.fresh("i")
    p = Point(st, s, [(i, n)], [b for b in readable(s) if b.root is not kept[0].root])
    v = p.fit(p.value(1), low, 7)
    op = st.pick(["add", "add", "max", "min"]) if dt in ("int32", "int64", "uint32") else "add"
    order = st.pick(["", "", ", memory_order='acq_rel'", ", memory_order='seq_cst'"])
    text = f"T.atomic_{op}({o.name}[{st.flat}, {i}], {v.text}{order}, return_prev=True)"
    line, features = header(st, [(i, n)])
    return [*kept[1], node(line, [*_taken(p), node(f"{kept[0].name}[{i}] = {text}", None, None, f"atomic:return-global:{dt}")],
                           None, *features)]


def tickets(st: State, s: Scope) -> Nodes | None:
    """Places handed out by an atomic: who gets which is open, that each is taken once is not."""
    if s.times > 1 or s.in_loop or s.depth:
        return None
    n, dt = st.pick([5, 16, 40, 64]), st.pick(["int32", "float16", "float32"])
    count = st.tensor((st.blocks,), (str(st.blocks),), "int32", prefix="O", zero=True, readable=False, writable=False)
    st.tensors[-1].pop("strides", None)
    o = st.tensor((st.blocks, n), (str(st.blocks), str(n)), dt, 3, prefix="O", readable=False, writable=False)
    i, t = st.fresh("i"), st.fresh("t")
    p = Point(st, s, [(i, n)], readable(s))
    order = st.pick(["", ", memory_order='relaxed'", ", memory_order='acq_rel'"])
    body = [node(f"{t} = T.atomic_add({count.name}[{st.flat}], 1{order}, return_prev=True)"),
            node(f"{o.name}[{st.flat}, {t}] = {st.between(1, 3)}", None, None, "atomic:ticket")]
    if st.chance(0.6):
        cond = p.condition()
        body = [*_taken(p), node(f"if {cond}:", body)]
    line, features = header(st, [(i, n)])
    return [node(line, body, None, *features)]


def reducer_forms(st: State, s: Scope) -> Nodes | None:
    """Reducers of the older form, of bits, and with a value they start from."""
    good = [b for b in writable(s, "fragment") if b.root is b and b.dtype in ("float32", "int32") and b.bound > 900]
    made = None if good else new_buffer(st, s, "fragment", (st.extent(),), st.pick(["int32", "float32"]), room=0)
    if not good and made is None:
        return None
    dst = st.pick(good) if made is None else made[0]
    name, vars = st.fresh("R"), [(st.fresh("i"), e) for e in dst.shape]
    n = st.between(2, 20)
    inner = (st.fresh("i"), n)
    if dst.size * n > 4000:
        return None
    form = st.pick(["old", "started", "bits"] if dst.dtype == "int32" else ["old", "started"])
    p = Point(st, s, [*vars, inner], [b for b in readable(s) if b.root is not dst.root])
    v = p.fit(p.value(2), 0 if form == "bits" else -31, 31)
    if form == "bits" and v.dtype not in ("int32", "int64"):
        return None
    line, features = header(st, [*vars, inner])
    idx = ", ".join(x for x, _ in vars)
    dims = ", ".join(st.dim(e) for e in dst.shape)
    if form == "old":
        op, far = st.pick([("sum", 0), ("max", -31), ("min", 31)])
        replication = st.pick(["'all'", "'none'"])
        add = f"{name}[{idx}] += {v.text}" if op == "sum" else f"{name}[{idx}] = T.{op}({name}[{idx}], {v.text})"
        return [node(f"{name} = T.alloc_reducer(({dims},), '{dst.dtype}', '{op}', replication={replication})"),
                node(f"T.fill({name}, {far})"), node(line, [*_taken(p), node(add)], None, *features),
                node(f"T.finalize_reducer({name})", None, None, "reducer:old", f"reducer:old-{op}"),
                node(f"T.copy({name}, {dst.name})")]
    op = st.pick(["bitand", "bitor"]) if form == "bits" else st.pick(["sum", "max", "min"])
    init = f", {st.between(0, 15)}" if form == "started" or op == "bitand" else ""
    return [node(f"{name} = T.alloc_reducer(({dims},), '{dst.dtype}', op='{op}')"), node(f"T.reducer_init({name}{init})"),
            node(line, [*_taken(p), node(f"T.reducer_update({name}[{idx}], {v.text})")], None, *features),
            node(f"T.finalize_reducer({name}, {dst.name})", None, None, f"reducer:{form}")]


REGIONS = {"gemm_regions": gemm_regions, "returned_global": returned_global, "tickets": tickets, "reducer_forms": reducer_forms}
REGION_WEIGHTS = {"gemm_regions": 0.9, "returned_global": 0.5, "tickets": 0.35, "reducer_forms": 1.2}
