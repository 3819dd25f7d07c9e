"""Names of release 0.1.15: launches, clusters, persistent pipelines, views with strides, partial fragments, hints, dialects."""

from importlib import import_module
from inspect import signature

import numpy as np
import pytest
from everywhere import SM80, SM90A, WITH_HOPPER, everywhere

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangWarning
from tilelang.layout import Fragment, PartialFragment

F16, F32, I32 = "float16", "float32", "int32"


# ---- clusters and launches ------------------------------------------------------------------------------------------

def cluster_numbers(dims, grid=(4, 6)):
    @T.prim_func
    def main(X: T.Tensor((*reversed(grid), 12), I32)):
        with T.launch_kernel(list(grid), threads=32, cluster_dims=dims) as (bx, by):
            frame = T.KernelLaunchFrame.Current()
            assert T.get_cluster_dims() == frame.get_cluster_dims() and frame.get_cluster_size() == T.get_cluster_size()
            assert frame.get_cluster_extents() == T.get_cluster_extents() == [frame.get_cluster_extent(d) for d in (0, 1)]
            numbers = [*T.get_cluster_dims(), T.get_cluster_size(), *T.get_cluster_ids(), T.get_cluster_id(),
                       frame.get_cluster_id(1), *T.get_cluster_extents(), T.get_cluster_extent(1), *frame.get_cluster_ids()[1:]]
            if T.get_thread_binding() == 0:
                [T.buffer_store(X, n, (by, bx, k)) for k, n in enumerate(numbers)]

    return main


