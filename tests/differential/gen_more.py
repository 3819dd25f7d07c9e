"""Statements for the rarer parts of the language: values atomics return, warps, vectors, masks, random numbers, hints."""

from __future__ import annotations

from gen_expr import Point
from gen_parallel import Nodes, _cover, header, new_local, readable, writable
from gen_state import Buf, Scope, State, node
from gen_tiles import holds, new_buffer, refill
from gen_values import EXACT, Value, is_float, is_unsigned

ORDERS = ("relaxed", "consume", "acquire", "release", "acq_rel", "seq_cst")
WORDS = ("int32", "float32", "int64", "float16", "float64")


def _own_buffer(st: State, s: Scope, scope: str, shape: tuple[int, ...], dt: str) -> tuple[Buf, Nodes] | None:
    """A live buffer that sums may go to, or a new one."""
    good = [b for b in writable(s, scope) if b.room is not None and b.shape == shape and b.dtype == dt and b.root is b]
    if good and st.chance(0.7):
        return st.pick(good), []
    return new_buffer(st, s, scope, shape, dt, room=0)


def returned(st: State, s: Scope) -> Nodes | None:
    """Atomics whose old value is kept: every element is changed once, so the value is the same in all orders."""
    dt = st.pick(["int32", "int32", "int64", "float32", "float16"])
    shape = (st.extent(),)
    got = _own_buffer(st, s, "shared", shape, dt)
    if got is None:
        return None
    to, nodes = got
    kept = new_buffer(st, s, st.pick(["fragment", "shared"]), shape, "float32" if is_float(dt) else dt, room=0)
    if kept is None or not holds(kept[0], to):
        return None
    i = st.fresh("i")
    p = Point(st, s, [(i, shape[0])], [b for b in readable(s) if b.root not in (to.root, kept[0].root)])
    v = p.fit(p.value(1), -7, 7)
    op = st.pick(["add", "add", "max", "min"]) if dt in ("int32", "int64") else "add"
    if op == "add":
        if v.bound * s.times > (to.room or 0):
            return None
        to.room -= v.bound * s.times
    if dt in ("float32", "float16") and shape[0] % 2 == 0 and st.chance(0.4):
        return _returned_pairs(st, s, to, kept[0], [*nodes, *kept[1]])
    order = f", memory_order='{st.pick(ORDERS)}'" if st.chance(0.6) else ""
    line, features = header(st, [(i, shape[0])])
    at = f"({shape[0] - 1} - {i})" if st.chance(0.5) else i
    text = f"{kept[0].name}[{i}] = T.atomic_{op}({to.name}[{at}], {v.text}{order}, return_prev=True)"
    return [*nodes, *kept[1], node(line, [*p.pre, node(text, None, None, "atomic:return", f"atomic:order{order[-9:-1]}"[:20])],
                                   None, *features)]


