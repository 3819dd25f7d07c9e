"""Running a traced function by its tile meaning and on every other execution, and looking at its statements."""

import numpy as np
from everywhere import EXECUTIONS
from everywhere import run as run_on

from tilelang.ir import numpy_dtype, walk
from tilelang.simulator.reference.run import run_tile


def run(f, *args):
    """The tensors by name after a run by tile meaning; those of the other executions are the same."""
    full = list(args)
    for p in f.func.params[len(full):]:
        b = f.func.buffer_of(p)
        full.append(np.zeros(tuple(int(d) for d in b.shape), numpy_dtype(b.dtype)))
    out = run_tile(f.func, full)
    for on in EXECUTIONS:
        for want, got in zip(out.values(), run_on(f, *full, on=on), strict=True):
            np.testing.assert_array_equal(got, want, on)
    return out


def nodes(f, kind):
    return [n for n in walk(f.func.body) if isinstance(n, kind)]


def out(f, *args):
    """The result of a kernel with one output `O`."""
    return run(f, *args)["O"].tolist()
