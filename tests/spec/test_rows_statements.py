"""Rows of language 2.3, 18 and 24 that no other module shows: statements, annotations, checks with their words."""

import logging

import numpy as np
import pytest
from everywhere import EXECUTIONS, SM80, cuda_text, everywhere, run

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.target import Target
from tilelang.transform.pipeline import legalized, lower


class Holder:
    pass


@pytest.mark.spec("L2.3:annotated")
def test_an_annotated_binding_keeps_the_values_own_type():
    @T.prim_func
    def f(X: T.Tensor((4,), "float32"), Y: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=4):
            t = T.get_thread_binding()
            n: T.int32 = 3
            x: T.int32 = X[t] * 0.5
            assert isinstance(n, int) and x.dtype == "float32"
            Y[t] = x + n

    assert np.array_equal(everywhere(f, np.arange(4, dtype=np.float32))[1], np.arange(4) * 0.5 + 3)


@pytest.mark.spec("L2.3:attribute-target")
def test_attributes_are_not_assigned_in_a_kernel():
    holder = Holder()
    with pytest.raises(NotImplementedError):
        @T.prim_func
        def f(Y: T.Tensor((4,), "float32")):
            with T.Kernel(1):
                holder.x = Y[0]


@pytest.mark.spec("L2.3:for-frame")
@pytest.mark.parametrize("items", [[1, 2], (3,), zip([1], [2]), enumerate("ab"), "text"])
def test_only_loops_are_looped_over(items):
    with pytest.raises(TypeError, match="Invalid for loop"):
        @T.prim_func
        def f(Y: T.Tensor((4,), "int32")):
            with T.Kernel(1):
                for i in items:
                    Y[0] = i


@pytest.mark.spec("L2.3:for-frame")
def test_for_else_is_refused():
    with pytest.raises(NotImplementedError):
        @T.prim_func
        def f(Y: T.Tensor((4,), "int32")):
            with T.Kernel(1):
                for i in T.serial(4):
                    Y[i] = 1
                else:
                    Y[0] = 2


@pytest.mark.spec("L2.3:expression")
def test_expression_statements(caplog):
    with caplog.at_level(logging.WARNING, logger="tilelang"):
        logging.getLogger("tilelang").addHandler(caplog.handler)
        try:
            @T.prim_func
            def f(Y: T.Tensor((4,), "int32")):
                with T.Kernel(1, threads=1):
                    Y[1] + 1  # unused: a warning
                    T.serial(4)  # opens a loop for the rest of the block: a warning
                    T.evaluate(0)
                    T.atomic_add(Y[0], 1)
        finally:
            logging.getLogger("tilelang").removeHandler(caplog.handler)
    assert everywhere(f)[0].tolist() == [4, 0, 0, 0]
    assert "is not used" in caplog.text and "a loop is used as a statement" in caplog.text


@pytest.mark.spec("L18:annotate_restrict_buffers", "L18:annotate_min_blocks_per_sm", "T.annotate_restrict_buffers",
                  "T.annotate_min_blocks_per_sm", "L18:annotate_l2_hit_ratio", "T.annotate_l2_hit_ratio")
