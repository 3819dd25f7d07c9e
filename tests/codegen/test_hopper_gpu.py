"""The hand-built Hopper programs on a Hopper GPU: TMA copies and the warp-specialised gemm, against float64."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
import by_driver
import hopper_programs as hopper
from handmade import at, evaluate, kernel, local, ramp, tensor, thread_vars, unrolled

from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import Alloc, If, Store, call, const, dtype, load, numpy_dtype, seq
from tilelang.layout import swizzled_box_layout, boxes_of
from tilelang.runtime.nvrtc import compile_cubin
from tilelang.target import Target
from tilelang.target.tensor_map import tensor_maps_of
from tilelang.target.wgmma import WGMMA_ROWS, expand

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper_device():
    if not Target("cuda").has_wgmma:
        pytest.skip("needs a Hopper GPU (sm_90a)")


def run(k, arrays: dict[str, np.ndarray], grid=(1,)) -> dict[str, np.ndarray]:
    return by_driver.run(k, "sm_90a", arrays, grid, tensor_maps_of(k.launch))


def grid_of(func) -> tuple[int, ...]:
    return tuple(int(g) for g in func.body.grid)


def random(shape, dt, seed=0):
    rng = np.random.default_rng(seed)
    if dt.startswith("float8"):
        return rng.integers(-3, 4, shape).astype(np.float32).astype(numpy_dtype(dtype(dt)))
    return rng.standard_normal(shape).astype(np.float32).astype(numpy_dtype(dtype(dt)))


@pytest.mark.parametrize("out", ["tma", "plain"])
@pytest.mark.parametrize("dt, columns, width", [("float16", 128, 128), ("float16", 32, 64), ("float16", 48, 32),
                                                ("float32", 32, 128), ("int8", 256, 128), ("bfloat16", 8, 16)])
def test_copy(dt, columns, width, out):
    m, n = 200, 1008
    a = (np.arange(m * n) % 251).astype(numpy_dtype(dtype(dt))).reshape(m, n)
    func = hopper.copy(m, n, 64, columns, dt, width, out)
    got = run(hopper.kernel_of(func), {"A": a, "B": np.zeros_like(a)}, grid_of(func))["B"]
    assert np.array_equal(got, a)


def test_copy_with_a_cache_hint():
    a = random((128, 256), "float16")
    func = hopper.copy(128, 256, hint="evict_first")
    assert np.array_equal(run(hopper.kernel_of(func), {"A": a, "B": np.zeros_like(a)}, grid_of(func))["B"], a)


def check_gemm(got, a, b, k, out, fp8=False):
    wide = a.astype(np.float64), b.astype(np.float64)
    want = wide[0] @ wide[1]
    unit = 2.0**-8 if out == "bfloat16" else 2.0**-11
    bound = np.abs(want) * unit + np.abs(wide[0]) @ np.abs(wide[1]) * (2.0**-10 if fp8 else k * 2.0**-24) + 2.0**-24
    assert (np.abs(got.astype(np.float64) - want) <= bound).all()


@pytest.mark.parametrize("trans_b", [True, False])
@pytest.mark.parametrize("m, n, k", [(256, 256, 512), (500, 392, 264), (128, 128, 8), (1024, 1024, 1024)])
@pytest.mark.parametrize("dt", ["float16", "bfloat16"])
def test_gemm(m, n, k, trans_b, dt):
    a, b = random((m, k), dt), random((n, k) if trans_b else (k, n), dt, 1)
    func = hopper.gemm(m, n, k, dt, trans_b, out=dt)
    got = run(hopper.kernel_of(func), {"A": a, "B": b, "C": np.zeros((m, n), a.dtype)}, grid_of(func))["C"]
    check_gemm(got, a, b.T if trans_b else b, k, dt)


def test_gemm_fp8():
    a, b = random((256, 512), "float8_e4m3"), random((128, 512), "float8_e4m3", 1)
    func = hopper.gemm(256, 128, 512, "float8_e4m3")
    got = run(hopper.kernel_of(func), {"A": a, "B": b, "C": np.zeros((256, 128), np.float16)}, grid_of(func))["C"]
    check_gemm(got, a, b.T, 512, "float16", fp8=True)


def one_instruction(row, a_in_registers, a_major, b_major, width, selector=0):
    """C = A @ B by one k-step, operands put into panels by plain stores.  Of a sparse A these are the kept values, and `words`
    has a thread's metadata."""
    m, n, k = row.shape
    tv = thread_vars()
    tx = tv[0]
    body, params, descriptors, offset, places = [], [], {}, 0, []
    for name, dt, rows, depth, major in (("a", row.a_dtype, m, k >> row.sparse, a_major), ("b", row.b_dtype, n, k, b_major)):
        stored = "float32" if dt == "tfloat32" else str(dt)
        shape = (rows, depth) if major == "k" else (depth, rows)
        t = tensor(name, shape, stored)
        params.append(t)
        if name == "a" and a_in_registers:
            regs = local("a_regs", row.a.registers, stored)
            body += [Alloc(regs), unrolled(row.a.registers, lambda i, r=regs, t=t: Store(
                r, (i,), load(t, row.a.index_at(tx, i)[0])))]
            descriptors[name] = at(regs, 0)
            continue
        w = min(width, row.b_bytes if name == "b" else 32) if major == "k" else width
        while shape[1] * dt.bits // 8 % w:
            w //= 2
        layout = swizzled_box_layout(shape, stored, w)
        p = boxes_of(layout, stored)
        tile = hopper.shared(f"{name}_tile", layout.size, stored)
        places.append((tile, offset))
        offset += -(-p.bytes // 1024) * 1024
        total = shape[0] * shape[1]

        def put(i, tile=tile, t=t, layout=layout, shape=shape, total=total):
            e = i * 128 + tx
            return If(e < total, Store(tile, (layout.offset((e // shape[1], e % shape[1])),),
                                       load(t, (e // shape[1], e % shape[1]))))

        d = p.descriptor(major)
        body += [Alloc(tile), unrolled(-(-total // 128), put)]
        descriptors[name] = call("wgmma_descriptor", (at(tile, 0),), "uint64", lbo=d.lbo, sbo=d.sbo, swizzle=d.swizzle)
    out, acc = tensor("c", (128, row.c.registers), str(row.c_dtype)), local("acc", row.c.registers, str(row.c_dtype))
    pins = [evaluate("wgmma_pin", descriptors["a"], count=row.a.registers)] if a_in_registers else []
    words, word, used, attrs = (), (), (), {"row": row.name, "a_major": a_major, "b_major": b_major}
    if row.sparse:
        given, held = tensor("words", (128,), "uint32"), local("held", 1, "uint32")
        body += [Alloc(held), Store(held, (const(0),), load(given, (tx,)))]
        words, word, attrs["selector"] = (given,), (load(held, (const(0),)),), selector
        used = (evaluate("wgmma_used", at(held, 0), count=1),)
    body += [evaluate("fence_proxy_async"), evaluate("sync_threads"), Alloc(acc), *pins, evaluate("wgmma_fence"),
             evaluate("wgmma", at(acc, 0), descriptors["a"], descriptors["b"], const(False), *word, **attrs),
             evaluate("wgmma_commit"), evaluate("wgmma_wait", n=0), *used,
             evaluate("wgmma_pin", at(acc, 0), count=row.c.registers),
             unrolled(row.c.registers // 4, lambda i: Store(out, (tx, ramp(i * 4, 4)), load(acc, (ramp(i * 4, 4),))))]
    return kernel((*params, *words, out), seq(*body), tvars=tv, shared_offsets=tuple(places), shared_bytes=offset)


def metadata(row, rng):
    """(codes of the groups of each row, word of each thread for a selector), as target/wgmma.py describes them."""
    m, groups = row.shape[0], row.shape[2] // 4
    codes = rng.choice(np.array([i | j << 2 for j in range(4) for i in range(j)]), (m, groups))
    t = np.arange(128)
    first, q = t // 32 * 16 + t % 32 // 4, t % 4

    def joined(rows, begin, count):
        return sum(codes[rows, begin + i].astype(np.uint32) << np.uint32(4 * i) for i in range(count))

    if row.a_dtype.bits == 8:
        return codes, lambda selector: joined(first + 8 * (q % 2), 8 * (q // 2), 8)
    both = joined(first, 4 * (q % 2), 4) | joined(first + 8, 4 * (q % 2), 4) << np.uint32(16)
    return codes, lambda selector: np.where(q // 2 == selector, both, rng.integers(0, 2**32, 128, np.uint32))


INSTRUCTIONS = [(name, rs, a, b) for name, row in WGMMA_ROWS.items() if row.shape[1] in (8, 64, 96)
                for rs in (False, True) for a in (row.majors if not rs else ("k",)) for b in row.majors]


@pytest.mark.parametrize("width", [16, 128])
@pytest.mark.parametrize("name", sorted({x[0] for x in INSTRUCTIONS}))
def test_row_means_what_the_table_says(name, width):
    row = WGMMA_ROWS[name]
    m, n, k = row.shape
    rng = np.random.default_rng(3)

    def matrix(shape, dt):
        return rng.integers(0 if dt.is_unsigned else -4, 5, shape).astype(numpy_dtype(dt))

    a, b = matrix((m, k >> row.sparse), row.a_dtype), matrix((k, n), row.b_dtype)
    codes, words = metadata(row, rng) if row.sparse else (None, None)
    want = row.reference(expand(a, codes) if row.sparse else a, b, np.zeros((m, n), numpy_dtype(row.c_dtype)), False)
    for (_, rs, a_major, b_major), selector in itertools.product(
            (x for x in INSTRUCTIONS if x[0] == name), (0, 1) if row.sparse and row.a_dtype.bits == 16 else (0,)):
        k_ = one_instruction(row, rs, a_major, b_major, width, selector)
        given = {"words": words(selector).astype(np.uint32)} if row.sparse else {}
        got = run(k_, {"a": a if a_major == "k" else a.T.copy(), "b": b.T.copy() if b_major == "k" else b, **given,
                       "c": np.zeros((128, row.c.registers), numpy_dtype(row.c_dtype))})["c"]
        c = got[row.c.owners()[0], row.c.register_table()]
        assert np.array_equal(c.astype(np.float64), want.astype(np.float64)), (rs, a_major, b_major, selector)


def test_host_code_encodes_the_maps():
    """The whole way: host stub, maps encoded at the call, symbolic extents, a changed tensor."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("tvm_ffi")
    pytest.importorskip("llvmlite")
    from tilelang.jit.artifact import Artifact
    from tilelang.jit.loading import load_gpu
    from tilelang.runtime.host_engine import compile_object
    from tilelang.runtime.host_stub import stub_text
    from tilelang.runtime.launchers import GpuLauncher
    from tilelang.runtime.signature import signature_of
    from tilelang.transform.lower.device_program import split_host

    m, n, k = (hopper.fresh(x) for x in "mnk")
    func = hopper.gemm(m, n, k)
    lowered, sig = split_host(func), signature_of(func)
    (device,) = lowered.kernels
    host = stub_text(sig, GpuLauncher(lowered.host, lowered.kernels), set(sig.symbols), ("call",))
    cubin = compile_cubin(print_kernel(device), "sm_90a")
    meta = {"kernels": [{"name": device.name, "file": "kernel.cubin", "shared_bytes": device.shared_bytes}]}
    entry = load_gpu(Artifact("cuda", "", host, {"host.o": compile_object(host), "kernel.cubin": cubin.bytes}, meta), sig)
    for sm, sn, sk in ((512, 256, 192), (512, 256, 192), (136, 72, 264)):
        a, b = (torch.randn(s, device="cuda").half() for s in ((sm, sk), (sn, sk)))
        c = torch.zeros(sm, sn, device="cuda").half()
        entry.call(a, b, c)
        torch.cuda.synchronize()
        check_gemm(c.cpu().numpy(), a.cpu().numpy(), b.cpu().numpy().T, sk, "float16")
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        entry.call(torch.zeros(64, 100, device="cuda").half(), torch.zeros(64, 100, device="cuda").half(),
                   torch.zeros(64, 64, device="cuda").half())
