"""Programs with one thing spoilt: refused by name at the user's line, or meant; never a trace from inside the compiler."""

import ast
import linecache
import os
import random
import traceback
from unittest import mock

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import InternalError, TileLangError
from tilelang.jit import building
from tilelang.target import Target
from tilelang.transform.pipeline import lower

STDLIB = (os.path.dirname(os.__file__) + os.sep, "<frozen")
SM90A = Target({"kind": "cuda", "arch": "sm_90a"})
# Each name called well.  X, X2, I, J, N: tensors; S, Q: shared; F, R: fragments; H: float16 tile; C: accumulator; B: barrier.
GOOD = """
T.copy(X[0:16, 0:16], S)
T.copy(X, X2, coalesced_width=2, disable_tma=True, eviction_policy='evict_first', prefer_instruction='sync', annotations={})
T.async_copy(X, S, coalesced_width=4)
T.transpose(S, Q)
T.fill(F, 3)
T.gemm(H, H, C, transpose_A=True, policy=T.GemmWarpPolicy.Square, clear_accum=True, k_pack=1)
T.reduce_max(F, R, 1, True, 1, False)
T.reduce(F, R, 'sum', 1, True)
T.cumsum(S, Q, dim=0, reverse=False)
T.atomic_add(X[0, 0], 1.0, memory_order='relaxed', return_prev=False)
T.atomic_addx2(X[0, 0], S[0, 0:2])
T.atomic_store(I[0], 1, memory_order='release')
v = T.alloc_var('int32', 1)
v = T.alloc_shared((4, 4), 'float32', scope='shared')
v = T.alloc_fragment((4, 4), 'float32')
v = T.alloc_reducer((4,), 'float32', op='sum')
v = T.view(S, (256,), dtype='int32')
X[0, 0] = T.pow(X[0, 1], 2)
X[0, 0] = T.clamp(X[0, 1], 0.0, 1.0)
X[0, 0] = T.cast(X[0, 1], 'float16', round='', sat=True)
X[0, 0] = T.if_then_else(X[0, 1] > 0, X[0, 1], 1.0)
X[0, 0] = T.ieee_fmaf(X[0, 1], X[0, 2], X[0, 3], 'rz')
X[0, 0] = T.shfl_xor(X[0, 1], 1, 32)
I[bx] = T.any_sync(I[bx] > 1, 4294967295)
I[0] = T.get_warp_group_idx(32, 4)
I[0] = T.shift_left(I[1], 3)
T.stg32(I[0], T.uint32(1))
T.sync_threads(1, 64)
T.use_swizzle(4, order='row', enable=True)
T.annotate_layout({S: T.Layout((16, 16), lambda i, j: i * 16 + j)})
T.annotate_safe_value({X: 1.0})
T.print(X[0, 0], msg='here')
T.device_assert(X[0, 0] > 0, msg='positive')
T.rng_init(7, seq=None, off=0)
T.evaluate(T.access_ptr(X[0, 0], 'r'))
T.im2col(N, S, 0, 0, 1, 1, 1, 0)
T.dp4a(J[0:4], J[0:4], I[0:1])
T.tma_copy(X[0:16, 0:16], S, barrier=B[0])
T.mbarrier_wait_parity(B[0], 0)
for i in T.serial(0, 4, 1): X[0, i] = 1.0
for i in T.unroll(0, 4, unroll_factor=2): X[0, i] = 1.0
for i in T.vectorized(0, 4): X[0, i] = 1.0
for i, j in T.Parallel(4, 4, coalesced_width=2): X[i, j] = 1.0
for i in T.Pipelined(0, 4, num_stages=2): T.copy(X[i * 4, 0], S)
for i in T.Pipelined(4, order=[0], stage=[0]): T.copy(X, S)
for i, j in T.Persistent([4, 4], 2, bx, group_size=2): X[i, j] = 1.0
with T.ws(0): X[0, 0] = 1.0
""".strip().splitlines()
SETUP = {"S": "T.alloc_shared((16, 16), 'float32')", "Q": "T.alloc_shared((16, 16), 'float32')",
         "F": "T.alloc_fragment((16, 16), 'float32')", "R": "T.alloc_fragment((16,), 'float32')",
         "H": "T.alloc_shared((16, 16), 'float16')", "C": "T.alloc_fragment((16, 16), 'float32')", "B": "T.alloc_barrier([64])"}
