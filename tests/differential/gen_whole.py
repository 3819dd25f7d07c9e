"""Random whole-tensor programs: operations on values whose shapes are known as texts of named extents.

A program is plain data.  Extents are names (A, B, ...) with a number each, open sizes of a call where `dynamic` lists them, so
that a smaller number leaves the text as it is.  A statement is a line that makes one or more values.
"""

from __future__ import annotations

from collections.abc import Callable

from drawn_whole import (FLOATS, MOST_ELEMENTS, MOST_WORK, Drawn, Program, Value, binary, choose, compare, count, mask, normed,
                         power, reduce, softmax, tree, unary, widest)
from text_whole import tidy


def product(d: Drawn) -> None:
    """@, with an operand that is at hand, the tensor itself, or an input."""
    a = d.float(1)
    k = a.shape[-1]
    right = [v for v in d.values if v.floating and len(v.shape) == 2 and v.shape[0] == k]
    turned = [v for v in d.values if v.floating and len(v.shape) == 2 and v.shape[1] == k]
    r = d.rng.random()
    if right and r < 0.3:
        b = d.rng.choice(right)
        text, n = b.text, b.shape[1]
    elif turned and r < 0.6:
        b = d.rng.choice(turned)
        text, n = f"{b.text}.T", b.shape[0]
    else:
        n = d.dim()
        flip = d.rng.random() < 0.5
        b = d.input((n, k) if flip else (k, n))
        text = f"{b.text}.T" if flip else b.text
    shape = (*a.shape[:-1], n)
    if not d.fits(shape) or d.count((*shape, k)) > MOST_WORK:
        return
    after = d.rng.choice(("", "", " * 0.125", " + 1"))
    size = a.size * b.size * (d.extent(k) + 1) ** 0.5 * 2
    y = d.add("matmul", f"{d.small(a, 50)} @ {text}{after}", shape, widest(a.dtype, b.dtype), size)
    if d.rng.random() < 0.25:  # a second product
        n2 = d.dim()
        c = d.input((n, n2))
        if d.fits((*shape[:-1], n2)) and d.count((*shape, n2)) <= MOST_WORK:
            inner = d.rng.choice(
                (
                    f"T.relu({y.text})",
                    f"({y.text} * 0.1) ** 2" if y.size < 200 else f"T.tanh({y.text})",
                    y.text,
                    f"T.tanh({y.text}) * {y.text}",
                )
            )
            d.add("matmul:chain", f"({inner}) @ {c.text}", (*shape[:-1], n2), widest(y.dtype, c.dtype), size * 20)


def contraction(d: Drawn) -> None:
    """T.einsum of two or three operands with random letters."""
    a = d.float(1)
    letters: dict[str, str] = {}
    terms, texts, types = [], [], []
    names = iter("bcdefghijklm")

    def term(v: Value, share: bool) -> str | None:
        out: list[str] = []
        for s in v.shape:
            near = [c for c, t in letters.items() if t == s and c not in out]
            c = d.rng.choice(near) if near and (share or d.rng.random() < 0.8) else next(names)
            letters[c] = s
            out.append(c)
        return "".join(out)

    operands = [a]
    for _ in range(d.rng.choice((1, 1, 1, 2))):
        r = d.rng.random()
        same = [v for v in d.values if v.floating and set(v.shape) & set(a.shape) and v.size < 50]
        if r < 0.2:
            operands.append(d.rng.choice(operands))
        elif r < 0.5 and same:
            operands.append(d.rng.choice(same))
        else:
            shape = [s for s in a.shape if d.rng.random() < 0.7] or [a.shape[-1]]
            shape += [d.dim()] if d.rng.random() < 0.5 else []
            d.rng.shuffle(shape)
            operands.append(d.input(tuple(shape)))
    d.rng.shuffle(operands)
    for v in operands:
        terms.append(term(v, False))
        texts.append(d.small(v, 8))
        types.append(v.dtype)
    kept = [c for c in letters if d.rng.random() < 0.55]
    d.rng.shuffle(kept)
    shape = tuple(letters[c] for c in kept)
    if not d.fits(shape) or d.count(tuple(letters.values())) > MOST_WORK or len(kept) > 4 or len(letters) > 7:
        return
    n = d.count(tuple(s for c, s in letters.items() if c not in kept))
    same = " twice" if len(set(texts)) < len(texts) else ""
    d.add(
        f"einsum:{len(texts)}{same}",
        f'T.einsum("{",".join(terms)}->{"".join(kept)}", {", ".join(texts)})',
        shape,
        widest(*types),
        64.0 * (n + 1) ** 0.5,
    )


