"""Control: loops of every kind, branches, scalars, and the choice of the next statement."""

from __future__ import annotations

from gen_extra import EXTRA, EXTRA_WEIGHTS
from gen_lanes import LANE_WEIGHTS, LANES
from gen_more import MORE, WEIGHTS
from gen_parallel import Nodes, atomic, inner_sum, parallel, per_thread, spread_sum
from gen_regions import REGION_WEIGHTS, REGIONS
from gen_state import Scope, State, counter, node
from gen_tile_ops import gemm, reducer, reduction, scan, transpose, view
from gen_tiles import copy, fill, find_input, new_buffer, operand
from gen_values import integer

MAX_TIMES = 24
MAX_DEPTH = 3


def condition(st: State, s: Scope) -> str:
    """A condition every thread of the block answers alike."""
    known = [v for v in s.uniform]
    inputs = [b for b in s.buffers if b.scope == "global" and not b.base and b.readable
              and not b.dtype.startswith(("float8", "u"))]
    if inputs and (not known or st.chance(0.5)):
        b = st.pick(inputs)
        return f"{b.name}[{', '.join(st.uniform_index(s, n) for n in b.shape)}] {st.pick(['>', '<', '=='])} {st.between(-1, 1)}"
    if not known:
        return "bx == 0"
    v = st.pick(known)
    c = st.between(v.low, v.high)
    form = st.between(0, 5)
    if form == 0:
        return f"{v.text} % 2 == {st.between(0, 1)}"
    if form == 1 and len(known) > 1:
        w = st.pick(known)
        return f"{v.text} {st.pick(['<', '<=', '==', '!='])} {w.text}"
    if form == 2:
        return f"{v.text} > {c} {st.pick(['and', 'or'])} not ({st.pick(known).text} == {c})"
    return f"{v.text} {st.pick(['<', '<=', '>', '>=', '==', '!='])} {c}"


def block(st: State, s: Scope, count: int) -> Nodes:
    """About `count` statements."""
    out: Nodes = []
    tries = 0
    while len(out) < count and tries < 8 * count + 8:
        tries += 1
        names, weights = zip(*_weights(st, s))
        before = [(x, len(x)) for x in (s.buffers, s.uniform)]
        made = STATEMENTS[st.rng.choices(names, weights)[0]](st, s)
        if made:
            out += made
        else:  # buffers it would have allocated here do not exist
            for x, n in before:
                _forget(st, x, n)
    if not out:
        out = fill(st, s) or [node("pass")]
    return out


def _forget(st: State, items: list, n: int) -> None:
    """Take back what was named after the first n, but not what lives in the whole kernel."""
    items[n:] = [x for x in items[n:] if x in st.top or x in st.inputs or x in st.mutable]


def _weights(st: State, s: Scope) -> list[tuple[str, float]]:
    w = {"parallel": 5.0, "copy": 4.0, "fill": 1.0, "gemm": 1.8, "reduce": 1.6, "scan": 0.9, "atomic": 1.5, "inner": 1.0,
         "spread": 0.4, "thread": 1.7, "view": 1.0, "transpose": 0.5, "reducer": 1.2, "let": 0.5, "assign": 0.7, "serial": 1.2,
         "pipelined": 1.3, "branch": 1.0, "while": 0.5, "grid": 0.3, "macro": 0.5, "leave": 0.0, "alloc": 0.3, "ordered": 0.4,
         "swap": 0.5, **WEIGHTS, **EXTRA_WEIGHTS, **LANE_WEIGHTS, **REGION_WEIGHTS}
    w.update(st.profile.weights)
    if s.in_loop and not s.pipelined:
        w["leave"] = 5.0
    if any(b.atomic for b in s.buffers):
        w["atomic"] = 4.0
    if s.depth >= MAX_DEPTH:
        for k in ("serial", "pipelined", "while", "grid", "ordered", "macro"):
            w[k] = 0.0
        if s.depth > MAX_DEPTH:
            w["branch"] = 0.0
    if s.pipelined:
        for k in ("pipelined", "ordered", "while"):
            w[k] *= 0.15
        w["copy"] *= 1.5
    return list(w.items())


