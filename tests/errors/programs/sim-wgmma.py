"""An accumulator read before the wait of its wgmma group."""

import numpy as np

from tilelang.ir import parse
from tilelang.simulator import run_device

PROGRAM = """
@T.prim_func
def main(A_handle: T.handle):
    A = T.match_buffer(A_handle, "A", (128,), "float32", scope="global", data="A_p")
    with T.Kernel(1, threads=(128, 1, 1)) as (bx, tx, ty, tz):
        S = T.alloc("S", (1024,), "float16", scope="shared.dyn", data="S_p")
        acc = T.alloc("acc", (4,), "float32", scope="local", data="acc_p")
        for i in T.serial(8):
            S[i * 128 + tx] = T.float16(1.0)
        T.evaluate(T.call("fence_proxy_async", "void"))
        T.evaluate(T.call("sync_threads", "void"))
        T.evaluate(T.call("wgmma_fence", "void"))
        a: T.uint64 = T.call("wgmma_descriptor", "uint64", T.address_of(S[0]),
                             lbo=1024, sbo=128, swizzle=0)
        T.evaluate(T.call("wgmma", "void", T.address_of(acc[0]), a, a, False,
                          a_major="k", b_major="k", row="wgmma.m64n8k16.f32.f16.f16"))
        T.evaluate(T.call("wgmma_commit", "void"))
        A[tx] = acc[0]
"""
run_device(parse(PROGRAM), [np.zeros(128, np.float32)])
