"""Options of calls take what the language says, and nothing for its truth value: `clear="no"` is true to Python."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import walk
from tilelang.ops import Copy

f16, f32 = "float16", "float32"
NO_FLAG = ("yes", "False", 3.7, -1, 2, None, [], {}, object(), (1,), float("nan"), np.float32(1.0), b"x", 1j)


def built(body, *given):
    @T.prim_func
    def main(A: T.Tensor((64, 64), f16), C: T.Tensor((64, 64), f32), I: T.Tensor((64,), "int32"), n: T.int32):
        with T.Kernel(2, threads=128):
            S = T.alloc_shared((64, 64), f16)
            F = T.alloc_fragment((64, 64), f32)
            R = T.alloc_fragment((64,), f32)
            T.copy(A, S)
            T.clear(F)
            T.clear(R)
            body(A, S, F, R, C, I, n, *given)
            T.copy(F, C)

    return main


FLAGS = {
    "disable_tma": lambda A, S, F, R, C, I, n, v: T.copy(A, S, disable_tma=v),
    "disable_tma as annotation": lambda A, S, F, R, C, I, n, v: T.copy(A, S, annotations={"disable_tma": v}),
    "transpose_A": lambda A, S, F, R, C, I, n, v: T.gemm(S, S, F, transpose_A=v),
    "transpose_B": lambda A, S, F, R, C, I, n, v: T.gemm(S, S, F, transpose_B=v),
    "wgmma_gemm transpose_B": lambda A, S, F, R, C, I, n, v: T.wgmma_gemm(S, S, F, transpose_B=v),
    "reduce clear": lambda A, S, F, R, C, I, n, v: T.reduce_sum(F, R, clear=v),
    "reduce nan_propagate": lambda A, S, F, R, C, I, n, v: T.reduce_max(F, R, nan_propagate=v),
    "cumsum reverse": lambda A, S, F, R, C, I, n, v: T.cumsum(F, reverse=v),
    "cummax reverse": lambda A, S, F, R, C, I, n, v: T.cummax(F, reverse=v),
    "return_prev": lambda A, S, F, R, C, I, n, v: T.atomic_add(C[0, 0], 1.0, return_prev=v),
    "use_tma": lambda A, S, F, R, C, I, n, v: T.atomic_add(C[0, 0], 1.0, use_tma=v),
    "no_stack_info": lambda A, S, F, R, C, I, n, v: T.device_assert(n > 0, "m", no_stack_info=v),
    "explicit": lambda A, S, F, R, C, I, n, v: T.unroll(4, explicit=v),
    "tma_store_wait read": lambda A, S, F, R, C, I, n, v: T.tma_store_wait(0, read=v),
    "set_max_nreg is_inc": lambda A, S, F, R, C, I, n, v: T.set_max_nreg(24, v),
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_that_is_no_bool_is_refused_and_not_taken_for_true_or_false(name):
    for value in NO_FLAG:
        with pytest.raises(TypeError, match="option-type.*True or False") as e:
            built(FLAGS[name], value)
        assert e.value.expected == "True or False" and e.value.hint and "^" in str(e.value)


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_of_numpy_or_a_number_or_a_constant_is_a_bool(name):
    for value in (False, np.False_, 0, T.bool(False)):
        built(FLAGS[name], value)


def test_clear_as_a_numpy_bool_or_an_integer_means_what_it_says():
    def sums(clear):
        @T.prim_func
        def main(B: T.Tensor((4,), f32)):
            with T.Kernel(1, threads=32):
                F = T.alloc_fragment((4, 64), f32)
                R = T.alloc_fragment((4,), f32)
                T.fill(F, 1.0)
                T.fill(R, 1.0)
                T.reduce_sum(F, R, clear=clear)
                T.copy(R, B)

        return main

    for clear, want in ((np.True_, 64.0), (1, 64.0), (np.False_, 65.0), (0, 65.0)):
        for target, backend in (("cpu", "tile"), ("cpu", None), ({"kind": "cuda", "arch": "sm_80"}, "simulator")):
            got = np.zeros(4, np.float32)
            tilelang.compile(sums(clear), target=target, execution_backend=backend)(got)
            assert (got == want).all(), (clear, target, got)


REFUSED = {
    "clear_accum as a string": ("gemm-clear", lambda A, S, F, R, C, I, n: T.gemm(S, S, F, clear_accum="yes")),
    "clear_accum as a float of NumPy": ("gemm-clear", lambda A, S, F, R, C, I, n: T.gemm(S, S, F, clear_accum=np.float32(2))),
    "k_pack as a bool": ("copy-option", lambda A, S, F, R, C, I, n: T.gemm(S, S, F, k_pack=True)),
    "an eviction policy as a number": ("eviction-policy", lambda A, S, F, R, C, I, n: T.copy(A, S, eviction_policy=0)),
    "annotations of an atomic": ("option-type", lambda A, S, F, R, C, I, n: T.atomic_add(C[0, 0], 1.0, annotations="x")),
    "L2 twice over": ("l2-hint", lambda A, S, F, R, C, I, n: T.annotate_l2_hit_ratio({A: 2.0})),
    "L2 less than nothing": ("l2-hint", lambda A, S, F, R, C, I, n: T.annotate_l2_hit_ratio({A: -0.5})),
    "L2 not a number": ("l2-hint", lambda A, S, F, R, C, I, n: T.annotate_l2_hit_ratio({A: float("nan")})),
    "L2 of no dict": ("option-type", lambda A, S, F, R, C, I, n: T.annotate_l2_hit_ratio(A)),
    "blocks that cannot be resident": ("min-blocks", lambda A, S, F, R, C, I, n: T.annotate_min_blocks_per_sm(2**40)),
    "a flag that is no text": ("option-type", lambda A, S, F, R, C, I, n: T.annotate_compile_flags((1,))),
    "flags that are a dict": ("option-type", lambda A, S, F, R, C, I, n: T.annotate_compile_flags({})),
    "a message instead of a condition": ("condition", lambda A, S, F, R, C, I, n: T.device_assert("x")),
    "a message that is no text": ("option-type", lambda A, S, F, R, C, I, n: T.device_assert(n > 0, n)),
    "an assumption that is a text": ("condition", lambda A, S, F, R, C, I, n: T.assume("n > 0")),
    "an assumption that is an object": ("condition", lambda A, S, F, R, C, I, n: T.assume(object())),
    "a condition that is a text": (None, lambda A, S, F, R, C, I, n: T.if_then_else("yes", 1, 2)),
    "a printed message that is no text": ("option-type", lambda A, S, F, R, C, I, n: T.print(n, msg=0)),
    "a warp that is no number": ("option-type", lambda A, S, F, R, C, I, n: T.print(n, warp_id="x")),
    "a warp group that no block has": ("option-type", lambda A, S, F, R, C, I, n: T.print(R, warp_group_id=9)),
    "a lane that is a float": ("lane-argument-type", lambda A, S, F, R, C, I, n: T.shfl_sync(n, 3.7)),
    "a mask that is a float": ("lane-argument-type", lambda A, S, F, R, C, I, n: T.shfl_sync(n, 3, mask=3.7)),
    "a mask of a warp barrier that is NaN": ("lane-argument-type", lambda A, S, F, R, C, I, n: T.sync_warp(float("nan"))),
    "a width that is a bool": ("lane-arguments", lambda A, S, F, R, C, I, n: T.shfl_xor(n, 1, width=True)),
    "a warp of -1 lanes": ("lane-argument-type", lambda A, S, F, R, C, I, n: T.get_lane_idx(-1)),
    "groups that are a bool": ("lane-arguments", lambda A, S, F, R, C, I, n: T.ptx_wait_group(True)),
    "a factor of unrolling that is a text": ("option-type", lambda A, S, F, R, C, I, n: T.unroll(4, unroll_factor="x")),
    "prefer_async that is a text": ("option-type", lambda A, S, F, R, C, I, n: T.Parallel(4, prefer_async="x")),
    "stages beyond all memory": ("pipeline-arguments", lambda A, S, F, R, C, I, n: T.Pipelined(4, num_stages=2**40)),
    "an order that is bytes": ("pipeline-arguments", lambda A, S, F, R, C, I, n: T.Pipelined(4, order=b"x", num_stages=2)),
    "an order that is a dict": ("pipeline-arguments", lambda A, S, F, R, C, I, n: T.Pipelined(4, order={}, num_stages=2)),
    "a group that is a text": ("pipeline-arguments", lambda A, S, F, R, C, I, n: T.Pipelined(4, group="x", num_stages=2)),
    "an empty domain": ("parallel-extents", lambda A, S, F, R, C, I, n: T.Persistent([], 2, n)),
    "waves of no blocks": ("loop-step", lambda A, S, F, R, C, I, n: T.Persistent([4, 4], 0, n)),
    "a mask of __fns that is a float": ("math-type", lambda A, S, F, R, C, I, n: getattr(T, "__fns")(3.7, 0, 1)),
    "a quotient of floats": ("math-type", lambda A, S, F, R, C, I, n: T.ceildiv(3.7, n)),
    "multiples of nothing": ("math-type", lambda A, S, F, R, C, I, n: T.align_up(n, 0)),
    "an integer to a power that takes long": ("math-type", lambda A, S, F, R, C, I, n: T.pow(n, 2**40)),
    "a tile that no block holds": ("tensor-shape", lambda A, S, F, R, C, I, n: T.alloc_fragment((2**40,), f32)),
    "a scope that is a list": ("alloc-scope", lambda A, S, F, R, C, I, n: T.alloc_shared((4,), f32, scope=[])),
    "enable of a swizzle that is a text": ("option-type", lambda A, S, F, R, C, I, n: T.use_swizzle(4, enable="no")),
    "a panel that is a bool": ("swizzle-order", lambda A, S, F, R, C, I, n: T.use_swizzle(True)),
    "a text that is asked for NaN": ("math-type", lambda A, S, F, R, C, I, n: T.isnan("x")),
    "an address of 32 bits": ("pointer", lambda A, S, F, R, C, I, n: T.make_tensor(n, (4,), f32)),
    "a scalar as a tensor": ("pointer", lambda A, S, F, R, C, I, n: T.match_buffer(n, (4,))),
    "explicit unrolling of run-time bounds": ("unroll-options", lambda A, S, F, R, C, I, n: T.unroll(n, explicit=True)),
    "a scheduler without workers": ("option-type", lambda A, S, F, R, C, I, n: T.PersistentTileScheduler(4, 4, num_workers=0)),
    "a scheduler with panels of nothing": (
        "option-type", lambda A, S, F, R, C, I, n: T.PersistentTileScheduler(4, 4, swizzle_size=0)),
    "a private array without dimensions": ("tensor-shape", lambda A, S, F, R, C, I, n: T.alloc_local([], f32)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_of_another_kind_is_refused(name):
    kind, body = REFUSED[name]
    with pytest.raises(TileLangError) as e:
        built(body)
    shown = str(e.value)
    assert (kind is None or e.value.kind == kind) and "^" in shown, shown
    assert e.value.expected and e.value.found and e.value.hint, shown


def test_a_large_power_of_a_float_is_one_call_and_no_tree_of_products():
    @T.prim_func
    def main(A: T.Tensor((8,), f32)):
        with T.Kernel(1, threads=8):
            for i in T.Parallel(8):
                A[i] = T.pow(A[i], 1000)

    base = np.linspace(0.99, 1.01, 8).astype(np.float32)
    want = base.astype(np.float64) ** 1000
    for target, backend in (("cpu", "tile"), ("cpu", None), ({"kind": "cuda", "arch": "sm_80"}, "simulator")):
        got = base.copy()
        tilelang.compile(main, target=target, execution_backend=backend)(got)
        assert (np.abs(got - want) <= 8 * 2.0**-24 * want).all(), (target, got, want)


KNOWN = {"T.copy(A, S, annotations={'%s': 1})": "coalesced_width", "T.atomic_add(A, S, annotations={'%s': 1})": "memory_order",
         "T.gemm(S, S, F, annotations={'%s': 1})": "k_pack", "T.reduce_max(F, R, dim=1, annotations={'%s': 1})": "batch",
         "for i in T.serial(4, annotations={'%s': 1}): S[i, 0] = 1": "software_pipeline_stage",
         "for i in T.unroll(4, annotations={'%s': 1}): S[i, 0] = 1": "pragma_unroll_explicit",
         "for i in T.Parallel(4, annotations={'%s': 1}): S[i, 0] = 1": "loop_layout",
         "T.func_attr({'%s': 1})": "tir.noalias"}


def annotated(line):
    return tilelang.from_source(f"""
