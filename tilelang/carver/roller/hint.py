"""Hint: one tiling of a computation for an architecture."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

# ---- orders of the blocks of a grid ----------------------------------------------------------------------------------

class _Single(type):
    """Metaclass of a class that is its own only instance, so that both `is NoRasterization` and `isinstance` work."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls

    def __instancecheck__(cls, instance: Any) -> bool:
        return instance is cls

    def __repr__(cls) -> str:
        return "<NoRasterization>"


class NoRasterization(metaclass=_Single):
    """Blocks run row by row: no T.use_swizzle."""

    box_width = 0

    @classmethod
    def get_code(cls) -> list[str]:
        """The statements that request this order: none."""
        return []


@dataclass(frozen=True)
class _Rasterization2D:
    box_width: int = 4

    order = "row"

    def get_code(self) -> list[str]:
        """The statements that request this order."""
        return [f"T.use_swizzle(panel_size={self.box_width}, order={self.order!r})"]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}({self.box_width})>"


@dataclass(frozen=True, repr=False)
class Rasterization2DRow(_Rasterization2D):
    """Rasterisation panels of `box_width` rows of blocks."""


@dataclass(frozen=True, repr=False)
class Rasterization2DColumn(_Rasterization2D):
    """Rasterisation panels of `box_width` columns of blocks."""

    order = "column"


_RASTERISATIONS = {c.__name__: c for c in (Rasterization2DRow, Rasterization2DColumn)}


@dataclass
class TensorCoreExtraConfig:
    """Strides of operands staged in shared memory, and the axes of the instruction; outer dimensions first."""

    AS_shape: tuple[int, ...] = ()
    BS_shape: tuple[int, ...] = ()
    AF_shape: tuple[int, ...] = ()
    BF_shape: tuple[int, ...] = ()
    tc_axis: tuple[int, ...] = ()


@dataclass
class Stride:
    """A padded stride of a staged tensor.  stride: elements; ax: its axis, -1 for a layout without padding."""

    stride: int = 1
    ax: int = -1

    def is_valid(self) -> bool:
        """Whether the stride has an effect."""
        return self.ax >= 0

    def compute_strides_from_shape(self, shape: list[int]) -> list[int]:
        """Strides of every dimension of a tensor of this shape, elements."""
        strides = [1] * len(shape)
        for i in range(len(shape) - 2, -1, -1):
            strides[i] = self.stride if self.is_valid() and i == self.ax else int(shape[i + 1]) * strides[i + 1]
        return strides

    def compute_elements_from_shape(self, shape: list[int]) -> int:
        """Elements of storage of a tensor of this shape."""
        if not shape:
            return 1
        return int(shape[0]) * self.compute_strides_from_shape(shape)[0]


@dataclass
class TileDict:
    """The cost of an output tile.  smem_cost: bytes; block_per_SM, num_wave: counts; traffic: bytes of global memory."""

    output_tile: tuple[int, ...]
    smem_cost: int = 0
    block_per_SM: int = 1
    num_wave: int = 1
    grid_size: int = 1
    traffic: float = 0.0
    valid: bool = True


@dataclass
class IntrinInfo:
    """The MMA instruction that a hint uses.  micro_size: (m, n, k) of one instruction, elements."""

    in_dtype: str
    out_dtype: str
    trans_b: bool
    trans_a: bool = False
    micro_size: tuple[int, int, int] = (16, 8, 16)


_ALWAYS = ("block", "rstep")
_PLAIN = ("use_tc", "thread", "warp", "reduce_thread", "vectorize", "step", "raxis_order", "pipeline_stage", "use_async",
          "block_reduction_depth", "split_k_factor", "shared_scope")


