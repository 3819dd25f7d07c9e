"""Statements for private tiles, scratch of one iteration, pointers, sparse products, patches of images, warp groups."""

from __future__ import annotations

from dataclasses import replace

from gen_expr import Point
from gen_parallel import Nodes, _cover, _statements, header, new_local, parallel, readable, writable
from gen_state import Buf, Scope, State, node
from gen_tiles import copy, fill, holds, new_buffer, operand
from gen_values import Value, is_float


def scratch(st: State, s: Scope) -> Nodes | None:
    """A T.Parallel loop whose iterations each set a private array, all of it, before they read it."""
    good = writable(s, "shared", "fragment", "global")
    if not good:
        return None
    dst = st.pick(good)
    vars: list[tuple[str, int]] = []
    idx = _cover(st, s, dst, vars)
    points = 1
    for _, e in vars:
        points *= e
    n = st.pick([2, 4, 4, 8])
    if idx is None or points * n > 6000:
        return None
    own, alloc = st.allocate("local", (n,), st.pick(["int32", "float32", "float16"]))
    st.allocs.append(alloc)
    r = st.fresh("r")
    p = Point(st, s, [*vars, (r, n)], [b for b in readable(s) if b.root is not dst.root])
    loop = st.pick(["T.serial", "T.unroll", "T.vectorized", "range"])
    set_all = p.store(own, 2)
    body = [node(f"for {r} in {loop}({n}):", [*_taken(p), node(f"{own.name}[{r}] = {set_all}")])]
    p.vars = vars
    if st.chance(0.4):
        text = f"if {p.condition()}:"
        again = node(f"{own.name}[{st.between(0, n - 1)}] = {p.store(own, 1)}")
        body += [*_taken(p), node(text, [again])]
    # The array of an iteration is read at places known beforehand: a variable of the loop would say whose array it is.
    parts = [Value(f"{own.name}[{k}]", own.dtype, own.low, own.high) for k in range(n)]
    p.scope = replace(s, vars=[*s.vars, *parts], uniform=[])
    p.reads = st.rng.sample(p.reads, min(1, len(p.reads)))
    body += _statements(st, p, dst, idx, 2)
    line, features = header(st, vars)
    return [node(line, body, None, "parallel:scratch", f"scratch:{loop}", *features, *sorted(p.features))]


def _taken(p: Point) -> Nodes:
    pre, p.pre = p.pre, []
    return pre


def private_tiles(st: State, s: Scope) -> Nodes | None:
    """Tile operations on arrays of each thread: copies with every scope, reductions, scans, fills."""
    local = [b for b in s.buffers if b.scope == "local"]
    if not local:
        local = [new_local(st, s)]
    b = st.pick(local)
    n = b.shape[0]
    form = st.pick(["in", "in", "in", "out", "out", "own", "reduce", "reduce", "scan", "reduce", "fill"])
    out: Nodes | None = None
    if form == "in":
        good = [x for x in s.buffers if x.scope in ("global", "shared", "shared") and x.readable and not x.base
                and x.shape[-1] >= n and holds(b, x)]
        wanted = st.pick(["global", "global", "shared"])
        if good:
            src = st.pick([x for x in good if x.scope == wanted] or good)
            p = Point(st, s, [("tx", st.threads)], [])
            lead = [p.index(e) for e in src.shape[:-1]]
            c = st.between(0, src.shape[-1] - n)
            out = [node(f"T.copy({src.name}[{', '.join([*lead, f'{c}:{c + n}'])}], {b.name})", None, None,
                        f"copy:{src.scope}->local")]
    elif form == "out":
        good = [x for x in writable(s, "shared") if len(x.shape) == 2 and x.shape[1] >= n and holds(x, b)]
        if good and st.chance(0.6):
            dst = st.pick(good)
            c = st.between(0, dst.shape[1] - n)
            text = f"T.copy({b.name}, {dst.name}[tx, {c}:{c + n}])"
            if dst.shape[0] < st.threads:
                return [node(f"if tx < {dst.shape[0]}:", [node(text)], None, "copy:local->shared")]
            return [node(text, None, None, "copy:local->shared")]
        if not s.depth:
            o = st.tensor((st.blocks, st.threads, n), (str(st.blocks), str(st.threads), str(n)), b.dtype, 7, prefix="O")
            st.outputs.append(o)
            out = [node(f"T.copy({b.name}, {o.name}[{st.flat}, tx, 0:{n}])", None, None, "copy:local->global")]
    elif form == "own":
        others = [x for x in local if x is not b and x.shape == b.shape and holds(x, b)]
        to = st.pick(others) if others else new_local(st, s, b.dtype, n)
        if holds(to, b):
            out = [node(f"T.copy({b.name}, {to.name})", None, None, "copy:local->local")]
    elif form == "reduce":
        dt = "float32" if is_float(b.dtype) else "int32"
        v = st.fresh("v")
        st.allocs.append(node(f"{v} = T.alloc_var('{dt}')", None, None, "alloc:var"))
        op = st.pick(["sum", "max", "min", "absmax"])
        low, high = (n * b.low, n * b.high) if op == "sum" else (0, b.bound) if op == "absmax" else (b.low, b.high)
        p = Point(st, s, [], [])
        fitted = p.fit(Value(v, dt, low, high), b.low, b.high)
        return [node(f"T.reduce_{op}({b.name}, {v})", None, None, f"reduce:local-{op}"), *_taken(p),
                node(f"{b.name}[{st.between(0, n - 1)}] = {fitted.text}")]
    elif form == "scan":
        reverse = ", reverse=True" if st.chance(0.4) else ""
        out = [node(f"T.cummax({b.name}, dim=0{reverse})", None, None, "scan:local")]
    else:
        c = st.between(max(b.low, -3), min(b.high, 5))
        out = [node(f"T.fill({b.name}, {c})" if c else f"T.clear({b.name})", None, None, "fill:local")]
    if out and st.chance(0.25):
        out = [node(f"if {st.pick(['tx % 2 == 0', 'tx > 5', f'tx < {max(1, st.threads // 2)}'])}:", out)]
    return out