HEAD = """
import tilelang.language as T

class Odd:
    pass

@T.prim_func
def program(X: T.Tensor((16, 16), 'float32'), X2: T.Tensor((16, 16), 'float32'), I: T.Tensor((32,), 'int32'),
            J: T.Tensor((32,), 'int8'), N: T.Tensor((1, 16, 16, 16), 'float32')):
    with T.Kernel(2, threads=64) as bx:
        tx = T.get_thread_binding()
"""
ODD = ["None", "'x'", "3.5", "-1", "[1, 2]", "()", "True", "0", "Odd()", "Odd", "T", "tx", "1 << 40", "float('nan')", "b'x'",
       "lambda *a: a[0]", "T.int64(3)", "X", "X[0, 0]", "X[0:4, 0:4]", "range(3)", "...", "T.Broadcast(T.float32(1), 4)",
       "{1: 2}", "1000000", "T.alloc_fragment((4,), 'float32')", "slice(0, 2)", "X[0]"]


def spoil(rng, text):
    """The statement with an argument left out, added, named wrongly or (most often) of another kind."""
    tree = ast.parse(text)
    call = rng.choice([n for n in ast.walk(tree) if isinstance(n, ast.Call)])
    odd = ast.parse(rng.choice(ODD), mode="eval").body
    way = rng.randrange(8)
    if way == 0 and call.args:
        call.args.pop(rng.randrange(len(call.args)))
    elif way == 1:
        call.args.insert(rng.randrange(len(call.args) + 1), odd)
    elif way == 2:
        call.keywords.append(ast.keyword("nothing", odd))
    elif call.keywords and (way == 3 or not call.args or rng.random() < 0.5):
        rng.choice(call.keywords).value = odd
    elif call.args:
        call.args[rng.randrange(len(call.args))] = odd
    return ast.unparse(ast.fix_missing_locations(tree))


def outcome(statement, name):
    """"meant", or the error with its full text.  Fails on what a user should not see."""
    used = {n.id for n in ast.walk(ast.parse(statement)) if isinstance(n, ast.Name)}
    lines = [f"{k} = {v}" for k, v in SETUP.items() if k in used] + statement.splitlines()
    text = HEAD + "".join(f"        {line}\n" for line in lines)
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    space = {"__name__": "spoilt"}
    try:
        exec(compile(text, name, "exec"), space)
        lower(space["program"].func, SM90A, {})
    except TileLangError as e:
        shown = str(e)
        assert f"--> {name}:" in shown and "^" in shown, f"no place: {statement}\n{shown}"
        assert e.expected and e.found and e.hint, f"not all is said: {statement}\n{shown}"
        return shown
    except Exception as e:
        outside = [f.filename for f in traceback.extract_tb(e.__traceback__) if not f.filename.startswith(STDLIB)]
        assert outside[-1] == name and not isinstance(e, InternalError), f"{statement}\n{traceback.format_exc()}"
        return f"{type(e).__name__} of the user's own: {e}"
    return "meant"


@pytest.mark.parametrize("text", GOOD)
def test_a_statement_with_an_argument_spoilt(text):
    good = outcome(text, f"<good {GOOD.index(text)}>")
    assert good == "meant" or text.startswith(("T.dp4a", "T.tma_copy", "T.mbarrier")) and "error[" in good, good  # not alone
    rng = random.Random(text)
    for k in range(6):
        outcome(spoil(rng, text), f"<spoilt {GOOD.index(text)} {k}>")


def test_statements_spoilt_by_a_fresh_seed():
    seed = random.SystemRandom().randrange(10**9)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for k in range(60):
        outcome(spoil(rng, rng.choice(GOOD)), f"<fresh {seed} {k}>")


@pytest.mark.slow
def test_many_statements_spoilt():
    rng = random.Random(2)
    for k in range(20000):
        outcome(spoil(rng, rng.choice(GOOD)), f"<many {k}>")