@pytest.mark.spec("S:clusters", "S:launch_kernel")
@pytest.mark.parametrize("dims", [None, (2, 1, 1), [2, 3], 4], ids=str)
def test_numbers_of_clusters(dims):
    x, y = (1, 1) if dims is None else (dims, 1) if isinstance(dims, int) else dims[:2]
    got = everywhere(cluster_numbers(dims), on=WITH_HOPPER if dims is None else {
        k: v for k, v in WITH_HOPPER.items() if k != "simulator"})[0]
    by, bx = np.mgrid[0:6, 0:4]
    want = [x, y, 1, x * y, bx // x, by // y, bx // x, by // y, 4 // x, 6 // y, 6 // y, by // y]
    np.testing.assert_array_equal(got, np.stack([np.broadcast_to(w, (6, 4)) for w in want], -1))


def test_extents_of_clusters_of_a_run_time_grid():
    n = T.dynamic("n")

    @T.prim_func
    def main(X: T.Tensor((n,), I32)):
        with T.ClusterKernel(n, cluster_dims=2, threads=32) as bx:
            if T.get_thread_binding() == 0:
                X[bx] = T.get_cluster_extent() * 100 + T.get_cluster_id()

    got = everywhere(main, np.zeros(6, np.int32), on={k: v for k, v in WITH_HOPPER.items() if k != "simulator"})[0]
    assert got.tolist() == [300, 300, 301, 301, 302, 302]


def test_wrong_uses_of_launches_and_clusters():
    for ask in (T.get_cluster_dims, T.get_cluster_size, T.get_cluster_ids, T.get_cluster_extents):
        with pytest.raises(AssertionError, match="is not initialized"):
            ask()
    frames = []

    def launched(use, **annotations):
        @T.prim_func
        def main(X: T.Tensor((4,), I32)):
            with T.launch_kernel(4, threads=32, **annotations) as bx:
                frames.append(T.KernelLaunchFrame.Current())
                use()
                X[bx] = 0

    for use in (lambda: T.get_cluster_id(1), lambda: T.get_cluster_extent(-1)):
        with pytest.raises(ValueError, match="dimension -?1 does not exist, the launch has 1"):
            launched(use)
    with pytest.raises(AssertionError, match="another launch than the open one"):
        launched(lambda: frames[0].get_cluster_dims())
    with pytest.warns(TileLangWarning, match="'occupancy' has no effect"):
        launched(lambda: None, occupancy=2)
    with pytest.raises(ValueError, match="cluster"):
        launched(lambda: None, cluster_dims=3)


# ---- persistent pipelines -------------------------------------------------------------------------------------------

def persistent(stages, domain=(4, 3), group=8):
    m, n = domain

    @T.prim_func
    def main(A: T.Tensor((m * 32, n * 64), F16), B: T.Tensor((m * 32, n * 64), F16)):
        with T.Kernel(3, threads=128) as bx:
            s = T.alloc_shared((32, 64), F16)
            for i, j in T.Persistent(list(domain), 3, bx, group, stages, annotations={}):
                T.copy(A[i * 32, j * 64], s)
                for r, c in T.Parallel(32, 64):
                    B[i * 32 + r, j * 64 + c] = s[r, c] * 2

    return main


@pytest.mark.spec("S:Persistent")
@pytest.mark.parametrize("stages", [0, 2, 3])
@pytest.mark.parametrize("domain,group", [((4, 3), 8), ((3, 5), 2), ((1, 7), 7)], ids=str)
def test_persistent_loops_with_stages(stages, domain, group):
    a = np.random.default_rng(0).standard_normal((domain[0] * 32, domain[1] * 64)).astype(np.float16)
    np.testing.assert_array_equal(everywhere(persistent(stages, domain, group), a, on=WITH_HOPPER)[1], a * 2)


def test_the_copies_of_a_persistent_loop_run_ahead():
    report = str(tilelang.compile(persistent(3), target=SM80).report())
    assert "pipelined: 3 stages of s" in report
    assert "stages of s" not in str(tilelang.compile(persistent(0), target=SM80).report())


@pytest.mark.parametrize("stages", [-1, 1.5, True])
def test_stages_of_a_persistent_loop_are_a_number(stages):
    with pytest.raises(ValueError, match="num_stages must be a non-negative integer"):
        persistent(stages)


# ---- views ----------------------------------------------------------------------------------------------------------

@pytest.mark.spec("S:view")
@pytest.mark.parametrize("scope", ["shared", "local", "global"])
def test_views_with_strides(scope):
    @T.prim_func
    def main(A: T.Tensor((4, 8), F32), B: T.Tensor((8, 4), F32), C: T.Tensor((4, 2, 8), F16)):
        with T.Kernel(1, threads=1):
            s = A if scope == "global" else T.alloc_local((4, 8), F32) if scope == "local" else T.alloc_shared((4, 8), F32)
            if scope != "global":
                T.copy(A, s)
            columns = T.view(s, (8, 4), strides=(1, 8))
            halves = T.view(s, (4, 2, 8), F16, strides=(16, 1, 2))
            for i, j in T.grid(8, 4):
                B[i, j] = columns[i, j]
            for i, j, k in T.grid(4, 2, 8):
                C[i, j, k] = halves[i, j, k]

    a = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    _, b, c = everywhere(main, a, on=WITH_HOPPER)
    np.testing.assert_array_equal(b, a.T)
    np.testing.assert_array_equal(c, a.view(np.float16).reshape(4, 8, 2).transpose(0, 2, 1))


def test_a_view_of_run_time_strides_and_of_one_that_is_dense():
    m, sx = T.dynamic("m, sx")

    @T.prim_func
    def main(X: T.StridedTensor((m, 64), (sx, 1), F16), D: T.StridedTensor((8, 64), (64, 1), F16), Y: T.Tensor((m, 64), F16)):
        with T.Kernel(m, threads=32) as bx:
            v, d = T.view(X, (m, 2, 32), strides=(sx, 32, 1)), T.view(D, (16, 32))
            for j in T.Parallel(32):
                Y[bx, j] = v[bx, 1, j]
                Y[bx, 32 + j] = v[bx, 0, j] + d[2 * bx, j]

    x, d = (np.random.default_rng(k).standard_normal((8, 96)).astype(np.float16) for k in (0, 1))
    d = np.ascontiguousarray(d[:, :64])
    got = everywhere(main, x[:, :64], d, np.zeros((8, 64), np.float16), on=WITH_HOPPER)[2]
    np.testing.assert_array_equal(got, np.hstack([x[:, 32:64], x[:, :32] + d[:, :32]]))


def test_a_transposed_view_of_a_tile_that_a_gemm_reads():
    @T.prim_func
    def main(A: T.Tensor((64, 64), F16), B: T.Tensor((64, 64), F16), C: T.Tensor((64, 64), F32)):
        with T.Kernel(1, threads=128):
            a, b, c = T.alloc_shared((64, 64), F16), T.alloc_shared((64, 64), F16), T.alloc_fragment((64, 64), F32)
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, clear_accum=True)
            T.gemm(a, T.view(b, strides=(1, 64)), c)
            T.copy(c, C)

    a, b = (np.random.default_rng(k).integers(-4, 5, (64, 64)).astype(np.float16) for k in (0, 1))
    np.testing.assert_array_equal(everywhere(main, a, b, on=WITH_HOPPER)[2], a.astype(np.float32) @ (b + b.T))


