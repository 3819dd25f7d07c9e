import numpy as np
import pytest
from pass_programs import F32, program

from tilelang.ir import Alloc, Buffer, Evaluate, Store, call, const, load, seq, walk, with_options, BufferFacts
from tilelang.ir.verify import verify
from tilelang.simulator.device.run import run_device
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.memory.plan_shared_memory import plan_shared_memory

G, H = Buffer("G", (64,), F32), Buffer("H", (128,), F32)


def chain(separate=False, count=2):
    """Each buffer is filled and read back mirrored, one after another."""
    bufs = [Buffer(f"S{k}", (64,), F32, "shared.dyn") for k in range(count)]
    sync = Evaluate(call("sync_threads", (), "void"))

    def body(block, thread):
        tx = thread[0]
        out = [Alloc(b) for b in bufs]
        for k, b in enumerate(bufs):
            out += [Store(b, (tx,), load(G, (tx,))), sync, Store(H, (tx + 64 * k,), load(b, (63 - tx,)))]
        if separate:
            out.append(Store(H, (tx,), load(bufs[0], (63 - tx,))))
        return seq(*out)

    return with_options(program("chain", (G, H), (1,), 64, body), phase="SYNCED")


def planned(f, target=None, **config):
    out = run_passes(f, [plan_shared_memory], PassContext(target, verify=True, config=config))
    assert verify(out, "DEVICE") == []
    return out


def barriers(f):
    return sum(isinstance(x, Evaluate) and x.call.op == "sync_threads" for x in walk(f))


def test_disjoint_lives_share_space_with_a_barrier_between():
    out = planned(chain())
    assert out.body.plan.shared_bytes == 256 and {at for _, at in out.body.plan.shared_offsets} == {0}
    assert barriers(out) == 3
    g = np.arange(64, dtype=np.float32)
    h = run_device(out, {"G": g, "H": np.zeros(128, np.float32)}).outputs["H"]
    np.testing.assert_array_equal(h, np.concatenate([g[::-1], g[::-1]]))


def test_overlapping_lives_do_not():
    out = planned(chain(separate=True))
    assert out.body.plan.shared_bytes == 512 and barriers(out) == 2


@pytest.mark.spec("R10:TL_DISABLE_SHARED_MEMORY_REUSE")
def test_reuse_can_be_switched_off():
    out = planned(chain(), **{"tl.disable_shared_memory_reuse": True})
    assert out.body.plan.shared_bytes == 512 and barriers(out) == 2


def test_alignment():
    a = Buffer("a", (3,), F32, "shared.dyn")
    b = Buffer("b", (2,), F32, "shared.dyn", facts=BufferFacts(align=1024))
    f = program("f", (G,), (1,), 32, lambda bl, t: seq(Alloc(a), Alloc(b), Store(a, (const(0),), const(1.0)), Store(
        b, (const(0),), const(1.0)), Store(a, (const(1),), const(1.0))))
    out = planned(with_options(f, phase="SYNCED"))
    at = {x.name: k for x, k in out.body.plan.shared_offsets}
    assert at["a"] % 128 == 0 and at["b"] % 1024 == 0 and at["a"] != at["b"]


def test_limit_of_the_target():
    class Small:
        max_shared_bytes = 200

    with pytest.raises(ValueError, match="needs 256 bytes of shared memory, a block has 200"):
        planned(chain(), Small())



def test_barriers_share_their_space_with_nothing():
    """An mbarrier used at the start only, before two buffers that share one place."""
    from tilelang.ir import AddressOf, Func, dtype, replace

    bar = Buffer("bar", (2,), dtype("uint64"), "shared.barrier", facts=BufferFacts(arrive=(1, 1)))
    f: Func = chain()
    init = Evaluate(call("mbarrier_init", (AddressOf(bar, (const(0),)), const(1, "uint32")), "void"))
    launch = f.body
    out = planned(replace(f, body=replace(launch, body=seq(Alloc(bar), init, launch.body))))
    places = {b.name: at for b, at in out.body.plan.shared_offsets}
    assert places == {"S0": 0, "S1": 0, "bar": 256} and out.body.plan.shared_bytes == 272
