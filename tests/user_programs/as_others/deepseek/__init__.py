"""In the manner of the inference kernels that are published with DeepSeek's models."""

from . import attention, gemm, quantise, routing

PROGRAMS = [
    *quantise.PROGRAMS,
    *gemm.PROGRAMS,
    *attention.PROGRAMS,
    *routing.PROGRAMS,
]
