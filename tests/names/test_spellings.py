"""Parameters by the names that the specification writes."""

import inspect

import numpy as np
import pytest
from everywhere import cuda_text, everywhere, run

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.language.spellings import SPELLINGS, spelled


def test_every_spelling_has_a_place():
    """A function takes as many parameters by place as the specification names, so that a name means the right one."""
    for name, order in SPELLINGS.items():
        params = inspect.signature(getattr(T, name)).parameters.values()
        places = [p for p in params if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert any(p.kind is p.VAR_POSITIONAL for p in params) or len(order.split()) <= len(places), name
        same = [p.name for p in places if p.name in order.split()]  # names that both have stand in one order
        assert same == [n for n in order.split() if n in same], name


def test_a_function_is_one_object_wherever_it_is_imported_from():
    from tilelang.language import proxy, thread, tir

    assert thread.shfl_sync is T.shfl_sync and thread.If_ is T.If is tir.ir.If and proxy.make_tensor is T.make_tensor


def test_a_parameter_given_twice_or_left_out_is_an_error():
    def f(a, b=2):
        return a, b

    g = spelled(f, "x y")
    assert g(1) == (1, 2) and g(x=3, y=4) == (3, 4) and g(1, y=5) == (1, 5) and g(a=6) == (6, 2)
    assert spelled(lambda *args: args, "x y")(y=2, x=1) == (1, 2)
    for bad in ({"x": 1, "a": 2}, {"z": 1}):
        with pytest.raises(TypeError):
            g(**bad)
    with pytest.raises(TypeError, match="multiple values for argument 'x'"):
        g(1, x=2)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        spelled(lambda *args: args, "x y")(y=2)


@pytest.mark.spec("L15:shuffles", "L14:ieee", "L14:packed", "L14:bits", "L4.3:casts")
def test_functions_of_values():
    @T.prim_func
    def f(X: T.Tensor((32,), "float32"), I: T.Tensor((32,), "int32"), Y: T.Tensor((5, 32), "float32"),
          Z: T.Tensor((6, 32), "int32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            Y[0, t] = T.ieee_fdiv(x=X[t], y=T.float32(3))
            Y[1, t] = T.ieee_fmaf(X[t], z=T.float32(1), y=X[t], rounding_mode="rn")
            Y[2, t] = T.shfl_sync(value=X[t], srcLane=3)
            Y[3, t] = T.shfl_down(X[t], delta=2, width=32)
            Y[4, t] = T.__ldg(A=X, idx=31 - t)
            Z[0, t] = T.shift_left(x=I[t], y=2)
            Z[1, t] = T.__ffs(v=I[t])
            T.buffer_store(buf=Z, value=I[t], indices=[2, t], predicate=t > 7)
            with T.If(c=t < 4):
                with T.Then():
                    Z[3, t] = 1
            Z[4, t] = T.get_warp_idx(ws=16)
            Z[5, t] = T.extract_lane(T.reinterpret(T.min2(x=T.float16x2(I[t], 1), y=T.float16x2(2, I[t])), "int16x2"), 0)

    x, i = np.linspace(0.1, 3, 32).astype(np.float32), np.arange(1, 33, dtype=np.int32)
    _, _, y, z = everywhere(f, x, i)
    t = np.arange(32)
    np.testing.assert_array_equal(y[0], x / np.float32(3))
    np.testing.assert_array_equal(y[1], (x.astype(np.float64) ** 2 + 1).astype(np.float32))
    np.testing.assert_array_equal(y[2:], [np.full(32, x[3]), x[np.where(t + 2 < 32, t + 2, t)], x[::-1]])
    low = np.minimum(i, 2).astype(np.float16).view(np.int16)
    ffs = [(int(v) & -int(v)).bit_length() for v in i]
    np.testing.assert_array_equal(z, [i << 2, ffs, np.where(t > 7, i, 0), t < 4, t // 16, low])


@pytest.mark.spec("L16:mbarriers", "L15:max_nreg")
def test_barriers():
    @T.prim_func
    def f(X: T.Tensor((64, 64), "float16"), Y: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=256):
            S = T.alloc_shared((64, 64), "float16")
            full = T.alloc_barrier(128)
            with T.ws(1):
                T.dec_max_nreg(n=24)
                T.tma_copy(X[0:64, 0:64], S, barrier=full)
                T.mbarrier_arrive(bar=full)
            with T.ws(0):
                T.inc_max_nreg(n=240)
                T.mbarrier_wait_parity(bar=full, parity=0)
                T.copy(S, Y)

    x = np.arange(4096).reshape(64, 64).astype(np.float16)
    for on in ("tile", "cpu", "sm_90a"):
        np.testing.assert_array_equal(run(f, x, on=on)[1], x, on)
    assert "set_max_nreg" in cuda_text(f, "sm_90a", assemble=False)


def test_a_name_that_no_spelling_has_is_told():
    with pytest.raises((TileLangError, TypeError), match="lame"):

        @T.prim_func
        def f(X: T.Tensor((32,), "float32")):
            with T.Kernel(1, threads=32):
                X[0] = T.shfl_sync(X[0], lame=3)