@pytest.mark.parametrize("build,words", [
    (lambda s, f, d: T.view(s, strides=(8,)), "Invalid shape/strides' dimensions: 2 and 1"),
    (lambda s, f, d: T.view(s, strides=(16, 1)), "goes beyond `s`"),
    (lambda s, f, d: T.view(s, strides=(1, 1)), "overlap"),
    (lambda s, f, d: T.view(s, strides=(8, 0)), "overlap"),
    (lambda s, f, d: T.view(f, strides=(8, 1)), "elements are registers of several threads"),
    (lambda s, f, d: T.view(d), "is not dense"),
    (lambda s, f, d: T.view(s, (4, 4), strides=(8, 2)), "shape check failed"),
    (lambda s, f, d: T.view(s, strides=("a", 1)), "shape of a tensor's strides"),
])
def test_strides_that_a_view_cannot_have(build, words):
    with pytest.raises((AttributeError, AssertionError, ValueError, TypeError), match=words):
        @T.prim_func
        def main(D: T.StridedTensor((4, 8), (16, 1), F32)):
            with T.Kernel(1, threads=32):
                s, f = T.alloc_shared((4, 8), F32), T.alloc_fragment((4, 8), F32)
                build(s, f, D)


# ---- layouts of reducers --------------------------------------------------------------------------------------------

def reduced(combine, op):
    @T.prim_func
    def main(A: T.Tensor((16, 64), F32), B: T.Tensor((16,), F32)):
        with T.Kernel(1, threads=128):
            a, out = T.alloc_fragment((16, 64), F32), T.alloc_fragment((16,), F32)
            T.copy(A, a)
            acc = T.alloc_reducer((16,), F32, op=op)
            T.annotate_layout({acc: PartialFragment((16,), lambda i, r: (r * 16 + i, 0), replicate=8, combine=combine)})
            T.reducer_init(acc)
            for i, j in T.Parallel(16, 64):
                T.reducer_update(acc[i], a[i, j])
            T.finalize_reducer(acc, out)
            T.copy(out, B)

    return main


@pytest.mark.spec("S:PartialFragment")
@pytest.mark.parametrize("combine", [None, 1, 2, 8])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_partial_fragments_of_reducers(combine, op):
    a = np.random.default_rng(0).integers(-9, 10, (16, 64)).astype(np.float32)
    np.testing.assert_array_equal(everywhere(reduced(combine, op), a, on=WITH_HOPPER)[1], getattr(a, op)(1))


def test_partial_fragments_that_are_none():
    given = {"replicate": 8, "forward_thread_fn": lambda i, r: r * 4 + i, "forward_index_fn": lambda i: 0}
    assert PartialFragment((4,), **given).combine == 8 and isinstance(PartialFragment((4,), combine=4, **given), Fragment)
    assert PartialFragment((4,), combine=4, **given).replicas == 8
    for combine in (3, 0, True, 16):
        with pytest.raises(ValueError, match="combine divides the 8 replicas"):
            PartialFragment((4,), combine=combine, **given)
    with pytest.raises(ValueError, match="`f` is no reducer"):
        @T.prim_func
        def main(A: T.Tensor((4,), F32)):
            with T.Kernel(1, threads=32):
                f = T.alloc_fragment((4,), F32)
                T.annotate_layout({f: PartialFragment((4,), **given)})


# ---- hints ----------------------------------------------------------------------------------------------------------