def test_annotations_of_a_launch_reach_the_source_and_change_no_result():
    @T.prim_func
    def f(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32")):
        T.annotate_restrict_buffers(X, Y)
        with T.Kernel(2, threads=32) as b:
            T.annotate_min_blocks_per_sm(3)
            T.annotate_l2_hit_ratio({X: 0.5})
            t = T.get_thread_binding()
            Y[b * 32 + t] = X[b * 32 + t] + 1

    x = np.arange(64, dtype=np.float32)
    assert np.array_equal(everywhere(f, x)[1], x + 1)
    text = cuda_text(f)
    assert "__launch_bounds__(32, 3)" in text and "X" in text and "__restrict__" not in text


@pytest.mark.spec("L18:annotate_restrict_buffers", "L18:annotate_min_blocks_per_sm", "L18:annotate_l2_hit_ratio")
@pytest.mark.parametrize("build,error", [
    (lambda A, S: T.annotate_restrict_buffers(3), TypeError), (lambda A, S: T.annotate_min_blocks_per_sm(0), AssertionError),
    (lambda A, S: T.annotate_min_blocks_per_sm(1.5), AssertionError),
    (lambda A, S: T.annotate_l2_hit_ratio({S: 0.5}), AssertionError)])
def test_annotations_of_the_wrong_things_are_refused(build, error):
    with pytest.raises(error):
        @T.prim_func
        def f(A: T.Tensor((64,), "float32")):
            with T.Kernel(1):
                S = T.alloc_shared((4,), "float32")
                build(A, S)


@pytest.mark.spec("L18:annotate_options", "T.annotate_pass_configs", "T.annotate_compile_flags", "L18:raw-attributes",
                  "T.func_attr")
def test_options_written_in_the_function_are_its_attributes():
    @T.prim_func
    def f(Y: T.Tensor((4,), "int32")):
        T.annotate_compile_flags("-lineinfo")
        T.annotate_compile_flags(["-O2"])
        T.annotate_pass_configs({"tl.enable_fast_math": True})
        T.func_attr({"my.attribute": 3})
        with T.Kernel(1, threads=4):
            Y[T.get_thread_binding()] = 1

    assert list(f.attrs["tilelang_compile_flags"]) == ["-lineinfo", "-O2"]
    assert dict(f.attrs["tilelang_pass_configs"])["tl.enable_fast_math"]
    assert f.attrs["my.attribute"] == 3 and f.attrs["global_symbol"] == "f"
    assert f.with_attr("other", 4).attrs["other"] == 4
    for outside in (lambda: T.annotate_compile_flags("-O1"), lambda: T.annotate_pass_configs({})):
        with pytest.raises(T.JITNoBuilderError):
            outside()


@pytest.mark.spec("L18:annotate_options", "T.annotate_pass_configs", "T.annotate_compile_flags", "R2.1:compile")
def test_options_written_in_the_function_are_compiled_with():
    """Flags are those of the function and then of the call; a pass config of the call wins."""
    @T.prim_func
    def f(X: T.Tensor((32,), "float32"), Y: T.Tensor((32,), "float32")):
        T.annotate_compile_flags("-lineinfo")
        T.annotate_pass_configs({"tl.enable_fast_math": True})
        with T.Kernel(1, threads=32):
            Y[T.get_thread_binding()] = T.exp(X[T.get_thread_binding()])

    plain = tilelang.compile(f, target=SM80)
    assert list(plain.compile_flags) == ["-lineinfo"] and "__expf" in plain.get_kernel_source()
    other = tilelang.compile(f, target=SM80, compile_flags=["--maxrregcount=64"], pass_configs={"tl.enable_fast_math": False})
    assert list(other.compile_flags) == ["-lineinfo", "--maxrregcount=64"] and "__expf" not in other.get_kernel_source()
    x = np.linspace(-3, 3, 32, dtype=np.float32)
    for on in EXECUTIONS:
        assert np.allclose(run(f, x, on=on)[1], np.exp(x), rtol=1e-5), on


def refused_program(body):
    @T.prim_func
    def f(A: T.Tensor((32, 32), "float32"), n: T.int32):
        with T.Kernel(1, threads=32):
            F = T.alloc_fragment((32, 32), "float32")
            G = T.alloc_fragment((32,), "float32")
            S = T.alloc_shared((32, 32), "float32")
            L = T.alloc_local((32,), "float32")
            body(A, n, F, G, S, L)

    return f


@T.macro
def nested(A, n, F, G, S, L):
    for i in T.Parallel(4):
        A[i, 0] = 1
        for j in T.Parallel(4):
            A[i, j] = 2


@T.macro
def pipelined(A, n, F, G, S, L):
    for i in T.Parallel(4):
        for j in T.Pipelined(4, num_stages=2):
            A[i, j] = 2


@T.macro
def tile_op(A, n, F, G, S, L):
    for i in T.Parallel(4):
        T.copy(A[i, 0:32], G)


@T.macro
def symbolic(A, n, F, G, S, L):
    for i in T.Parallel(n):
        G[i] = 1


@T.macro
def local(A, n, F, G, S, L):
    for i in T.Parallel(32):
        L[i] = A[i, 0]


WORDS = [
    ("parallel-nested", nested, "[Tilelang Semantic Check] Nested parallel loops are not allowed", ValueError),
    ("parallel-pipelined", pipelined, "Pipelined loop cannot be nested inside a parallel loop", ValueError),
    ("parallel-tile-op", tile_op, "Only elementwise operations are allowed inside a parallel loop. Got a tile-op", ValueError),
    ("parallel-symbolic", symbolic, "is used to index a fragment buffer", ValueError),
    ("parallel-local", local, "Local buffer `L` is indexed by T.Parallel loop variable `i`", ValueError),
]


@pytest.mark.spec("L24:parallel-nested", "L24:parallel-pipelined", "L24:parallel-tile-op", "L24:parallel-symbolic",
                  "L24:parallel-local", "R10:TL_DISABLE_PRELOWER_SEMANTIC_CHECK")
@pytest.mark.parametrize("kind,body,words,error", WORDS, ids=[w[0] for w in WORDS])
def test_checks_speak_the_words_users_match(kind, body, words, error):
    with pytest.raises(error) as e:
        legalized(refused_program(body).func)
    assert e.value.kind == kind and words in str(e.value) and "-->" in str(e.value)


@pytest.mark.spec("T.Fragment")
@pytest.mark.spec("L24:fragment-access", "M:shifted-fragment")
def test_a_fragment_at_a_serial_index_is_right_or_refused():
    def program(threads_read_all):
        @T.prim_func
        def f(X: T.Tensor((64,), "int32"), Y: T.Tensor((64,), "int32"), n: T.int32):
            with T.Kernel(1, threads=32):
                G = T.alloc_fragment((64,), "int32")
                T.copy(X, G)
                if not threads_read_all:
                    T.annotate_layout({G: T.Fragment((64,), forward_fn=lambda i: (i // 2, i % 2))})
                t = T.get_thread_binding()
                for k in T.serial(2):
                    Y[t + 32 * k] = G[(t + n + 32 * k) % 64]
        return f

    x = np.arange(64, dtype=np.int32)
    for on in EXECUTIONS:
        assert np.array_equal(run(program(True), x, np.zeros(64, np.int32), 5, on=on)[1], np.roll(x, -5))
    with pytest.raises(TileLangError, match="Cannot lower access to thread-distributed fragment"):
        lower(program(False).func, Target(SM80), {})


@pytest.mark.spec("L24:fragment-constant")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_a_fragment_at_a_constant_index_in_a_parallel_loop_is_that_element(on):
    @T.prim_func
    def f(X: T.Tensor((32,), "int32"), Y: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            G = T.alloc_fragment((32,), "int32")
            T.copy(X, G)
            for i in T.Parallel(32):
                Y[i] = G[1] * 100 + G[i]

    x = np.arange(5, 37, dtype=np.int32)
    assert np.array_equal(run(f, x, on=on)[1], 600 + x)


@pytest.mark.spec("L24:loop-layout", "L8:Parallel")
def test_a_loop_layout_that_is_not_injective_is_refused():
    with pytest.raises(TileLangError, match="Loop layout is not injective") as e:
        @T.prim_func
        def f(A: T.Tensor((32, 32), "float32")):
            with T.Kernel(1, threads=32):
                for i, j in T.Parallel(32, 32, loop_layout=T.Fragment((32, 32), forward_fn=lambda i, j: (i, j // 2))):
                    A[i, j] = 1

        lower(f.func, Target(SM80), {})
    assert e.value.kind == "layout-not-injective" and "loop_layout" in str(e.value)


@pytest.mark.parametrize("form", ("loop", "role", "copy"))
def test_iterations_of_threads_that_a_block_does_not_have_were_left_out(form):
    layout = T.Fragment((16, 16), forward_fn=lambda i, j: (i * 16 + j, 0))

    @T.prim_func
    def f(X: T.Tensor((16, 16), "float32")):
        with T.Kernel(1, threads=384 if form == "role" else 64):
            if form == "role":
                with T.ws(0):
                    for i, j in T.Parallel(16, 16, loop_layout=layout):
                        X[i, j] = 1
            elif form == "copy":
                S = T.alloc_shared((16, 16), "float32")
                T.copy(X, S, loop_layout=layout)
                T.copy(S, X)
            else:
                for i, j in T.Parallel(16, 16, loop_layout=layout):
                    X[i, j] = 1

    with pytest.raises(TileLangError, match="uses 256 threads") as e:
        lower(f.func, Target({"kind": "cuda", "arch": "sm_90a"}), {})
    assert e.value.kind == "layout-conflict" and "loop_layout=layout" in str(e.value)


@pytest.mark.parametrize("on", EXECUTIONS)
def test_threads_that_a_loop_layout_leaves_out_stored_elements_behind_the_last(on):
    layout = T.Fragment((4, 8), forward_fn=lambda t, v: (t, v))

    @T.prim_func
    def f(X: T.Tensor((64,), "int32"), Y: T.Tensor((64,), "int32"), Most: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=64):
            x, rows, most = (T.alloc_fragment(s, "int32") for s in ((4, 8), (4,), (1,)))
            for t, v in T.Parallel(4, 8, loop_layout=layout):
                x[t, v] = X[t * 8 + v]
            for t, v in T.Parallel(4, 8, loop_layout=layout):
                Y[t * 8 + v] = x[t, v]
            T.reduce_max(x, rows, dim=1)
            T.reduce_max(rows, most, dim=0)
            T.copy(most, Most)

    x = np.arange(1, 65, dtype=np.int32)
    y, most = run(f, x, np.zeros(64, np.int32), on=on)[1:]
    assert np.array_equal(y, np.where(x <= 32, x, 0)) and most == 32


@pytest.mark.spec("L24:arch")
@pytest.mark.parametrize("config", [{}, {"tl.enable_async_copy": True}])
def test_architectures_without_asynchronous_copies_get_plain_ones(config):
    @T.prim_func
    def f(A: T.Tensor((256,), "float32"), B: T.Tensor((256,), "float32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((64,), "float32")
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[k * 64], S)
                T.copy(S, B[k * 64])

    def text(arch):
        (kernel,) = lower(f.func, Target({"kind": "cuda", "arch": arch}), config).kernels
        return repr(kernel.launch)

    assert "cp_async" in text("sm_80") and "cp_async" not in text("sm_75")


@pytest.mark.spec("L24:shape-errors", "L11:gemm")
@pytest.mark.parametrize("shapes,words", [(((32, 32), (32, 16), (16, 16)), "T.gemm M shape check failed: M_A = 32, M_C = 16"),
                                          (((16, 32), (16, 16), (16, 16)), "T.gemm K shape check failed: K_A = 32, K_B = 16"),
                                          (((16, 16), (16, 32), (16, 16)), "T.gemm N shape check failed")])
def test_gemm_shapes_that_do_not_fit_say_which(shapes, words):
    with pytest.raises(AssertionError) as e:
        @T.prim_func
        def f():
            with T.Kernel(1, threads=32):
                A, B = (T.alloc_shared(s, "float16") for s in shapes[:2])
                C = T.alloc_fragment(shapes[2], "float32")
                T.gemm(A, B, C)
    assert words in str(e.value)


@pytest.mark.spec("L24:shape-errors", "T.handle", "T.match_buffer", "L5:handle")
def test_a_handle_is_bound_by_match_buffer():
    @T.prim_func
    def f(P: T.handle, Y: T.Tensor((4,), "float32")):
        X = T.match_buffer(P, (4,), "float32")
        with T.Kernel(1, threads=4):
            Y[T.get_thread_binding()] = X[T.get_thread_binding()] * 2

    x = np.arange(4, dtype=np.float32)
    for on in EXECUTIONS:
        assert np.array_equal(run(f, x, on=on)[1], 2 * x)
    assert tilelang.compile(f, target="cpu").params


@pytest.mark.spec("L19:views", "T.reshape")
@pytest.mark.parametrize("shape,other,threads", [((5, 7), (35,), 32), ((3, 50), (10, 15), 64), ((1, 9), (3, 3), 32),
                                                 ((33,), (11, 3), 32), ((4, 64), (256,), 48)])
def test_fragments_of_odd_shapes_are_reshaped(shape, other, threads):
    n = int(np.prod(shape))

    @T.prim_func
    def f(X: T.Tensor(shape, "float32"), Y: T.Tensor(other, "float32"), Z: T.Tensor(shape, "float32")):
        with T.Kernel(1, threads=threads):
            F = T.alloc_fragment(shape, "float32")
            T.copy(X, F)
            G = T.reshape(F, other)
            H = T.reshape(G, (n,))
            for i in T.Parallel(n):
                H[i] = H[i] * 2 + i
            T.copy(G, Y)
            T.copy(F, Z)

    x = np.arange(n, dtype=np.float32).reshape(shape)
    want = x.ravel() * 2 + np.arange(n)
    for on in EXECUTIONS:
        _, y, z = run(f, x, on=on)
        assert np.array_equal(y.ravel(), want) and np.array_equal(z.ravel(), want), on
    cuda_text(f)