def shared(d: Drawn) -> None:
    """Scores, something of them, and products with it, alone and divided by a sum: what streams over an axis."""
    k, n, m, e = (d.dim() for _ in range(4))
    if len({k, n, m}) < 3 or d.count((n, m, k)) > MOST_WORK or not d.nonempty(m):
        return
    q, key, v = d.input((n, k)), d.input((m, k)), d.input((m, e))
    s = d.add(
        "stream:scores",
        f"{q.text} @ {key.text}.T * {d.rng.choice(('0.125', '0.5', '1.0'))}",
        (n, m),
        widest(q.dtype, key.dtype),
        8.0,
    )
    name, text = d.rng.choice(
        (
            ("softmax", f"T.softmax({s.text})"),
            ("square", f"(1 + {s.text} * 0.5) ** 2"),
            ("relu", f"T.relu({s.text}) ** 2"),
            ("sigmoid", f"T.sigmoid({s.text})"),
            ("capped", f"T.softmax(T.tanh({s.text} * 0.25) * 4)"),
            ("exp", f"T.exp({s.text} - {s.text}.max(-1, True))"),
            ("causal", f"T.softmax(T.where(T.iota({m}) <= T.iota({n})[:, None], {s.text}, -float('inf')))"),
            ("window", f"T.where(T.abs(T.iota({m}) - T.iota({n})[:, None]) < 9, T.exp({s.text} * 0.25), 0)"),
            ("twice", f"{s.text} * T.softmax({s.text})"),
            ("centred", f"{s.text} - {s.text}.mean(-1, True)"),
            ("unit", f"{s.text} / (T.abs({s.text}).sum(-1, True) + 0.1)"),
        )
    )
    w = d.add(f"stream:{name}", text, (n, m), s.dtype, 16.0)
    out = widest(w.dtype, v.dtype)
    d.add("stream:product", f"{w.text} @ {v.text}", (n, e), out, 64.0)
    r = d.rng.random()
    if r < 0.4:
        d.add(
            "stream:quotient",
            d.rng.choice(
                (
                    f"{w.text} @ {v.text} / ({w.text}.sum(-1, True) + 1)",
                    f"({w.text} * {w.text}) @ {v.text}",
                    f"({w.text} * {s.text}) @ {v.text}",
                )
            ),
            (n, e),
            out,
            99.0,
        )
    elif r < 0.55:
        d.add("stream:back", f"{w.text}.T @ T.tanh({q.text})", (m, k), widest(w.dtype, q.dtype), 64.0)


