"""CUDA text of Hopper's operations: tensor maps, TMA, warp groups. MMA instructions are in wgmma.py.

Functions whose form depends on a rank or an instruction row are written out when a kernel names them (`hopper_function`); all
others are sections of prelude_*.cuh.
"""

from __future__ import annotations

import re

from tilelang.errors import InternalError
from tilelang.ir import Call, Launch
from tilelang.target.instructions import CACHE_HINTS
from tilelang.target.tensor_map import REDUCE_ADD, TensorMap, tensor_maps_of

from ..device.calls import Calls
from ..device.text import POSTFIX, REL, Text
from ..device.types import unsupported
from .wgmma import wgmma_function

_TMA = re.compile(r"tma_(load|store|reduce_add)_([1-5])d(_im2col)?(_multicast)?(_hint)?")


class HopperCalls:
    """Registers the text of TMA, of mbarriers and of warp groups."""

    def __init__(self, calls: Calls, launch: Launch) -> None:
        self.x, self.page, self._launch = calls.x, calls.x.page, launch
        calls.special.update({
            "tma_load": lambda e: self._tma(e, "load", 2), "tma_store": lambda e: self._tma(e, "store", 1),
            "tma_reduce_add": self._tma_reduce_add,
            "tma_prefetch": lambda e: (f"tl::tma_prefetch({self._tensor_map(e)[1]})", POSTFIX),
            "tensor_map": lambda e: (f"tl::map_argument{{{self._tensor_map(e)[1][1:]}}}", POSTFIX),
            "in_warp_groups": self._in_warp_groups})

    def map_parameters(self) -> list[str]:
        """Declarations of the kernel's tensor maps, its last parameters."""
        return [f"const __grid_constant__ tl::tensor_map {self.page.name(('tensor map', m.name), m.name)}"
                for m in tensor_maps_of(self._launch)]

    def _tensor_map(self, e: Call) -> tuple[TensorMap, str]:
        """The map that a TMA call names, and the address of its parameter."""
        name = e.options.map
        for m in tensor_maps_of(self._launch):
            if m.name == name:
                return m, "&" + self.page.name(("tensor map", name), name)
        raise InternalError(f"{e.op} names the tensor map {name!r}, which the launch does not have")

    def _tma(self, e: Call, kind: str, fixed: int) -> Text:
        """A call with `fixed` addresses (shared tile, barrier) in front of the coordinates."""
        m, place = self._tensor_map(e)
        addresses, at = e.args[:fixed], e.args[fixed:]
        multicast = e.options.multicast
        at, mask = (at[:-1], at[-1:]) if multicast else (at, ())
        if len(at) != m.coordinates:
            raise InternalError(f"{e.op} gives {len(at)} of {m.coordinates} coordinates of `{m.buffer.name}`")
        args = [self.x.top(addresses[0]), place, *map(self.x.top, (*addresses[1:], *at, *mask))]
        hint = e.options.cache_hint
        if hint is not None:
            value = CACHE_HINTS[hint] if isinstance(hint, str) else int(hint)
            args.append(f"0x{value:016x}ull")
        more = "_im2col" * bool(m.im2col) + "_multicast" * bool(multicast) + "_hint" * (hint is not None)
        return f"tl::tma_{kind}_{m.rank}d{more}({', '.join(args)})", POSTFIX

    def _tma_reduce_add(self, e: Call) -> Text:
        m, _ = self._tensor_map(e)
        if m.buffer.dtype.base not in REDUCE_ADD:
            raise unsupported(f"a TMA reduction of {m.buffer.dtype}", e)
        return self._tma(e, "reduce_add", 1)

    def _in_warp_groups(self, e: Call) -> Text:
        first, count = e.options.size * e.options.first, e.options.size * e.options.count
        x, y, z = self._launch.threads
        thread = "threadIdx.x" if y == z == 1 else "tl::linear_thread()"
        if first == 0:
            return f"{thread} < {count}", REL
        if first + count >= x * y * z:
            return f"{thread} >= {first}", REL
        return f"{thread} - {first}u < {count}u", REL


# ---- functions written out --------------------------------------------------------------------------------------------


def hopper_function(name: str) -> str | None:
    """The definition of a function of this file by its name; None for other names."""
    if not name.startswith(("tma_", "wgmma")):  # few words of a text have these prefixes
        return None
    if name == "tma_prefetch":
        return ("TL_DEVICE void tma_prefetch(const tensor_map* map) {\n"
                '  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");\n}\n')
    m = _TMA.fullmatch(name)
    if m is not None:
        return _tma_function(name, m.group(1), int(m.group(2)), bool(m.group(4)), bool(m.group(5)))
    return wgmma_function(name)


def _tma_function(name: str, kind: str, rank: int, multicast: bool, hint: bool) -> str:
    """The function of one tensor copy: shared tile, map, barrier (loads), coordinates innermost first, offsets of im2col, mask
    of CTAs, cache policy."""
    load, offsets = kind == "load", ["x0", "x1"] if "_im2col" in name else []
    coordinates = [f"c{i}" for i in range(rank)]
    params = ["void* dst" if load else "const void* src", "const tensor_map* map", *(["void* bar"] if load else []),
              *(f"int {c}" for c in (*coordinates, *offsets)), *(["unsigned short mask"] if multicast else []),
              *(["unsigned long long hint"] if hint else [])]
    place = "{" + ", ".join(f"%{i + 2}" for i in range(rank)) + "}"
    inputs = [f'"r"(shared_address({"dst" if load else "src"}))', '"l"(map)', *(f'"r"({c})' for c in coordinates)]
    if load:
        text = (f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.{'im2col' if offsets else 'tile'}"
                f".mbarrier::complete_tx::bytes{'.multicast::cluster' if multicast else ''}{'.L2::cache_hint' if hint else ''} "
                f"[%0], [%1, {place}], [%{rank + 2}]")
        inputs.append('"r"(shared_address(bar))')
        if offsets:
            text += ", {" + ", ".join(f"%{len(inputs) + i}" for i in range(len(offsets))) + "}"
            inputs += [f'"h"((unsigned short){c})' for c in offsets]
        if multicast:
            text += f", %{len(inputs)}"
            inputs.append('"h"(mask)')
    else:
        op = "cp.async" if kind == "store" else "cp.reduce.async"
        text = (f"{op}.bulk.tensor.{rank}d.global.shared::cta{'.add' if kind != 'store' else ''}.tile.bulk_group"
                f"{'.L2::cache_hint' if hint else ''} [%1, {place}], [%0]")
    if hint:
        text += f", %{len(inputs)}"
        inputs.append('"l"(hint)')
    return (f"TL_DEVICE void {name}({', '.join(params)}) {{\n"
            f'  asm volatile("{text};"\n               ::{", ".join(inputs)} : "memory");\n}}\n')
