"""Raw statements (language 23, 19, 15): scoped values, targets, access pointers, reductions over threads by hand."""

import numpy as np
import pytest
from everywhere import EXECUTIONS, cuda_text, everywhere, run

import tilelang.language as T
from tilelang.errors import TileLangError


@pytest.mark.spec("T.let")
def test_let_gives_a_variable_its_value_in_a_block():
    v = T.var("v", "int32")

    @T.prim_func
    def f(X: T.Tensor((8,), "int32"), Y: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=8):
            t = T.get_thread_binding()
            with T.let(v, X[t] * 2 + 1):
                Y[t] = v * v

    x = np.arange(8, dtype=np.int32)
    assert np.array_equal(everywhere(f, x)[1], (2 * x + 1) ** 2)
    cuda_text(f)
    with pytest.raises(TileLangError, match="names a scalar variable"):
        @T.prim_func
        def g(X: T.Tensor((8,), "int32")):
            with T.Kernel(1), T.let(X[0], 1):
                X[0] = 2


def test_let_expressions_and_undefined_values():
    v = T.var("v", "int32")

    @T.prim_func
    def f(Y: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=1):
            Y[0] = T.Let(v * v + 1, {v: 5})
            Y[1] = T.undef() * 0

    assert everywhere(f)[0].tolist() == [26, 0]


@pytest.mark.spec("T.target")
def test_target_describes_what_to_compile_for():
    assert T.target("cpu").kind.name == "llvm" or str(T.target("cpu")) == "cpu"
    assert T.target({"kind": "cuda", "arch": "sm_90"}).attrs["arch"] == "sm_90"
    with pytest.raises(AssertionError, match="foo"):
        T.target("foo")


SOURCE = """
__device__ void scale_pair(const float* x, float* y) { y[0] = x[0] * 3; y[1] = x[1] * 3; }
"""


@pytest.mark.spec("T.tvm_access_ptr", "T.type_annotation")
def test_access_pointers_by_storage():
    @T.prim_func
    def f(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32):
            T.import_source(SOURCE)
            t = T.get_thread_binding()
            S = T.alloc_shared((64,), "float32")
            T.copy(X, S)
            T.call_extern("handle", "scale_pair", T.tvm_access_ptr(T.type_annotation("float32"), S.data, t * 2, 2, 1),
                          T.tvm_access_ptr(T.type_annotation("float32"), Y.data, t * 2, 2, 2))

    text = cuda_text(f)
    assert "scale_pair(&S[tx * 2], &Y[tx * 2])" in text
    with pytest.raises(TileLangError, match="storage of a buffer"):
        @T.prim_func
        def g(X: T.Tensor((8,), "int32")):
            with T.Kernel(1):
                T.evaluate(T.tvm_access_ptr(T.type_annotation("int32"), T.var("p"), 0, 1, 1))