def moved(d: Drawn) -> None:
    v = d.pick(low=1)
    n = len(v.shape)
    kind = d.rng.choice(("transpose", "permute", "swapaxes", "unsqueeze", "flatten", "merge", "split", "broadcast"))
    if kind == "transpose":
        d.add("move:T", f"{v.text}.T", v.shape[::-1], v.dtype, v.size)
    elif kind == "permute":
        perm = list(range(n))
        d.rng.shuffle(perm)
        d.add(
            "move:transpose",
            f"{v.text}.transpose({', '.join(map(str, perm))})",
            tuple(v.shape[k] for k in perm),
            v.dtype,
            v.size,
        )
    elif kind == "swapaxes" and n > 1:
        shape = (*v.shape[:-2], v.shape[-1], v.shape[-2])
        d.add("move:swapaxes", f"T.swapaxes({v.text}, -1, -2)", shape, v.dtype, v.size)
    elif kind == "unsqueeze" and n < 4:
        at = d.rng.randrange(n + 1)
        d.add("move:unsqueeze", f"{v.text}.unsqueeze({at})", (*v.shape[:at], "1", *v.shape[at:]), v.dtype, v.size)
    elif kind == "flatten":
        d.add("move:flatten", f"{v.text}.reshape(-1)", (" * ".join(map(_factor, v.shape)),), v.dtype, v.size)
    elif kind == "merge" and n > 1:
        at = d.rng.randrange(n - 1)
        merged = f"{_factor(v.shape[at])} * {_factor(v.shape[at + 1])}"
        shape = (*v.shape[:at], merged, *v.shape[at + 2 :])
        y = d.add("move:merge", f"{v.text}.reshape({', '.join(shape)})", shape, v.dtype, v.size)
        if d.rng.random() < 0.4:
            pair = (v.shape[at + 1], v.shape[at]) if d.rng.random() < 0.5 else v.shape[at : at + 2]
            back = (*v.shape[:at], *pair, *v.shape[at + 2 :])
            d.add("move:split", f"{y.text}.reshape({', '.join(back)})", back, v.dtype, v.size)
    elif kind == "broadcast" and n < 4:
        extra = d.dim()
        if d.fits((extra, *v.shape)):
            d.add(
                "move:broadcast",
                f"T.broadcast_to({v.text}, {', '.join((extra, *v.shape))})",
                (extra, *v.shape),
                v.dtype,
                v.size,
            )


def _factor(s: str) -> str:
    return s if s.isidentifier() or s.isdigit() else f"({s})"


def cut(d: Drawn) -> None:
    v = d.pick(low=1)
    axis = d.axis(v)
    s = v.shape[axis]
    if d.extent(s) < 6 or not s.isidentifier():
        return
    text, size = d.rng.choice(
        (
            ("1:", f"{s} - 1"),
            (":-2", f"{s} - 2"),
            ("2:-1", f"{s} - 3"),
            ("::2", f"({s} + 1) // 2"),
            ("::-1", s),
            ("1::3", f"({s} + 1) // 3"),
            (f":{s} // 2", f"{s} // 2"),
            ("3", ""),
            ("-1", ""),
        )
    )
    index = ", ".join([":"] * axis + [text])
    shape = (*v.shape[:axis], *([size] if size else []), *v.shape[axis + 1 :])
    d.add("slice" if size else "index", f"{v.text}[{index}]", shape, v.dtype, v.size)
    if text == "1:" and v.floating:
        d.add(
            "slice:difference", f"{v.text}[{index}] - {v.text}[{', '.join([':'] * axis + [':-1'])}]", shape, v.dtype, 2 * v.size
        )


