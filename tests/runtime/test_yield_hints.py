"""Yield and reuse hints of long FFMA runs: one of SPACING yields, the others reuse an operand; nothing else changes."""

import re
import struct

import pytest

import tilelang.language as T
from tilelang.codegen.cuda import print_kernel
from tilelang.env import env
from tilelang.jit.kernel_cache import cache_key
from tilelang.jit.requests import make_request
from tilelang.runtime import nvrtc, sass
from tilelang.runtime.cuda_cache import CUDABinaryCache
from tilelang.runtime.yield_hints import MIN_RUN, SPACING, set_yield_hints
from tilelang.target import Target
from tilelang.transform.pipeline import lower

WAIT, ARRIVE, BRANCH = (0x8000000079C5, 0xFE40000010000), (0x79C5, 0xFE20000000000), (0x7947, 0xFEA0003800000)
STAYS, REUSE_B = 1 << 45, 2 << 58  # the first is set where a warp stays
HINTS = 1 << 45 | 7 << 58


def ffma(d, a, b, c, stall=1, waits=0, yields=True):
    """Rd = Ra * Rb + Rc."""
    return 0x7223 | d << 16 | a << 24 | b << 32, c | stall << 41 | (0 if yields else STAYS) | 7 << 46 | 7 << 49 | waits << 52


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


@pytest.mark.parametrize("yields", [True, False])
def test_one_of_several_yields_way(yields):
    whole = elf(WAIT, *sums(64, yields=yields), ARRIVE)
    out = set_yield_hints(whole)
    stays = [bool(high(out, 1 + k) & STAYS) for k in range(64)]
    assert stays == [k % SPACING != SPACING - 1 for k in range(64)]
    assert [bool(high(out, 1 + k) & REUSE_B) for k in range(63)] == stays[:63] and not high(out, 64) & REUSE_B
    assert set_yield_hints(out) is out
    other = bytearray(out)
    for k in range(64):
        at = 64 + 16 * (1 + k) + 8
        struct.pack_into("<Q", other, at, high(out, 1 + k) & ~HINTS | high(whole, 1 + k) & HINTS)
    assert bytes(other) == whole


@pytest.mark.parametrize("what, words", [
    ("too short", [WAIT, *sums(MIN_RUN - 1), ARRIVE]), ("no wait before it", [ARRIVE, *sums(64), ARRIVE]),
    ("cut by a branch", [WAIT, *sums(20), BRANCH, *sums(40), ARRIVE]),
    ("under a predicate", [WAIT, *((low & ~(7 << 12), high) for low, high in sums(64)), ARRIVE]),
    ("no sums over iterations", [WAIT, *(ffma(100 + k, 24 + k, 6, 7) for k in range(64)), ARRIVE])])
def test_what_stays(what, words):
    whole = elf(*words)
    assert set_yield_hints(whole) is whole, what
    assert set_yield_hints(b"no such file") == b"no such file"


def test_a_factor_is_kept_for_the_very_next_sum_only():
    run = sums(40)
    run[3] = ffma(6, 27, 6, 6)  # writes the factor
    run[8] = ffma(108, 32, 7, 108)  # another factor
    run[20] = ffma(120, 44, 6, 120, waits=1)  # other warps run while it waits
    run[30] = ffma(130, 54, 6, 130, stall=2)  # ptxas let others in here
    out = set_yield_hints(elf(WAIT, *run, ARRIVE))
    kept = {k for k in range(40) if high(out, 1 + k) & REUSE_B}
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
    out = set_yield_hints(elf(*words))
    kept = {n for n in range(first, first + 39) if high(out, n) & REUSE_B}
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


def compiled(form, hints):
    (kernel,) = lower(product(form).func, Target({"kind": "cuda", "arch": "sm_90a"}), {"tl.enable_hopper": True}).kernels
    with env.using(TILELANG_YIELD_HINTS=hints):
        return nvrtc.compile_cubin(print_kernel(kernel), "sm_90a").bytes


def instructions(cubin):
    """[(text without reuse flags, 128-bit encoding)] of each instruction, as nvdisasm reads it."""
    words = re.findall(
        r"^\s*(?:/\*([0-9a-f]{4,})\*/\s+(.*?);)?\s*/\* (0x[0-9a-f]{16}) \*/",
        sass.disassemble(cubin, encodings=True), re.M)
    low, high = words[::2], words[1::2]
    assert len(low) == len(high) > 200 and all(a[0] and not b[0] for a, b in zip(low, high))
    return [(a[1].replace(".reuse", ""), int(a[2], 16) | int(b[2], 16) << 64) for a, b in zip(low, high)]


@pytest.mark.skipif(not nvrtc.available() or sass.find_nvdisasm() is None, reason="NVRTC or nvdisasm is not installed")
def test_nvdisasm_sees_the_same_instructions_but_for_hint_bits():
    plain, hinted = (instructions(compiled("scaled", hints)) for hints in ("0", "1"))
    assert [text for text, _ in plain] == [text for text, _ in hinted]
    changed = [(text, a ^ b) for (text, a), (_, b) in zip(plain, hinted) if a != b]
    assert len(changed) > 16
    for text, bits in changed:
        assert text.startswith("FFMA") and not bits & ~(HINTS << 64), text


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
def test_off_by_default_and_only_runs_with_scales_change(monkeypatch):
    calls = []
    monkeypatch.setattr(nvrtc, "set_yield_hints", lambda c: calls.append(c) or set_yield_hints(c))
    monkeypatch.delenv("TILELANG_YIELD_HINTS", raising=False)
    (kernel,) = lower(product("plain").func, Target({"kind": "cuda", "arch": "sm_90a"}), {"tl.enable_hopper": True}).kernels
    off = nvrtc.compile_cubin(print_kernel(kernel), "sm_90a").bytes
    assert not calls and not env.is_yield_hints_enabled()
    assert compiled("plain", "1") == off and calls == [off]


def test_cache_keys_tell_the_setting():
    request = make_request(product("plain"), target={"kind": "cuda", "arch": "sm_90a"})
    keys = []
    for hints in "10":
        with env.using(TILELANG_YIELD_HINTS=hints):
            keys.append((cache_key(request), nvrtc.available() and CUDABinaryCache().key("", "sm_90a")))
    assert keys[0][0] != keys[1][0] and (keys[0][1] != keys[1][1] or not nvrtc.available())