@pytest.mark.spec("T.call_intrin")
@pytest.mark.parametrize("on", ("simulator", "cpu"))
def test_access_pointers_reach_the_element(on):
    @T.prim_func
    def f(Y: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            T.call_intrin("void", "atomic_add", T.tvm_access_ptr(T.type_annotation("int32"), Y.data, t + 3, 1, 3), t)

    assert run(f, on=on)[0].tolist() == [0] * 3 + list(range(32)) + [0] * 29


REDUCERS = {"sum": (lambda x, y: x + y, 0, np.sum), "max": (lambda x, y: T.max(x, y), -1000, np.max)}


def allreduce(threads, over, kind, dtype="int32"):
    combine, identity, _ = REDUCERS[kind]
    n = int(np.prod(threads))

    @T.prim_func
    def f(X: T.Tensor((n,), dtype), Y: T.Tensor((n,), dtype)):
        with T.Kernel(1, threads=threads):
            tx, ty, tz = T.get_thread_bindings()
            at = (tz * threads[1] + ty) * threads[0] + tx
            R = T.alloc_local((1,), dtype)
            with T.attr(T.comm_reducer(combine, [T.dtype(dtype)(identity)]), "reduce_scope",
                        T.reinterpret(T.uint64(0), dtype="handle")):
                T.evaluate(T.tvm_thread_allreduce(T.uint32(1), X[at], True, R[0], *[(tx, ty, tz)[d] for d in over],
                                                  dtype="handle"))
            Y[at] = R[0]

    return f


@pytest.mark.spec("T.evaluate")
@pytest.mark.spec("T.tvm_thread_allreduce", "T.comm_reducer", "L15:raw-forms")
@pytest.mark.parametrize("kind", REDUCERS)
@pytest.mark.parametrize("threads,over", [((32, 4, 1), (0,)), ((8, 4, 1), (0,)), ((8, 4, 1), (1,)), ((64, 2, 1), (0,)),
                                          ((5, 3, 2), (0,)), ((5, 3, 2), (1, 2)), ((6, 7, 2), (0, 1, 2)), ((1, 32, 1), (1,))])
def test_values_of_threads_are_combined(threads, over, kind):
    f = allreduce(threads, over, kind)
    x = np.random.default_rng(0).integers(-99, 99, int(np.prod(threads))).astype(np.int32)
    axes = tuple(2 - d for d in over)
    cube = x.reshape(threads[::-1])
    want = np.broadcast_to(REDUCERS[kind][2](cube, axis=axes, keepdims=True), cube.shape).ravel()
    for on in EXECUTIONS:
        assert np.array_equal(run(f, x, on=on)[1], want), on
    cuda_text(f)


@pytest.mark.spec("T.attr")
@pytest.mark.spec("T.tvm_thread_allreduce")
def test_threads_that_do_not_take_part_give_the_identity():
    @T.prim_func
    def f(X: T.Tensor((32,), "float32"), Y: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            r = T.alloc_var("float32")
            with T.attr(T.comm_reducer(lambda x, y: x + y, [T.float32(0)]), "reduce_scope", None):
                T.tvm_thread_allreduce(1, X[t], t < 10, r, t)
            Y[t] = r

    x = np.arange(32, dtype=np.float32)
    assert np.array_equal(everywhere(f, x)[1], np.full(32, 45, np.float32))


@pytest.mark.spec("T.tvm_thread_allreduce", "T.comm_reducer")
@pytest.mark.parametrize("build", [
    lambda X, R, t: T.tvm_thread_allreduce(1, X[t], True, R[0], t),
    lambda X, R, t: T.attr(3, "reduce_scope", None),
    lambda X, R, t: T.comm_reducer(lambda x, y: x, []),
    lambda X, R, t: scoped(lambda: T.tvm_thread_allreduce(2, X[t], True, R[0], t)),
    lambda X, R, t: scoped(lambda: T.tvm_thread_allreduce(1, X[t], True, X[0], t)),
    lambda X, R, t: scoped(lambda: T.tvm_thread_allreduce(1, X[t], True, R[0])),
    lambda X, R, t: scoped(lambda: T.tvm_thread_allreduce(1, X[t], True, R[0], X[t]))])
def test_reductions_out_of_place_are_refused(build):
    with pytest.raises(TileLangError) as e:
        @T.prim_func
        def f(X: T.Tensor((32,), "int32")):
            with T.Kernel(1, threads=32):
                R = T.alloc_local((1,), "int32")
                build(X, R, T.get_thread_binding())
    assert e.value.kind in ("reducer-type", "reducer-operand")


def scoped(work):
    with T.attr(T.CommReducer(lambda x, y: x + y, [T.int32(0)]), "reduce_scope", None):
        work()


def test_bytes_are_added_to_an_address():
    @T.prim_func
    def f(P: T.ptr, Y: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=4):
            X = T.make_tensor(T.handle_add_byte_offset(P, 8), (4,), "float32")
            t = T.get_thread_binding()
            Y[t] = X[t]

    x = np.arange(8, dtype=np.float32)
    assert np.array_equal(run(f, x, on="cpu")[1], x[2:6])
    cuda_text(f)


@pytest.mark.spec("T.call_extern", "T.call_pure_extern", "L19:extern")
@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("form", ["statement", "value", "pure value", "address"])
def test_functions_of_the_user_are_refused_where_their_source_cannot_run(form, on):
    """Their C++ text is for the device's compiler: elsewhere the error names the function and the place."""
    @T.prim_func
    def f(X: T.Tensor((4,), "float32"), Y: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=4):
            T.import_source("TL_DEVICE float twice(float x) { return 2 * x; } TL_DEVICE void put(float* p) { *p = 1; }")
            t = T.get_thread_binding()
            S = T.alloc_shared((4,), "float32")
            S[t] = X[t]
            if form == "statement":
                T.call_extern("handle", "put", T.address_of(Y[t]))
            elif form == "address":
                T.call_extern("handle", "put", S.access_ptr("rw"))
                Y[t] = S[t]
            elif form == "value":
                Y[t] = T.call_extern("float32", "twice", X[t])
            else:
                Y[t] = T.call_pure_extern("float32", "twice", X[t])

    with pytest.raises(TileLangError) as e:
        run(f, np.ones(4, np.float32), on=on, simulated=True)
    name = "twice" if "value" in form else "put"
    assert e.value.kind in ("eval-unsupported", "sim-unsupported", "cpu-unsupported"), e.value.kind
    assert "extern" in str(e.value) and name in str(e.value) and "-->" in str(e.value), str(e.value)


@pytest.mark.spec("T.call_extern", "L19:extern")
def test_calls_that_look_alike_were_taken_for_one_value():
    """Each call may change what the next one gives.  One that a condition guards stays behind it."""
    @T.prim_func
    def f(X: T.Tensor((4,), "int32"), O: T.Tensor((5,), "int32")):
        with T.Kernel(1, threads=8) as b:
            T.import_source("TL_DEVICE int tick(int* p) { return (*p)++; }")
            t = T.get_thread_binding()
            O[0] = T.call_extern("int32", "tick", T.address_of(X[0])) - T.call_extern("int32", "tick", T.address_of(X[0]))
            O[1] = T.call_extern("int32", "tick", T.address_of(X[1])) ^ T.call_extern("int32", "tick", T.address_of(X[1]))
            O[2] = T.min(T.call_extern("int32", "tick", T.address_of(X[2])), T.call_extern("int32", "tick", T.address_of(X[2])))
            O[3] = T.call_pure_extern("int32", "four", b) - T.call_pure_extern("int32", "four", b)
            O[4] = T.if_then_else(t < 4, T.call_extern("int32", "tick", T.address_of(X[t])), 7)

    text = cuda_text(f)
    text = "".join(x for x in text[text.index("__global__"):].splitlines() if "//" not in x)
    assert [text.count(f"tick(&X[{k}])") for k in range(3)] == [2, 2, 2]
    assert "O[3] = 0;" in text and "tx < 4 ? tick(&X[tx]) : 7" in text


@pytest.mark.spec("T.call_extern", "T.call_pure_extern", "L19:extern")
def test_functions_of_cudas_own_library_run_where_there_is_no_cuda():
    @T.prim_func
    def f(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float64"), O: T.Tensor((3, 64), "float64")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "float32")
            t = T.get_thread_binding()
            for i in T.Parallel(64):
                S[i] = T.call_extern("float32", "fabsf", X[i])
            O[0, t] = T.cast(T.call_pure_extern("float32", "sqrtf", S[t]) + T.call_extern("float32", "floorf", X[t]), "float64")
            O[1, t] = T.call_extern("float64", "sqrt", Y[t])
            O[2, t] = T.cast(T.call_extern("float32", "fmaf", X[t], X[t], S[t]), "float64")

    x = np.linspace(-3, 3, 64).astype(np.float32)
    y = np.linspace(0, 9, 64)
    o = everywhere(f, x, y)[2]
    assert np.array_equal(o[0], np.sqrt(np.abs(x)) + np.floor(x)) and np.array_equal(o[1], np.sqrt(y))
    assert np.array_equal(o[2], (x.astype(np.float64) ** 2 + np.abs(x)).astype(np.float32))
    assert "sqrtf(" in cuda_text(f)


@pytest.mark.spec("T.call_extern", "T.import_source", "L19:extern")
@pytest.mark.parametrize("on", list(EXECUTIONS))
def test_a_name_of_cudas_library_that_the_program_defines_is_its_own(on):
    @T.prim_func
    def f(X: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=4):
            T.import_source("TL_DEVICE float sqrtf(float x) { return x; }")
            t = T.get_thread_binding()
            X[t] = T.call_extern("float32", "sqrtf", X[t])

    with pytest.raises(TileLangError, match="extern") as e:
        run(f, np.ones(4, np.float32), on=on, simulated=True)
    assert e.value.kind in ("eval-unsupported", "sim-unsupported", "cpu-unsupported")
