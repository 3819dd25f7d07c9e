"""Arguments of the language's functions do what they say, or are refused: none is taken and then forgotten."""

import ast
import inspect
import textwrap

import numpy as np
import pytest
from completed import caught
from everywhere import cuda_text, everywhere, run

import tilelang.language as T
from tilelang.errors import TileLangError

# Arguments that have no effect, and why that leaves the meaning as it is.
WITHOUT_EFFECT = {
    "T.Pipelined": {"sync", "group"},  # metadata of an older form
    # carried nowhere
    **{f"T.{name}": {"annotations"} for name in ("allocate", "alloc_buffer", "sblock_alloc_buffer", "call_intrin")},
    "T.finalize_reducer": {"annotations"},
    "T.sblock": {"name", "no_realize"}, "T.target": {"host"},  # names of a scope; the host is always this one
    "T.prim_func": {"eager_jit"},  # both styles are traced alike
    "T.access_ptr": {"extent", "ignore_last_ndim"}, "T.tvm_access_ptr": {"extent", "rw_mask"},  # how much is accessed
    "T.decl_buffer": {"offset_factor"}, "T.match_buffer": {"align", "offset_factor"},  # promises
    "T.gemm_sp": {"wg_wait"}, "T.tvm_thread_allreduce": {"dtype"},  # it waits at once; the type is the result's
    "T.ptx_mma": {"dtype"}, "T.ptx_wgmma_ss": {"dtype"}, "T.ptx_wgmma_rs": {"dtype"},  # the accumulator has it
    **{f"T.{name}": {"enable_aggressive_vectorize"}  # accesses are as wide as the addresses allow
       for name in ("put_block", "get_block", "put_warp", "get_warp")},
    "T.abs": {"dtype"}, "T.validate_gemm_ab_dtypes": {"a_in_tmem"},
}
MATH = {"dtype"}  # accepted and ignored, as the specification says


