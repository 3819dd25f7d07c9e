"""Tiles and what fills them: copies, fills, inputs, new buffers."""

from __future__ import annotations

from gen_parallel import Nodes, parallel, writable
from gen_state import Buf, Scope, State, node
from gen_values import BITS, BOUNDS, is_unsigned


def holds(dst: Buf, src: Buf) -> bool:
    """Whether a copy from src to dst keeps every value."""
    return dst.low <= src.low and src.high <= dst.high


def region(b: Buf, start: list[str], extents: list[int], st: State, base: bool = False) -> str:
    """The operand's text: whole buffer, element base, or slices."""
    if b.base is None and list(b.shape) == extents and all(x == "0" for x in start) and not base and (
            b.scope != "global" or not any(d.startswith("M") for d in b.dims)):
        return b.name
    if b.base:
        start = [p if x == "0" else x if p == "0" else f"{p} + {x}" for p, x in zip(b.base, start)]
    if base:
        return f"{b.name}[{', '.join(start)}]"
    parts = []
    for x, e in zip(start, extents):
        n, fixed = b.shape[len(parts)], not b.base and not b.dims[len(parts)].startswith("M")
        if e == 1 and st.chance(0.8):
            # A constant index below zero counts from the end, of an extent of run time too.
            parts.append(str(int(x) - n) if x.isdigit() and int(x) < n and not b.base and st.chance(0.25) else x)
        elif x == "0" and fixed and st.chance(0.3):
            parts.append(":" if e == n else f":{e}")
        elif x.isdigit() and int(x) + e == n and fixed and st.chance(0.5):
            parts.append(f"{x}:")
        elif x.isdigit():
            parts.append(f"{x}:{int(x) + e}")
        else:
            parts.append(f"{x}:{x} + {e}")
    return f"{b.name}[{', '.join(parts)}]"


def _window(st: State, s: Scope, b: Buf, extents: tuple[int, ...]) -> tuple[list[str], list[int]] | None:
    """Starts and extents in b (units where b has more dimensions) of a window of these extents; None when none fits."""
    want = [e for e in extents if e != 1]
    tile = b.tile
    free = b.scope == "global" and not b.base  # inputs are guarded: the window may hang over
    spots: list[int] = []
    for d in range(len(tile)):
        left = len(want) - len(spots)
        if left and (free or tile[d] >= want[len(spots)]) and (len(tile) - d == left or st.chance(0.75)):
            spots.append(d)
    if len(spots) < len(want):
        return None
    start, ext = [], []
    for d, n in enumerate(tile):
        if d in spots:
            e = want[spots.index(d)]
            ext.append(e)
            known = [v for v in s.uniform if v.low >= 0]
            if free and known and st.chance(0.75):
                u = st.pick(known[-3:])
                start.append(f"{u.text} * {e}" if u.high * e < 4 * n + 8 else st.uniform_index(s, n))
            elif n > e and st.chance(0.5):
                start.append(st.uniform_index(s, n - e + 1) if not free else str(st.between(0, n - e)))
            else:
                start.append("0")
        else:
            ext.append(1)
            start.append(st.uniform_index(s, n))
    return start, ext