def joined(d: Drawn) -> None:
    v = d.float(1)
    axis = d.axis(v)
    same = [
        x
        for x in d.values
        if x.floating
        and len(x.shape) == len(v.shape)
        and all(s == t for k, (s, t) in enumerate(zip(x.shape, v.shape)) if k != axis)
    ]
    kind = d.rng.choice(("concat", "stack", "pad", "flip", "roll", "windows", "pieces"))
    s = v.shape[axis]
    if kind == "concat":
        x = d.rng.choice(same)
        shape = (*v.shape[:axis], f"{_factor(s)} + {_factor(x.shape[axis])}", *v.shape[axis + 1 :])
        if d.fits(shape):
            d.add(
                "join:concat",
                f"T.concat([{v.text}, {x.text} * 0.5], {axis})",
                shape,
                widest(v.dtype, x.dtype),
                max(v.size, x.size),
            )
    elif kind == "stack" and len(v.shape) < 4:
        d.add("join:stack", f"T.stack([{v.text}, -{v.text}], {axis})", (*v.shape[:axis], "2", *v.shape[axis:]), v.dtype, v.size)
    elif kind == "pad":
        before, after = d.rng.randrange(4), d.rng.randrange(4)
        value = d.rng.choice(("0", "1.5", '-float("inf")' if d.rng.random() < 0.1 else "-1"))
        widths = [(0, 0)] * axis + [(before, after)] + [(0, 0)] * (len(v.shape) - axis - 1)
        d.add(
            "join:pad",
            f"T.pad({v.text}, {widths}, {value})",
            (*v.shape[:axis], f"{_factor(s)} + {before + after}", *v.shape[axis + 1 :]),
            v.dtype,
            v.size,
        )
    elif kind == "flip":
        d.add("join:flip", f"T.flip({v.text}, {axis})", v.shape, v.dtype, v.size)
    elif kind == "roll" and d.nonempty(s) and not any(n in s for n in d.dynamic):
        d.add("join:roll", f"T.roll({v.text}, {d.rng.randrange(-3, 5)}, {axis})", v.shape, v.dtype, v.size)
    elif kind == "windows" and d.extent(s) >= 6 and s.isidentifier() and len(v.shape) < 4:
        stride = d.rng.choice((1, 1, 2))
        size = f"{s} - 2" if stride == 1 else f"({s} - 3) // 2 + 1"
        shape = (*v.shape[:axis], size, *v.shape[axis + 1 :], "3")
        if d.fits(shape):
            y = d.add("join:windows", f"T.windows({v.text}, 3, {axis}, {stride})", shape, v.dtype, v.size)
            d.add("join:window sums", f"{y.text}.{d.rng.choice(('sum', 'max', 'mean'))}(-1)", shape[:-1], v.dtype, 3 * v.size)
    elif kind == "pieces" and d.extent(s) > 0:
        x = d.add(
            "join:concat",
            f"T.concat([{v.text}, {v.text} + 1], {axis})",
            (*v.shape[:axis], f"2 * {_factor(s)}", *v.shape[axis + 1 :]),
            v.dtype,
            v.size + 1,
        )
        d.many("join:split", f"{x.text}.split(2, {axis})", [(v.shape, v.dtype, v.size)] * 2)


def gathered(d: Drawn) -> None:
    v = d.float(1)
    axis = d.axis(v)
    s = v.shape[axis]
    if not d.nonempty(s):
        return
    kind = d.rng.choice(("gather", "columns", "take_along", "one_hot", "embedding", "cross_entropy"))
    if kind in ("gather", "embedding", "columns"):
        shape = (d.dim(),) if kind != "embedding" else d.shape(1, 2)
        i = d.input(shape, "int32", "index", s)
        made = (*v.shape[:axis], *shape, *v.shape[axis + 1 :])
        if d.fits(made):
            text = (
                f"T.gather({v.text}, {i.text}, {axis})"
                if kind != "columns"
                else f"{v.text}[{', '.join([':'] * axis + [i.text])}]"
            )
            d.add(f"gather:{kind}", text, made, v.dtype, v.size)
    elif kind == "take_along":
        shape = (*v.shape[:axis], d.rng.choice((d.dim(), "1")), *v.shape[axis + 1 :])
        if d.fits(shape):
            i = d.input(shape, "int32", "index", s)
            d.add("gather:take_along", f"T.take_along({v.text}, {i.text}, {axis})", shape, v.dtype, v.size)
    elif kind == "one_hot":
        i = d.input((d.dim(),), "int32", "index", s)
        if d.fits((i.shape[0], s)) and not any(n in s for n in d.dynamic):
            y = d.add("gather:one_hot", f"T.one_hot({i.text}, {s})", (i.shape[0], s), "float32", 1.0)
            if axis == 0 and len(v.shape) == 2 and d.fits((i.shape[0], v.shape[1])):
                d.add("gather:by matmul", f"{y.text} @ {v.text}", (i.shape[0], v.shape[1]), widest("float32", v.dtype), v.size)
    elif axis == len(v.shape) - 1:
        i = d.input(v.shape[:-1], "int32", "index", s)
        d.add("gather:cross_entropy", f"T.cross_entropy({d.small(v, 40)}, {i.text})", v.shape[:-1], v.dtype, 50.0)


