"""In the manner of an operator library for language models: GEMM, attention, norms, reductions, mixture of experts."""

from . import attention, decoding, elementwise, experts, gemm, norms, reductions

PROGRAMS = [
    *gemm.PROGRAMS,
    *attention.PROGRAMS,
    *decoding.PROGRAMS,
    *norms.PROGRAMS,
    *reductions.PROGRAMS,
    *experts.PROGRAMS,
    *elementwise.PROGRAMS,
]
