"""chunk_state and chunk_scan against float64, on the CPU and on simulators of GPUs."""

import numpy as np
import pytest

from tilelang.errors import TileLangError
from tilelang.library import chunk_scan, chunk_state
from tilelang.library.recurrent.ssd_kernels import SsdForm, scan_pairs, state_kernel
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.pipeline import lower

MACHINES = {"cpu": None, "sm_80": {"kind": "cuda", "arch": "sm_80"}, "sm_90a": {"kind": "cuda", "arch": "sm_90a"},
            "gfx942": {"kind": "hip", "mcpu": "gfx942"}}
EACH = ["cpu", "sm_80", "sm_90a", pytest.param("gfx942", marks=pytest.mark.slow)]
SIZES = [(1, 2, 64, 2, 1, 64, 64), (1, 2, 192, 4, 2, 64, 64), (1, 1, 128, 4, 2, 32, 48), (2, 2, 192, 1, 1, 16, 16),
         (1, 2, 128, 2, 1, 32, 64), (2, 1, 192, 3, 1, 128, 64),
         pytest.param((1, 1, 64, 2, 1, 256, 256), marks=pytest.mark.slow)]


def inputs(batch, chunks, length, heads, groups, p, n, dtype=np.float16):
    rng = np.random.default_rng(length)
    x, b, c = (rng.standard_normal((batch, chunks * length, *s)).astype(dtype) for s in ((heads, p), (groups, n), (groups, n)))
    dt = rng.random((batch, heads, chunks, length), np.float32) * 0.2
    a = -np.cumsum(dt * rng.uniform(0.5, 4, (heads, 1, 1)), -1, dtype=np.float32)
    rows = [y.astype(np.float64).reshape(batch, chunks, length, groups, n) for y in (c, b)]
    cb = np.einsum("bclgn,bcsgn->bcgls", *rows).astype(dtype)
    before = rng.standard_normal((batch, chunks, heads, p, n)).astype(dtype)
    return x, b, c, dt, a, cb, before, rng.standard_normal(heads).astype(np.float32)


def wide(x, dt, groups):
    """x by chunks, and the number of heads of a group."""
    batch, heads, chunks, length = dt.shape
    return x.astype(np.float64).reshape(batch, chunks, length, heads, -1), heads // groups


def close(got, want, terms, unit=2.0**-11):
    """Weights and results are rounded to 16 bits, each off by half a unit of the sum of the magnitudes of its terms."""
    assert (np.abs(got.astype(np.float64) - want) <= 2 * unit * (terms + np.abs(want)) + 2.0**-14).all()


@pytest.mark.parametrize("where", EACH)
@pytest.mark.parametrize("sizes", SIZES)
def test_states_are_those_of_float64(sizes, where):
    x, b, _, dt, a, *_ = inputs(*sizes)
    got = chunk_state(x, b, dt, a, target=MACHINES[where])
    xs, each = wide(x, dt, b.shape[2])
    bs = b.astype(np.float64).reshape(*xs.shape[:3], b.shape[2], -1).repeat(each, 3)
    weight = np.exp(a[..., -1:].astype(np.float64) - a) * dt
    want, terms = (np.einsum("bclhp,bclhn,bhcl->bchpn", f(xs), f(bs), weight) for f in (np.asarray, np.abs))
    close(got, want, terms)


@pytest.mark.parametrize("where", EACH)
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_outputs_are_those_of_float64(sizes, skip, where):
    x, _, c, dt, a, cb, before, d = inputs(*sizes)
    got = chunk_scan(cb, x, dt, a, c, before, d if skip else None, target=MACHINES[where])
    xs, each = wide(x, dt, c.shape[2])
    cs = c.astype(np.float64).reshape(*xs.shape[:3], c.shape[2], -1).repeat(each, 3)
    a = a.astype(np.float64)
    decay = np.tril(np.exp(np.minimum(a[..., None] - a[..., None, :], 0))) * dt[..., None, :]
    pairs = cb.astype(np.float64).repeat(each, 2).transpose(0, 2, 1, 3, 4) * decay
    found = []
    for f in (np.asarray, np.abs):
        y = np.einsum("bclhn,bchpn,bhcl->bclhp", f(cs), f(before.astype(np.float64)), np.exp(a))
        y += np.einsum("bhcls,bcshp->bclhp", f(pairs), f(xs)) + (f(xs) * f(d.astype(np.float64))[:, None] if skip else 0)
        found.append(y.reshape(got.shape))
    close(got, *found)


@pytest.mark.parametrize("change", [dict(x=np.zeros((1, 64, 2, 64), np.float32)), dict(b=np.zeros((1, 60, 1, 64), np.float16)),
                                    dict(b=np.zeros((1, 64, 1, 60), np.float16)), dict(a=np.zeros((1, 2, 1, 32), np.float32)),
                                    dict(dt=np.zeros((1, 2, 1, 64), np.float16))])
def test_arguments_that_do_not_go_together_are_rejected(change):
    x, b, _, dt, a, *_ = inputs(1, 1, 64, 2, 1, 64, 64)
    given = {**dict(x=x, b=b, dt=dt, a=a), **change}
    with pytest.raises(TileLangError, match=r"error\[ssd-argument\]"):
        chunk_state(given["x"], given["b"], given["dt"], given["a"])


@pytest.mark.parametrize("pairs", [False, True])
def test_kernels_for_any_length_have_warps_that_load(pairs):
    """The verifier leaves out whole periods of the rings, the same in all roles, when the number of tiles is open."""
    f = SsdForm(192, 4, 1, 64, 64, "float16", wide=True)
    program = scan_pairs(f._replace(blocks=132, stages=4)) if pairs else state_kernel(f)
    launch = lower(program.func, cx=PassContext(Target(MACHINES["sm_90a"]), verify=True)).kernels[0]
    assert launch.plan.sync_report.startswith("ordered") and launch.launch.num_threads == 384
