"""Every example agrees with its reference: in small, ragged sizes everywhere, in its own sizes on a GPU."""

import pathlib

import pytest

from tilelang.transform import PassContext

# file, check, small sizes, sizes on a GPU ({}: the example's own)
CHECKS = [
    ("elementwise/add.py", "check_add", {"n": 3001}, {}),
    ("elementwise/add.py", "check_add_any", {"n": 2049, "dtype": "bfloat16"}, {}),
    ("elementwise/broadcast.py", "check_scale_shift_gate", {"m": 70, "n": 150}, {}),
    ("elementwise/broadcast.py", "check_outer_compare", {"m": 70, "n": 65}, {}),
    ("gemv/gemv.py", "check", {"m": 37, "k": 1100}, {}),
    ("gemm/gemm.py", "check_gemm", {"m": 100, "n": 72, "k": 88, "trans_b": True}, {"trans_b": True}),
    ("gemm/gemm.py", "check_gemm", {"m": 72, "n": 100, "k": 40, "dtype": "bfloat16"}, {"dtype": "bfloat16"}),
    ("gemm/gemm.py", "check_gemm", {"m": 70, "n": 50, "k": 100, "trans_b": True, "dtype": "int8"},
     {"trans_b": True, "dtype": "int8"}),
    ("gemm/gemm.py", "check_gemm", {"m": 33, "n": 40, "k": 48, "trans_a": True, "dtype": "float32"},
     {"m": 1000, "n": 1024, "k": 2000, "trans_a": True, "dtype": "float32"}),
    ("gemm/gemm.py", "check_persistent", {"m": 300, "n": 200, "k": 40, "workers": 3}, {}),
    ("gemm/gemm.py", "check_batched", {"batch": 3, "m": 70, "n": 40, "k": 48}, {}),
    ("gemm/gemm.py", "check_strided", {"m": 70, "n": 50, "k": 40}, {}),
    ("gemm/split_k.py", "check_split_k", {"m": 70, "n": 50, "k": 200, "parts": 3}, {}),
    ("gemm/split_k.py", "check_stream_k", {"m": 100, "n": 130, "k": 150, "workers": 5}, {}),
    ("gemm/fp8.py", "check_per_tensor", {"m": 40, "n": 20, "k": 72}, {}),
    ("gemm/fp8.py", "check_by_block", {"m": 20, "n": 70, "k": 136}, {}),
    ("gemm/library.py", "check_layer", {"m": 40, "n": 72, "k": 50}, {}),
    ("gemm/library.py", "check_experts", {"tokens": 50, "n": 24, "k": 40, "experts": 3}, {}),
    ("gemm/library.py", "check_taken_apart", {"m": 70, "n": 40, "k": 50}, {}),
    ("convolution/conv2d.py", "check_implicit", {"n": 2, "h": 7, "w": 6, "c": 32, "f": 40}, {}),
    ("convolution/conv2d.py", "check_implicit", {"n": 1, "h": 9, "w": 8, "c": 64, "f": 16, "stride": 2, "pad": 2,
                                                 "dilation": 2}, {"stride": 2, "dilation": 2, "pad": 2}),
    ("convolution/conv2d.py", "check_by_hand", {"n": 2, "h": 7, "w": 9, "c": 5, "f": 20}, {}),
    ("dequantize_gemm/dequantize.py", "check_int4", {"m": 40, "n": 70, "k": 160}, {}),
    ("dequantize_gemm/dequantize.py", "check_table", {"m": 70, "n": 40, "k": 192}, {}),
    ("softmax/softmax.py", "check_whole", {"m": 9, "n": 100}, {}),
    ("softmax/softmax.py", "check_whole", {"m": 5, "n": 130, "dtype": "float32"}, {"dtype": "float32"}),
    ("softmax/softmax.py", "check_online", {"m": 5, "n": 2500}, {}),
    ("normalization/rms_norm.py", "check_forward", {"m": 9, "n": 72}, {}),
    ("normalization/rms_norm.py", "check_backward", {"m": 37, "n": 72}, {}),
    ("normalization/layer_norm.py", "check_forward", {"m": 9, "n": 72, "dtype": "bfloat16"}, {}),
    ("normalization/layer_norm.py", "check_backward", {"m": 37, "n": 72}, {}),
    ("scan/scan.py", "check_tile", {"m": 9, "n": 100}, {}),
    ("scan/scan.py", "check_carried", {"m": 9, "n": 600}, {}),
    ("scan/scan.py", "check_two_passes", {"n": 5000}, {}),
    ("topk/topk.py", "check", {"m": 19, "n": 40, "k": 3}, {}),
    ("cast/fp8_cast.py", "check_per_token", {"m": 13, "n": 200}, {}),
    ("cast/fp8_cast.py", "check_per_block", {"m": 40, "n": 70, "group": 32}, {}),
    ("rotary/rotary.py", "check_half", {"batch": 1, "seq": 19, "heads": 2, "dim": 32}, {}),
    ("rotary/rotary.py", "check_interleaved", {"batch": 1, "seq": 19, "heads": 2, "dim": 32}, {}),
    ("moe/gating.py", "check_gate", {"tokens": 19, "experts": 24, "k": 3}, {}),
    ("moe/gating.py", "check_places", {"tokens": 500, "experts": 12, "k": 3}, {}),
    ("hadamard/hadamard.py", "check", {"m": 5, "n": 128}, {}),
    ("hadamard/hadamard.py", "check", {"m": 3, "n": 64, "dtype": "float32"}, {"dtype": "float32"}),
    ("dynamic/dynamic_gemm.py", "check_gemm", {"m": 70, "n": 40, "k": 50}, {}),
    ("dynamic/dynamic_gemm.py", "check_padded", {"rows": 150, "tokens": 70, "n": 40, "k": 50}, {}),
    ("macros/generic.py", "check_linear", {"m": 40, "n": 70, "k": 40}, {}),
    ("macros/generic.py", "check_polynomial", {"n": 1000}, {}),
]
IDS = [f"{file.split('/')[-1].removesuffix('.py')}-{check}" for file, check, _, _ in CHECKS]


