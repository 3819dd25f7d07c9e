"""Statements of single elements: T.Parallel loops, code per thread, atomics."""

from __future__ import annotations

from gen_expr import Point
from gen_state import Buf, Node, Scope, State, node
from gen_values import BITS, EXACT, INTS, Value, is_float

Nodes = list[Node]
MAX_POINTS = 6000


def readable(s: Scope, private: bool = False) -> list[Buf]:
    """Buffers that a T.Parallel loop (private: code of one thread) may read."""
    good = ("global", "shared", "local") if private else ("global", "shared", "fragment")
    return [b for b in s.buffers if b.scope in good and b.readable]


def writable(s: Scope, *scopes: str) -> list[Buf]:
    return [b for b in s.buffers if b.scope in scopes and b.writable]


def _cover(st: State, s: Scope, b: Buf, vars: list[tuple[str, int]], whole: bool = False) -> list[str] | None:
    """Indices that visit different elements of b in different iterations of new variables, one for each dimension."""
    idx = []
    for n in b.tile:
        roll = st.rng.random()
        if n == 1 or (not whole and len(b.tile) > 1 and roll < 0.07):
            idx.append("0" if whole else st.uniform_index(s, n))
            continue
        i = st.fresh("i")
        if whole or roll < 0.8:
            vars.append((i, n))
            if roll > 0.74 and not whole:
                idx.append(st.pick([f"({n - 1} - {i})", f"(({i} + {st.between(1, n - 1)}) % {n})"]))
            else:
                idx.append(i)
        else:
            e = st.between(1, n)
            vars.append((i, e))
            c = st.between(0, n - e)
            idx.append(i if c == 0 else f"({i} + {c})")
    if not vars:
        vars.append((st.fresh("i"), 1))
    return idx


def _also(st: State, b: Buf, vars: list[tuple[str, int]]) -> list[str] | None:
    """Indices of a second buffer that are different for every point of the loop; None when it has no room for them."""
    left = [v for v in vars if v[1] > 1]
    if len(left) > len(b.tile):
        return None
    order = list(left)
    if st.chance(0.3):
        st.rng.shuffle(order)
    idx, at = [], 0
    for d, n in enumerate(b.tile):
        rest = len(b.tile) - d
        if at < len(order) and (n >= order[at][1]) and (rest == len(order) - at or st.chance(0.7)):
            v, e = order[at]
            c = st.between(0, n - e) if st.chance(0.3) else 0
            idx.append(v if c == 0 else f"({v} + {c})")
            at += 1
        else:
            idx.append(str(st.between(0, n - 1)))
    return idx if at == len(order) else None


def header(st: State, vars: list[tuple[str, int]]) -> tuple[str, list[str]]:
    """The loop's line, and its features."""
    order = list(vars)
    features = [f"parallel:{len(order)}d"]
    if len(order) > 1 and st.chance(0.15):
        st.rng.shuffle(order)
        features.append("parallel:permuted")
    options = ""
    if st.chance(0.04):
        options = f", coalesced_width={st.pick([1, 2, 4])}"
        features.append("parallel:coalesced_width")
    names = ", ".join(v for v, _ in order)
    return f"for {names} in T.Parallel({', '.join(st.dim(e) if e > 1 else '1' for _, e in order)}{options}):", features


def _statements(st: State, p: Point, dst: Buf, idx: list[str], depth: int) -> Nodes:
    """The store (or accumulation) of one element, plain or under a condition."""
    at = dst.at(idx)
    if dst.room is not None and st.chance(0.35):
        v = p.fit(p.value(depth), -31, 31)
        points = p.scope.times
        if v.bound * points <= dst.room and v.dtype is not None:
            dst.room -= v.bound * points
            stmt = node(f"{at} += {v.text}", None, None, f"accumulate:{dst.scope}")
            return [*_taken(p), stmt]
    text = f"{at} = {p.store(dst, depth)}"
    pre = _taken(p)
    roll = st.rng.random()
    if roll < 0.2:
        cond = p.condition()
        pre += _taken(p)
        orelse = None
        if st.chance(0.5):
            other = p.store(dst, depth - 1)
            pre += _taken(p)
            orelse = [node(f"{at} = {other}")]
        return [*pre, node(f"if {cond}:", [node(text)], orelse, "parallel:if")]
    return [*pre, node(text, None, None, f"store:{dst.scope}:{dst.dtype}")]


def _taken(p: Point) -> Nodes:
    pre, p.pre = p.pre, []
    return pre


