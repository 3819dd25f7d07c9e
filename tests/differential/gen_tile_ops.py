"""Statements that compute on whole tiles: products, reductions, scans, views, transposes, reducers."""

from __future__ import annotations

from gen_parallel import Nodes, writable
from gen_state import Buf, Scope, State, node
from gen_tiles import holds, new_buffer, operand
from gen_values import BITS, EXACT, INTS, is_float, is_unsigned

PRODUCTS = {"float16": ("float32", "float32", "float16"), "bfloat16": ("float32",), "float32": ("float32",), "int8": ("int32",),
            "uint8": ("int32",), "float8_e4m3fn": ("float32",), "float8_e5m2": ("float32",), "float64": ("float64",)}


def _even(st: State, m: int, n: int, k: int, dt: str) -> bool:
    """Whether matrix instructions and the warps divide the tiles; others are padded."""
    if dt == "float64":
        return True
    step = {"float32": 8, "float16": 16, "bfloat16": 16}.get(dt, 32)
    if m % 16 or n % 8 or k % step or st.threads % 32:
        return False
    warps = st.threads // 32
    return any(warps % w == 0 and m % (16 * w) == 0 and n % (8 * (warps // w)) == 0 for w in range(1, warps + 1))


def gemm(st: State, s: Scope) -> Nodes | None:
    """T.gemm in any form, its accumulator cleared or added to."""
    dt = st.pick([d for d in st.profile.dtypes if d in PRODUCTS])
    other = dt
    if dt.startswith("float8") and st.chance(0.5):
        other = st.pick(["float8_e4m3fn", "float8_e5m2"])
    acc = st.pick(PRODUCTS[dt])
    even = st.chance(0.6)
    for _ in range(12):
        m, n, k = st.extent(), st.extent(), st.extent()
        if not even or _even(st, m, n, k, dt):
            break
    if m * n * k > 70000 and st.profile.name != "tensor":
        return None
    live = [b for b in s.buffers if b.scope == "fragment" and b.room is not None and b.dtype == acc and len(b.shape) == 2]
    nodes: Nodes = []
    if live and st.chance(0.65):
        c = st.pick(live)
        m, n = c.shape
        k = next((e for e in st.rng.sample(st.profile.extents, len(st.profile.extents)) if _even(st, m, n, e, dt)), k)
    else:
        made = new_buffer(st, s, "fragment", (m, n), acc, room=0, here=st.chance(0.15))
        if made is None:
            return None
        c, nodes = made
    limit = {"float16": 3, "float8_e4m3fn": 7, "float8_e5m2": 7}.get(dt if acc != "float16" else acc, 31)
    ta, tb = st.chance(0.3), st.chance(0.35)
    a = operand(st, s, "fragment" if st.chance(0.16) else "shared", (k, m) if ta else (m, k), dt, limit)
    if a is None:
        return None
    in_registers = st.chance(0.45 if a[0].scope == "fragment" else 0.07)  # both rarely meet by themselves
    b = operand(st, s, "fragment" if in_registers else "shared", (n, k) if tb else (k, n), other, limit)
    if b is None or a[0].root is b[0].root and a[0] is not b[0]:
        return None
    delta = k * a[0].bound * b[0].bound
    top = 2**12 if dt.startswith("float8") else min(c.high, EXACT[acc])
    options, tags = [], []
    if min(m, n, k) < 8:
        tags.append("gemm:tiny")
    if other != dt:
        tags.append("gemm:two-types")
    if ta:
        options.append("transpose_A=True")
    if tb:
        options.append("transpose_B=True")
    if st.chance(0.3):
        policy = st.pick(["Square", "FullRow", "FullCol"])
        options.append(f"policy=T.GemmWarpPolicy.{policy}")
        tags.append(f"gemm:policy-{policy}")
    if delta > top or dt.startswith("float8") and c.room < c.high - 4096 - 2**12:
        return None
    if delta * s.times <= c.room and st.chance(0.7):
        c.room -= delta * s.times
    elif s.uniform and st.chance(0.4) and delta * s.times <= c.room:
        c.room -= delta * s.times
        options.append(f"clear_accum=({st.pick(s.uniform).text} == 0)")
        tags.append("gemm:clear-runtime")
    else:
        options.append("clear_accum=True")
    kind = f"gemm:{a[0].scope[0]}{b[0].scope[0]}:{'T' if ta else 'N'}{'T' if tb else 'N'}"
    text = f"T.gemm({', '.join([a[0].name, b[0].name, c.name, *options])})"
    return [*nodes, *a[1], *b[1], node(text, None, None, "gemm", kind, f"gemm:{dt}->{acc}", *tags)]


def reduction(st: State, s: Scope) -> Nodes | None:
    """A reduction of any kind over any dimension, into a live or new buffer, cleared or combined."""
    good = [b for b in s.buffers if b.scope in ("fragment", "shared") and not b.base and len(b.shape) in (1, 2, 3)
            and not b.dtype.startswith("float8")]
    if not good:
        return None
    src = st.pick([*good, *(b for b in good if len(b.shape) == 3 for _ in range(5))])  # few tiles have three dimensions
    kinds = ["sum", "sum", "max", "min", "absmax", "abssum"]
    if src.dtype in INTS and not is_unsigned(src.dtype):
        kinds += ["bitand", "bitor", "bitxor"] * 3
    kind = st.pick(kinds)
    dim = st.between(0, len(src.shape) - 1)
    n = src.shape[dim]
    out = tuple(e for d, e in enumerate(src.shape) if d != dim) or (1,)
    if len(src.shape) > 1 and st.chance(0.12):
        out = tuple(1 if d == dim else e for d, e in enumerate(src.shape))
    need = src.bound * n if "sum" in kind else 2 * src.bound if kind.startswith("bit") else src.bound
    clear = kind == "abssum" or st.chance(0.65)
    fits = [b for b in writable(s, "fragment", "shared") if b.shape == out and b.root is not src.root and b.bound >= need
            and b.low <= -need * (not is_unsigned(src.dtype)) and not b.dtype.startswith("float8")
            and (not kind.startswith("bit") or b.dtype == src.dtype) and EXACT[b.dtype] >= need]
    if not clear:
        fits = [b for b in fits if "sum" not in kind or (b.room is not None and b.room >= need * s.times)]
    nodes: Nodes = []
    if fits and st.chance(0.7):
        dst = st.pick(fits)
    else:
        dts = [d for d in ("float32", "int32", src.dtype) if EXACT[d] // 4 >= need and not is_unsigned(d)
               and (not kind.startswith("bit") or d == src.dtype) and not (d in INTS and is_float(src.dtype))]
        if not dts:
            return None
        dt = st.pick(dts)
        made = new_buffer(st, s, "fragment" if st.chance(0.75) else "shared", out, dt, room=0, here=st.chance(0.15))
        if made is None:
            return None
        dst, nodes = made
        if dst.bound < need:
            return None
    if "sum" in kind and not clear:
        if dst.room is None or dst.room < need * s.times:
            clear = True
        else:
            dst.room -= need * s.times
    options = "" if kind == "abssum" or (clear and st.chance(0.5)) else f", clear={clear}"
    where = f"dim={dim if st.chance(0.7) else dim - len(src.shape)}"
    more = []
    if st.chance(0.15):
        options += ", batch=1"
        more.append("reduce:batch")
    if kind in ("max", "min", "absmax") and st.chance(0.3) and dst.dtype in ("float16", "bfloat16", "float32"):
        options += ", nan_propagate=True"
        more.append("reduce:nan_propagate")
    if st.chance(0.15):
        text = f"T.reduce({src.name}, {dst.name}, '{kind}', {dim}, {clear})"
        return [*nodes, node(text, None, None, "reduce:generic", f"reduce:{kind}")]
    tags = (*more, f"reduce:{kind}", f"reduce:{src.scope}->{dst.scope}", f"reduce:dim{dim}/{len(src.shape)}")
    return [*nodes, node(f"T.reduce_{kind}({src.name}, {dst.name}, {where}{options})", None, None, *tags)]


def scan(st: State, s: Scope) -> Nodes | None:
    """T.cumsum or T.cummax, in place or into another buffer."""
    good = [b for b in s.buffers if b.scope in ("fragment", "shared") and not b.base and len(b.shape) in (1, 2)
            and b.dtype in ("float32", "int32", "float16") and b.size <= 4096]
    if not good:
        return None
    src = st.pick(good)
    dim = st.between(0, len(src.shape) - 1)
    reverse = ", reverse=True" if st.chance(0.4) else ""
    kind = st.pick(["cumsum", "cumsum", "cummax"])
    if kind == "cummax" and src.writable and st.chance(0.5):
        return [node(f"T.cummax({src.name}, dim={dim}{reverse})", None, None, "scan:cummax-in-place")]
    need = src.bound * (src.shape[dim] if kind == "cumsum" else 1)
    fits = [b for b in writable(s, "fragment", "shared") if b.shape == src.shape and b.root is not src.root
            and b.dtype == src.dtype and b.bound >= need and EXACT[b.dtype] >= need]
    nodes: Nodes = []
    if fits:
        dst = st.pick(fits)
    else:
        made = new_buffer(st, s, st.pick(["fragment", "shared"]), src.shape, src.dtype, room=0)
        if made is None:
            return None
        dst, nodes = made
        if dst.bound < need:
            return None
    return [*nodes, node(f"T.{kind}({src.name}, {dst.name}, dim={dim}{reverse})", None, None,
                         f"scan:{kind}", f"scan:{src.scope}->{dst.scope}")]


BIT_VIEWS = {"uint8": ("int8",), "int8": ("uint8",), "int16": ("uint16", "int8"), "int32": ("int8", "int16", "uint8")}


def view(st: State, s: Scope, of: Buf | None = None) -> Nodes | None:
    """A reshape of a live buffer, or a view of its bits as another type; of some of them another view."""
    good = [b for b in s.buffers if b.scope in ("shared", "shared", "fragment") and not b.base]
    if not good:
        return None
    views = [b for b in good if b.root is not b]
    b = of or st.pick(views if views and st.chance(0.4) else good)
    name = st.fresh("W")
    if st.chance(0.6) and b.scope == "shared" and b.dtype in BIT_VIEWS and b.root is b:
        dt = st.pick(BIT_VIEWS[b.dtype])  # integers only: which zero a float is depends on the order of its sums
        k = BITS[b.dtype] // BITS[dt]
        shape = (*b.shape[:-1], b.shape[-1] * k)
        low, high = (0 if is_unsigned(dt) else -(2 ** (BITS[dt] - 1))), 2 ** (BITS[dt] - (not is_unsigned(dt))) - 1
        if k == 1 and b.dtype == "uint8":
            low, high = b.low, b.high
        v = Buf(name, b.scope, shape, tuple(str(e) for e in shape), dt, low, high, root=b.root, writable=False)
        s.buffers.append(v)
        return [node(f"{name} = T.view({b.name}, ({', '.join(map(str, shape))},), dtype='{dt}')", None, None, "view:bits")]
    n = b.size
    if n == 1:
        return None
    shapes = [(n,)] + [(a, n // a) for a in (2, 3, 4, 8, 16) if n % a == 0] + [(2, n // 4, 2)] * (n % 4 == 0)
    shape = st.pick([x for x in shapes if x != b.shape] or [b.shape])
    v = Buf(name, b.scope, shape, tuple(str(e) for e in shape), b.dtype, b.low, b.high, root=b.root, writable=b.writable)
    s.buffers.append(v)
    made = [node(f"{name} = T.{st.pick(['reshape', 'view'])}({b.name}, ({', '.join(map(str, shape))},))", None, None,
                 f"view:{b.scope}", *(["view:of-view"] if b.root is not b else []))]
    return made + (view(st, s, v) or [] if of is None and st.chance(0.25) else [])


def transpose(st: State, s: Scope) -> Nodes | None:
    """T.transpose of a shared tile."""
    pairs = [(a, b) for a in s.buffers for b in writable(s, "shared") if a.scope == "shared" and len(a.shape) == 2
             and b.shape == a.shape[::-1] and a.root is not b.root and a.dtype == b.dtype and holds(b, a)]
    if pairs:
        a, b = st.pick(pairs)
    else:
        tiles = [a for a in s.buffers if a.scope == "shared" and len(a.shape) == 2 and a.root is a and a.room is None]
        a = st.pick(tiles) if tiles else None
        made = a and new_buffer(st, s, "shared", a.shape[::-1], a.dtype, bound=a.bound)
        if not made:
            return None
        b = made[0]
    return [node(f"T.transpose({a.name}, {b.name})", None, None, "transpose")]


def reducer(st: State, s: Scope) -> Nodes | None:
    """A deferred reducer: started, updated by every iteration of a loop, finalised into a fragment."""
    from gen_expr import Point
    from gen_parallel import header, readable

    good = [b for b in writable(s, "fragment") if b.root is b and b.dtype in ("float32", "int32") and b.bound > 900]
    if not good:
        return None
    dst = st.pick(good)
    op = st.pick(["sum", "max", "min"])
    name = st.fresh("R")
    vars = [(st.fresh("i"), e) for e in dst.shape]
    n = st.between(2, 20)
    vars.append((st.fresh("i"), n))
    if dst.size * n > 4000:
        return None
    p = Point(st, s, vars, [b for b in readable(s) if b.root is not dst.root])
    v = p.fit(p.value(2), -31, 31)
    pre, p.pre = p.pre, []
    line, features = header(st, vars)
    idx = ", ".join(x for x, _ in vars[:-1])
    # max and min start from an element of the right range: no identity may remain
    return [node(f"{name} = T.alloc_reducer(({', '.join(st.dim(e) for e in dst.shape)},), '{dst.dtype}', op='{op}')"),
            node(f"T.reducer_init({name})"),
            node(line, [*pre, node(f"T.reducer_update({name}[{idx}], {v.text})")], None, *features),
            node(f"T.finalize_reducer({name}, {dst.name})", None, None, f"reducer:{op}")]