def run(example, file, check, on, sizes):
    results = getattr(example(file), check)(on=on, **sizes)
    for result in results if isinstance(results, list) else [results]:
        assert result.ok, str(result)


@pytest.mark.parametrize("file, check, small, real", CHECKS, ids=IDS)
def test_agrees_with_reference(example, place, file, check, small, real):
    run(example, file, check, place, small)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [{}, {"tl.enable_hopper": True}], ids=["plain", "hopper"])
@pytest.mark.parametrize("file, check, small, real", CHECKS, ids=IDS)
def test_agrees_with_reference_on_gpu(example, gpu, file, check, small, real, config):
    with PassContext(config=config):
        run(example, file, check, gpu, real)


def test_every_kernel_file_of_these_families_is_run():
    examples = pathlib.Path(__file__).resolve().parents[2] / "examples"
    families = {file.split("/")[0] for file, *_ in CHECKS}
    files = {str(p.relative_to(examples)) for f in families for p in (examples / f).glob("*.py")}
    assert files == {file for file, *_ in CHECKS}


def test_a_wrong_result_ends_the_program_with_status_1(example):
    """The comparison can fail, and main says so."""
    import harness
    import numpy as np

    def wrong(n: int = 4, on: harness.Place = harness.HERE):
        return harness.compare("wrong", np.zeros(n), np.full(n, np.nan), 1.0)

    with pytest.raises(SystemExit) as ended:
        harness.main(wrong, argv=["--n", "3", "--target", "cpu"])
    assert ended.value.code == 1
    assert harness.compare("shape", np.zeros(3), np.zeros((3, 1)), 1.0).ok is False
    assert harness.compare("one", np.array([0.0, 2.0]), np.zeros(2), np.array([0.0, 1.0])).ok is False
