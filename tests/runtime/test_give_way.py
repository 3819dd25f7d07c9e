"""Hint bits of long runs of sums in machine code: one of SPACING gives way, the others keep a factor that comes again."""

import struct

import pytest

import tilelang.language as T
from tilelang.codegen.cuda import print_kernel
from tilelang.runtime import nvrtc
from tilelang.runtime.give_way import LEAST, SPACING, give_way
from tilelang.target import Target
from tilelang.transform.pipeline import lower

WAIT, ARRIVE, BRANCH = (0x8000000079C5, 0xFE40000010000), (0x79C5, 0xFE20000000000), (0x7947, 0xFEA0003800000)
GIVES, KEEPS = 1 << 45, 2 << 58  # the first is set where a warp stays
HINTS = 1 << 45 | 7 << 58


def ffma(d, a, b, c, stall=1, waits=0, gives=True):
    """Rd = Ra * Rb + Rc."""
    return 0x7223 | d << 16 | a << 24 | b << 32, c | stall << 41 | (0 if gives else GIVES) | 7 << 46 | 7 << 49 | waits << 52


def elf(*words):
    """A file with one section of machine code."""
    code, names = b"".join(struct.pack("<QQ", *w) for w in words), b"\0.shstrtab\0.text.k\0"
    head = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<QIHHHHHH", 64 + len(code) + len(names), 0, 64, 0, 0, 64, 3, 2)
    def section(name, kind, at, size):
        return struct.pack("<IIQQQQ", name, kind, 0, 0, at, size).ljust(64, b"\0")
    return head + code + names + section(0, 0, 0, 0) + section(11, 1, 64, len(code)) + section(1, 3, 64 + len(code), len(names))


def high(cubin, n):
    return struct.unpack_from("<Q", cubin, 64 + 16 * n + 8)[0]


def sums(count, **options):
    return [ffma(100 + k, 24 + k, 6, 100 + k, **options) for k in range(count)]


@pytest.mark.parametrize("gives", [True, False])
def test_one_of_several_gives_way(gives):
    whole = elf(WAIT, *sums(64, gives=gives), ARRIVE)
    out = give_way(whole)
    stays = [bool(high(out, 1 + k) & GIVES) for k in range(64)]
    assert stays == [k % SPACING != SPACING - 1 for k in range(64)]
    assert [bool(high(out, 1 + k) & KEEPS) for k in range(63)] == stays[:63] and not high(out, 64) & KEEPS
    assert give_way(out) is out
    other = bytearray(out)
    for k in range(64):
        at = 64 + 16 * (1 + k) + 8
        struct.pack_into("<Q", other, at, high(out, 1 + k) & ~HINTS | high(whole, 1 + k) & HINTS)
    assert bytes(other) == whole


@pytest.mark.parametrize("what, words", [
    ("too short", [WAIT, *sums(LEAST - 1), ARRIVE]), ("no wait before it", [ARRIVE, *sums(64), ARRIVE]),
    ("cut by a branch", [WAIT, *sums(20), BRANCH, *sums(40), ARRIVE]),
    ("under a predicate", [WAIT, *((low & ~(7 << 12), high) for low, high in sums(64)), ARRIVE]),
    ("no sums over iterations", [WAIT, *(ffma(100 + k, 24 + k, 6, 7) for k in range(64)), ARRIVE])])
def test_what_stays(what, words):
    whole = elf(*words)
    assert give_way(whole) is whole, what
    assert give_way(b"no such file") == b"no such file"


def test_a_factor_is_kept_for_the_very_next_sum_only():
    run = sums(40)
    run[3] = ffma(6, 27, 6, 6)  # writes the factor
    run[8] = ffma(108, 32, 7, 108)  # another factor
    run[20] = ffma(120, 44, 6, 120, waits=1)  # other warps run while it waits
    run[30] = ffma(130, 54, 6, 130, stall=2)  # ptxas let others in here
    out = give_way(elf(WAIT, *run, ARRIVE))
    kept = {k for k in range(40) if high(out, 1 + k) & KEEPS}
    assert not kept & {3, 7, 8, 15, 19, 20, 30, 31, 39} and {0, 1, 2, 4, 5, 6, 9, 10, 21, 29} <= kept
    assert high(out, 21) == run[20][1] and high(out, 31) == run[30][1]


@pytest.mark.parametrize("branch, to", [((0x7947 | 0x10 << 16, 0xFEA0003800000), 4),
                                        ((0x7945 | 0x10 << 34, 0xFE20003800000), 4),
                                        ((0x7947 | 0xF0 << 16 | (1 << 30) - 1 << 34, 0xFEA000383FFFF), -4)])
def test_no_factor_is_kept_where_branches_lead(branch, to):
    """To the fourth instruction behind the next one, and before it."""
    run = sums(40)
    words = [branch, WAIT, *run, ARRIVE] if to > 0 else [WAIT, *run, branch, ARRIVE]
    first = 1 + (to > 0)
    target = 1 + to if to > 0 else len(words) - 1 + to
    out = give_way(elf(*words))
    kept = {n for n in range(first, first + 39) if high(out, n) & KEEPS}
    assert target - 1 not in kept and {target - 3, target - 2} & kept and len(kept) >= 38 - 40 // SPACING


def product(form):
    @T.prim_func
    def main(A: T.Tensor((256, 1024), "float8_e4m3fn"), B: T.Tensor((256, 1024), "float8_e4m3fn"),
             S: T.Tensor((256, 8), "float32"), C: T.Tensor((256, 256), "float32")):
        with T.Kernel(1, 2, threads=256) as (bx, by):
            As, Bs = T.alloc_shared((128, 128), "float8_e4m3fn"), T.alloc_shared((256, 128), "float8_e4m3fn")
            part, total = T.alloc_fragment((128, 256), "float32"), T.alloc_fragment((128, 256), "float32")
            row = T.alloc_fragment((128,), "float32")
            T.clear(total)
            for ko in T.Pipelined(8, num_stages=3):
                T.copy(A[by * 128, ko * 128], As)
                T.copy(B[0, ko * 128], Bs)
                if form == "scaled":
                    for i in T.Parallel(128):
                        row[i] = S[by * 128 + i, ko]
                T.gemm(As, Bs, part, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(128, 256):
                    total[i, j] += part[i, j] * row[i] if form == "scaled" else part[i, j]
            T.copy(total, C[by * 128, 0])

    return main


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("form", ["scaled", "plain"])
def test_what_is_compiled(form, monkeypatch):
    """Sums with scales are changed, in hint bits alone; plain ones, and other architectures' code, are ptxas's."""
    (kernel,) = lower(product(form).func, Target({"kind": "cuda", "arch": "sm_90a"}), {"tl.enable_hopper": True}).kernels
    text, seen = print_kernel(kernel), []
    monkeypatch.setattr(nvrtc, "give_way", lambda c: seen.append(c) or give_way(c))
    done, (whole,) = nvrtc.compile_cubin(text, "sm_90a").bytes, seen
    changed = [n for n in range(0, len(whole), 8) if whole[n:n + 8] != done[n:n + 8]]
    assert len(whole) == len(done) and (len(changed) > 64) == (form == "scaled") == bool(changed)
    for n in changed:
        (a,), (b,) = struct.unpack_from("<Q", whole, n), struct.unpack_from("<Q", done, n)
        assert not (a ^ b) & ~HINTS