def unread(fn):
    """Parameters of a function that its body does not name."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(fn))).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return set()
    if not isinstance(tree, ast.FunctionDef):
        return set()
    named = {n.id for s in tree.body for n in ast.walk(s) if isinstance(n, ast.Name)}
    everything = [*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs]
    rest = [tree.args.kwarg] if tree.args.kwarg else []
    return {a.arg for a in (*everything, *rest)} - named - {"self", "cls"}


def test_no_argument_is_taken_and_forgotten():
    forgotten = {}
    for name in T.__all__:
        fn = getattr(T, name, None)
        if not inspect.isfunction(fn) or not fn.__module__.startswith("tilelang") or fn.__module__.endswith("unavailable"):
            continue
        allowed = WITHOUT_EFFECT.get(f"T.{name}", set()) | (MATH if fn.__module__.endswith((".math", ".rounded")) else set())
        if left := unread(fn) - allowed:
            forgotten[name] = left
    assert not forgotten
    assert unread(run) == set() and unread(lambda x: 0) == set()
    assert "predicate" in inspect.signature(T.buffer_store).parameters


def refuses(kind, body):
    with pytest.raises(TileLangError) as e:

        @T.prim_func
        def f(X: T.Tensor((8, 8), "int32"), P: T.Tensor((1,), T.ptr), q: T.ptr):
            with T.Kernel(1, threads=32):
                S = T.alloc_shared((4, 8), "int32")
                body(X, P, q, S)

    assert e.value.kind == kind, str(e.value)
    caught(e.value)


@pytest.mark.spec("L5:Tensor", "L5:scoped-buffers")
def test_a_tensor_over_the_storage_of_another():
    @T.prim_func
    def f(X: T.Tensor((4, 8), "int32"), Y: T.Tensor((32,), "int32"), Z: T.Tensor((16, 2), "int32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((4, 8), "int32")
            flat = T.Tensor((32,), "int32", X.data)
            square = T.SharedBuffer((16, 2), "int32", data=S.data)
            out = T.Tensor((32,), data=Y.data, dtype="int32")
            T.copy(X, S)
            for i in T.Parallel(32):
                out[i] = flat[31 - i]
            T.copy(square, Z)

    x = np.arange(32, dtype=np.int32).reshape(4, 8)
    _, y, z = everywhere(f, x)
    np.testing.assert_array_equal(y, x.ravel()[::-1])
    np.testing.assert_array_equal(z, x.reshape(16, 2))


@pytest.mark.spec("L5:Buffer", "T.Buffer")
def test_a_buffer_over_a_part_of_the_storage():
    with pytest.warns(DeprecationWarning):

        @T.prim_func
        def f(X: T.Tensor((4, 8), "int32"), Y: T.Tensor((8,), "int32")):
            with T.Kernel(1, threads=32):
                row = T.Buffer((8,), "int32", X.data, elem_offset=16)
                for i in T.Parallel(8):
                    Y[i] = row[i]

    x = np.arange(32, dtype=np.int32).reshape(4, 8)
    np.testing.assert_array_equal(everywhere(f, x)[1], x[2])
    cuda_text(f)


def test_storage_that_is_smaller_or_elsewhere_is_refused():
    refuses("view-size", lambda X, P, q, S: T.Tensor((65,), "int32", X.data))
    refuses("view-size", lambda X, P, q, S: T.decl_buffer((60,), "int32", data=X.data, elem_offset=5))
    refuses("pointer", lambda X, P, q, S: T.Tensor((32,), "int32", S.data))  # global over shared memory
    refuses("pointer", lambda X, P, q, S: T.Tensor((32,), "int32", 7))
    refuses("pointer", lambda X, P, q, S: T.make_tensor_from_addr(P[0], (8,), "int32", storage_scope="shared"))


@pytest.mark.spec("T.match_buffer")
def test_match_buffer_of_storage_that_begins_or_lies_elsewhere_is_refused():
    refuses("pointer", lambda X, P, q, S: T.match_buffer(q, (8,), "int32", elem_offset=4))
    refuses("pointer", lambda X, P, q, S: T.match_buffer(q, (8,), "int32", scope="shared"))
    refuses("pointer", lambda X, P, q, S: T.match_buffer(X[0:2, 0:8], (2, 8), "int32", data=S.data))
    refuses("not-available", lambda X, P, q, S: T.match_buffer(q, (8,), "int32", axis_separators=[1]))


@pytest.mark.spec("L23:raw-statements")
def test_a_store_under_a_predicate():
    @T.prim_func
    def f(X: T.Tensor((32,), "int32"), Y: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            T.buffer_store(Y, X[t], [t], predicate=t % 3 == 0)

    x = np.arange(1, 33, dtype=np.int32)
    np.testing.assert_array_equal(everywhere(f, x)[1], np.where(np.arange(32) % 3 == 0, x, 0))
    refuses("predicate-type", lambda X, P, q, S: T.buffer_store(X, 1, [0, 0], predicate=T.float32(1)))


def test_a_variable_that_is_bound():
    @T.prim_func
    def f(Y: T.Tensor((2, 4), "int64")):
        with T.Kernel(2, threads=32) as bx:
            v = T.int64()
            T.bind(bx + 7, var=v)
            for i in T.Parallel(4):
                Y[bx, i] = v + i

    np.testing.assert_array_equal(everywhere(f)[0], np.arange(4) + np.array([[7], [8]]))

    def twice(X, P, q, S):
        v = T.int32()
        T.bind(1, var=v)
        T.bind(2, var=v)

    refuses("store-target", twice)
    refuses("store-target", lambda X, P, q, S: T.bind(1, var=X))


def test_a_check_raises_one_kind_of_error():
    refuses("not-available", lambda X, P, q, S: T.Assert(X[0, 0] > 0, "positive", error_kind="ValueError"))


@pytest.mark.spec("L15:raw-forms", "L15:shuffles", "T.tvm_warp_shuffle")
@pytest.mark.parametrize("runtime", [False, True])
def test_a_shuffle_among_some_lanes(runtime):
    """The mask names the lanes that come, as a number or as what a vote gave."""

    @T.prim_func
    def f(X: T.Tensor((32,), "int32"), Y: T.Tensor((3, 32), "int32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            lanes = T.ballot_sync(t < 16)
            if t < 16:
                mask = lanes if runtime else T.uint32(0xFFFF)
                Y[0, t] = T.tvm_warp_shuffle(mask, X[t], 3, 32, 32)
                Y[1, t] = T.tvm_warp_shuffle_down(mask, X[t], 2, 16, 32)
                Y[2, t] = T.shfl_xor(X[t], 1, mask=mask)

    x = np.arange(100, 132, dtype=np.int32)
    want = np.zeros((3, 32), np.int32)
    i = np.arange(16)
    want[0, :16], want[1, :16], want[2, :16] = x[3], x[np.where(i + 2 < 16, i + 2, i)], x[i ^ 1]
    np.testing.assert_array_equal(everywhere(f, x)[1], want)
    assert not runtime or "ballot" in cuda_text(f)
    refuses("lane-arguments", lambda X, P, q, S: T.tvm_warp_shuffle(0xFFFFFFFF, X[0, 0], 0, 32, 64))


def test_a_shuffle_whose_mask_names_a_lane_that_does_not_come_is_refused():
    @T.prim_func
    def f(X: T.Tensor((32,), "int32"), Y: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            if t < 16:
                Y[t] = T.shfl_sync(X[t], 3, 32, T.ballot_sync(X[0] >= 0, 0xFFFF) | T.uint32(1 << 20))

    for on in ("simulator", "cpu"):
        with pytest.raises(TileLangError if on == "simulator" else RuntimeError, match="mask") as e:
            run(f, np.zeros(32, np.int32), on=on, simulated=True)
        caught(e.value)


@pytest.mark.spec("T.access_ptr", "T.im2col", "T.finalize_reducer")
def test_arguments_that_say_nothing_possible():
    refuses("access-type", lambda X, P, q, S: T.access_ptr(X, "r", 1, 2, 3))
    refuses("pointer", lambda X, P, q, S: T.access_ptr(X, 2.5))
    refuses("reduce-batch", lambda X, P, q, S: T.finalize_reducer(T.alloc_reducer((8,), "int32", op="sum"), None, batch=0))

    with pytest.raises(KeyError, match="eviction policy"):

        @T.prim_func
        def f(X: T.Tensor((1, 4, 4, 8), "float16")):
            with T.Kernel(1, threads=32):
                S = T.alloc_shared((16, 8), "float16")
                T.im2col(X, S, 0, 0, 1, 1, 1, 0, eviction_policy="first")
