"""Running a traced function by its tile meaning, and looking at its statements."""

import numpy as np

from tilelang.ir import numpy_dtype, walk
from tilelang.simulator.tile import run_tile


def run(f, *args):
    full = list(args)
    for p in f.func.params[len(full):]:
        b = f.func.buffer_of(p)
        full.append(np.zeros(tuple(int(d) for d in b.shape), numpy_dtype(b.dtype)))
    return run_tile(f.func, full)


def nodes(f, kind):
    return [n for n in walk(f.func.body) if isinstance(n, kind)]


def out(f, *args):
    """The result of a kernel with one output `O`."""
    return run(f, *args)["O"].tolist()