def converted(d: Drawn) -> None:
    v = d.pick()
    dt = d.rng.choice([t for t in (*FLOATS, "int32", "bool", "int8") if t != v.dtype])
    text = v.text
    if v.floating and dt in ("int32", "int8"):
        text = f"({v.text} * 3)" if v.size < 1e6 else f"T.tanh({v.text})"
    y = d.add(f"cast:{v.dtype}->{dt}", f"{text}.astype('{dt}')", v.shape, dt, min(v.size * 3, 1e6))
    if dt in FLOATS and d.rng.random() < 0.3:
        d.add("cast:back", f"{y.text}.astype('float32') - 1", v.shape, "float32", v.size + 1)
    if dt == "int8":
        d.values.remove(y)  # arithmetic of eight bits is left to integers of 32
        wide = d.rng.choice(("int32", "float32"))
        d.add("cast:wider", f"{y.text}.astype('{wide}') * 2", v.shape, wide, 256.0)


def scanned(d: Drawn) -> None:
    v = d.float(1)
    axis = d.axis(v)
    kind = d.rng.choice(("cumsum", "cumsum", "cummax", "cummin", "cumprod"))
    base = f"T.clamp({v.text} * 0.25 + 1, 0.5, 1.5)" if kind == "cumprod" else v.text
    if kind == "cumprod" and d.extent(v.shape[axis]) > 40:
        return
    reverse = ", reverse=True" if d.rng.random() < 0.3 else ""
    n = d.extent(v.shape[axis])
    size = v.size * n if kind == "cumsum" else 1.5 ** min(n, 40) if kind == "cumprod" else v.size
    d.add(f"scan:{kind}", f"T.{kind}({base}, {axis}{reverse})", v.shape, v.dtype, size)


def ordered(d: Drawn) -> None:
    v = d.float(1)
    axis = d.axis(v)
    s = v.shape[axis]
    if d.extent(s) < 2:
        return
    kind = d.rng.choice(("topk", "sort", "argsort", "argmax", "argmin", "gates"))
    down = d.rng.choice(("True", "False"))
    if kind == "topk":
        k = d.rng.choice([k for k in (1, 2, 3, 5) if k <= d.extent(s)])
        if any(n in s for n in d.dynamic):
            return
        shape = (*v.shape[:axis], str(k), *v.shape[axis + 1 :])
        d.many("order:topk", f"T.topk({v.text}, {k}, {axis}, {down})", [(shape, v.dtype, v.size), (shape, "int32", 100.0)])
    elif kind == "sort":
        d.many("order:sort", f"T.sort({v.text}, {axis}, {down})", [(v.shape, v.dtype, v.size), (v.shape, "int32", 100.0)])
    elif kind == "argsort":
        d.add("order:argsort", f"T.argsort({v.text}, {axis}, {down})", v.shape, "int32", 100.0)
    elif kind in ("argmax", "argmin"):
        d.add(
            f"order:{kind}", f"T.{kind}({v.text}, {axis})", tuple(x for k, x in enumerate(v.shape) if k != axis), "int32", 100.0
        )
    elif len(v.shape) == 2 and not any(n in s for n in d.dynamic) and axis == 1:
        pair = (v.shape[0], "2")
        w, i = d.many("order:topk", f"T.topk({v.text}, 2)", [(pair, v.dtype, v.size), (pair, "int32", 100.0)])
        d.add(
            "order:gates",
            f"(T.one_hot({i.text}, {s}) * T.softmax({w.text})[:, :, None]).sum(1)",
            v.shape,
            "float32" if v.dtype != "float32" else v.dtype,
            1.0,
        )


