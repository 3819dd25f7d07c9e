"""Templates of common computations, which recommend tiles for their sizes and an architecture.

    hints = MatmulTemplate(M=1024, N=1024, K=1024).with_arch(CUDA("cuda")).recommend_hints(topk=10)
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from tilelang.carver.roller.hint import Hint
from tilelang.carver.roller.work import Attention, Map, Matmul, Work
from tilelang.language.tracing.state import error

from . import programs
from ..arch import TileDevice, auto_infer_current_arch, is_ampere_arch, is_volta_arch
from ..roller.policy import OutputNode, PrimFuncNode, hints_for


@dataclass
class BaseTemplate:
    """A computation given by its sizes.  `with_arch`, then `recommend_hints`."""

    def __post_init__(self) -> None:
        for name, value in self.params_as_dict().items():
            if name.endswith("dtype"):
                setattr(self, name, f"{value}")
            sizes = value if isinstance(value, (tuple, list)) else (value,)
            if any(isinstance(x, int) and not isinstance(x, bool) and x < (0 if name == "P" else 1) for x in sizes):
                raise ValueError(f"{type(self).__name__}: {name} must be positive, found {value!r}")
        self._arch: TileDevice | None = None
        self._func: Any = None

    @property
    def work(self) -> Work:
        """Sizes and types of the computation."""
        raise NotImplementedError

    def program(self, hint: Hint) -> Any:
        """The computation as a PrimFunc with the tiles of a hint."""
        raise NotImplementedError

    @property
    def arch(self) -> TileDevice:
        """The chosen architecture, else that of the current target or device."""
        if self._arch is None:
            self._arch = auto_infer_current_arch()
        return self._arch

    def with_arch(self, arch: TileDevice) -> Any:
        """Choose the architecture.  Returns self."""
        self._arch = arch
        return self

    def is_volta_arch(self) -> bool:
        """Whether the architecture is sm_70."""
        return is_volta_arch(self.arch)

    def is_ampere_arch(self) -> bool:
        """Whether the architecture is sm_80 up to sm_88."""
        return is_ampere_arch(self.arch)

    def get_hardware_aware_configs(self, arch: TileDevice, topk: int = 10) -> list[Hint]:
        """The `topk` hints with the least estimated time on an architecture; fewer when fewer tiles fit."""
        return hints_for(self.work, arch, topk)

    def recommend_hints(self, topk: int = 10) -> list[Hint]:
        """The `topk` hints with the least estimated time on the chosen architecture; fewer when fewer tiles fit."""
        return self.get_hardware_aware_configs(self.arch, topk)

    def equivalent_function(self) -> Any:
        """The computation as a runnable PrimFunc with the tiles of the first hint."""
        if self._func is None:
            hints = self.recommend_hints(1)
            if not hints:
                raise ValueError(f"{type(self).__name__}: no tile fits {self.arch}")
            self.set_function(self.program(hints[0]))
        return self._func

    def set_function(self, func: Any) -> Any:
        """Use `func` as the program of this computation.  Returns self."""
        func.carver_work = self.work
        self._func = func
        return self

    @property
    def output_nodes(self) -> list[OutputNode]:
        """The result, as a node."""
        return [OutputNode(PrimFuncNode(self.equivalent_function()))]

    def params_as_dict(self) -> dict[str, Any]:
        """Sizes and types by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    class_attributes = property(params_as_dict)


@dataclass
class MatmulTemplate(BaseTemplate):
    """C (M, N) = A @ B, A (M, K) or with trans_A (K, M), B (K, N) or with trans_B (N, K), plus a bias (N,)."""

    M: int = 1
    N: int = 1
    K: int = 1
    trans_A: bool = False
    trans_B: bool = True
    in_dtype: str = "float16"
    out_dtype: str = "float16"
    accum_dtype: str = "float16"
    with_bias: bool = False

    @property
    def work(self) -> Matmul:
        return Matmul(self.M, self.N, self.K, self.in_dtype, self.out_dtype, self.accum_dtype, 1,
                       self.trans_A, self.trans_B)

    def program(self, hint: Hint) -> Any:
        return programs.matmul_program(self.work, hint, self.with_bias)