@T.prim_func
def reverse(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32"), n: T.int32):
    with T.Kernel(1, threads=32):
        S = T.alloc_shared((64,), "float32")
        T.copy(X, S)
        for i in T.Parallel(64):
            Y[i] = S[63 - i] + n


@pytest.mark.parametrize("backend", ("tvm_ffi", "cython", "tile", "simulator"))
def test_calls_with_an_argument_spoilt(backend):
    target = {"kind": "cuda", "arch": "sm_80"} if backend == "simulator" else "cpu"
    kernel = tilelang.compile(reverse, target=target, execution_backend=backend)
    x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
    for k in range(3):
        for odd in (None, "x", 3.5, [1.0] * 64, (), {}, object(), np.ones(63, np.float32), np.ones((64, 1), np.float32),
                    np.ones(64), np.ones(128, np.float32)[::2], 1j, 2**40, b"x", type):
            args = [x, y, 1]
            args[k] = odd
            with pytest.raises(TileLangError, match="[Ee]xpected|Unsupported tensor type|[Mm]ismatch|kernel reverse"):
                kernel(*args)
    for args in ((), (x,), (x, y), (x, y, 1, 2)):
        with pytest.raises(TileLangError, match="[Ee]xpected"):
            kernel(*args)
    kernel(x, y, 2)
    assert (y == 3).all()


@pytest.mark.parametrize("option", ("out_idx", "target", "execution_backend", "pass_configs", "compile_flags"))
def test_compilations_with_an_option_spoilt(option):
    for odd in ("x", 3.5, ["x"], {"x": 1}, object(), -9, 99, b"x", (1, 2), [None]):
        try:
            tilelang.compile(reverse, **{"target": "cpu", option: odd})
        except TileLangError:
            pass
        except Exception as e:  # settings are refused by Python's own kinds, by a sentence
            assert isinstance(e, (TypeError, ValueError, AttributeError)) and not isinstance(e, InternalError) and str(e), odd
            assert "object has no attribute" not in str(e) and "not subscriptable" not in str(e), (option, odd, str(e))


PLANTED = [("cuda", f) for f in ("host_text", "signature_of", "device_source", "facts_of")] + [
    ("cpu", f) for f in ("host_text", "compile_object", "announce_code")] + [("simulator", "build_interpreted")]


@pytest.mark.parametrize("target,part", PLANTED)
def test_a_fault_of_the_compiler_is_a_report_and_a_message_of_one_screen(target, part, monkeypatch, tmp_path):
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")
    monkeypatch.delenv("TILELANG_DEBUG", raising=False)
    where = {"kind": "cuda", "arch": "sm_80"} if target == "cuda" else target
    with mock.patch.object(building, part, side_effect=KeyError("lost")), pytest.raises(InternalError) as e:
        tilelang.compile(reverse, target=where)
    shown = "".join(traceback.format_exception(e.value))
    assert "the compiler failed on `reverse` for " in str(e.value) and "KeyError: 'lost'" in str(e.value)
    assert len(shown.splitlines()) <= 12 and "building.py" not in shown, shown
    folder = str(e.value).split("report: ")[1].strip()
    assert "lost" in open(f"{folder}/error.txt").read() and "T.copy" in open(f"{folder}/before.tl").read()


def test_errors_leave_the_package_without_its_frames(monkeypatch):
    def refused():
        @T.prim_func
        def f(X: T.Tensor((4,), "float32")):
            with T.Kernel(1):
                T.copy(X, 3)

    monkeypatch.delenv("TILELANG_DEBUG", raising=False)
    with pytest.raises(TileLangError) as e:
        refused()
    assert [x.name for x in traceback.extract_tb(e.value.__traceback__)][1:] == ["refused", "prim_func", "_trace_for_user"]
    monkeypatch.setenv("TILELANG_DEBUG", "1")
    with pytest.raises(TileLangError) as e:
        refused()
    assert len(traceback.extract_tb(e.value.__traceback__)) > 6


def test_a_fault_of_ours_while_tracing_is_a_report_and_the_users_line():
    with mock.patch("tilelang.language.tile.whole_region", side_effect=KeyError("lost")), pytest.raises(InternalError) as e:
        @T.prim_func
        def f(X: T.Tensor((4,), "float32")):
            with T.Kernel(1):
                T.fill(X, 3)

    shown = str(e.value)
    assert "tracing `f` failed at " in shown and "test_bad_programs.py:" in shown and "KeyError: 'lost'" in shown
    folder = shown.split("report: ")[1].strip()
    assert "lost" in open(f"{folder}/error.txt").read() and "T.fill(X, 3)" in open(f"{folder}/source.py").read()