def packed(d: Drawn) -> None:
    """A product with quantised weights."""
    form, per = d.rng.choice((("int4", 2), ("uint4", 2), ("int8", 1), ("uint8", 1), ("int2", 4), ("uint2", 4)))
    k, n = d.dim(), d.dim()
    if k == n or d.count((k, n)) * per * 4 > MOST_ELEMENTS * 4 or not d.nonempty(k, n) or any(x in d.dynamic for x in (k, n)):
        return
    rows = f"4 * {k}"
    w = d.input((rows, n), "int8" if form.startswith("i") else "uint8", "full")
    dt = d.main
    s = d.input((k, f"{per} * {n}") if d.rng.random() < 0.6 else ("1", f"{per} * {n}"), dt, "unit")
    zeros = ""
    if d.rng.random() < 0.3:
        zeros = f", {d.input(s.shape, dt, 'whole').text}"
    x = d.input((d.dim(), rows), dt)
    if d.count((x.shape[0], rows, n)) * per <= MOST_WORK:
        d.add(
            f"quantised:{form}",
            f"{x.text} @ T.quantised({w.text}, {s.text}, '{form}'{zeros})",
            (x.shape[0], f"{per} * {n}"),
            dt,
            1e4,
        )


def looped(d: Drawn) -> None:
    """T.loop with one or two states."""
    n, k = d.dim(), d.dim()
    if n == k or d.extent(n) > 40 or d.extent(k) > 33 or not d.nonempty(n, k):
        return
    x, y = d.input((n, k), "float32"), d.input((n, k), "float32")
    kind = d.rng.choice(("sum", "outer", "decay", "affine", "two", "max"))
    f32 = "float32"
    row, table, both = (k,), (n, k), (k, k)
    if kind == "sum":
        d.many(
            "loop:sum",
            f"T.loop(lambda s, x: (s * 0.5 + x, T.tanh(s)), T.zeros(({k},)), {x.text})",
            [(row, f32, 8.0), (table, f32, 1.0)],
        )
    elif kind == "outer" and d.fits(both):
        d.many(
            "loop:outer",
            f"T.loop(lambda s, x: (s * 0.9 + x[0][:, None] * x[1], x[1] @ s), T.zeros(({k}, {k})), ({x.text}, {y.text}))",
            [(both, f32, 100.0), (table, f32, 999.0)],
        )
    elif kind == "decay":
        d.many(
            "loop:decay",
            f"T.loop(lambda s, x: (s * T.sigmoid(x[1]) + x[0], s + x[0]), {x.text}[0], ({x.text}, {y.text}))",
            [(row, f32, 50.0), (table, f32, 50.0)],
        )
    elif kind == "affine" and d.fits(both):
        w = d.input((k, k), f32)
        d.many(
            "loop:affine",
            f"T.loop(lambda h, x: (T.tanh((h @ {w.text}) * 0.1 + x), h.sum()), T.zeros(({k},)), {x.text})",
            [(row, f32, 1.0), ((n,), f32, 40.0)],
        )
    elif kind == "two":
        start = f"(T.zeros(({k},)), T.full((), 0, 'int32'))"
        a, b, c = d.many(
            "loop:two",
            f"(lambda r: (*r[0], r[1]))(T.loop(lambda s, x: ((s[0] + x, s[1] + 1), s[0] * s[1]), {start}, {x.text}))",
            [(row, f32, 99.0), ((), "int32", 40.0), (table, f32, 999.0)],
        )
    elif kind == "max":
        d.many(
            "loop:max",
            f"T.loop(lambda m, x: (T.maximum(m, x), x - m), T.full(({k},), -1e9), {x.text})",
            [(row, f32, 4.0), (table, f32, 1e9)],
        )


