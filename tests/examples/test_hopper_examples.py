"""Examples that name Hopper's own operations: on the interpreters, and on a GPU that has them."""

import pytest

from tilelang.codegen.cuda.printer import print_kernel
from tilelang.runtime import nvrtc
from tilelang.target import Target
from tilelang.transform.pipeline import lower

CHECKS = [("check_warp_roles", {"m": 200, "n": 72, "k": 328}), ("check_cluster", {"m": 300, "n": 72, "k": 328}),
          ("check_warp_roles", {"m": 128, "n": 128, "k": 64}), ("check_cluster", {"m": 100, "n": 128, "k": 40})]
SM90A = {"kind": "cuda", "arch": "sm_90a"}


@pytest.mark.parametrize("check, sizes", CHECKS)
def test_programs_written_for_hopper_agree_with_the_reference(example, check, sizes):
    import harness

    for place in (harness.Place(backend="tile"), harness.Place(target=SM90A, backend="simulator")):
        result = getattr(example("hopper/gemm_by_hand.py"), check)(on=place, **sizes)
        assert result.ok, str(result)


@pytest.mark.parametrize("name", ["mamba2", "gated_delta", "kda"])
def test_gradients_of_linear_attentions_on_hopper(example, name):
    """Walks back over chunks by TMA and bulk copies."""
    import checks
    import harness

    row, = [c for c in checks.CHECKS if c.file == f"attention/{name}_backward.py"]
    for result in example(row.file).check(on=harness.Place(target=SM90A, backend="simulator"), **row.small):
        assert result.ok, str(result)


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("name, sizes", [("mamba2", (1, 1024, 32, 1, 64, 128)), ("gated_delta", (1, 16, 1024, 128, 128)),
                                         ("kda", (1, 16, 1024, 128, 128))])
def test_gradients_of_linear_attentions_assemble_clean(example, name, sizes):
    program = getattr(example(f"attention/{name}_backward.py"), f"{name}_backward")(*sizes)
    for k in lower(program.func, Target(SM90A)).kernels:
        cubin = nvrtc.compile_cubin(print_kernel(k), "sm_90a")
        assert "C75" not in cubin.log and cubin.spills == 0, cubin.log


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("kernel", ["gemm_roles", "gemm_cluster"])
def test_programs_written_for_hopper_assemble_clean(example, kernel):
    program = getattr(example("hopper/gemm_by_hand.py"), kernel)(4096, 4096, 4096)
    (k,) = lower(program.func, Target(SM90A)).kernels
    cubin = nvrtc.compile_cubin(print_kernel(k), "sm_90a")
    assert "C75" not in cubin.log and cubin.spills == 0, cubin.log


def test_tiles_dealt_out_by_hand_are_multiplied_by_wgmma(example):
    """T.Persistent: a loop of each block's own length, which the check of the synchronisation follows."""
    program = example("gemm/gemm.py").persistent(4096, 4096, 1024)
    (k,) = lower(program.func, Target(SM90A)).kernels
    text = print_kernel(k)
    assert "wgmma.mma_async" in text and not any("without Hopper features" in line for line in k.launch.plan.report)


def test_a_tile_shared_by_workers_is_added_in_one_order(example):
    """stream_k: roles that follow each worker's list of tiles; no atomic sum, so nothing depends on who comes first."""
    import harness

    split_k = example("gemm/split_k.py")
    launch, join = (k.launch for k in lower(split_k.stream_k(1000, 1000, 4096).func, Target(SM90A)).kernels)
    text = str(launch) + str(join)
    assert "tma_load" in text and "in_warp_groups" in text and "atomic" not in text and "reduce_add" not in text
    for sizes in (dict(m=136, n=264, k=200, workers=5), dict(m=136, n=264, k=200, workers=24)):  # several tiles, less than one
        result = split_k.check_stream_k(on=harness.Place(target=SM90A, backend="simulator"), **sizes)
        assert result.ok, str(result)


@pytest.mark.gpu
@pytest.mark.parametrize("check", ["check_warp_roles", "check_cluster"])
@pytest.mark.parametrize("sizes", [{}, {"m": 1000, "n": 1048, "k": 328}])
def test_programs_written_for_hopper_agree_on_gpu(example, gpu, check, sizes):
    result = getattr(example("hopper/gemm_by_hand.py"), check)(on=gpu, **sizes)
    assert result.ok, str(result)
