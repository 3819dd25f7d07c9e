"""Annotations of a kernel: layouts, out-of-range values, compile options, cache and aliasing hints."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from math import prod
from typing import Any

from tilelang.errors import warn
from tilelang.ir import Buffer, Evaluate, call as ir_call, cast, convert, is_const, FRAGMENT, GLOBAL, LOCAL, SHARED
from tilelang.layout import Fragment, Layout, PartialFragment
from tilelang.layout.periods import is_open, stored_extents

from .tracing.flags import condition, words
from .kernel import need_kernel
from .loops import freeze_attr
from .tracing.builder import FACTS, need_builder
from .tracing.state import describe, error, example


def entries(given: Any, what: str) -> list[tuple[Any, Any]]:
    """The entries of an annotation's dict.  Raises option-type for anything else."""
    if not isinstance(given, Mapping):
        raise error("option-type", f"{what} takes «a dict», found {describe(given)}", f"write {what}({{…: …}})")
    return list(given.items())


def annotate_layout(layouts: dict[Buffer, Any]) -> None:
    """Give buffers their layouts: a T.Fragment for fragments, a T.Layout or a function of the indices for shared memory.

    A tensor in global memory may have a layout too: the kernel then finds element (i, j) at the place that the layout gives.
    The caller's tensor is plain storage of as many elements. Extents known at run time only are whole periods of the layout,
    which the call checks. Places of threads' own arrays (T.alloc_local) may be permuted; a T.Fragment over several threads
    makes them a fragment. Reducers may have a tilelang.layout.PartialFragment. Raises layout-fragment, layout-annotation.

    Example:
        T.annotate_layout({A_s: T.Layout((128, 64), lambda i, j: (i, j ^ (i % 8 * 8)))})   # swizzle of 16-byte units
        T.annotate_layout({dQ: T.Layout(dQ.shape, lambda i, j: (i // 8, j // 8, j % 2, i % 8 * 4 + j % 8 // 2))})
    """
    b, k = need_builder("T.annotate_layout"), need_kernel("T.annotate_layout")
    for buffer, layout in entries(layouts, "T.annotate_layout"):
        if not isinstance(buffer, Buffer):
            raise error("annotation", f"T.annotate_layout takes buffers, found {describe(buffer)}")
        if buffer.scope_name == FRAGMENT:
            if not isinstance(layout, Fragment):
                raise error("layout-fragment", f"`{buffer.name}` is a fragment: its layout must be a T.Fragment, found "
                            f"{describe(layout)}")
        elif buffer.scope_name not in (*SHARED, GLOBAL, LOCAL):
            raise error("layout-annotation", f"`{buffer.name}` has scope {buffer.scope_name}: layouts are of shared buffers, "
                        "fragments, tensors and T.alloc_local", expected="a shared buffer, a fragment, a tensor or an array",
                        found=f"a buffer of scope {buffer.scope_name}", hint="leave it out")
        elif callable(layout) and not isinstance(layout, (Layout, Fragment)):
            layout = Layout(buffer.shape, layout)
        if isinstance(layout, PartialFragment) and id(buffer) not in b.reducers:
            raise error("layout-annotation", f"‹`{buffer.name}`› is no reducer: partial results are a reducer's",
                        expected="a reducer of T.alloc_reducer", hint="give it a T.Fragment")
        if not isinstance(layout, (Layout, Fragment)):
            raise error("layout-annotation", f"the layout of `{buffer.name}` must be a T.Layout or a function, found "
                        f"{describe(layout)}")
        if not _suits(layout, buffer):
            raise error("layout-annotation", f"`{buffer.name}` has shape {tuple(buffer.shape)}, its layout "
                        f"‹{tuple(layout.shape)}›", expected=f"a layout of shape {tuple(buffer.shape)}")
        if buffer.scope_name == GLOBAL:
            _check_tensor(buffer, layout)
        k.layouts = [(x, y) for x, y in k.layouts if x is not buffer] + [(buffer, layout)]


def _suits(layout: Layout | Fragment, b: Buffer) -> bool:
    """Whether a layout was made for the shape of a buffer.  Extents known at run time only are those of a tensor."""
    if any(map(is_open, b.shape)) and isinstance(layout, Layout):
        return len(layout.extents) == b.ndim and all(
            convert(n).same(convert(m)) for n, m in zip(layout.extents, b.shape))
    return tuple(layout.shape) == tuple(b.shape)


def _check_tensor(b: Buffer, layout: Layout | Fragment) -> None:
    """Raise layout-annotation if a layout is not one of a tensor: a permutation of its compact storage.

    Of an extent known at run time only, the call checks that it consists of whole periods of the layout.
    """
    found = ""
    if isinstance(layout, Fragment):
        found = "a T.Fragment, which distributes registers"
    elif any(map(is_open, b.shape)):
        stored = stored_extents(layout, b.shape)
        if isinstance(stored, str):
            found = stored
        elif b.strides_ is not None or not is_const(convert(b.offset), 0):
            found = "a tensor whose rows may not be contiguous"
        else:
            for d, length in stored[1]:
                assume(b.shape[d] % length == 0)
    elif layout.size != prod(layout.shape):
        found = f"a layout over {layout.size} places for {prod(layout.shape)} elements"
    elif tuple(b.strides) != tuple(Buffer("", b.shape, b.dtype).strides) or not is_const(convert(b.offset), 0):
        found = "a tensor whose rows are not contiguous"
    if not found and b.dtype.bits < 8:
        found = f"elements of {b.dtype}, several of which share a byte"
    if found:
        raise error("layout-annotation", f"`{b.name}` is a tensor: its layout permutes its storage, found {found}",
                    expected="a T.Layout that permutes compact storage")


