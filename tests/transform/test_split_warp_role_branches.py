"""split_warp_role_branches: statements of a branch through which threads of several warp roles exchange values."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.ir import If, walk
from tilelang.simulator import run_tile
from tilelang.transform.legalize.split_warp_role_branches import split_warp_role_branches
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import TILE_PASSES


def before(main):
    """The program as the pass gets it."""
    names = [p.__name__ for p in TILE_PASSES]
    return run_passes(main.func, TILE_PASSES[:names.index("split_warp_role_branches")], PassContext())


def program(where):
    @T.prim_func
    def main(O: T.Tensor((256,), "int32"), P: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            S, R = T.alloc_shared((64,), "int32"), T.alloc_shared((64,), "int32")
            x = T.alloc_var("int32", init=0)
            for i in T.Parallel(64):
                S[i] = -1
                R[i] = i
            if where == "exchange":
                if tx >= 96 and tx < 160:
                    y = R[tx - 96] * 3
                    S[tx - 96] = y
                    x = S[159 - tx] + y
            elif where == "store":
                if tx >= 96 and tx < 160:
                    S[tx - 96] = R[tx - 96] * 3
            elif where == "both ways":
                if tx >= 96 and tx < 160:
                    S[tx - 96] = 1
                    x = S[159 - tx]
                else:
                    x = 2
            O[tx] = x
            if where != "no roles":
                with T.ws(0):
                    T.copy(S, P)
            else:
                T.copy(S, P)

    return before(main)


def test_threads_read_what_others_of_their_branch_stored():
    func = program("exchange")
    parted = split_warp_role_branches(func, PassContext())
    branches = [[n for n in walk(f.body) if isinstance(n, If)] for f in (func, parted)]
    assert len(branches[1]) == len(branches[0]) + 2  # three statements, each under a condition of its own
    got = run_tile(parted, [np.zeros(256, np.int32), np.zeros(64, np.int32)])
    i = np.arange(64)
    want = np.zeros(256, np.int32)
    want[96:160] = 3 * (63 - i) + 3 * i
    assert (got["O"] == want).all() and (got["P"] == 3 * i).all()


def test_an_exchange_beside_another_way_is_parted_too():
    func = program("both ways")
    parted = split_warp_role_branches(func, PassContext())
    assert parted is not func
    got = run_tile(parted, [np.zeros(256, np.int32), np.zeros(64, np.int32)])
    want = np.full(256, 2, np.int32)
    want[96:160] = 1
    assert (got["O"] == want).all() and (got["P"] == 1).all()


@pytest.mark.parametrize("where", ["store", "no roles"])
def test_other_branches_stay_whole(where):
    func = program(where)
    assert split_warp_role_branches(func, PassContext()) is func
