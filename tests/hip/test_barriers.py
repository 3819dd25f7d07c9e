"""Barriers in the machine code wait for what the wave did in LDS."""

import re

import pytest

import tilelang
import tilelang.language as T
from tilelang.runtime import cache

pytest.importorskip("ziglang")


@T.prim_func
def in_a_loop(A: T.Tensor((99, 256), "float32"), S: T.Tensor((4,), "float32"), C: T.Tensor((256,), "float32"), n: T.int32):
    with T.Kernel(1, threads=256) as bx:
        tx = T.get_thread_binding()
        s, acc = T.alloc_shared((256,), "float32"), T.alloc_local((1,), "float32")
        s[tx] = A[0, tx]
        acc[0] = S[bx]  # a scalar load, for which the wave waits in front of the loop, and so for its stores
        for k in T.serial(n):
            acc[0] += s[255 - tx]
            s[tx] = A[k + 1, tx]
        C[tx] = acc[0] + s[0]


def unwaited(isa):
    """Barriers in front of which, on the path from a label or an access of LDS, no wait for LDS stands."""
    found, waits = [], False
    for number, line in enumerate(isa.splitlines()):
        words = line.split(";")[0].strip()
        if re.match(r"\.?LBB|ds_", words):
            waits = False
        elif re.match(r"s_waitcnt .*lgkmcnt\(0\)", words):
            waits = True
        elif words == "s_barrier" and not waits:
            found.append(number)
    return found


@pytest.mark.parametrize("chip", ["gfx90a", "gfx942", "gfx950"])
def test_a_barrier_in_a_loop_did_not_wait_for_the_stores_of_the_iteration_before(chip):
    isa = tilelang.compile(in_a_loop, target=chip)._built.files["kernel.s"].decode()
    assert isa.count("s_barrier") >= 2 and not unwaited(isa)


def test_a_changed_prelude_was_no_reason_to_compile_again(tmp_path, monkeypatch):
    """Kernels of the old text came from the disk cache."""
    (tmp_path / "codegen").mkdir()
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "runtime" / "cache.py"))
    found = set()
    for text in ("old", "new"):
        (tmp_path / "codegen" / "prelude.hip").write_text(text)
        found.add(cache.package_stamp.__wrapped__(contents=True))
    assert len(found) == 2
