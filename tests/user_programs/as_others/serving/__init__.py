"""In the manner of the kernels of serving systems: paged caches, sampling, quantised products, small fused steps."""

from . import attention, decoding, quantised, sampling

PROGRAMS = [
    *decoding.PROGRAMS,
    *attention.PROGRAMS,
    *quantised.PROGRAMS,
    *sampling.PROGRAMS,
]
