"""The cost model of attention tiles, and what ptxas makes of the tiles it chooses."""

from collections import Counter

import numpy as np
import pytest

from tilelang.codegen.cuda.printer import print_kernel
from tilelang.library import flash_attention
from tilelang.library.attention.build import plan_attention
from tilelang.library.attention.form import AttentionForm, Tile
from tilelang.library.attention.kernels import dense_attention, seen
from tilelang.library.attention.packed_kernels import packed_attention
from tilelang.library.attention.problem import Mask, Sizes, attention_problem
from tilelang.library.attention.tile_cost import (Machine, attention_tile, candidates, estimate, machine_of,
                                                  registers, registers_mma, shared_bytes, step_cycles, steps)
from tilelang.runtime import nvrtc
from tilelang.target import Target
from tilelang.transform.pipeline import lower

import tilelang.language as T

FULL, CAUSAL = Mask(), Mask(None, 0)
SM90, SM80 = (Target({"kind": "cuda", "arch": a}) for a in ("sm_90a", "sm_80"))
H200 = machine_of(SM90)


def square(batch, heads, length, dim):
    return Sizes(batch, length, length, heads, heads, dim, dim)


def test_machines():
    assert H200.kind == "wgmma" and H200.sms == 132 and machine_of(SM90, 78).sms == 78
    assert machine_of(SM80).kind == "mma" and machine_of(Target("cpu")).kind == "cpu"


