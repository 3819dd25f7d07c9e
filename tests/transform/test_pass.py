import json
from pathlib import Path

import pytest

from tilelang.errors import InternalError, TileLangError, error, register
from tilelang.ir import (BOOL, F32, I32, Alloc, Bind, Binary, Buffer, Const, For, Func, If, Launch, Parallel, Seq, Store, Var,
                         const, fresh, load, replace)
from tilelang.ir.verify import verify
from tilelang.transform import PassConfigKey
from tilelang.transform.framework.config import ROWS, normalize_config
from tilelang.transform.framework.pass_ import THREADS_BOUND, TILE, PassContext, pass_, run_passes


def vector_add(n=64):
    h = [fresh(x + "_handle", "handle") for x in "ABC"]
    a, b, c = (Buffer(x, (n,), F32) for x in "ABC")
    bx, i = fresh("bx"), fresh("i")
    at = bx * 32 + i
    body = Parallel((i,), (const(32),), Store(c, (at,), load(a, (at,)) + load(b, (at,))))
    tv = tuple(fresh(x) for x in ("tx", "ty", "tz"))
    return Func("add", tuple(h), tuple(zip(h, (a, b, c))), Launch((const(n // 32),), (bx,), (32, 1, 1), tv, body))


def quiet(**kw):
    lines = []
    return PassContext(verify=True, report=lines.append, **kw), lines


@pass_(needs=TILE)
def nothing(func, cx):
    return func


@pass_(needs=TILE)
def mark(func, cx):
    return replace(func, attrs=(("seen", True),))


@pass_(needs=TILE)
def fails(func, cx):
    raise KeyError("lost")


def test_runner_times_and_recognises_unchanged_programs():
    cx, lines = quiet(debug=3)
    out = run_passes(vector_add(), [nothing, mark], cx)
    assert out.attrs == (("seen", True),)
    assert list(cx.seconds) == ["nothing", "mark"]
    assert lines[0].startswith("# after nothing") and lines[0].endswith("(unchanged)")
    assert lines[1].startswith("# after mark") and not lines[1].endswith("(unchanged)")


def test_ir_can_be_written_and_times_told(tmp_path):
    cx, lines = quiet(config={"tl.enable_dump_ir": True, "tl.dump_ir_path": str(tmp_path / "ir"), "tl.pass_profile": True})
    run_passes(vector_add(), [nothing, mark], cx)
    assert sorted(p.name for p in (tmp_path / "ir").iterdir()) == ["00_add_nothing.tl", "01_add_mark.tl"]
    assert [x.split(":")[0] for x in lines] == ["nothing", "mark"]


def test_a_failing_pass_leaves_a_report_folder():
    cx, _ = quiet()
    with pytest.raises(InternalError, match="pass fails failed on `add`: KeyError") as e:
        run_passes(vector_add(), [fails], cx)
    folder = Path(str(e.value).split("report: ")[1].strip())
    assert {p.name for p in folder.iterdir()} == {"before.tl", "error.txt", "facts.json"}
    assert "lost" in (folder / "error.txt").read_text()
    assert str(folder) in json.loads((folder / "facts.json").read_text())["command"]


def test_a_users_mistake_passes_through():
    register("test-mistake", ValueError, "for this test", "do it", expected="a program", found="a mistake")

    @pass_(needs=TILE)
    def refuses(func, cx):
        raise error("test-mistake", "no")

    with pytest.raises(TileLangError, match="no"):
        run_passes(vector_add(), [refuses], quiet()[0])


def test_a_pass_needs_its_phase():
    @pass_(needs=THREADS_BOUND)
    def late(func, cx):
        return func

    with pytest.raises(InternalError, match="needs a program in phase THREADS_BOUND, found TILE"):
        run_passes(vector_add(), [late], quiet()[0])


def test_a_pass_that_breaks_the_program_is_named():
    @pass_(needs=TILE)
    def breaks(func, cx):
        x = fresh("x")
        return Func(func.name, func.params, func.buffers, Seq((func.body, Store(func.buffers[0][1], (x,), const(1.0)))))

    with pytest.raises(InternalError, match=r"after pass breaks:\n\[defined\] variable `x`"):
        run_passes(vector_add(), [breaks], quiet()[0])


def test_phase_attribute_follows_the_pass():
    @pass_(needs=TILE, gives=THREADS_BOUND)
    def lowers(func, cx):
        return Func(func.name, func.params, func.buffers, Seq(()))

    assert run_passes(vector_add(), [lowers], quiet()[0]).facts.phase == THREADS_BOUND


def rules(func, phase="TILE"):
    return {f.rule for f in verify(func, phase)}


def wrap(*stmts, params=(), threads=(32, 1, 1)):
    tv = tuple(fresh(x) for x in ("tx", "ty", "tz"))
    return Func("f", tuple(params), (), Launch((const(1),), (fresh("bx"),), threads, tv, Seq(tuple(stmts))))


def test_verifier_accepts_and_refuses():
    assert verify(vector_add()) == []
    assert rules(vector_add(), "THREADS_BOUND") == {"no-tile"}
    x, i = fresh("x"), fresh("i")
    s, r = Buffer("s", (4, 4), F32, "shared.dyn"), Buffer("r", (4,), F32, "local")
    one = const(1)
    assert rules(wrap(Bind(x, one), Bind(x, one))) == {"bound-once"}
    assert rules(wrap(For(i, const(0), const(4), "serial", Bind(x, i)), Bind(fresh("y"), x))) == {"defined"}
    assert rules(wrap(Store(r, (one,), const(1.0)))) == {"defined"}
    assert rules(wrap(Alloc(r), Store(r, (one, one), const(1.0)))) == {"rank"}
    assert rules(wrap(Alloc(r), Store(r, (one,), one))) == {"dtypes"}
    assert rules(wrap(Alloc(r), Store(r, (const(1.0),), const(1.0)))) == {"dtypes"}
    assert rules(wrap(If(one, Seq(())))) == {"dtypes"}
    assert rules(wrap(Bind(x, Binary("add", one, const(1, "int64"), I32)))) == {"dtypes"}
    assert rules(wrap(For(i, const(0), const(4), "sideways", Seq(())))) == {"loops"}
    assert rules(wrap(Alloc(s)), "THREADS_BOUND") == {"flat-shared"}
    assert rules(wrap(Alloc(Buffer("s", (4,), F32, "shared"))), "DEVICE") == {"shared-plan"}
    assert rules(wrap(Alloc(Buffer("l", (4, 2), F32, "local"))), "DEVICE") == {"flat-local"}
    assert rules(wrap(Alloc(Buffer("f", (4,), F32, "local.fragment"))), "SYNCED") == {"no-fragment"}


def test_views_share_the_scope_of_their_storage():
    s = Buffer("s", (16,), F32, "shared.dyn")
    view = Buffer("v", (4, 4), F32, "shared.dyn", data=s.data)
    assert rules(wrap(Alloc(s), Store(view, (const(0), const(0)), const(1.0)))) == set()
    assert rules(wrap(Store(view, (const(0), const(0)), const(1.0)), Alloc(s))) == {"defined"}


def test_dynamic_dims_are_bound_by_the_tensor():
    n = Var("n", I32)
    h = fresh("A_handle", "handle")
    a = Buffer("A", (n,), F32)
    ok = Func("f", (h,), ((h, a),), Launch((n,), (fresh("bx"),), (1, 1, 1), tuple(map(fresh, "xyz")), Seq(())))
    assert rules(ok) == set()
    bad = Func("f", (h,), ((h, a),), Launch((Var("m", I32),), (fresh("bx"),), (1, 1, 1), tuple(map(fresh, "xyz")), Seq(())))
    assert rules(bad) == {"defined"}


@pytest.mark.spec("R10:keys")
def test_config_keys():
    assert set(ROWS) == set(PassConfigKey)
    assert normalize_config({PassConfigKey.TL_ENABLE_FAST_MATH: 1, "tl.disable_wgmma": True}) == {
        "tl.enable_fast_math": True, "tl.disable_wgmma": True}
    with pytest.raises(AttributeError, match="Invalid config option 'tl.nope' candidates are: tl.disable_warp"):
        normalize_config({"tl.nope": 1})
    with pytest.raises(TypeError, match="tl.enable_fast_math takes"):
        normalize_config({"tl.enable_fast_math": "yes"})
    with pytest.raises(ValueError, match="takes one of 32, 64"):
        normalize_config({"tl.config_index_bitwidth": 48})
    with pytest.warns(DeprecationWarning, match="tl.disable_tma_lower is deprecated"):
        normalize_config({"tl.disable_tma_lower": True})
    cx = PassContext(config={"tl.disable_wgmma": True})
    assert cx.option(PassConfigKey.TL_DISABLE_WGMMA) is True
    assert cx.option(PassConfigKey.TL_ENABLE_ASYNC_COPY) is True


def test_bool_constant_dtype_is_checked():
    assert rules(wrap(If(Const(True, BOOL), Seq(())))) == set()


def test_a_report_can_be_replayed():
    import tilelang.language as T
    from tilelang.target import Target
    from tilelang.transform.framework.pass_ import THREADS_BOUND
    from tilelang.transform.pipeline import DEVICE_PASSES, TILE_PASSES
    from tilelang.transform.replay import replay

    @T.prim_func
    def main(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((64,), "float32")
            T.copy(A, s)
            for i in T.Parallel(64):
                B[i] = s[63 - i]

    @pass_(needs=THREADS_BOUND)
    def place_sync(func, cx):
        raise RuntimeError("planted")

    before = [p for p in (*TILE_PASSES, *DEVICE_PASSES)]
    at = [p.__name__ for p in before].index("place_sync")
    cx = PassContext(Target({"kind": "cuda", "arch": "sm_80"}), {"tl.disable_shared_memory_reuse": True})
    with pytest.raises(InternalError, match="planted") as e:
        run_passes(main.func, [*before[:at], place_sync], cx)
    text = replay(str(e.value).split("report: ")[1].strip())
    assert text.count("sync_threads") == 1 and 'phase' in text
