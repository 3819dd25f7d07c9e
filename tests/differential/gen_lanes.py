"""Statements of single threads and of parts of a warp: lanes under masks, words of memory, sorting, sums of bytes."""

from __future__ import annotations

from gen_expr import Point
from gen_parallel import Nodes, new_local, writable
from gen_state import Buf, Scope, State, node
from gen_tiles import new_buffer
from gen_values import Value

# How a warp is parted: the condition, the mask where it holds, the mask where not, distances that stay on one side.
PARTS = {"low": ("tx % 32 < 8", "0xFF", "0xFFFFFF00", (1, 2, 4), 8),
         "half": ("tx % 32 < 16", "0xFFFF", "0xFFFF0000", (1, 4, 8), 16),
         "even": ("tx % 2 == 0", "0x55555555", "0xAAAAAAAA", (2, 4, 8, 16), 32)}


def _private(st: State, s: Scope, dt: str = "int32", n: int | None = None) -> Buf:
    local = [b for b in s.buffers if b.scope == "local" and b.dtype == dt and (n is None or b.shape[0] == n)]
    return st.pick(local) if local else new_local(st, s, dt, n)


def masked(st: State, s: Scope) -> Nodes | None:
    """Votes and shuffles of some lanes of a warp, which name themselves in a mask; the others do likewise, or nothing."""
    if st.threads % 32:
        return None
    b = _private(st, s)
    if st.chance(0.25):
        return _balloted(st, b)
    kind = st.pick(list(PARTS))
    cond, yes, no, steps, width = PARTS[kind]
    sides = [[_of_lanes(st, b, mask, steps, width, kind, mask == no) for _ in range(st.between(1, 2))] for mask in (yes, no)]
    if st.chance(0.25):
        one = f"T.if_then_else({cond}, T.uint32({yes}), T.uint32({no}))"
        lane = st.fresh("m")
        return [node(f"{lane} = {one}"), _vote(st, b, lane, "chosen")]
    return [node(f"if {cond}:", sides[0], sides[1] if st.chance(0.6) else None, f"mask:lanes-{kind}")]


def _at(st: State, b: Buf) -> str:
    return f"{b.name}[{st.between(0, b.shape[0] - 1)}]"


def _vote(st: State, b: Buf, mask: str, kind: str) -> dict:
    """One vote of the lanes of a mask, or which of them have the same value."""
    form = st.pick(["any", "all", "ballot", "match_any", "match_all"])
    x, c, m = _at(st, b), st.between(-1, 2), min(b.high, 7) + 1
    if form in ("any", "all"):
        text = f"T.{form}_sync({x} > {c}, {mask})"
    elif form == "ballot":
        text = f"T.cast(T.ballot_sync({x} > {c}, {mask}) % {m}, 'int32')"
    else:
        text = f"T.cast(T.{form}_sync({x}, {mask}) % T.uint32({m}), 'int32')"
    return node(f"{_at(st, b)} = {text}", None, None, f"mask:{form}", f"mask:lanes-{kind}")


def _of_lanes(st: State, b: Buf, mask: str, steps: tuple[int, ...], width: int, kind: str, rest: bool) -> dict:
    """One vote or shuffle among the lanes of one side."""
    if st.chance(0.5):
        return _vote(st, b, mask, kind)
    form, x, d = st.pick(["xor", "up", "down", "sync"]), _at(st, b), st.pick(steps)
    if form == "sync":
        lane = {"even": 2 * st.between(0, 15) + rest, "half": st.between(0, 15) + 16 * rest}.get(
            kind, st.between(8, 31) if rest else st.between(0, 7))
        text = f"T.shfl_sync({x}, {lane}, mask={mask})"
    else:
        text = f"T.shfl_{form}({x}, {d}, width={width}, mask={mask})" if width < 32 else f"T.shfl_{form}({x}, {d}, mask={mask})"
    return node(f"{_at(st, b)} = {text}", None, None, f"mask:shfl-{form}")


def _balloted(st: State, b: Buf) -> Nodes:
    """Lanes that a vote found act under what it found."""
    lane, cond = st.fresh("m"), f"{_at(st, b)} > {st.between(-1, 2)}"
    return [node(f"{lane} = T.cast(T.ballot({cond}), 'uint32')"),
            node(f"if {cond}:", [_vote(st, b, lane, "ballot")], None, "mask:lanes-ballot")]