def copy(st: State, s: Scope, dst: Buf | None = None, src: Buf | None = None) -> Nodes | None:
    """T.copy between any two scopes, of a part or the whole, converting where the types differ."""
    if dst is None:
        good = writable(s, "shared", "shared", "fragment", "global")
        if not good:
            return None
        dst = st.pick(good)
    if src is None:
        good = [b for b in s.buffers if b.scope in ("global", "shared", "fragment") and b.readable and b.root is not dst.root
                and holds(dst, b)]
        if not good:
            return None
        same = [b for b in good if b.tile == dst.tile]
        src = st.pick(same if same and st.chance(0.6) else good)
    ext = list(dst.tile)
    if st.chance(0.25):
        ext = [st.between(1, e) if st.chance(0.5) else e for e in ext]
    if src.scope != "global" or src.base:
        # both sides finite: no larger than the source where ranks agree
        if len(src.tile) == len(ext):
            ext = [min(a, b) for a, b in zip(ext, src.tile)]
    to = _window(st, s, dst, tuple(ext))
    of = _window(st, s, src, tuple(ext))
    if to is None or of is None:
        return None
    if len([e for e in ext if e != 1]) == 0:
        return None
    base_src = base_dst = False
    roll = st.rng.random()
    n = len([e for e in ext if e != 1])
    if roll < 0.45 and src.scope == "global" and [e for e in of[1]][-n:] == to[1][-n:] and len(to[1]) <= len(of[1]) \
            and of[1][-len(to[1]):] == to[1]:
        base_src = True
    elif roll < 0.45 and dst.scope == "global" and len(of[1]) <= len(to[1]) and to[1][-len(of[1]):] == of[1]:
        base_dst = True
    a = region(src, of[0], of[1], st, base_src)
    b = region(dst, to[0], to[1], st, base_dst)
    if "[" not in a and "[" not in b and src.shape != dst.shape:  # whole buffers must have one shape, unit extents too
        a = f"{src.name}[{', '.join(f'0:{n}' for n in src.shape)}]"
    options = []
    if st.chance(0.06):
        options.append(f"coalesced_width={st.pick([1, 2, 4])}")
    if st.chance(0.06):
        options.append("disable_tma=True")
    if st.chance(0.05):
        options.append(f"prefer_instruction='{st.pick(['tma', 'cp_async', 'sync'])}'")
    if st.chance(0.03):
        options = ["annotations={'coalesced_width': 2}"]
    if st.chance(0.04):
        options.append(f"eviction_policy='{st.pick(['evict_normal', 'evict_first', 'evict_last'])}'")
    conv = "same" if src.dtype == dst.dtype else f"{src.dtype}->{dst.dtype}"
    tag = f"copy:{src.scope}->{dst.scope}"
    if src.dtype == dst.dtype and src.scope == "global" and not src.base and dst.scope == "shared" and st.chance(0.15) \
            and BITS[src.dtype] * ext[-1] % 32 == 0 and not s.pipelined:
        return [node(f"T.async_copy({a}, {b})", None, None, "copy:async"), node("T.ptx_wait_group(0)")]
    said = [("region:negative", "[-"), ("region:negative", ", -"), ("region:open", ":,"), ("region:open", ":]"),
            ("region:open", "[:"), ("region:open", ", :")]
    tags = (tag, f"{tag}:{conv}", *(f"copy-option:{o.split('=')[0]}" for o in options),
            *sorted({f for f, x in said if x in a or x in b}))
    return [node(f"T.copy({', '.join([a, b, *options])})", None, None, *tags)]


def fill(st: State, s: Scope) -> Nodes | None:
    """T.fill or T.clear of a buffer or a part of one."""
    good = writable(s, "shared", "fragment", "global")
    if not good:
        return None
    dst = st.pick(good)
    part = dst.base is not None or st.chance(0.25)
    if part:
        ext = [st.between(1, n) if st.chance(0.5) else n for n in dst.tile]
        at = _window(st, s, dst, tuple(ext))
        if at is None:
            return None
        text = region(dst, at[0], at[1], st)
    else:
        text = dst.name
    if st.chance(0.4):
        return [node(f"T.clear({text})", None, None, f"clear:{dst.scope}")]
    known = [v for v in s.uniform if v.low >= dst.low and v.high <= dst.high]
    value = st.pick(known).text if known and st.chance(0.4) else str(st.between(dst.low, dst.high) if dst.bound < 5000 else 3)
    return [node(f"T.fill({text}, {value})", None, None, f"fill:{dst.scope}" + (":part" if part else ""))]


# -- getting buffers

def new_input(st: State, s: Scope, shape: tuple[int, ...], dt: str, bound: int) -> Buf:
    """An input tensor in which windows of that shape lie, the last ones over its edge."""
    dims, nums = [], []
    for e in shape:
        n = e * st.pick([1, 1, 2, 3])
        if st.chance(0.45):
            n = max(1, n - st.between(1, max(1, e - 1)))
        if st.chance(0.2):
            m = st.fresh("M")
            st.symbols[m] = n
            dims.append(m)
        else:
            dims.append(str(n))
        nums.append(n)
    if st.chance(0.25):
        lead = st.between(1, 3)
        dims.insert(0, str(lead))
        nums.insert(0, lead)
    b = st.tensor(tuple(nums), tuple(dims), dt, bound, writable=False)
    if st.chance(0.05) and "strides" not in st.tensors[-1] and all(d.isdigit() for d in dims):
        st.tensors[-1]["pointer"] = True
    st.inputs.append(b)
    s.buffers.append(b)
    return b