def _returned_pairs(st: State, s: Scope, to: Buf, kept: Buf, nodes: Nodes) -> Nodes | None:
    """The old values of T.atomic_addx2 of neighbours."""
    n = to.shape[0]
    got = new_buffer(st, s, "shared", (n,), to.dtype, bound=3)
    if got is None or got[0].bound * s.times > (to.room or 0):
        return None
    to.room -= got[0].bound * s.times
    i, w = st.fresh("i"), st.fresh("w")
    body = [node(f"{w} = T.atomic_addx2({to.name}[{i} * 2], {got[0].name}[{i} * 2], return_prev=True)", None, None,
                 "atomic:return-x2"),
            *(node(f"{kept.name}[{i} * 2 + {k}] = T.extract_lane({w}, {k})") for k in (0, 1))]
    line, features = header(st, [(i, n // 2)])
    return [*nodes, *got[1], node(line, body, None, *features)]


def bits(st: State, s: Scope) -> Nodes | None:
    """T.atomic_or onto integers, T.atomic_load and T.atomic_store of elements that one thread each touches."""
    n = st.extent()
    got = _own_buffer(st, s, "shared", (n,), "int32")
    if got is None:
        return None
    b, nodes = got
    i = st.fresh("i")
    line, features = header(st, [(i, n)])
    kind = st.pick(["or", "load", "store"])
    if kind == "or":
        other = [x for x in readable(s) if x.dtype in ("int32", "uint8", "int16") and x.root is not b.root and x.low >= 0
                 and x.high < 64]
        p = Point(st, s, [(i, n)], other)
        v = p.fit(p.leaf() if other else Value(i, "int32", 0, n - 1), 0, 63)
        if v.dtype not in ("int32", "int64"):
            return None
        text = f"T.atomic_or({b.name}[{p.index(n)}], {v.text})"
        clear = [node(f"T.fill({b.name}, {st.between(0, 9)})")]
        return [*nodes, *clear, node(line, [*p.pre, node(text, None, None, "atomic:or")], None, *features)]
    if kind == "load":
        order = st.pick(["relaxed", "consume", "acquire", "seq_cst"])
        to = new_buffer(st, s, "fragment", (n,), "int32", room=0)
        if to is None:
            return None
        text = f"{to[0].name}[{i}] = T.atomic_load({b.name}[{n - 1} - {i}], memory_order='{order}')"
        return [*nodes, *to[1], node(line, [node(text, None, None, "atomic:load")], None, *features)]
    order = st.pick(["relaxed", "release", "seq_cst"])
    p = Point(st, s, [(i, n)], [x for x in readable(s) if x.root is not b.root])
    v = p.fit(p.value(1), -31, 31)
    if is_float(v.dtype):
        v = Value(f"T.cast({v.text}, 'int32')", "int32", v.low, v.high)
    return [*nodes, node(line, [*p.pre, node(f"T.atomic_store({b.name}[{i}], {v.text}, memory_order='{order}')", None, None,
                                             "atomic:store")], None, *features)]


def pairs(st: State, s: Scope) -> Nodes | None:
    """T.atomic_addx2 or x4 of neighbours."""
    dt = st.pick(["float32", "float16", "bfloat16", "float32"])
    wide = st.pick([2, 4]) if dt == "float32" else 2
    good = [b for b in s.buffers if b.atomic == "add" and b.dtype == dt and b.shape[-1] % wide == 0]
    if not good or not st.chance(0.7):
        n = st.pick([8, 16, 32])
        low, high = -EXACT[dt] // 4, EXACT[dt] // 4
        o = st.tensor((n,), (str(n),), dt, prefix="O", zero=True, atomic="add", readable=False, writable=False, room=high // 2)
        o.low, o.high = low, high
        st.outputs.append(o)
        s.buffers.append(o)
        st.top_outputs.append(o)
        good = [o]
    dst = st.pick(good)
    n = dst.shape[-1] // wide
    got = new_buffer(st, s, "shared", (dst.shape[-1],), dt, bound=max(x for x in (1, 3, 7) if x <= 3))
    if got is None:
        return None
    src, nodes = got
    if src.bound * st.blocks * s.times > (dst.room or 0):
        return None
    dst.room -= src.bound * st.blocks * s.times
    i = st.fresh("i")
    lead = [st.uniform_index(s, e) for e in dst.shape[:-1]]
    line, features = header(st, [(i, n)])
    at = ", ".join([*lead, f"{i} * {wide}"])
    return [*nodes, node(line, [node(f"T.atomic_addx{wide}({dst.name}[{at}], {src.name}[{i} * {wide}])", None, None,
                                     f"atomic:addx{wide}:{dt}")], None, *features)]


def warps(st: State, s: Scope) -> Nodes | None:
    """Reductions and votes of a warp, of private integers."""
    if st.threads % 32:
        return None
    local = [b for b in s.buffers if b.scope == "local" and b.dtype == "int32"] or [new_local(st, s, "int32")]
    b = st.pick(local)
    x = f"{b.name}[{st.between(0, b.shape[0] - 1)}]"
    form = st.pick(["sum", "bitand", "bitor", "any", "all", "ballot", "shfl"])
    m = min(b.high, 7) + 1
    if form in ("sum", "bitand", "bitor"):
        value = f"T.floormod(T.warp_reduce_{form}({x}), {m})"
    elif form in ("any", "all"):
        value = f"T.cast(T.{form}_sync({x} > {st.between(-1, 2)}), 'int32') % {m}"
    elif form == "ballot":
        value = f"T.cast(T.ballot({x} > {st.between(-1, 2)}) % {m}, 'int32')"
    else:
        value = f"T.shfl_{st.pick(['xor', 'up', 'down'])}({x}, {st.pick([1, 2, 4])}, width={st.pick([8, 16, 32])})"
    return [node(f"{b.name}[{st.between(0, b.shape[0] - 1)}] = {value}", None, None, f"warp:{form}")]


def vectors(st: State, s: Scope) -> Nodes | None:
    """Slices of private arrays and of rows of shared memory as vectors, and arithmetic on pairs."""
    local = [b for b in s.buffers if b.scope == "local" and b.shape[0] >= 2]
    if not local:
        local = [new_local(st, s, st.pick(["float32", "float16"]))]
    b = st.pick(local)
    n = b.shape[0]
    if st.chance(0.4) and (rows := _row_slice(st, s, b)):
        return rows
    if n >= 4 and st.chance(0.5):
        k = n // 2
        a, c = (0, k) if st.chance(0.5) else (k, 0)
        return [node(f"{b.name}[{a}:{a + k}] = {b.name}[{c}:{c + k}]", None, None, "vector:slice")]
    if b.dtype not in ("float32", "float16"):
        return None
    w = st.fresh("w")
    x, y = (f"{b.name}[{st.between(0, n - 1)}]" for _ in range(2))
    op = st.pick(["max2", "abs2", "min2", "extract"])
    pair = f"T.{b.dtype}x2({x}, {y})"
    text = {"max2": f"T.max2({pair}, T.{b.dtype}x2({y}, {x}))", "min2": f"T.min2({pair}, T.{b.dtype}x2({y}, {x}))",
            "abs2": f"T.abs2({pair})", "extract": pair}[op]
    if b.low < -b.high:
        return None
    taken = f"{b.name}[{st.between(0, n - 1)}] = T.extract_lane({w}, {st.between(0, 1)})"
    return [node(f"{w} = {text}"), node(taken, None, None, f"vector:{op}")]


def _row_slice(st: State, s: Scope, b: Buf) -> Nodes | None:
    """Consecutive elements of a thread's private array from a row of shared memory, or into one."""
    store = st.chance(0.5)
    rows = [x for x in (writable(s, "shared") if store else readable(s)) if x.scope == "shared" and len(x.shape) == 2
            and x.dtype == b.dtype and x.shape[1] >= 2 and (holds(x, b) if store else holds(b, x))]
    if not rows:
        got = new_buffer(st, s, "shared", (st.extent(), st.pick([4, 8, 24])), b.dtype)
        if got is None or not (holds(got[0], b) if store else holds(b, got[0])):
            return None
        rows = [got[0]]
    row = st.pick(rows)
    k = st.pick([n for n in (2, 3, 4, 8, 16) if n <= min(row.shape[1], b.shape[0])])
    at, to = st.between(0, row.shape[1] - k), st.between(0, b.shape[0] - k)
    own = f"{b.name}[{to}:{to + k}]"
    if not store:
        return [node(f"{own} = {row.name}[(tx + {st.between(0, 40)}) % {row.shape[0]}, {at}:{at + k}]", None, None,
                     "vector:row-load")]
    count = min(row.shape[0], st.threads)
    return [node(f"if tx < {count}:", [node(f"{row.name}[{row.shape[0] - 1} - tx, {at}:{at + k}] = {own}")], None,
                 "vector:row-store")]


def drawn(st: State, s: Scope) -> Nodes | None:
    """Random numbers: the same on every execution."""
    local = [b for b in s.buffers if b.scope == "local" and b.dtype in ("int32", "float32")]
    b = st.pick(local) if local else new_local(st, s)
    if b.dtype not in ("int32", "float32"):
        return None
    if not any("T.rng_init" in n["t"] for n in st.prologue):
        st.prologue.append(node(f"T.rng_init({st.between(0, 2**20)}, off={st.between(0, 40)})", None, None, "random:init"))
    k = st.between(0, b.shape[0] - 1)
    m = min(b.high, 15) + 1
    return [node(f"{b.name}[{k}] = T.cast(T.rng_rand() % T.uint32({m}), 'int32')", None, None, "random:integer")]


def mask(st: State, s: Scope) -> Nodes | None:
    """A tile of bool, written by one loop and read by another; sometimes asked as a whole."""
    shape = (st.extent(),) if st.chance(0.5) else (st.extent(), st.extent())
    scope = st.pick(["shared", "fragment"])
    same = [b for b in writable(s, "shared", "fragment") if not b.base]
    if same and st.chance(0.5):
        shape = st.pick(same).shape
    name = st.fresh("B")
    size = 1
    for n in shape:
        size *= n
    if size > 2048 or not st.fits(scope, shape, "int8"):
        return None
    dims = [st.dim(n) for n in shape]
    st.allocs.append(node(f"{name} = T.alloc_{scope}(({', '.join(dims)},), 'bool')", None, None, f"alloc:{scope}:bool"))
    vars = [(st.fresh("i"), n) for n in shape]
    p = Point(st, s, vars, readable(s))
    idx = ", ".join(v for v, _ in vars)
    line, features = header(st, vars)
    cond = p.condition()
    out = [node(line, [*p.pre, node(f"{name}[{idx}] = {cond}")], None, "mask:written", *features)]
    dsts = [b for b in writable(s, "shared", "fragment") if b.tile == shape and not b.base]
    if dsts:
        dst = st.pick(dsts)
        p = Point(st, s, vars, [b for b in readable(s) if b.root is not dst.root])
        text = f"{dst.name}[{idx}] = {p.store(dst, 1)}"
        cond = f"{name}[{idx}]" if st.chance(0.5) else f"not {name}[{idx}]"
        out.append(node(line, [*p.pre, node(f"if {cond}:", [node(text)])], None, "mask:read", *features))
    if scope == "shared" and len(shape) == 1:
        v = st.pick(st.mutable) if st.mutable else st.scalar(s)
        fn = st.pick(["any_of", "all_of"])
        out.append(node(f"{v.text} = T.cast(T.{fn}({name}), 'int32')", None, None, f"mask:{fn}"))
    return out


def run_time_extent(st: State, s: Scope) -> Nodes | None:
    """A T.Parallel loop whose extent is a value of run time, over shared memory."""
    good = [b for b in writable(s, "shared") if b.size > 1]
    known = [v for v in s.uniform if v.low >= 0 and v.high > 0]
    if not good or not known:
        return None
    dst = st.pick(good)
    u = st.pick(known)
    n = dst.shape[-1]
    extent = f"T.min({u.text} + {st.between(0, 3)}, {n})"
    i = st.fresh("i")
    lead = [st.uniform_index(s, e) for e in dst.shape[:-1]]
    p = Point(st, s, [(i, n)], [b for b in readable(s) if b.root is not dst.root and b.scope != "fragment"])
    text = f"{dst.at([*lead, i])} = {p.store(dst, 2)}"
    return [node(f"for {i} in T.Parallel({extent}):", [*p.pre, node(text)], None, "parallel:run-time", *sorted(p.features))]


def by_reference(st: State, s: Scope) -> Nodes | None:
    """Macros that change an element handed to them, nested, with default arguments and two results."""
    good = [b for b in writable(s, "shared", "fragment") if b.room is not None and b.dtype in WORDS]
    if not good:
        return None
    dst = st.pick(good)
    vars: list[tuple[str, int]] = []
    idx = _cover(st, s, dst, vars, whole=True)
    if idx is None or dst.size > 3000:
        return None
    p = Point(st, s, vars, [b for b in readable(s) if b.root is not dst.root])
    v = p.fit(p.value(1), -15, 15)
    if 4 * (v.bound + 1) * s.times > dst.room or is_float(v.dtype) != is_float(dst.dtype) and dst.dtype in ("int32", "int64"):
        return None
    dst.room -= 4 * (v.bound + 1) * s.times
    form = st.pick(["added", "added_twice", "results"])
    at = dst.at(idx)
    if form == "results":
        a, b = st.fresh("t"), st.fresh("t")
        body = [node(f"{a}, {b} = added({at}, {v.text}, w=1)"), node(f"added({at}, {b} - 1, 1)")]
    else:
        body = [node(f"{form}({at}, {v.text})")]
    line, features = header(st, vars)
    return [node(line, [*p.pre, *body], None, f"macro:ref-{form}", *features)]


def stated(st: State, s: Scope) -> Nodes | None:
    """Statements that say what holds: T.device_assert, T.assume."""
    known = [v for v in s.uniform]
    if not known:
        return None
    v = st.pick(known)
    cond = f"{v.text} >= {v.low}" if st.chance(0.5) else f"{v.text} <= {v.high}"
    if st.chance(0.5):
        return [node(f"T.device_assert({cond}, 'in range')", None, None, "stated:assert")]
    return [node(f"T.assume({cond})", None, None, "stated:assume")]


def workspace(st: State, s: Scope) -> Nodes | None:
    """Global memory of the launch: a block writes its part, and reads it behind a barrier the compiler places."""
    tiles = [b for b in s.buffers if b.scope in ("shared", "fragment") and b.root is b and 1 < b.size <= 2048]
    if not tiles or s.depth:
        return None
    b = st.pick(tiles)
    name = st.fresh("G")
    dims = ", ".join(b.dims)
    st.allocs.append(node(f"{name} = T.alloc_global(({st.blocks}, {dims}), '{b.dtype}')", None, None, "alloc:global"))
    w = Buf(name, "global", (st.blocks, *b.shape), (str(st.blocks), *b.dims), b.dtype, b.low, b.high, writable=False,
            base=(st.flat, *["0"] * len(b.shape)), part=(1, *b.shape))
    slices = ", ".join(f"0:{d}" for d in b.dims)
    out = [node(f"T.copy({b.name}, {name}[{st.flat}, {slices}])", None, None, "workspace:copy")]
    st.workspaces.append(w)
    s.buffers.append(w)
    return out


def counted(st: State, s: Scope) -> Nodes | None:
    """T.syncthreads_count, _and, _or of a condition on the thread, into a scalar of the block."""
    if s.in_loop and st.chance(0.5):
        return None
    v = st.pick(st.mutable) if st.mutable else st.scalar(s)
    form = st.pick(["count", "and", "or"])
    cond = st.pick([f"tx < {st.between(0, st.threads)}", f"tx % {st.between(2, 5)} == 0"])
    return [node(f"{v.text} = T.syncthreads_{form}({cond}) % {v.high + 1}", None, None, f"warp:syncthreads-{form}")]


def scalar_atomic(st: State, s: Scope) -> Nodes | None:
    """A scalar added to every element of a part of a tensor or tile."""
    good = [b for b in s.buffers if b.atomic == "add"] + [b for b in writable(s, "shared") if b.room is not None
                                                           and b.dtype in WORDS]
    if not good:
        return None
    dst = st.pick(good)
    c = st.between(1, 3)
    times = s.times * (st.blocks if dst.atomic else 1)
    if c * times > (dst.room or 0):
        return None
    dst.room -= c * times
    parts = []
    for n in dst.shape:
        a = st.between(0, n - 1)
        parts.append(f"{a}:{st.between(a + 1, n)}")
    return [node(f"T.atomic_add({dst.name}[{', '.join(parts)}], {c})", None, None, "atomic:tile-scalar")]


def small_types(st: State, s: Scope) -> Nodes | None:
    """A packed tensor of int4, uint4 or fp4: through shared memory, element by element or as a whole."""
    kind, least, most = st.pick([("int4", -8, 7), ("uint4", 0, 15), ("float4_e2m1fn", -6, 6)])
    good = [b for b in writable(s, "fragment", "shared") if len(b.shape) == 2 and b.shape[1] % 2 == 0 and b.low <= least
            and b.high >= most and not is_unsigned(b.dtype) and not b.dtype.startswith("float8")
            and (kind[0] != "f" or is_float(b.dtype))]
    if not good:
        return None
    b = st.pick(good)
    rows, cols = b.shape
    t = st.tensor((rows, cols), (str(rows), str(cols)), "float16", 7)
    row = st.tensors[-1]
    row.pop("strides", None)
    row.update(dtype=kind, low=least, high=most)
    if st.chance(0.5):
        i, j = st.fresh("i"), st.fresh("i")
        text = f"{b.name}[{i}, {j}] = T.cast({t.name}[{i}, {cols - 1} - {j}], '{'float32' if kind[0] == 'f' else 'int32'}')"
        return [node(f"for {i}, {j} in T.Parallel({b.dims[0]}, {b.dims[1]}):", [node(text)], None, f"{kind}:elements")]
    name = st.fresh("S")
    if not st.fits("shared", b.shape, "int8"):
        return None
    st.allocs.append(node(f"{name} = T.alloc_shared(({', '.join(b.dims)},), '{kind}')", None, None, f"alloc:shared:{kind}"))
    return [node(f"T.copy({t.name}, {name})", None, None, f"{kind}:copy"), node(f"T.copy({name}, {b.name})")]


def by_hand_ring(st: State, s: Scope) -> Nodes | None:
    """Two versions of a tile, kept by the program itself, multiplied as slices."""
    m, n, k = (st.pick([e for e in st.profile.extents if e % 16 == 0] or [16]) for _ in range(3))
    if m * n * k > 40000 or not any(d == "float16" for d in st.profile.dtypes):
        return None
    a = new_buffer(st, s, "shared", (2, m, k), "float16", bound=3)
    b = new_buffer(st, s, "shared", (k, n), "float16", bound=3) if a else None
    c = new_buffer(st, s, "fragment", (m, n), "float32", room=0) if b else None
    if not a or not b or not c:
        return None
    u = st.uniform_index(s, 2)
    times = s.times * 9 * k
    if times > (c[0].room or 0):
        return None
    c[0].room -= times
    nodes: Nodes = [*a[1], *b[1], *c[1]]
    if st.chance(0.4) and b[0].writable:
        nodes += refill(st, s, b[0])
    return [*nodes, node(f"T.gemm({a[0].name}[{u}, :, :], {b[0].name}, {c[0].name})", None, None, "gemm:slice")]


MORE = {"returned": returned, "bits": bits, "pairs": pairs, "warps": warps, "vectors": vectors, "drawn": drawn, "mask": mask,
        "run_time_extent": run_time_extent, "by_reference": by_reference, "stated": stated, "workspace": workspace,
        "counted": counted, "scalar_atomic": scalar_atomic, "small_types": small_types, "by_hand_ring": by_hand_ring}
WEIGHTS = {"returned": 0.9, "bits": 0.4, "pairs": 0.8, "warps": 0.9, "vectors": 1.3, "drawn": 0.25, "mask": 1.1,
           "run_time_extent": 0.3, "by_reference": 1.1, "stated": 0.4, "workspace": 0.25, "counted": 0.6,
           "scalar_atomic": 0.4, "small_types": 1.7, "by_hand_ring": 0.3}