@pytest.mark.spec("S:annotate_ws_pipeline_depth")
def test_depths_of_buffers_are_hints():
    def build(depths):
        @T.prim_func
        def main(A: T.Tensor((256,), F32), B: T.Tensor((256,), F32)):
            with T.Kernel(1, threads=64):
                s, f = T.alloc_shared((64,), F32), T.alloc_fragment((64,), F32)
                T.annotate_ws_pipeline_depth(depths(s, f))
                for k in T.Pipelined(4, num_stages=2):
                    T.copy(A[k * 64], s)
                    T.copy(s, B[k * 64])

        return main

    a = np.arange(256, dtype=np.float32)
    np.testing.assert_array_equal(everywhere(build(lambda s, f: {s: 3}), a, on=WITH_HOPPER)[1], a)
    assert "the annotated depth 3 of `s`" in str(tilelang.compile(build(lambda s, f: {s: 3}), target=SM90A).report())
    for wrong, words in ((lambda s, f: {s: 0}, "0"), (lambda s, f: {f: 2}, "versions of shared tiles"),
                         (lambda s, f: 3, "a dict"), (lambda s, f: {s: True}, "True")):
        with pytest.raises(TypeError, match=words):
            build(wrong)


@pytest.mark.spec("S:pass-configs")
def test_pass_configs_of_schedulers(recwarn):
    tilelang.compile(persistent(0), target="cpu", pass_configs={
        "tl.enable_auto_schedule": True, "tl.enable_auto_warp_specialization": "role_based",
        tilelang.PassConfigKey.TL_ENABLE_FP32X2_REDUCTION: False})
    assert not [w for w in recwarn if issubclass(w.category, TileLangWarning)]
    for key, value, words in (("tl.enable_auto_warp_specialization", "other", "no scheduler has this name"),
                              ("tl.enable_fp32x2_reduction", True, "sm_100"),
                              ("tl.enable_auto_schedule", False, "is scheduled")):
        with pytest.warns(TileLangWarning, match=words):
            tilelang.compile(persistent(0), target="cpu", pass_configs={key: value})
    with pytest.raises(TypeError, match="takes str, found bool True"):
        tilelang.compile(persistent(0), target="cpu", pass_configs={"tl.enable_auto_warp_specialization": True})


# ---- dialects -------------------------------------------------------------------------------------------------------

KEYWORDS = {"copy": "disable_tma eviction_policy prefer_instruction", "gemm": "mbar k_pack", "gemm_sp": "wg_wait k_pack",
            "atomic_add": "use_tma", "Parallel": "prefer_async", "unroll": "unroll_factor", "reduce_max": "nan_propagate",
            "reduce_min": "nan_propagate", "reduce_absmax": "nan_propagate", "Kernel": "threads prelude",
            "gemm_blockscaled": "mbar use_2cta sf_layout"}


@pytest.mark.spec("S:dialects")
@pytest.mark.parametrize("name", ["cuda", "rocm", "cpu", "metal", "webgpu", "ascend"])
def test_dialects_are_facades(name):
    dialect = import_module(f"tilelang.{name}.language")
    assert dialect.__tilelang_dialect__ == name
    for function, keywords in KEYWORDS.items():
        assert set(keywords.split()) <= set(signature(getattr(dialect, function)).parameters), function
    scope = {}
    exec(f"from tilelang.{name} import language as T", scope)
    L = scope["T"]

    @L.prim_func
    def main(A: L.Tensor((64,), "float32"), B: L.Tensor((64,), "float32")):
        with L.Kernel(1, threads=32):
            s = L.alloc_shared((64,), "float32")
            L.copy(A, s, disable_tma=True, prefer_instruction="sync")
            for i in L.Parallel(64, prefer_async=False):
                B[i] = s[i] + 1

    np.testing.assert_array_equal(everywhere(main, np.zeros(64, np.float32))[1], 1)


def test_names_of_a_machine_that_is_not_there():
    from tilelang.ascend import language as ascend

    assert set(T.__all__) & {"copy", "Kernel", "gemm_blockscaled"} <= set(ascend.__all__) and not hasattr(T, "dual_copy")
    for name in ("MixedKernel", "Cube", "alloc_l0c", "dual_copy", "ascend_set_flag", "gemm_v0"):
        with pytest.raises(NotImplementedError, match=f"{name} is for Ascend NPUs, which are not available"):
            getattr(ascend, name)(1)