def find_input(st: State, s: Scope, dst: Buf, dt: str | None = None) -> Buf:
    """An input that dst can be filled from."""
    dt = dt or dst.dtype
    rank = len([e for e in dst.shape if e != 1])
    good = [b for b in st.inputs if b.dtype == dt and holds(dst, b) and len(b.shape) >= rank]
    if good and st.chance(0.6):
        b = st.pick(good)
        if b not in s.buffers:
            s.buffers.append(b)
        return b
    allowed = [x for x in BOUNDS[dt] if x <= dst.bound] or [1]
    return new_input(st, s, dst.shape, dt, st.pick(allowed))


def refill(st: State, s: Scope, b: Buf) -> Nodes:
    """Statements that set the whole buffer anew, most often from global memory."""
    if st.chance(0.75):
        for _ in range(3):
            done = copy(st, s, b, find_input(st, s, b))
            if done and "coalesced" not in done[0]["t"]:
                return done
    done = parallel(st, s, b, whole=True) if b.scope != "local" else None
    if done:
        return done
    return [node(f"T.fill({b.name}, {st.between(0 if is_unsigned(b.dtype) else -1, 1)})", None, None, f"fill:{b.scope}")]


def start(st: State, s: Scope, b: Buf) -> Nodes:
    """Statements that set every element of a new buffer."""
    if b.room is not None:
        return [node(f"T.clear({b.name})", None, None, f"clear:{b.scope}")] if st.chance(0.8) else [
            node(f"T.fill({b.name}, {st.between(0, 5)})", None, None, f"fill:{b.scope}")]
    if st.chance(0.7):
        src = find_input(st, s, b)
        at = _window(st, s, src, b.shape)
        if at is not None and (src.shape == b.shape or list(src.shape) != at[1]):
            return [node(f"T.copy({region(src, at[0], at[1], st)}, {b.name})", None, None, f"copy:global->{b.scope}")]
    done = parallel(st, s, b, whole=True)
    if done:
        return done
    return [node(f"T.fill({b.name}, {st.between(0, 1)})", None, None, f"fill:{b.scope}")]


def new_buffer(st: State, s: Scope, scope: str, shape: tuple[int, ...], dt: str, *, bound: int | None = None,
               room: int | None = None, here: bool = False) -> tuple[Buf, Nodes] | None:
    """A new buffer, started at the kernel's beginning or here; None when the block has no space for it."""
    if not st.fits(scope, shape, dt):
        return None
    b, alloc = st.allocate(scope, shape, dt, bound=bound, room=room)
    if here and s.depth:
        nodes = [alloc, *start(st, s, b)]
        s.buffers.append(b)
        return b, nodes
    st.allocs.append(alloc)
    top = Scope([*st.inputs, *st.top], list(st.grid_values), [])
    st.prologue += start(st, top, b)
    st.top.append(b)
    s.buffers.append(b)
    return b, []


def operand(st: State, s: Scope, scope: str, shape: tuple[int, ...], dt: str, bound: int) -> tuple[Buf, Nodes] | None:
    """A live buffer of that shape with values no larger, or a new one; most often filled right here."""
    good = [b for b in s.buffers if b.scope == scope and b.shape == shape and b.dtype == dt and b.bound <= bound
            and b.room is None]
    if good and st.chance(0.6):
        b, nodes = st.pick(good), []
    else:
        made = new_buffer(st, s, scope, shape, dt, bound=max([x for x in BOUNDS[dt] if x <= bound], default=1),
                          here=st.chance(0.2))
        if made is None:
            return None
        b, nodes = made
    if b.writable and st.chance(0.6):
        nodes = nodes + refill(st, s, b)
    return b, nodes