def words(st: State, s: Scope) -> Nodes | None:
    """Words of 32, 64 and 128 bits: of shared memory or an input into private values, and back."""
    rows = {t["name"]: t for t in st.tensors}
    good = [b for b in s.buffers if b.dtype in ("int32", "float32") and b.readable and not b.base and not b.atomic and (
        b.scope == "shared" and b.root is b or b.scope == "global" and b in st.inputs and "strides" not in rows[b.name]
        and not rows[b.name].get("pointer") and all(d.isdigit() for d in b.dims))]
    if not good:
        return None
    wanted = st.pick(["global", "shared"])
    b = st.pick([x for x in good if x.scope == wanted] or good)
    n = b.shape[-1]
    wide = st.pick([w for w in (1, 2, 4) if n % w == 0])
    lead = [st.uniform_index(s, e) for e in b.shape[:-1]]
    at = b.at([*lead, f"tx % {n // wide} * {wide}" if n > wide else "0"])
    name = "lds" if b.scope == "shared" else "ldg"
    if b.scope == "shared" and st.chance(0.6):
        dsts = [x for x in writable(s, "shared") if x.root is x and x is not b and x.dtype == b.dtype and x.low <= b.low
                and b.high <= x.high and x.shape[-1] % wide == 0]
        if dsts:
            to = st.pick(dsts)
            k = to.shape[-1] // wide
            spot = to.at([*[st.uniform_index(s, e) for e in to.shape[:-1]], f"tx * {wide}"])
            text = f"T.sts{32 * wide}({spot}, T.lds{32 * wide}({at}))"
            return [node(f"if tx < {k}:", [node(text)], None, f"words:sts{32 * wide}", "words:sts")]
    to = _private(st, s, b.dtype)
    w = st.fresh("w")
    x = w if wide == 1 else f"T.extract_lane({w}, {st.between(0, wide - 1)})"
    p = Point(st, s, [], [])
    v = p.fit(Value(f"T.reinterpret({x}, '{b.dtype}')", b.dtype, b.low, b.high), to.low, to.high)
    return [node(f"{w} = T.{name}{32 * wide}({at})", None, None, f"words:{name}{32 * wide}", f"words:{name}"), *p.pre,
            node(f"{_at(st, to)} = {v.text}")]


def sort_private(st: State, s: Scope) -> Nodes | None:
    """Each thread sorts its private array: a while loop that neighbours leave after different numbers of turns."""
    if s.pipelined:
        return None
    b = _private(st, s, st.pick(["int32", "float32", "float16"]))
    w, r = st.fresh("w"), st.fresh("r")
    st.allocs.append(node(f"{w} = T.alloc_var('int32')", None, None, "alloc:var"))
    x, y = f"{b.name}[{w} - 1]", f"{b.name}[{w}]"
    before = st.pick(["<=", "<=", ">="])
    swapped = [node(f"{x}, {y} = {y}, {x}"), node(f"{w} = {w} - 1")]
    if st.chance(0.5):
        loop = node(f"while {w} > 0:", [node(f"if {x} {before} {y}:", [node("break")]), *swapped])
        form = "break"
    else:
        loop = node(f"while {w} > 0 and {b.name}[T.max({w} - 1, 0)] {'>' if before == '<=' else '<'} {y}:", swapped)
        form = "condition"
    return [node(f"for {r} in T.serial(1, {b.shape[0]}):", [node(f"{w} = {r}"), loop], None, f"sort:private-{form}")]


def sort_shared(st: State, s: Scope) -> Nodes | None:
    """The block sorts a row by exchanging neighbours, until nothing moves."""
    if s.pipelined or s.times > 4:
        return None
    good = [b for b in writable(s, "shared") if b.root is b and len(b.shape) == 1 and 2 <= b.shape[0] <= 33]
    if not good:
        made = new_buffer(st, s, "shared", (st.pick([6, 9, 16]),), st.pick(["int32", "float32", "float16"]))
        if made is None:
            return None
        good = [made[0]]
    b = st.pick(good)
    n, w, i = b.shape[0], st.fresh("w"), st.fresh("i")
    st.allocs.append(node(f"{w} = T.alloc_var('int32')", None, None, "alloc:var"))
    first = f"{i} * 2 + {w} % 2"
    x, y = f"{b.name}[{first}]", f"{b.name}[{first} + 1]"
    turn = node(f"for {i} in T.Parallel({n // 2}):", [node(f"if {first} + 1 < {n}:", [
        node(f"if {x} > {y}:", [node(f"{x}, {y} = {y}, {x}")])])])
    step = node(f"{w} = {w} + 1")
    if st.chance(0.5):
        return [node(f"{w} = 0"), node(f"while {w} < {n}:", [turn, step], None, "sort:shared")]
    name, j = st.fresh("B"), st.fresh("i")
    st.allocs.append(node(f"{name} = T.alloc_shared(({n - 1},), 'bool')", None, None, "alloc:shared:bool"))
    asked = node(f"for {j} in T.Parallel({n - 1}):", [node(f"{name}[{j}] = {b.name}[{j}] <= {b.name}[{j} + 1]")])
    leave = node(f"if T.all_of({name}):", [node("break")])
    return [node(f"{w} = 0"), node(f"while {w} < {n}:", [asked, leave, turn, step], None, "sort:shared-break")]


def bytes_summed(st: State, s: Scope) -> Nodes | None:
    """T.dp4a: four products of bytes into a private sum."""
    a, b, to = _private(st, s, "int8", 4), _private(st, s, "int8", 4), _private(st, s, "int32")
    m = min(to.high, 15) + 1
    return [node(f"T.dp4a({a.name}, {b.name}, {to.name})", None, None, "dp4a"),
            node(f"{to.name}[0] = {to.name}[0] % {m}")]


LANES = {"masked": masked, "words": words, "sort_private": sort_private, "sort_shared": sort_shared,
         "bytes_summed": bytes_summed}
LANE_WEIGHTS = {"masked": 0.9, "words": 2.2, "sort_private": 0.35, "sort_shared": 0.3, "bytes_summed": 0.25}
