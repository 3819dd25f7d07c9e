"""check_lanes: exchanges that only some lanes of a warp reach are refused at compile time, on every target."""

import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.target import Target
from tilelang.transform.pipeline import legalized, lower

EXCHANGES = {
    "shfl_xor": lambda x: T.shfl_xor(x, 1), "shfl_up": lambda x: T.shfl_up(x, 1), "shfl_down": lambda x: T.shfl_down(x, 1),
    "shfl_sync": lambda x: T.shfl_sync(x, 0), "any_sync": lambda x: T.any_sync(x > 0), "all_sync": lambda x: T.all_sync(x > 0),
    "ballot_sync": lambda x: T.cast(T.ballot_sync(x > 0), "int32"),
    "match_any_sync": lambda x: T.cast(T.match_any_sync(x), "int32"),
    "match_all_sync": lambda x: T.cast(T.match_all_sync(x), "int32"),
    "warp_reduce_sum": lambda x: T.warp_reduce_sum(x), "warp_reduce_max": lambda x: T.warp_reduce_max(x),
}
# Conditions under which only some lanes of a warp come.
SPLIT = ["tx % 2 == 0", "tx < 16", "tx == 5", "tx >= 40", "tx % 32 < 8 and n > 3", "A[tx] > 0", "not (tx < 33)", "v == 3",
         "tx // 16 == 0 or tx // 16 == 2", "A[tx + n] == 1", "T.get_lane_idx() == 0"]
# Conditions that hold for whole warps, or that are known only when the program runs.
WHOLE = ["tx // 32 == 0", "tx < 32", "tx >= 32", "n > 3", "tx // 32 == n", "A[tx // 32] > 0", "A[0] == tx // 32",
         "T.any_sync(A[tx] > 0) != 0", "tx < n", "T.get_warp_idx() == 1", "tx < 64", "w == 1", "T.syncthreads_or(A[tx]) != 0",
         "tx // 32 == 0 or n > 3", "s > 3",
         "A[(tx + n * 32) // 32] > 3"]


def under(cond, exchange="shfl_xor"):
    """A program with an exchange under a condition."""
    space = {"T": T, "act": EXCHANGES[exchange]}
    text = f"""
def f(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32"), n: T.int32):
    with T.Kernel(1, threads=64):
        tx = T.get_thread_binding()
        v = T.alloc_var("int32", init=tx % 32)
        w = T.alloc_var("int32", init=tx // 32)
        s = T.warp_reduce_sum(A[tx])
        if {cond}:
            O[tx] = act(A[tx])
"""
    return text, space


def made(tmp_path, cond, exchange="shfl_xor"):
    text, space = under(cond, exchange)
    file = tmp_path / "program.py"
    file.write_text(text)
    exec(compile(text, str(file), "exec"), space)
    return T.prim_func(space["f"])


@pytest.mark.parametrize("cond", SPLIT)
def test_an_exchange_that_some_lanes_do_not_reach_is_refused(cond, tmp_path):
    """It compiled for GPUs, where the lanes that come wait for the others or read garbage."""
    with pytest.raises(TileLangError, match="T.shfl_xor ") as e:
        legalized(made(tmp_path, cond).func)
    assert e.value.kind == "warp-divergent" and "mask" in e.value.hint
    assert "entered by some lanes of a warp only" in str(e.value)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_every_exchange_is_refused(exchange, tmp_path):
    with pytest.raises(TileLangError) as e:
        legalized(made(tmp_path, "tx % 2 == 0", exchange).func)
    assert e.value.kind == "warp-divergent"


@pytest.mark.parametrize("cond", WHOLE)
def test_whole_warps_may_come_to_an_exchange(cond, tmp_path):
    legalized(made(tmp_path, cond).func)


def test_every_target_refuses_alike(tmp_path):
    f = made(tmp_path, "tx % 2 == 0")
    for start in (lambda: lower(f.func, Target({"kind": "cuda", "arch": "sm_80"})),
                  lambda: lower(f.func, Target({"kind": "cuda", "arch": "sm_90a"})),
                  lambda: tilelang.compile(f, target="cpu"), lambda: tilelang.compile(f, execution_backend="tile")):
        with pytest.raises(TileLangError) as e:
            start()
        assert e.value.kind == "warp-divergent"


def loop(form):
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            x = T.alloc_var("int32", init=A[tx])
            if form == "break of lanes":
                for k in T.serial(4):
                    x = x + T.shfl_xor(x, 1)
                    if tx == k:
                        break
            elif form == "continue of lanes":
                for k in T.serial(100):
                    if tx % 2 == k % 2:
                        continue
                    x = x + T.shfl_xor(x, 1)
            elif form == "another length for each lane":
                for k in T.serial(tx % 4):
                    x = x + T.shfl_xor(x, k)
            elif form == "strides of a tree":
                for k in T.serial(5):
                    if tx % 32 < 16 >> k:
                        x = x + T.shfl_down(x, 16 >> k)
            elif form == "another length for each warp":
                for k in T.serial(tx // 32 + 2):
                    x = x + T.shfl_xor(x, k)
            elif form == "break of warps":
                for k in T.serial(4):
                    x = x + T.shfl_xor(x, 1)
                    if tx // 32 == k:
                        break
                    if T.all_sync(x > 3) != 0:
                        break
            elif form == "returned lanes":
                if tx % 32 >= 8:
                    T.thread_return()
                x = x + T.shfl_xor(x, 1)
            elif form == "masks":
                if tx % 32 < 8:
                    x = T.shfl_xor(x, 3, mask=0xFF)
                else:
                    x = T.shfl_xor(x, 1, mask=0xFFFFFF00)
            O[tx] = x

    return f


@pytest.mark.parametrize("form", ["break of lanes", "continue of lanes", "another length for each lane", "strides of a tree"])
def test_lanes_that_leave_a_loop_before_an_exchange_are_seen(form):
    with pytest.raises(TileLangError) as e:
        legalized(loop(form).func)
    assert e.value.kind == "warp-divergent" and "^^^" in str(e.value)


@pytest.mark.parametrize("form", ["another length for each warp", "break of warps", "returned lanes", "masks"])
def test_loops_of_whole_warps_and_masks_stay(form):
    legalized(loop(form).func)
