"""In the manner of a library of training kernels: casts, SwiGLU, expert dispatch, hyper-connections."""

from . import casts, dispatch, hyper_connections, routing, swiglu

PROGRAMS = [
    *swiglu.PROGRAMS,
    *hyper_connections.PROGRAMS,
    *dispatch.PROGRAMS,
    *routing.PROGRAMS,
    *casts.PROGRAMS,
]