def parallel(st: State, s: Scope, dst: Buf | None = None, whole: bool = False) -> Nodes | None:
    """A T.Parallel loop that stores to one or two buffers what it reads from others."""
    if dst is None:
        good = writable(s, "shared", "fragment", "fragment", "global")
        if not good:
            return None
        dst = st.pick(good)
    vars: list[tuple[str, int]] = []
    idx = _cover(st, s, dst, vars, whole)
    points = 1
    for _, e in vars:
        points *= e
    if points > MAX_POINTS or points * s.times > 4 * MAX_POINTS or idx is None or len(vars) > 4:
        return None
    p = Point(st, s, vars, [b for b in readable(s) if b.root is not dst.root])
    if not whole:
        p.reads += [dst] * st.pick([0, 1, 1, 2])
        p.written[id(dst.root)] = (dst, idx)
    if whole:
        text = f"{dst.at(idx)} = {p.store(dst, st.pick([1, 2, 2]))}"
        body = [*_taken(p), node(text, None, None, f"store:{dst.scope}:{dst.dtype}")]
    else:
        body = _statements(st, p, dst, idx, st.pick([1, 2, 2, 3]))
    if not whole and st.chance(0.2):
        others = [b for b in writable(s, "shared", "fragment", "global") if id(b.root) not in p.written
                  and not any(v.root is b.root and v.name + "[" in str(body) for v in s.buffers)]  # views have other names
        if others:
            second = st.pick(others)
            at = _also(st, second, vars)
            if at is not None:
                p.written[id(second.root)] = (second, at)
                p.reads = [b for b in p.reads if b.root is not second.root]
                body += _statements(st, p, second, at, 1)
                p.features.add("parallel:two-stores")
    line, features = header(st, vars)
    return [node(line, body, None, *features, *sorted(p.features))]


def inner_sum(st: State, s: Scope) -> Nodes | None:
    """A T.Parallel loop whose iterations each run a serial loop into a variable."""
    good = writable(s, "shared", "fragment", "global")
    reads = readable(s)
    if not good or not reads:
        return None
    dst = st.pick(good)
    vars: list[tuple[str, int]] = []
    idx = _cover(st, s, dst, vars)
    points = 1
    for _, e in vars:
        points *= e
    if points > 2000 or idx is None:
        return None
    n = st.between(2, 9)
    dt = st.pick(["int32", "float32"])
    if dst.dtype == "float64":
        dt = "int32"
    acc, r = st.fresh("v"), st.fresh("r")
    st.allocs.append(node(f"{acc} = T.alloc_var('{dt}')", None, None, "alloc:var"))
    p = Point(st, s, [*vars, (r, n)], [b for b in reads if b.root is not dst.root])
    v = p.fit(p.value(2), -63, 63)
    loop = [*_taken(p), node(f"{acc} = {acc} + {v.text}")]
    if st.chance(0.25) and "index:negative" not in p.features:  # of a loop's variable they count from the end, of others not
        return _while_sum(st, dst, vars, idx, (acc, dt), (r, n), v, loop, p)
    if st.chance(0.4):
        cond = p.condition()
        loop = [*_taken(p), node(f"if {cond}:", loop)] if st.chance(0.5) else [
            *_taken(p), node(f"if {cond}:", [node(st.pick(["continue", "break"]))], None, "inner:break-continue"), *loop]
    kind = st.pick(["T.serial", "T.serial", "T.unroll", "range"])
    p.vars = vars
    low, high = n * min(v.low, 0), n * max(v.high, 0)
    p2 = Point(st, s, vars, [])
    total = p2.fit(Value(acc, dt, low, high), dst.low, dst.high)
    body = [node(f"{acc} = 0"), node(f"for {r} in {kind}({n}):", loop), *p2.pre, node(f"{dst.at(idx)} = {total.text}")]
    line, features = header(st, vars)
    return [node(line, body, None, "parallel:inner-loop", *features, *sorted(p.features))]


def _while_sum(st: State, dst: Buf, vars: list[tuple[str, int]], idx: list[str], acc: tuple[str, str], counted: tuple[str, int],
               v: Value, loop: Nodes, p: Point) -> Nodes:
    """The sum by a while loop whose iterations each have a count of their own."""
    (name, dt), (r, n) = acc, counted
    st.allocs.append(node(f"{r} = T.alloc_var('int32')", None, None, "alloc:var"))
    p2 = Point(st, p.scope, vars, [])
    total = p2.fit(Value(name, dt, n * min(v.low, 0), n * max(v.high, 0)), dst.low, dst.high)
    until = f"{st.pick(vars)[0]} % {n + 1}" if st.chance(0.6) else str(n)
    body = [node(f"{name} = 0"), node(f"{r} = 0"), node(f"while {r} < {until}:", [*loop, node(f"{r} = {r} + 1")]), *p2.pre,
            node(f"{dst.at(idx)} = {total.text}")]
    line, features = header(st, vars)
    return [node(line, body, None, "parallel:inner-while", *features, *sorted(p.features))]


