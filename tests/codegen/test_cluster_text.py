"""CUDA text of clusters, taken by NVRTC for sm_90a, and the order of blocks under T.use_swizzle in clusters."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "simulator"))
sys.path.insert(0, str(Path(__file__).parent))
from cluster_text import gemm, send, shift
from handmade import kernel, tensor
from sass_text import opcodes

from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import Store, const, fresh, with_options
from tilelang.runtime import nvrtc, sass
from tilelang.target import Target
from tilelang.transform.lower.device_program import split_host
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.memory.plan_shared_memory import plan_shared_memory

needs_nvrtc = pytest.mark.skipif(not nvrtc.available() or sass.find_nvdisasm() is None, reason="no NVRTC or nvdisasm")
SM90 = Target({"kind": "cuda", "arch": "sm_90a"})


def source(func) -> str:
    (k,) = split_host(plan_shared_memory(with_options(func, phase="SYNCED"), PassContext(SM90, {}))).kernels
    return print_kernel(k)


@needs_nvrtc
@pytest.mark.parametrize("func, dims, texts, opcode", [
    (lambda: gemm(empties="all"), "1, 2, 1", ("mbarrier.arrive.shared::cluster.b64 _, [%0]", "mapa.shared::cluster.u32",
     "complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5", '"h"(mask)'), "UTMALDG"),
    (shift, "4, 1, 1", ("ld.shared::cluster.u32", "tl::cluster_load(&S[tx]"), "UCGABAR_ARV"),
    (lambda: shift(write=True), "4, 1, 1", ("st.shared::cluster.u32",), "UCGABAR_WAIT"),
    (send, "2, 1, 1", ("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes",), "UBLKCP"),
])
def test_cluster_operations_assemble(func, dims, texts, opcode):
    text = source(func())
    assert f"__cluster_dims__({dims})" in text and all(t in text for t in texts)
    cubin = nvrtc.compile_cubin(text, "sm_90a")
    assert cubin.spills == 0 and "C75" not in cubin.log
    assert opcodes(sass.disassemble(cubin.bytes))[opcode] > 0


@needs_nvrtc
@pytest.mark.parametrize("dt", ["uint8", "float16", "bfloat16", "float64", "int64"])
def test_remote_elements_of_every_width_assemble(dt):
    for write in (False, True):
        text = source(shift(write=write)).replace("float*", f"{dt}_x*")
        kinds = {"uint8": "unsigned char", "float64": "double", "int64": "long long", "float16": "__half",
                 "bfloat16": "__nv_bfloat16"}
        text = f"#include <cuda_fp16.h>\n#include <cuda_bf16.h>\ntypedef {kinds[dt]} {dt}_x;\n" + text
        nvrtc.compile_cubin(text, "sm_90a")


@pytest.mark.parametrize("order", ["row", "column"])
@pytest.mark.parametrize("dims", [(2, 1, 1), (1, 2, 1), (2, 2, 1)])
def test_swizzled_clusters_stay_together_and_visit_every_block_once(order, dims):
    bx, by = fresh("bx"), fresh("by")
    o = tensor("O", (64, 64), "int32")
    text = print_kernel(kernel((o,), Store(o, (by, bx), const(0)), grid=(8, 6), block_vars=(bx, by), swizzle=(3, order),
                               cluster=dims))
    lines = [x.strip() for x in text.splitlines() if re.match(r"\s+const (unsigned|int) ", x)]
    seen = {}
    for y in range(6):
        for x in range(8):
            env = {"min": min, "blockIdx": type("B", (), {"x": x, "y": y}), "gridDim": type("G", (), {"x": 8, "y": 6})}
            for line in lines:
                line = re.sub(r"^const (unsigned|int) ", "", line).rstrip(";")
                line = re.sub(r"(\d)u\b", r"\1", line).replace("/", "//")
                line = re.sub(r"= (.*?) \? (.*?) : (.*)$", r"= (\2) if (\1) else (\3)", line)
                for part in re.split(r", (?=\w+_ = )", line):
                    exec(part, env)
            seen[x, y] = env["bx"], env["by"]
    assert sorted(seen.values()) == [(x, y) for x in range(8) for y in range(6)]
    for (x, y), (u, v) in seen.items():  # the hardware's clusters are clusters of the program
        assert (x % dims[0], y % dims[1]) == (u % dims[0], v % dims[1])
        a, b = seen[x - x % dims[0], y - y % dims[1]]
        assert (u // dims[0], v // dims[1]) == (a // dims[0], b // dims[1])