def pointers(st: State, s: Scope) -> Nodes | None:
    """A buffer made of the address of a row: of a shared tile, or of an input."""
    rows = {t["name"]: t for t in st.tensors}
    good = [b for b in s.buffers if len(b.shape) == 2 and b.root is b and b.shape[0] > 1 and not b.base and (
        b.scope == "shared" or b.scope == "global" and b in st.inputs and "strides" not in rows[b.name]
        and all(d.isdigit() for d in b.dims) and rows[b.name]["dtype"] == b.dtype)]
    if not good:
        return None
    wanted = st.pick(["global", "global", "shared"])
    b = st.pick([x for x in good if x.scope == wanted] or good)
    name = st.fresh("W")
    first = st.between(0, b.shape[0] - 1)
    left = b.shape[0] - first
    shape = (left, b.shape[1]) if st.chance(0.6) else (left * b.shape[1],)
    v = Buf(name, b.scope, shape, tuple(map(str, shape)), b.dtype, b.low, b.high, root=b.root,
            writable=b.writable and b.scope == "shared")
    s.buffers.append(v)
    at = f"T.address_of({b.name}[{first}, 0])"
    return [node(f"{name} = T.make_tensor({at}, ({', '.join(map(str, shape))},), '{b.dtype}')", None, None,
                 f"pointer:{b.scope}")]