def spread_sum(st: State, s: Scope) -> Nodes | None:
    """`F[i] += ...` over a loop with one variable more than F has dimensions: all of its iterations count."""
    good = [b for b in writable(s, "fragment") if b.room is not None]
    if not good:
        return None
    dst = st.pick(good)
    vars: list[tuple[str, int]] = []
    idx = _cover(st, s, dst, vars, whole=True)
    if idx is None:
        return None
    n = st.between(2, 6)
    vars.append((st.fresh("i"), n))
    p = Point(st, s, vars, [b for b in readable(s) if b.root is not dst.root and b.scope != "fragment"])
    v = p.fit(p.value(1), -15, 15)
    if v.bound * n * s.times > dst.room:
        return None
    dst.room -= v.bound * n * s.times
    line, features = header(st, vars)
    return [node(line, [*_taken(p), node(f"{dst.at(idx)} += {v.text}")], None, "parallel:spread-sum", *features)]


def atomic(st: State, s: Scope) -> Nodes | None:
    """Atomics of elements in a loop, or of a tile; onto tensors and shared buffers that only atomics touch meanwhile."""
    good = [b for b in s.buffers if b.atomic]
    shared = [b for b in writable(s, "shared") if b.room is not None and b.dtype in ("int32", "float32", "int64", "float16")]
    if shared and st.chance(0.55):
        return _atomic_shared(st, s, st.pick(shared))
    if not good:
        return None
    dst = st.pick(good)
    op = dst.atomic
    everywhere = st.blocks * s.times
    if st.chance(0.45):
        tiles = [b for b in s.buffers if b.scope in ("fragment", "shared") and len(b.shape) == len(dst.shape)
                 and b.dtype != "bool" and (op != "add" or b.bound * everywhere <= (dst.room or 0))
                 and -EXACT[dst.dtype] <= b.low and b.high <= dst.high and (b.low >= dst.low)]
        if tiles:
            src = st.pick(tiles)
            if op == "add":
                dst.room -= src.bound * everywhere
            base = []
            for extent in dst.shape:
                u = st.uniform_index(s, max(1, extent))
                base.append(u)
            whole = all(a <= b for a, b in zip(src.shape, dst.shape)) and st.chance(0.3)
            target = f"{dst.name}[{', '.join(base)}]" if not whole else \
                f"{dst.name}[{', '.join(f'0:{st.dim(n)}' for n in src.shape)}]"
            return [node(f"T.atomic_{op}({target}, {src.name})", None, None, f"atomic:tile-{op}:{dst.dtype}")]
    n = st.pick([4, 8, 16, 30, 32, 64, 100])
    vars = [(st.fresh("i"), n)]
    if st.chance(0.4):
        vars.append((st.fresh("i"), st.between(2, 6)))
    points = n * (vars[1][1] if len(vars) > 1 else 1)
    p = Point(st, s, vars, readable(s))
    v = p.fit(p.value(2), -7 if dst.low < 0 else 0, 7)
    if op == "add":
        if points * v.bound * everywhere > (dst.room or 0):
            return None
        dst.room -= points * v.bound * everywhere
    elif not (dst.low <= v.low and v.high <= dst.high):
        return None
    idx = [p.index(k) for k in dst.shape]
    if st.chance(0.15):
        idx[0] = f"{vars[0][0]} + {st.between(0, dst.shape[0])}"  # some outside: those are skipped
    order = st.pick(["", "", "", ", memory_order='relaxed'", ", memory_order='acq_rel'"])
    stmt = node(f"T.atomic_{op}({dst.name}[{', '.join(idx)}], {v.text}{order})", None, None, f"atomic:{op}:{dst.dtype}")
    body = [*_taken(p), stmt]
    if st.chance(0.3):
        cond = p.condition()
        body = [*_taken(p), node(f"if {cond}:", body)]
    line, features = header(st, vars)
    return [node(line, body, None, *features, *sorted(p.features))]


def _atomic_shared(st: State, s: Scope, dst: Buf) -> Nodes | None:
    n = st.pick([8, 32, 50, 64, 128])
    vars = [(st.fresh("i"), n)]
    p = Point(st, s, vars, [b for b in readable(s) if b.root is not dst.root])
    v = p.fit(p.value(1), -3, 3)
    op = st.pick(["add", "max", "min"]) if dst.dtype in ("int32", "int64", "float32") else "add"
    if op == "add":
        if n * v.bound * s.times > (dst.room or 0):
            return None
        dst.room -= n * v.bound * s.times
    idx = [p.index(k) for k in dst.shape]
    line, features = header(st, vars)
    return [node(line, [*_taken(p), node(f"T.atomic_{op}({dst.at(idx)}, {v.text})", None, None,
                                         f"atomic:shared-{op}:{dst.dtype}")], None, *features)]