def integers(d: Drawn) -> None:
    found = [v for v in d.values if v.dtype == "int32"]
    a = d.rng.choice(found) if found and d.rng.random() < 0.7 else d.input(d.shape(1, 3), "int32", "whole")
    t = a.text
    text = d.rng.choice(
        (
            f"{t} * 3 - 1",
            f"{t} // 3",
            f"{t} % 5",
            f"({t} ^ 5) & 7",
            f"{t} >> 1",
            f"({t} << 2) | 1",
            f"T.maximum({t}, 2)",
            f"T.abs({t})",
            f"{t} * {t}",
            f"-{t}",
            f"{t} // -2",
            f"~{t}",
            f"{t} % -3",
            f"{t} ** 2",
        )
    )
    y = d.add("integers", text, a.shape, "int32", 100.0)
    if d.rng.random() < 0.3:
        d.add("integers:compare", f"{y.text} > 1", a.shape, "bool", 1.0)
    elif d.rng.random() < 0.3:
        d.add("integers:float", f"{y.text} * 0.5", a.shape, "float32", 100.0)
    elif d.rng.random() < 0.3 and len(a.shape) == 2:
        d.add("integers:matmul", f"({y.text} % 7) @ ({t} % 5).T", (a.shape[0], a.shape[0]), "int32", 1e5)


def convolved(d: Drawn) -> None:
    c, o, n = d.dim(), d.dim(), d.dim()
    if (
        d.extent(n) < 4
        or d.extent(c) > 17
        or d.extent(o) > 17
        or not d.nonempty(c, o)
        or len({c, o, n}) < 3
        or not d.fits(("2", c, n))
    ):
        return
    x, w = d.input(("2", c, n)), d.input((o, c, "3"))
    stride, padding = d.rng.choice(((1, 1), (1, 0), (2, 1)))
    size = {(1, 1): n, (1, 0): f"{n} - 2", (2, 1): f"({n} - 1) // 2 + 1"}[stride, padding]
    d.add(
        "convolution",
        f"T.conv1d({x.text}, {w.text}, stride={stride}, padding={padding})",
        ("2", o, size),
        widest(x.dtype, w.dtype),
        99.0,
    )


OPERATIONS: tuple[tuple[Callable[[Drawn], None], int], ...] = (
    (binary, 8),
    (tree, 4),
    (unary, 8),
    (power, 3),
    (compare, 2),
    (choose, 3),
    (mask, 3),
    (reduce, 9),
    (count, 1),
    (softmax, 5),
    (normed, 3),
    (product, 6),
    (contraction, 5),
    (shared, 3),
    (moved, 6),
    (cut, 4),
    (joined, 4),
    (gathered, 4),
    (converted, 4),
    (scanned, 3),
    (ordered, 3),
    (packed, 1),
    (looped, 1),
    (integers, 2),
    (convolved, 1),
)


def make_whole(seed: int, profile: str | None = None) -> Program:
    """The program of a seed."""
    d = Drawn(seed)
    r = d.rng
    d.input(d.shape(2, 3))
    names = [fn for fn, weight in OPERATIONS for _ in range(weight)]
    for _ in range(r.choice((1, 2, 2, 3, 3, 4, 5, 6, 8))):
        r.choice(names)(d)
    if not d.lines:
        unary(d)
    made = [v for line in d.lines for v in line["names"]]
    last = d.lines[-1]["names"]
    outputs = [*last] if r.random() < 0.8 else [r.choice(last)]
    for _ in range(r.choice((0, 0, 1, 2))):
        outputs.append(r.choice(made))
    if r.random() < 0.05:
        outputs.append(r.choice(d.inputs)["name"])
        d.features.add("result:input")
    if r.random() < 0.05 and len(d.inputs[0]["shape"]) > 1:
        outputs.append("x0.T")
        d.features.add("result:view")
    sizes = [dict(d.dims)]
    if d.dynamic:
        d.features.add("dynamic")
        sizes.append({n: r.choice((8, 11, 19, v)) if n in d.dynamic else v for n, v in d.dims.items()})
    d.features |= (
        {f"extent:{v}" for v in d.dims.values() if v < 2}
        | ({"special"} if d.special else set())
        | {f"results:{min(len(outputs), 3)}"}
    )
    program = {
        "family": "whole",
        "seed": seed,
        "profile": "whole",
        "sizes": sizes,
        "dynamic": d.dynamic,
        "inputs": d.inputs,
        "lines": d.lines,
        "outputs": list(dict.fromkeys(outputs)),
        "declared": bool(d.dynamic) or r.random() < 0.5,
        "drawn": sorted(d.features),
    }
    return tidy(program)