@example("T.annotate_safe_value({A: -1.0})")
def annotate_safe_value(values: dict[Buffer, Any]) -> None:
    """Set the values that out-of-range reads of buffers return (default 0)."""
    need_builder("T.annotate_safe_value")
    k = need_kernel("T.annotate_safe_value")
    for buffer, value in entries(values, "T.annotate_safe_value"):
        if not isinstance(buffer, Buffer):
            raise error("annotation", f"T.annotate_safe_value takes buffers, found {describe(buffer)}")
        if buffer.scope_name != GLOBAL:
            warn("annotation-no-effect", f"the value outside `{buffer.name}` has no effect: only reads of tensors may be "
                 "outside", "leave it out", span=k.span)
        entry = (buffer, cast(convert(value), buffer.dtype))
        k.safe_values = [(x, y) for x, y in k.safe_values if x is not buffer] + [entry]


@example("T.annotate_l2_hit_ratio({A: 0.8})")
def annotate_l2_hit_ratio(ratios: dict[Buffer, float]) -> None:
    """Keep a part of a global tensor in L2: each launch gets an access policy window (sm_80 and newer).

    ratios: {tensor: the part of its accesses that persist, from 0 to 1}.  A launch has one window, that of the first tensor.
    """
    need_builder("T.annotate_l2_hit_ratio")
    k = need_kernel("T.annotate_l2_hit_ratio")
    for buffer, ratio in entries(ratios, "T.annotate_l2_hit_ratio"):
        if not isinstance(buffer, Buffer) or buffer.scope_name != GLOBAL:
            raise error("l2-hint", "T.annotate_l2_hit_ratio applies to global buffers", found=describe(buffer))
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1:
            raise error("l2-hint", f"the part of `{buffer.name}` that stays in L2 is «a number from 0 to 1», found "
                        f"{describe(ratio)}", hint="1.0 means all of it")
    if sum(r > 0 for r in ratios.values()) > 1:
        warn("l2-hint-unused", "a launch keeps one tensor in L2: only the first of T.annotate_l2_hit_ratio has an effect",
             "annotate one tensor")
    k.set(l2_hit_ratio=tuple((x, float(r)) for x, r in ratios.items()))


@example("T.annotate_restrict_buffers(X, Y)")
def annotate_restrict_buffers(*buffers: Buffer) -> None:
    """Declare that these parameters may alias each other."""
    b = need_builder("T.annotate_restrict_buffers")
    for x in buffers:
        if not isinstance(x, Buffer):
            raise error("annotation", f"T.annotate_restrict_buffers takes buffers, found {describe(x)}")
    old = b.facts.may_alias
    b.facts = b.facts.having(may_alias=(*old, *(x.name for x in buffers if x.name not in old)))


@example('T.annotate_pass_configs({"tl.disable_tma_lower": True})')
def annotate_pass_configs(configs: dict[Any, Any]) -> None:
    """Set pass options of this function.  Options given to tilelang.compile override them."""
    b = need_builder("T.annotate_pass_configs")
    old = dict(b.facts.pass_configs)
    old.update({str(getattr(k, "value", k)): freeze_attr(v) for k, v in entries(configs, "T.annotate_pass_configs")})
    b.facts = b.facts.having(pass_configs=tuple(sorted(old.items())))


@example('T.annotate_compile_flags(["-O3", "--use_fast_math"])')
def annotate_compile_flags(flags: str | list[str]) -> None:
    """Set device compiler flags of this function.  Flags given to tilelang.compile are appended."""
    b = need_builder("T.annotate_compile_flags")
    given = [flags] if isinstance(flags, str) else flags
    if not isinstance(given, (list, tuple)):
        raise error("option-type", f"compile flags are «a string or a list of strings», found {describe(flags)}",
                    "write T.annotate_compile_flags('-lineinfo')")
    texts = [words(f, "a compile flag") for f in given]
    new = tuple(flags.split() if isinstance(flags, str) else texts)
    b.facts = b.facts.having(compile_flags=(*b.facts.compile_flags, *new))


@example("T.assume(n % 8 == 0)")
def assume(cond: Any) -> None:
    """Promise that a condition holds.  A condition on values known to the host is checked at the call."""
    b = need_builder("T.assume")
    c = condition(b, cond, "T.assume")
    if isinstance(c, bool):
        if not c:
            raise error("assume-false", "T.assume of a condition that is false")
        return
    b.emit(Evaluate(ir_call("assume", (c,), "bool", span=b.here()), span=b.here()))


_FUNC_ATTRS = ("global_symbol", "tir.noalias", "tirx.noalias", "tir.is_entry_func", "tirx.is_entry_func")


@example('T.func_attr({"tir.noalias": True})')
def func_attr(attrs: dict[str, Any]) -> None:
    """Set attributes of the function."""
    b = need_builder("T.func_attr")
    for key, value in attrs.items():
        near = get_close_matches(str(key), (*FACTS, *_FUNC_ATTRS), 1, 0.8)
        if near and near[0] != key:
            raise error("annotation-key", f"no attribute of functions is named ‹{key!r}›", f"did you mean {near[0]!r}?",
                        expected="an attribute that has an effect")
        if key in FACTS:
            b.facts = b.facts.having(**{FACTS[key]: freeze_attr(value)})
        elif key != "global_symbol":
            b.func_attrs[str(key)] = freeze_attr(value)
    if "global_symbol" in attrs:
        b.name = str(attrs["global_symbol"])


__all__ = ["annotate_compile_flags", "annotate_l2_hit_ratio", "annotate_layout", "annotate_pass_configs",
           "annotate_restrict_buffers", "annotate_safe_value", "assume", "func_attr"]