import tilelang.language as T

@T.prim_func
def f(A: T.Tensor((16, 16), "float16")):
    with T.Kernel(1, threads=32):
        S = T.alloc_shared((16, 16), "float16")
        F = T.alloc_fragment((16, 16), "float16")
        R = T.alloc_fragment((16,), "float16")
        {line}
""", "f")


@pytest.mark.parametrize("line", KNOWN)
def test_a_misspelt_annotation_key_was_kept_in_silence(line):
    key = KNOWN[line]
    wrong = key[:-3] + key[-2] + key[-3] + key[-1]  # two letters change places
    with pytest.raises(ValueError, match=f"annotation-key.*{wrong}") as e:
        annotated(line % wrong)
    assert f"did you mean '{key}'?" in str(e.value)


@pytest.mark.parametrize("line", [x for x in KNOWN if "func_attr" not in x] + ["T.fill(F, annotations={'%s': 1}, value=0)"])
def test_an_annotation_without_effect_says_so_and_stays_in_the_program(line):
    with pytest.warns(tilelang.errors.TileLangWarning, match="annotation-no-effect: the annotation 'remark'"):
        text = repr(annotated(line % "remark").func)
    assert "remark" in text


def test_annotations_do_not_set_what_passes_decide():
    """`tma` of a copy is a decision; as an annotation it is a remark."""
    with pytest.warns(tilelang.errors.TileLangWarning, match="annotation-no-effect"):
        copy = annotated("T.copy(A, S, annotations={'tma': True})").func.body
    assert not any(x.plan.tma for x in walk(copy, Copy))


def test_a_value_outside_a_shared_tile_has_no_effect():
    with pytest.warns(tilelang.errors.TileLangWarning, match="annotation-no-effect: the value outside `S`"):
        annotated("T.annotate_safe_value({S: 1})")