def serial(st: State, s: Scope) -> Nodes | None:
    """A serial or unrolled loop: plain, stepped, backwards, with a run-time bound, or of no iteration."""
    k = st.fresh("k")
    kind = st.pick(["T.serial", "range", "range", "T.unroll", "T.Serial"])
    form = st.between(0, 5)
    n = st.between(1, 4)
    known = [v for v in s.uniform if v.low >= 0 and v.high <= 4]
    tag = ""
    if form == 0:
        step, tag = st.between(2, 3), "step"
        text, var = f"{kind}(0, {n * step - st.between(0, step - 1)}, {step})", counter(k, n * step)
    elif form == 1:
        first, tag = st.between(1, 3), "start"
        text, var = f"{kind}({first}, {first + n})", counter(k, n, first)
    elif form == 2 and kind == "range":
        text, var, tag = f"range({n - 1}, -1, -1)", counter(k, n), "down"
    elif form == 3 and known and kind != "T.unroll":
        v = st.pick(known)
        n, tag = v.high + 1, "runtime"
        text, var = f"{kind}({v.text} + {st.between(0, 1)})", counter(k, n)
    elif form == 4 and st.symbols and kind != "T.unroll":
        m = st.pick(st.symbols)
        n = -(-st.symbols[m] // 8)
        text, var, tag = f"{kind}(T.ceildiv({m}, 8))", counter(k, n), "symbol"
    else:
        text, var = f"{kind}({n})", counter(k, n)
        if kind == "T.unroll" and st.chance(0.4):
            text, tag = f"T.unroll({n}, {st.pick(['explicit=True', 'unroll_factor=2'])})", "unroll-option"
    if n * s.times > MAX_TIMES:
        return None
    inner = s.inner(max(1, n), in_loop=kind != "T.unroll", uniform=[var])
    return [node(f"for {k} in {text}:", block(st, inner, st.between(1, 4)), None, f"loop:{kind}",
                 *([f"loop:{tag}"] if tag else []))]


def grid(st: State, s: Scope) -> Nodes | None:
    a, b = st.between(1, 3), st.between(1, 3)
    if a * b * s.times > MAX_TIMES:
        return None
    x, y = st.fresh("k"), st.fresh("k")
    inner = s.inner(a * b, in_loop=False, uniform=[counter(x, a), counter(y, b)])
    return [node(f"for {x}, {y} in T.grid({a}, {b}):", block(st, inner, st.between(1, 3)), None, "loop:T.grid")]


def while_loop(st: State, s: Scope) -> Nodes | None:
    """A while loop on a counter of its own."""
    n = st.between(1, 4)
    if n * s.times > MAX_TIMES:
        return None
    w = st.fresh("w")
    st.allocs.append(node(f"{w} = T.alloc_var('int32')"))
    inner = s.inner(n, in_loop=False, uniform=[integer(w, 0, n)])
    step = st.between(1, 2)
    body = block(st, inner, st.between(1, 3))
    if st.chance(0.3):
        body.append(node(f"if {condition(st, inner)}:", [node("break")], None, "loop:while-break"))
    return [node(f"{w} = 0"), node(f"while {w} < {n}:", [*body, node(f"{w} = {w} + {step}")], None, "loop:while")]


def pipelined(st: State, s: Scope) -> Nodes | None:
    """A pipelined loop over statements of any kind; tiles are mostly filled from global memory by the loop's variable."""
    k = st.fresh("k")
    n = st.pick([0, 1, 2, 3, 3, 4, 5, 6])
    if n * s.times > MAX_TIMES:
        return None
    known = [v for v in s.uniform if v.low >= 0 and v.high <= 4]
    text, count = str(n), n
    if known and st.chance(0.2):
        v = st.pick(known)
        text, count = v.text if st.chance(0.5) else f"{v.text} + 1", v.high + 1
    stages = st.pick([0, 1, 2, 2, 3, 3, 4])
    inner = s.inner(max(1, count), in_loop=True, pipelined=True, uniform=[counter(k, max(1, count))])
    body: Nodes = []
    if st.chance(0.7):
        for _ in range(st.between(1, 2)):
            got = _produced(st, inner)
            if got:
                body += got
    body += block(st, inner, st.between(1, 4))
    first = f"{st.between(0, 2)}, {int(text) + 2}" if st.chance(0.08) and text.isdigit() else text
    if first is not text:
        inner.uniform[-1] = inner.uniform[-1]
    return [node(f"for {k} in T.Pipelined({text}, num_stages={stages}):", body, None, "loop:T.Pipelined", f"stages:{stages}",
                 *(["loop:pipelined-runtime"] if not text.isdigit() else []))]


def _produced(st: State, s: Scope) -> Nodes | None:
    dt = st.pick(st.profile.dtypes)
    got = operand(st, s, "shared", (st.extent(), st.extent()), dt, 31)
    return got[1] if got else None


def ordered(st: State, s: Scope) -> Nodes | None:
    """A pipelined loop with the user's order and stages: producers first, consumers later."""
    k = st.fresh("k")
    n = st.between(1, 5)
    if n * s.times > MAX_TIMES:
        return None
    inner = s.inner(n, in_loop=False, pipelined=True, uniform=[counter(k, n)])
    producers: Nodes = []
    filled = []
    for _ in range(st.between(1, 2)):
        shape, dt = (st.extent(), st.extent()), st.pick(st.profile.dtypes)
        live = [b for b in s.buffers if b.scope == "shared" and b.writable and b.room is None and b.root is b
                and len(b.shape) == 2]
        if live and st.chance(0.4):
            b = st.pick(live)
        else:
            got = new_buffer(st, inner, "shared", shape, dt)
            if got is None:
                continue
            b = got[0]
        if b in filled:
            continue
        done = None
        for _ in range(4):
            done = copy(st, inner, b, find_input(st, inner, b))
            if done:
                break
        if done and len(done) == 1:
            filled.append(b)
            producers += done
    if not producers:
        return None
    # what the loop copies is read only: other statements must not be its producers
    for b in filled:
        b.writable = False
    consumers: Nodes = []
    tries = 0
    while len(consumers) < st.between(1, 3) and tries < 12:
        tries += 1
        before = [(x, len(x)) for x in (inner.buffers, inner.uniform)]
        made = st.pick([parallel, parallel, gemm, reduction])(st, inner)
        if made is None or len(made) > 1:
            for x, count in before:
                _forget(st, x, count)
        elif any(b.name in str(made) for b in filled):
            consumers += made
    for b in filled:
        b.writable = True
    if not consumers:
        return None
    p, q = len(producers), len(consumers)
    last = st.between(1, 3)
    stage = [0] * p + [last] * q
    order = list(range(p + q))
    if st.chance(0.5):
        order = [q + i for i in range(p)] + list(range(q))
    text, tags = f"T.Pipelined({n}, order={order}, stage={stage})", ["loop:ordered", f"stages:user{last}"]
    roll = st.rng.random()
    if roll < 0.2:
        text = f"T.Pipelined({n}, order={order}, stage={stage}, group={[list(range(p)), list(range(p, p + q))]})"
        tags.append("loop:ordered-group")
    elif roll < 0.35:
        marks = f"{{'software_pipeline_stage': {stage}, 'software_pipeline_order': {order}}}"
        text = f"T.serial({n}, annotations={marks})"
        tags.append("loop:ordered-annotations")
    elif roll < 0.5:
        text = f"T.Pipelined({n}, num_stages={st.between(1, 3)}, order={order}, stage={stage})"
    return [node(f"for {k} in {text}:", producers + consumers, None, *tags)]


def branch(st: State, s: Scope) -> Nodes | None:
    """A branch the whole block takes, with else, elif, or a test known when the program is written."""
    cond = condition(st, s)
    then = block(st, s.inner(1), st.between(1, 3))
    orelse = block(st, s.inner(1), st.between(1, 2)) if st.chance(0.4) else None
    if orelse and st.chance(0.3):
        orelse = [node(f"if {condition(st, s)}:", orelse, block(st, s.inner(1), 1))]
    features = ["branch"] + (["branch:else"] if orelse else [])
    if "[" in cond:
        features.append("branch:loaded")
    return [node(f"if {cond}:", then, orelse, *features)]


def leave(st: State, s: Scope) -> Nodes | None:
    """break or continue of the innermost loop under a condition of the block."""
    word = st.pick(["break", "continue", "T.loop_break()"])
    return [node(f"if {condition(st, s)}:", [node(word)], None, f"loop:{word.strip('()')}")]


def let(st: State, s: Scope) -> Nodes | None:
    """A name for a scalar, immutable."""
    known = [v for v in s.uniform if v.low >= 0]
    if not known:
        return None
    a, b = st.pick(known), st.pick(known)
    name = st.fresh("u")
    c = st.between(0, 3)
    if st.chance(0.5):
        v = integer(name, c, a.high + b.high + c)
        text = f"{a.text} + {b.text} + {c}"
    else:
        n = st.between(2, 6)
        v = integer(name, 0, n - 1)
        text = f"({a.text} * {c + 1} + {b.text}) % {n}"
    s.uniform.append(v)
    return [node(f"{name} = {text}", None, None, "scalar:let")]


def assign(st: State, s: Scope) -> Nodes | None:
    """A step of a mutable scalar."""
    if not st.mutable or st.chance(0.15):
        st.scalar(s)
    v = st.pick(st.mutable)
    if v not in s.uniform:
        s.uniform.append(v)
    known = [u for u in s.uniform if u.low >= 0]
    u = st.pick(known)
    roll = st.rng.random()
    if roll < 0.6:
        text = f"{v.text} = ({v.text} * {st.between(1, 3)} + {u.text} + {st.between(0, 2)}) % {v.high + 1}"
    elif roll < 0.8:
        text = f"{v.text} = T.min({u.text}, {v.high})"
    else:
        inputs = [b for b in s.buffers if b.scope == "global" and not b.base and b.readable
                  and b.dtype in ("int32", "int8", "int16")]
        if not inputs:
            return None
        b = st.pick(inputs)
        idx = [st.uniform_index(s, n) for n in b.shape]
        text = f"{v.text} = T.cast({b.name}[{', '.join(idx)}], 'int32') % {v.high + 1}"
    return [node(text, None, None, "scalar:assign")]


def swap(st: State, s: Scope) -> Nodes | None:
    """Two scalars change places."""
    if not st.mutable:
        return None
    a = st.pick(st.mutable)
    good = [b for b in st.mutable if b is not a and b.high == a.high]
    b = st.pick(good) if good else st.scalar(s, a.high)
    return [node(f"{a.text}, {b.text} = {b.text}, {a.text}", None, None, "scalar:swap")]


def macro(st: State, s: Scope) -> Nodes | None:
    """Statements moved into a macro: the text writer makes its parameters, T.Ref for scalars it assigns."""
    inner = s.inner(1, in_loop=False)
    body = [n for n in block(st, inner, st.between(1, 3)) if n["t"] != "pass"]
    return [node("#macro", body, None, "macro")] if body else None


def alloc(st: State, s: Scope) -> Nodes | None:
    """A buffer that lives in this block only."""
    if not s.depth:
        return None
    got = operand(st, s, st.pick(["shared", "fragment"]), (st.extent(), st.extent()) if st.chance(0.7) else (st.extent(),),
                  st.pick(st.profile.dtypes), 31)
    return got[1] if got and got[1] else None


STATEMENTS = {"parallel": parallel, "copy": copy, "fill": fill, "gemm": gemm, "reduce": reduction, "scan": scan,
              "atomic": atomic, "inner": inner_sum, "spread": spread_sum, "thread": per_thread, "view": view,
              "transpose": transpose, "reducer": reducer, "let": let, "assign": assign, "serial": serial,
              "pipelined": pipelined, "branch": branch, "while": while_loop, "grid": grid, "macro": macro, "leave": leave,
              "alloc": alloc, "ordered": ordered, "swap": swap, **MORE, **EXTRA, **LANES,
              **REGIONS}