def test_steps_counts_the_tiles_that_someone_sees():
    """Against the predicate of the programs, key by key."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        seq_q, seq_k = (int(n) for n in rng.integers(1, 150, 2))
        left, right = (None if rng.random() < 0.4 else int(rng.integers(0, 60)) for _ in range(2))
        mask, tile = Mask(left, right), Tile(32, 16)
        got = steps(Sizes(1, seq_q, seq_k, 1, 1, 64, 64), mask, tile)
        for i, (n, partly) in enumerate(got):
            rows = range(32 * i, min(seq_q, 32 * i + 32))
            pairs = [(r, j) for r in rows for j in range(seq_k) if bool(T.And(True, seen(mask, j, seq_k, r + seq_k - seq_q)))]
            tiles = Counter(j // 16 for _, j in pairs)
            # Rows behind the last query may reach a tile further.
            assert len(tiles) <= n <= len(tiles) + (3 if 32 * i + 32 > seq_q else 0), (seq_q, seq_k, mask, i)
            if 32 * i + 32 <= seq_q:
                assert partly == sum(c < 32 * 16 for c in tiles.values()), (seq_q, seq_k, mask, i)


@pytest.mark.parametrize("dim", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("target", [SM90, SM80], ids=["sm_90a", "sm_80"])
def test_candidates_fit(target, dim):
    machine = machine_of(target)
    sizes = square(2, 4, 1000, dim)
    found = list(candidates(machine, sizes))
    assert found
    for tile in found:
        taken = (registers if target is SM90 else registers_mma)(tile, dim)
        assert shared_bytes(tile, dim, dim) <= target.max_shared_bytes and taken <= 255 + machine.spilled
        assert step_cycles(machine, tile, dim, dim) > 0
    best = attention_tile(machine, sizes, CAUSAL)
    assert all(estimate(machine, sizes, CAUSAL, best)[0] <= 1.003 * estimate(machine, sizes, CAUSAL, t)[0] for t in found)


def test_choices_are_sane():
    for length in (512, 1024, 4096, 8192, 16384):  # two groups of 64 rows share the tiles of keys
        for mask in (FULL, CAUSAL):
            tile = attention_tile(H200, square(1, 32, length, 128), mask)
            assert (tile.rows, tile.threads) == (128, 256) and 128 <= tile.keys <= 176
    assert attention_tile(H200, Sizes(4, 1, 4096, 32, 32, 128, 128), FULL).rows == 64
    assert attention_tile(H200, square(1, 1, 16, 64), FULL).rows == 64
    assert attention_tile(Machine("cpu", 1), square(1, 1, 8, 64), FULL).rows == 16


def test_tiles_of_64_rows_waited_for_keys_and_values():
    """128 x 64 took 1272 us of 10,000 keys and 16 heads on an H200, 64 x 80 took 1511; of 4096 and 8 heads 132 and 127."""
    assert attention_tile(H200, square(1, 16, 10000, 256), CAUSAL).rows == 128
    assert attention_tile(H200, square(1, 8, 4096, 256), CAUSAL).rows == 64


def test_tiles_of_80_and_96_columns_had_two_groups():
    """Without a mask 128 x 160 took 639 and 676 us of four batches of 16 heads, 192 rows 581 and 648."""
    for dim, keys in ((80, 96), (96, 80)):
        tile = attention_tile(H200, square(4, 16, 4096, dim), FULL, plain=True)
        assert (tile.rows, tile.keys) == (192, keys)
    assert attention_tile(H200, square(4, 16, 4096, 80), CAUSAL, plain=True).rows == 192
    assert attention_tile(H200, square(4, 16, 4096, 96), CAUSAL, plain=True).rows == 128
    assert attention_tile(H200, square(4, 16, 4096, 128), FULL, plain=True).rows == 128


def test_prices_grow_with_the_work():
    tile = Tile(128, 128, 2, 256)
    times = [estimate(H200, square(1, 16, n, 128), m, tile)[0] for n in (2048, 8192) for m in (CAUSAL, FULL)]
    assert times == sorted(times) and times[-1] > 12 * times[-3]
    # All tiles run at once: the longest one decides, and of its tiles of keys one is masked.
    short = [estimate(H200, square(1, 16, 512, 128), m, tile)[0] for m in (FULL, CAUSAL)]
    assert short[0] < short[1] < 1.1 * short[0] < times[0]
    near, all_before = (estimate(H200, square(1, 16, 8192, 128), mask, tile)[0] for mask in (Mask(256, 0), CAUSAL))
    assert near < all_before / 5


# ---- compiled --------------------------------------------------------------------------------------------------------------


def strides(sizes, packed=False):
    out = []
    for n, h, d in ((sizes.seq_q, sizes.heads, sizes.dim), (sizes.seq_k, sizes.kv_heads, sizes.dim),
                    (sizes.seq_k, sizes.kv_heads, sizes.dim_v), (sizes.seq_q, sizes.heads, sizes.dim_v)):
        out.append((h * d, d, 1) if packed else (n * h * d, h * d, d, 1))
    return tuple(out)


def cubins(program, target):
    configs = {"tl.enable_fast_math": True, **({"tl.enable_hopper": True} if target.has_wgmma else {})}
    kernels = lower(program.func, target, configs).kernels
    return [(k, nvrtc.compile_cubin(print_kernel(k, fast_math=True), target.arch)) for k in kernels]


FORMS = {"causal_64": (64, CAUSAL, 8192), "full_64": (64, FULL, 8192), "causal_96": (96, CAUSAL, 4096),
         "full_80": (80, FULL, 4096),
         "causal_128": (128, CAUSAL, 8192), "full_128": (128, FULL, 16384), "short_128": (128, CAUSAL, 512),
         "ragged_128": (128, FULL, 8190), "window_128": (128, Mask(1023, 0), 8192), "causal_192": (192, CAUSAL, 8192),
         "causal_256": (256, CAUSAL, 8192), "full_256": (256, FULL, 8192)}
IN_CI = ("causal_128", "full_128", "full_64", "causal_256")  # the others take half a minute together


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in IN_CI else [pytest.mark.slow]) for n in FORMS])
def test_chosen_tiles_assemble_without_spills_or_serialised_products(name):
    dim, mask, length = FORMS[name]
    sizes = square(1, 16, length, dim)
    tile = attention_tile(H200, sizes, mask)
    for with_lse in (False, True):
        program = dense_attention(AttentionForm(sizes, strides(sizes), "bshd", "bfloat16", mask, tile, with_lse))
        ((kernel, cubin),) = cubins(program, SM90)
        assert "warp groups: 1 loads" in kernel.launch.plan.pipeline_report, kernel.launch.plan.report
        assert cubin.spills == 0 and "C75" not in cubin.log, (tile, cubin.log)


def masks(sizes, mask, keys):
    """How many times a kernel masks a tile of scores: in front of the loop, and in it."""
    program = dense_attention(AttentionForm(
        sizes, strides(sizes), "bshd", "bfloat16", mask, Tile(128, keys, 2, 256), False, 0.1))
    (kernel,) = lower(program.func, SM90, {"tl.enable_hopper": True, "tl.enable_fast_math": True}).kernels
    return print_kernel(kernel, fast_math=True).count("tl::registers_out_S(")


@pytest.mark.parametrize("dim, boxes", [(64, 1), (72, 2), (96, 3), (112, 2), (128, 2)])
def test_rows_of_72_and_112_columns_came_by_boxes_of_16(dim, boxes):
    """Five and seven for each row of keys: 72 columns took 698 us, and 613 by two boxes."""
    q = np.zeros((1, 4096, 1, dim), np.float16)
    tensors = {"q": q, "k": q, "v": q, **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "out"))}
    p = attention_problem(tensors, True, causal=False, window=None, layout="bshd", scale=None, with_lse=False, unit=8)
    form, _ = plan_attention(p, H200)
    (kernel,) = lower(dense_attention(form).func, SM90, {"tl.enable_hopper": True, "tl.enable_fast_math": True}).kernels
    text = print_kernel(kernel, fast_math=True)
    assert sum("tma_load" in line and "&Ks[" in line for line in text.splitlines()) == boxes
    assert f"mbarrier_wait(&Qs_full[{form.tile.rows // 64 - 1}]" in text  # a warp group waits for its own rows of the operand


@pytest.mark.parametrize("dim, dim_v", [(24, 80), (88, 72)])
def test_whole_boxes_of_a_narrow_operand_were_wider_than_its_tile(dim, dim_v):
    """Heads whose columns become a multiple of 16 first: the region had the boxes of 24, or 88, the tile those of 32, or 96."""
    rng = np.random.default_rng(dim)
    q, k, v = (rng.standard_normal((1, 20, 1, n)).astype(np.float16) for n in (dim, dim, dim_v))
    found = flash_attention(q, k, v, layout="bshd", target="cuda -arch=sm_90a")[0, :, 0].astype(np.float64)
    q, k, v = (x[0, :, 0].astype(np.float64) for x in (q, k, v))
    weights = np.exp(q @ k.T * dim**-0.5)
    assert abs(found - weights @ v / weights.sum(1, keepdims=True)).max() < 2e-3


def test_a_ragged_end_is_masked_before_the_loop():
    """A mask costs a loop 2 % where it is not applied either: its instructions are jumped over."""
    assert masks(square(1, 16, 2047, 128), FULL, 144) == 1
    assert masks(square(1, 16, 2048, 128), FULL, 128) == 0


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_packed_sequences_assemble_without_spills(dim):
    n, tokens_q, tokens_k = T.dynamic("n, tokens_q, tokens_k")
    sizes = Sizes(n, tokens_q, tokens_k, 16, 4, dim, dim)
    tile = attention_tile(H200, square(8, 16, 2048, dim), CAUSAL)
    form = AttentionForm(sizes, strides(sizes, True), "packed", "float16", CAUSAL, tile, True)
    for kernel, cubin in cubins(packed_attention(form), SM90):
        assert cubin.spills == 0 and "C75" not in cubin.log, (kernel.name, tile, cubin.log)


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tiles_of_sm_80_assemble_with_few_spills(dim):
    sizes, machine = square(1, 16, 4096, dim), machine_of(SM80)
    tile = attention_tile(machine, sizes, CAUSAL)
    form = AttentionForm(sizes, strides(sizes), "bshd", "float16", CAUSAL, tile, True)
    ((_, cubin),) = cubins(dense_attention(form), SM80)
    assert cubin.spills <= (4 * machine.spilled if dim == 128 else 0), (tile, cubin.registers)


@pytest.mark.parametrize("dim", [64, 128])
def test_warps_of_16_rows_read_keys_and_values_twice_as_often_as_shared_memory_allows(dim):
    """An H200 by mma.sync, 8192 keys: 128 rows by 128 threads 1.08 to 1.13 times as fast as the tiles before."""
    for mask in (FULL, CAUSAL):
        assert attention_tile(machine_of(SM80), square(2, 16, 8192, dim), mask) == Tile(128, 64, 2, 128)