def per_thread(st: State, s: Scope) -> Nodes | None:
    """Code that names the thread: strided stores to shared memory, private arrays, vectors, conditions on the thread."""
    kind = st.pick(["stride", "guard", "private", "private", "split", "shuffle"])
    threads = st.threads
    shared = [b for b in writable(s, "shared") if len(b.shape) == 1 or b.size >= 1]
    reads = readable(s, private=True)
    if kind == "private" or kind == "shuffle":
        local = [b for b in s.buffers if b.scope == "local"]
        if not local:
            local = [new_local(st, s)]
        dst = st.pick(local)
        n = dst.shape[0]
        if kind == "shuffle":
            if threads % 32 or dst.dtype not in ("int32", "float32") or n < 2:
                return None
            a, b = st.rng.sample(range(n), 2)
            x = f"{dst.name}[{b}]"
            call = st.pick([f"T.shfl_xor({x}, {st.pick([1, 2, 8, 16])})", f"T.shfl_down({x}, {st.pick([1, 3])})",
                            f"T.shfl_up({x}, 2)", f"T.shfl_sync({x}, {st.between(0, 31)})", f"T.warp_reduce_max({x})",
                            f"T.warp_reduce_min({x})"])
            return [node(f"{dst.name}[{a}] = {call}", None, None, "thread:shuffle")]
        v = st.fresh("r")
        p = Point(st, s, [("tx", threads), (v, n)], [b for b in reads if b.scope != "global" or not b.base])
        p.reads = [b for b in p.reads if b.root is not dst.root]
        text = f"{dst.name}[{v}] = {p.store(dst, 2)}"
        loop = st.pick(["T.serial", "T.unroll", "T.vectorized", "range"])
        return [node(f"for {v} in {loop}({n}):", [*_taken(p), node(text)], None, f"thread:{loop}", *sorted(p.features))]
    if not shared:
        return None
    dst = st.pick(shared)
    p = Point(st, s, [("tx", threads)], [b for b in reads if b.root is not dst.root and not b.base])
    if st.chance(0.3):
        p.vars.append(st.pick([("T.get_lane_idx()", 32), ("T.get_warp_idx()", -(-threads // 32)),
                               ("T.get_warp_group_idx()", -(-threads // 128))]))
        p.features.add("thread:lane")
    n = dst.shape[-1]
    lead = [st.uniform_index(s, k) for k in dst.shape[:-1]]
    if kind == "stride":
        r = st.fresh("r")
        at = f"{r} * {threads} + tx"
        p.vars.append((r, -(-n // threads)))
        value = p.store(dst, 2)
        body = [*_taken(p), node(f"{dst.at([*lead, at])} = {value}")]
        if n % threads:
            body = [node(f"if {at} < {n}:", body)]
        return [node(f"for {r} in T.serial({-(-n // threads)}):", body, None, "thread:stride", *sorted(p.features))]
    count = min(n, threads)
    first = st.between(0, max(0, threads - count))
    index = "tx" if first == 0 else f"tx - {first}"
    cond = f"tx < {count}" if first == 0 else f"tx >= {first} and tx < {first + count}"
    value = p.store(dst, 2)
    out = [node(f"if {cond}:", [*_taken(p), node(f"{dst.at([*lead, index])} = {value}")], None, "thread:guard",
                *sorted(p.features))]
    if kind == "split":
        if not any(b.scope == "local" for b in s.buffers):
            new_local(st, s)
        local = [b for b in s.buffers if b.scope == "local" and b.low <= dst.low and dst.high <= b.high
                 and (dst.dtype in INTS or is_float(b.dtype) or BITS[b.dtype] >= 16)]
        if local:
            to = st.pick(local)
            mirrored = dst.at([*lead, f"({n - 1} - ({index})) % {n}"])
            out[0]["b"].append(node(f"{to.name}[{st.between(0, to.shape[0] - 1)}] = {mirrored}"))
            out[0]["f"].append("thread:barrier-in-if")
    return out


def new_local(st: State, s: Scope, dt: str | None = None, n: int | None = None) -> Buf:
    """A private array of the whole kernel, set at its start."""
    n = n or st.pick([2, 4, 4, 8])
    b, alloc = st.allocate("local", (n,), dt or st.pick(["int32", "float32", "float16"]), bound=None)
    st.allocs.append(alloc)
    r = st.fresh("r")
    st.prologue.append(node(f"for {r} in T.serial({n}):", [node(f"{b.name}[{r}] = (tx + {r}) % {min(b.bound, 5) + 1}")]))
    s.buffers.append(b)
    st.top.append(b)
    return b