def sparse(st: State, s: Scope) -> Nodes | None:
    """A product with a 2:4 sparse operand and its metadata."""
    dt = st.pick(["float16", "float16", "bfloat16", "int8", "float32"])
    if dt not in st.profile.dtypes:
        return None
    acc, meta = "int32" if dt == "int8" else "float32", st.pick(["int16", "int32"])
    step = (4 if meta == "int16" else 8) * (2 if dt == "float32" else 4)  # columns that one word describes
    m, n = st.extent(), st.extent()
    k = max(step, 32) * st.pick([1, 1, 2])
    if m * n * k > 60000 or m < 8 or n < 8:
        return None
    c = new_buffer(st, s, "fragment", (m, n), acc, room=0)
    if c is None:
        return None
    flags = [st.chance(0.25) for _ in range(3)]
    a = operand(st, s, "shared", (k // 2, m) if flags[0] else (m, k // 2), dt, 7)
    b = operand(st, s, "shared", (n, k) if flags[1] else (k, n), dt, 7) if a else None
    e_shape = (k // step, m) if flags[2] else (m, k // step)
    if a is None or b is None or a[0].root is b[0].root or not st.fits("shared", e_shape, "int32"):
        return None
    delta = k // 2 * a[0].bound * b[0].bound * s.times
    if delta > (c[0].room or 0):
        return None
    c[0].room -= delta
    t = st.tensor(e_shape, tuple(map(str, e_shape)), meta, 7)
    row = st.tensors[-1]
    row.pop("strides", None)
    row["nibbles"] = [4, 14] if dt == "float32" else [4, 8, 9, 12, 13, 14]
    name = st.fresh("E")
    st.shared_bytes += e_shape[0] * e_shape[1] * 4
    st.allocs.append(node(f"{name} = T.alloc_shared({e_shape}, '{meta}')"))
    options = [f"{x}=True" for x, f in zip(("transpose_A", "transpose_B", "transpose_E"), flags) if f]
    text = f"T.gemm_sp({', '.join([a[0].name, name, b[0].name, c[0].name, *options])})"
    return [*a[1], *b[1], node(f"T.copy({t.name}, {name})"), node(text, None, None, "gemm:sparse", f"gemm:sparse:{dt}")]


def image(st: State, s: Scope) -> Nodes | None:
    """A tile of an image's patches: T.im2col of an input of four dimensions."""
    good = [b for b in writable(s, "shared") if len(b.shape) == 2 and b.root is b]
    if not good:
        return None
    dst = st.pick(good)
    kernel, stride, dilation, pad = st.between(1, 3), st.between(1, 2), st.between(1, 2), st.between(0, 2)
    least = max(1, dilation * (kernel - 1) + 1 - 2 * pad)
    shape = (st.between(1, 2), least + st.between(0, 5), least + st.between(0, 5), st.pick([1, 3, 4, 8, 16]))
    dims = [str(n) for n in shape]
    if st.chance(0.25):
        name = st.fresh("M")
        st.symbols[name] = shape[1]
        dims[1] = name
    bound = max((x for x in (1, 3, 7, 31) if x <= dst.bound), default=1)
    t = st.tensor(shape, tuple(dims), dst.dtype, bound, writable=False)
    if not holds(dst, t):
        return None
    steps = ", ".join(st.uniform_index(s, 3) for _ in range(2))
    return [node(f"T.im2col({t.name}, {dst.name}, {steps}, {kernel}, {stride}, {dilation}, {pad})", None, None, "copy:im2col")]


def warp_groups(st: State, s: Scope) -> Nodes | None:
    """Warp groups that each fill tiles of their own, with T.ws, in front of what the whole block does with them."""
    if st.threads < 256 or st.threads % 128 or s.pipelined or st.sides:
        return None
    good = [b for b in writable(s, "shared") if b.root is b]
    if len(good) < 2:
        made = new_buffer(st, s, "shared", (st.extent(), st.extent()), st.pick(st.profile.dtypes))
        if made is None:
            return None
        good.append(made[0])
    if len(good) < 2:
        return None
    groups = st.threads // 128
    count = st.between(2, min(groups, len(good)))
    dsts = st.rng.sample(good, count)
    reads = [replace(b, writable=False) for b in s.buffers if b.scope in ("global", "shared") and b.readable and not b.base
             and not b.atomic and b.root not in dsts]
    # Groups of one T.ws and of the next, or of the loop's next turn, meet here: their order is the program's own affair.
    out: Nodes = [node("T.sync_threads()")]
    for g, dst in enumerate(dsts):
        role = Scope([*reads, dst], list(s.uniform), list(s.vars), s.times, s.depth + 1)
        body: Nodes = []
        for _ in range(st.between(1, 2)):
            made = st.pick([parallel, copy, parallel])(st, role, dst)
            body += made or fill(st, role) or []
        if not body:
            return None
        if st.chance(0.2):
            k = st.fresh("k")
            body = [node(f"for {k} in T.serial({st.between(0, 2)}):", body)]
        ids = str(g) if g < count - 1 else ", ".join(map(str, range(g, groups)))
        out.append(node(f"with T.ws({ids}):", body, None, "ws:tiles"))
    return out


LIBRARY_CALLS = ("fabsf", "floorf", "ceilf", "truncf", "nearbyintf", "fmodf", "fmaf")


def library_call(st: State, s: Scope) -> Nodes | None:
    """Functions of CUDA's own library by T.call_extern, of whole numbers and halves."""
    good = [b for b in writable(s, "shared", "fragment", "global") if b.dtype in ("float32", "float64", "int32", "float16")]
    if not good:
        return None
    dst = st.pick(good)
    vars: list[tuple[str, int]] = []
    idx = _cover(st, s, dst, vars)
    if idx is None:
        return None
    p = Point(st, s, vars, [b for b in readable(s) if b.root is not dst.root])
    v = p.fit(p.value(1), -63, 63)
    x = f"T.cast({v.text}, 'float32')"
    name = st.pick(LIBRARY_CALLS)
    call = st.pick(["T.call_extern", "T.call_pure_extern"])
    if name == "fmodf":
        got = Value(f"{call}('float32', 'fmodf', {x}, T.float32(8.0))", "float32", -7, 7)
    elif name == "fmaf":
        got = Value(f"{call}('float32', 'fmaf', {x}, T.float32(3.0), T.float32(-1.0))", "float32", 3 * v.low - 1,
                    3 * v.high - 1)
    elif name == "fabsf":
        got = Value(f"{call}('float32', 'fabsf', {x})", "float32", 0, v.bound)
    else:
        got = Value(f"{call}('float32', '{name}', {x} * T.float32(0.25))", "float32", v.low // 4 - 1, v.high // 4 + 1)
    got = p.bind(got)
    text = p.fit(got, dst.low, dst.high).text
    line, features = header(st, vars)
    return [node(line, [*_taken(p), node(f"{dst.at(idx)} = {text}")], None, f"extern:{name}", *features, *sorted(p.features))]


EXTRA = {"scratch": scratch, "private_tiles": private_tiles, "pointers": pointers, "sparse": sparse, "image": image,
         "warp_groups": warp_groups, "library_call": library_call}
EXTRA_WEIGHTS = {"scratch": 0.5, "private_tiles": 2.6, "pointers": 1.2, "sparse": 0.4, "image": 0.35, "warp_groups": 3.0,
                 "library_call": 0.3}