@dataclass
class ConvTemplate(BaseTemplate):
    """Out (N, OH, OW, F) of data (N, H, W, C) and weights (K, K, C, F); stride S, dilation D, padding P.

    Hints tile the equivalent GEMM over windows: (N * OH * OW) x F x (K * K * C).
    """

    N: int = 1
    C: int = 1
    H: int = 1
    W: int = 1
    F: int = 1
    K: int = 1
    S: int = 1
    D: int = 1
    P: int = 0
    in_dtype: str = "float16"
    out_dtype: str = "float16"
    accum_dtype: str = "float16"
    with_bias: bool = False

    @property
    def work(self) -> Matmul:
        oh, ow = (programs.output_size(x, self.K, self.S, self.D, self.P) for x in (self.H, self.W))
        if oh < 1 or ow < 1:
            raise ValueError(f"ConvTemplate: a window of {self.K} does not fit {self.H} x {self.W} with padding {self.P}")
        return Matmul(self.N * oh * ow, self.F, self.K * self.K * self.C, self.in_dtype, self.out_dtype,
                       self.accum_dtype, 1, False, False)

    def program(self, hint: Hint) -> Any:
        if self.with_bias:
            raise error("not-available", "ConvTemplate: a program with bias is not available",
                        expected="a convolution without bias", found="with_bias=True",
                        hint="its hints are those of the convolution without bias: tile your own program by them")
        sizes = self.N, self.C, self.H, self.W, self.F, self.K, self.S, self.D, self.P
        return programs.convolution_program(self.work, sizes, hint)


@dataclass
class GEMVTemplate(BaseTemplate):
    """C (1, N) = A (1, K) @ B, B (N, K) or without trans_B (K, N), plus a bias (N,) when with_bias."""

    N: int = 1
    K: int = 1
    trans_B: bool = True
    in_dtype: str = "float16"
    out_dtype: str = "float16"
    accum_dtype: str = "float16"
    with_bias: bool = False

    @property
    def work(self) -> Map:
        return Map((self.N,), (self.K,), self.in_dtype, self.accum_dtype, self.trans_B)

    def program(self, hint: Hint) -> Any:
        return programs.gemv_program(self.work, self.out_dtype, self.with_bias, hint)


@dataclass
class ElementwiseTemplate(BaseTemplate):
    """B = f(A) element by element, both of `shape`."""

    shape: Any = (1,)
    dtype: str = "float16"

    @property
    def work(self) -> Map:
        return Map(tuple(self.shape), (), self.dtype, self.dtype)

    def program(self, hint: Hint) -> Any:
        return programs.elementwise_program(self.work, hint)


@dataclass
class GeneralReductionTemplate(BaseTemplate):
    """The sum over some axes.  structure: "S" for an axis that is kept, "R" for one that is reduced, as in "SSR".

    Without an R it is a map of elements.
    """

    structure: str = "SR"
    shape: Any = (1, 1)
    dtype: str = "float16"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.structure, (list, tuple)):
            self.structure = "".join(self.structure)
        if len(self.structure) != len(self.shape) or set(self.structure) - set("SR"):
            raise ValueError(f"GeneralReductionTemplate: structure wants one of S and R for each of {len(self.shape)} axes, "
                             f"found {self.structure!r}")

    @property
    def work(self) -> Map:
        if "R" not in self.structure:
            return Map(tuple(self.shape), (), self.dtype, self.dtype)
        axes = list(zip(self.structure, self.shape, strict=True))
        return Map(tuple(n for s, n in axes if s == "S"), tuple(n for s, n in axes if s == "R"), self.dtype, "float32"
                   if "float" in self.dtype else self.dtype, self.structure.endswith("R"))

    def program(self, hint: Hint) -> Any:
        if "R" not in self.structure:
            return programs.elementwise_program(self.work, hint)
        return programs.reduction_program(self.work, self.structure, hint)


@dataclass
class FlashAttentionTemplate(BaseTemplate):
    """softmax(Q @ K^T / sqrt(head_dim)) @ V.  Hints: block = (queries, keys) of a step, rstep = width of a head."""

    batch_size: int = 1
    num_heads: int = 1
    head_dim: int = 1
    seq_length: int = 1
    seq_kv_length: int = 1
    is_causal: bool = False
    in_dtype: str = "float16"
    out_dtype: str = "float16"
    accum_dtype: str = "float16"

    @property
    def work(self) -> Attention:
        return Attention(self.batch_size * self.num_heads, self.seq_length, self.seq_kv_length, self.head_dim,
                         self.in_dtype, self.out_dtype, self.accum_dtype, self.is_causal)

    def program(self, hint: Hint) -> Any:
        return programs.attention_program(self.work, hint)


__all__ = ["BaseTemplate", "ConvTemplate", "ElementwiseTemplate", "FlashAttentionTemplate", "GEMVTemplate",
           "GeneralReductionTemplate", "MatmulTemplate"]