@dataclass(repr=False)
class Hint:
    """One tiling: the elements that a block, a warp and a step of the reduction cover.

    block: elements of a block along each axis of the output.  warp (tensor cores only): elements of a warp along each axis, so
    that a block has prod(block) / prod(warp) warps.  thread (without tensor cores): threads along each axis.  reduce_thread:
    threads along each reduced axis.  rstep: elements of a step along each reduced axis.  step: contiguous elements per thread
    along each axis.  pipeline_stage: stages of each operand, 1 for no overlap.  use_async: asynchronous copies fill the stages.
    smem_bytes, registers: estimates for the tile, bytes of shared memory per block and 32-bit registers per thread.
    """

    arch: Any = None
    use_tc: bool = False
    block: list[int] = field(default_factory=list)
    thread: list[int] = field(default_factory=list)
    warp: list[int] = field(default_factory=list)
    rstep: list[int] = field(default_factory=list)
    reduce_thread: list[int] = field(default_factory=list)
    rasterization_plan: Any = NoRasterization
    cached_tensors: list[str] = field(default_factory=list)
    output_strides: dict[int, Stride] = field(default_factory=dict)
    schedule_stages: list[str] | None = None
    block_reduction_depth: int | None = None
    split_k_factor: int = 1
    vectorize: dict[str, int] = field(default_factory=dict)
    pipeline_stage: int = 1
    use_async: bool = False
    opt_shapes: dict[str, int] = field(default_factory=dict)
    intrin_info: IntrinInfo | None = None
    shared_scope: str = "shared"
    pass_context: dict[str, Any] = field(default_factory=dict)
    smem_bytes: int = 0
    registers: int = 0
    _step: list[int] = field(default_factory=list)
    _raxis_order: list[int] = field(default_factory=list)

    @property
    def step(self) -> list[int]:
        """Contiguous elements per thread along each axis of the output; 1 where not set."""
        return list(self._step) or [1] * len(self.block)

    @step.setter
    def step(self, value: list[int]) -> None:
        self._step = list(value)

    @property
    def raxis_order(self) -> list[int]:
        """The order of the loops over the reduced axes."""
        return list(self._raxis_order) or list(range(len(self.rstep)))

    @raxis_order.setter
    def raxis_order(self, value: list[int]) -> None:
        self._raxis_order = list(value)

    @property
    def threads(self) -> int:
        """Number of threads of a block."""
        count = 1
        for b, w in zip(self.block, self.warp, strict=False):
            count *= b // w
        if self.warp:
            return count * max(32, getattr(self.arch, "warp_size", 32))
        for t in (*self.thread, *self.reduce_thread):
            count *= t
        return count

    def to_dict(self) -> dict[str, Any]:
        """The entries that differ from an empty hint, as plain values; `from_dict` reads them back."""
        plain = Hint()
        out: dict[str, Any] = {}
        for name in (*_ALWAYS, *_PLAIN):
            value = getattr(self, name)
            if name in _ALWAYS or value != getattr(plain, name) and not (name == "step" and set(value) <= {1}) \
                    and not (name == "raxis_order" and not self._raxis_order):
                out[name] = value
        if self.intrin_info is not None:
            out["intrin_info"] = asdict(self.intrin_info)
        if self.rasterization_plan is not NoRasterization:
            plan = self.rasterization_plan
            out["rasterization_plan"] = (type(plan).__name__, plan.box_width)
        return out

    @classmethod
    def from_dict(cls, entries: dict[str, Any]) -> Hint:
        """The hint that `to_dict` wrote.  Raises ValueError for an unknown entry."""
        hint = cls()
        for name, value in entries.items():
            if name == "intrin_info":
                hint.intrin_info = IntrinInfo(**{**value, "micro_size": tuple(value["micro_size"])})
            elif name == "rasterization_plan":
                hint.rasterization_plan = _RASTERISATIONS[value[0]](value[1])
            elif name in (*_ALWAYS, *_PLAIN):
                setattr(hint, name, value)
            else:
                raise ValueError(f"{name!r} is no entry of a Hint; expected one of {', '.join((*_ALWAYS, *_PLAIN))}")
        return hint

    def __repr__(self) -> str:
        return str(self.to_dict())
