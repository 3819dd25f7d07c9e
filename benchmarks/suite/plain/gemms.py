"""GEMMs: tiles, layouts, types, loops of tiles, changed operands, epilogues, several products."""

from typing import Any

import tilelang.language as T

from .corpus import Plain, Sizes, Spec, Tensors, enter, unit_of

SQUARE, SMALL = dict(m=4096, n=4096, k=4096), dict(m=200, n=264, k=136)
WHOLE = dict(m=256, n=256, k=256)  # small sizes of programs that need whole tiles
_ACCUMULATOR = {"int8": "int32", "float16": "float32", "bfloat16": "float32", "float8_e4m3fn": "float32", "float32": "float32"}


def flops(m: int, n: int, k: int, **_: Any) -> float:
    return 2.0 * m * n * k


def operands(trans_a: bool, trans_b: bool, dtype: str, out: str) -> Any:
    def tensors(m: int, n: int, k: int, **_: Any) -> dict[str, Spec]:
        fill = "bytes" if dtype == "int8" else "normal"
        return {"A": Spec((k, m) if trans_a else (m, k), dtype, fill), "B": Spec((n, k) if trans_b else (k, n), dtype, fill),
                "C": Spec((m, n), out, out=True)}

    return tensors


def product(t: Tensors, trans_a: bool, trans_b: bool) -> tuple[Any, Any, int]:
    a, b = t["A"].double(), t["B"].double()
    a, b = a.T if trans_a else a, b.T if trans_b else b
    return a @ b, a.abs() @ b.abs(), a.shape[1]


def bounded(want: Any, size: Any, k: int, out: str, operand: float = 0.0) -> Any:
    """The error of a sum of k products in float32 that is rounded to `out`."""
    return (k * 2.0**-24 + operand) * size + 1.01 * unit_of(out) * want.abs() + (0.5 if out == "int32" else 1e-6)


_OPERAND_ERROR = {"float32": 2.0**-10, "float8_e4m3fn": 2.0**-11}


def reference(trans_a: bool, trans_b: bool, dtype: str, out: str) -> Any:
    def compute(t: Tensors, sizes: Sizes) -> list[tuple[str, Any, Any]]:
        want, size, k = product(t, trans_a, trans_b)
        return [("C", want, bounded(want, size, k, out, _OPERAND_ERROR.get(dtype, 0.0)))]

    return compute


def gemm(bm: int = 128, bn: int = 128, bk: int = 64, stages: int = 3, threads: int = 256, dtype: str = "float16",
         trans_a: bool = False, trans_b: bool = False, out: str = "float16") -> Any:
    """C = A B with one tile a block."""
    acc = _ACCUMULATOR[dtype]

    def program(m: int, n: int, k: int) -> Any:
        @T.prim_func
        def matmul(A: T.Tensor((k, m) if trans_a else (m, k), dtype), B: T.Tensor((n, k) if trans_b else (k, n), dtype),
                   C: T.Tensor((m, n), out)):
            with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (bx, by):
                a = T.alloc_shared((bk, bm) if trans_a else (bm, bk), dtype)
                b = T.alloc_shared((bn, bk) if trans_b else (bk, bn), dtype)
                c = T.alloc_fragment((bm, bn), acc)
                T.clear(c)
                for step in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):
                    T.copy(A[step * bk, by * bm] if trans_a else A[by * bm, step * bk], a)
                    T.copy(B[bx * bn, step * bk] if trans_b else B[step * bk, bx * bn], b)
                    T.gemm(a, b, c, transpose_A=trans_a, transpose_B=trans_b)
                T.copy(c, C[by * bm, bx * bn])

        return matmul

    return program


def torch_gemm(trans_a: bool, trans_b: bool) -> Any:
    def call(torch: Any, t: Tensors) -> Any:
        torch.backends.cuda.matmul.allow_tf32 = True  # of float32 operands, which our programs round too
        return torch.matmul(t["A"].T if trans_a else t["A"], t["B"].T if trans_b else t["B"])

    return call


def _scaled(torch: Any, t: Tensors) -> Any:
    one = torch.ones((), device=t["A"].device)
    b = t["B"].T if t["B"].shape[1] == t["A"].shape[1] else t["B"].T.contiguous().T
    return torch._scaled_mm(t["A"], b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)


def enter_gemm(name: str, kind: str, best: Any = None, full: Any = None, small: Any = None, **form: Any) -> None:
    dtype, out = form.get("dtype", "float16"), form.get("out", "float16")
    ta, tb = form.get("trans_a", False), form.get("trans_b", False)
    enter(Plain(name, kind, gemm(**form), operands(ta, tb, dtype, out), reference(ta, tb, dtype, out), full or SQUARE,
                small or SMALL, flops, None, best or ("torch", torch_gemm(ta, tb))))


for _bm, _bn, _bk, _stages, _threads in (
        (128, 128, 64, 3, 256), (128, 128, 32, 4, 128), (128, 256, 64, 3, 256), (256, 128, 64, 3, 256), (64, 128, 64, 4, 128),
        (64, 256, 64, 4, 128), (128, 64, 64, 4, 128), (256, 256, 64, 2, 256), (256, 256, 64, 2, 512), (128, 128, 64, 3, 384),
        (128, 128, 64, 3, 512), (128, 128, 64, 0, 256), (128, 128, 64, 1, 256), (128, 128, 64, 2, 256), (192, 128, 64, 3, 384)):
    enter_gemm(f"gemm {_bm}x{_bn}x{_bk}, {_stages} stages, {_threads} threads", "tiles", bm=_bm, bn=_bn, bk=_bk, stages=_stages,
               threads=_threads, trans_b=True)
enter_gemm("gemm bf16", "tiles", dtype="bfloat16", out="bfloat16", trans_b=True)
enter_gemm("gemm 1024", "tiles", trans_b=True, full=dict(m=1024, n=1024, k=1024))
for _ta, _tb in ((False, False), (True, False), (True, True)):
    enter_gemm(f"gemm {'t' if _ta else 'n'}{'t' if _tb else 'n'}", "layouts", trans_a=_ta, trans_b=_tb)
enter_gemm("gemm rows of 4001", "layouts", trans_b=True, full=dict(m=4096, n=4096, k=4001), small=dict(m=130, n=70, k=101))
_FP8 = dict(dtype="float8_e4m3fn", out="bfloat16", bk=128)
_WHOLE_K = dict(m=200, n=264, k=144)
enter_gemm("gemm fp8 nt", "layouts", ("torch", _scaled), trans_b=True, small=_WHOLE_K, **_FP8)
enter_gemm("gemm fp8 nn", "layouts", ("program", "gemm fp8 nt"), small=_WHOLE_K, **_FP8)
_INT8 = dict(dtype="int8", out="int32", bk=128)
enter_gemm("gemm int8 nt", "layouts", ("torch", lambda torch, t: torch._int_mm(t["A"], t["B"].T)), trans_b=True, small=_WHOLE_K,
           **_INT8)
enter_gemm("gemm int8 nn", "layouts", ("program", "gemm int8 nt"), small=_WHOLE_K, **_INT8)
_TF32 = dict(dtype="float32", out="float32", bk=32)
enter_gemm("gemm tf32 nt", "layouts", trans_b=True, **_TF32)
enter_gemm("gemm tf32 nn", "layouts", **_TF32)


# ---- loops of tiles ---------------------------------------------------------------------------------------------------


def persistent(m: int, n: int, k: int, bm: int = 128, bn: int = 128, bk: int = 64, blocks: int = 132) -> Any:
    @T.prim_func
    def matmul(A: T.Tensor((m, k), "float16"), B: T.Tensor((n, k), "float16"), C: T.Tensor((m, n), "float16")):
        with T.Kernel(blocks, threads=256) as block:
            a, b = T.alloc_shared((bm, bk), "float16"), T.alloc_shared((bn, bk), "float16")
            c = T.alloc_fragment((bm, bn), "float32")
            for by, bx in T.Persistent([T.ceildiv(m, bm), T.ceildiv(n, bn)], blocks, block):
                T.clear(c)
                for step in T.Pipelined(T.ceildiv(k, bk), num_stages=3):
                    T.copy(A[by * bm, step * bk], a)
                    T.copy(B[bx * bn, step * bk], b)
                    T.gemm(a, b, c, transpose_B=True)
                T.copy(c, C[by * bm, bx * bn])

    return matmul


def serial_tiles(m: int, n: int, k: int, bm: int = 128, bn: int = 128, bk: int = 64, blocks: int = 132) -> Any:
    columns = -(-n // bn)
    tiles = -(-m // bm) * columns

    @T.prim_func
    def matmul(A: T.Tensor((m, k), "float16"), B: T.Tensor((n, k), "float16"), C: T.Tensor((m, n), "float16")):
        with T.Kernel(blocks, threads=256) as block:
            a, b = T.alloc_shared((bm, bk), "float16"), T.alloc_shared((bn, bk), "float16")
            c = T.alloc_fragment((bm, bn), "float32")
            for wave in T.serial(T.ceildiv(tiles, blocks)):
                tile = wave * blocks + block
                if tile < tiles:
                    T.clear(c)
                    for step in T.Pipelined(T.ceildiv(k, bk), num_stages=3):
                        T.copy(A[tile // columns * bm, step * bk], a)
                        T.copy(B[tile % columns * bn, step * bk], b)
                        T.gemm(a, b, c, transpose_B=True)
                    T.copy(c, C[tile // columns * bm, tile % columns * bn])

    return matmul


def row_of_tiles(m: int, n: int, k: int, bm: int = 128, bn: int = 128, bk: int = 64) -> Any:
    """A block computes two tiles of a row, one after another."""
    @T.prim_func
    def matmul(A: T.Tensor((m, k), "float16"), B: T.Tensor((n, k), "float16"), C: T.Tensor((m, n), "float16")):
        with T.Kernel(T.ceildiv(n, 2 * bn), T.ceildiv(m, bm), threads=256) as (bx, by):
            a, b = T.alloc_shared((bm, bk), "float16"), T.alloc_shared((bn, bk), "float16")
            c = T.alloc_fragment((bm, bn), "float32")
            for half in range(2):
                T.clear(c)
                for step in T.Pipelined(T.ceildiv(k, bk), num_stages=3):
                    T.copy(A[by * bm, step * bk], a)
                    T.copy(B[(2 * bx + half) * bn, step * bk], b)
                    T.gemm(a, b, c, transpose_B=True)
                T.copy(c, C[by * bm, (2 * bx + half) * bn])

    return matmul


def split_k(m: int, n: int, k: int, parts: int = 4, bm: int = 128, bn: int = 128, bk: int = 64) -> Any:
    """Each block adds its quarter of K to C by atomics."""
    steps = -(-k // (bk * parts))

    @T.prim_func
    def matmul(A: T.Tensor((m, k), "float16"), B: T.Tensor((n, k), "float16"), C: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), parts, threads=256) as (bx, by, bz):
            a, b = T.alloc_shared((bm, bk), "float16"), T.alloc_shared((bn, bk), "float16")
            c = T.alloc_fragment((bm, bn), "float32")
            T.clear(c)
            for step in T.Pipelined(steps, num_stages=3):
                T.copy(A[by * bm, (bz * steps + step) * bk], a)
                T.copy(B[bx * bn, (bz * steps + step) * bk], b)
                T.gemm(a, b, c, transpose_B=True)
            T.atomic_add(C[by * bm, bx * bn], c)

    return matmul


def experts(tokens: int, n: int, k: int, groups: int, bm: int = 128, bn: int = 128, bk: int = 64) -> Any:
    """Rows of A in groups of equal capacity, each multiplied by the matrix of its group; counts tell how many rows are
    there."""
    rows = tokens // groups

    @T.prim_func
    def grouped(A: T.Tensor((tokens, k), "float16"), B: T.Tensor((groups, n, k), "float16"), counts: T.Tensor((groups,),
                                                                                                              "int32"),
                C: T.Tensor((tokens, n), "float16")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(rows, bm), groups, threads=256) as (bx, by, g):
            a, b = T.alloc_shared((bm, bk), "float16"), T.alloc_shared((bn, bk), "float16")
            c = T.alloc_fragment((bm, bn), "float32")
            if by * bm < counts[g]:
                T.clear(c)
                for step in T.Pipelined(T.ceildiv(k, bk), num_stages=3):
                    T.copy(A[g * rows + by * bm, step * bk], a)
                    T.copy(B[g, bx * bn:(bx + 1) * bn, step * bk:(step + 1) * bk], b)
                    T.gemm(a, b, c, transpose_B=True)
                T.copy(c, C[g * rows + by * bm, bx * bn])

    return grouped


def _experts_reference(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
    g, n, k = s["groups"], s["n"], s["k"]
    a, b = t["A"].double().reshape(g, -1, k), t["B"].double()
    want, size = a @ b.transpose(1, 2), a.abs() @ b.abs().transpose(1, 2)
    return [("C", want.reshape(-1, n), bounded(want, size, k, "float16").reshape(-1, n))]


_PLAIN = "gemm 128x128x64, 3 stages, 256 threads"
_NT = dict(tensors=operands(False, True, "float16", "float16"), reference=reference(False, True, "float16", "float16"),
           full=SQUARE, small=WHOLE, flops=flops, best=("program", _PLAIN))
enter(Plain("tiles by T.Persistent", "tile loops", persistent, **_NT),
      Plain("tiles in a serial loop", "tile loops", serial_tiles, **_NT),
      Plain("two tiles of a row, unrolled", "tile loops", row_of_tiles, **_NT),
      Plain("split-K by atomics", "tile loops", split_k,
            lambda m, n, k: {"A": Spec((m, k)), "B": Spec((n, k)), "C": Spec((m, n), "float32", "zeros", True)},
            reference(False, True, "float16", "float32"), dict(m=1024, n=1024, k=16384), WHOLE, flops,
            best=("torch", torch_gemm(False, True))),
      Plain("experts of equal capacity", "tile loops", experts,
            lambda tokens, n, k, groups: {
                "A": Spec((tokens, k)), "B": Spec((groups, n, k)),
                "counts": Spec((groups,), "int32", lambda torch, s, g, d: torch.full(
                    (s["groups"],), s["tokens"] // s["groups"], dtype=torch.int32, device=d)),
                "C": Spec((tokens, n), out=True)},
            _experts_reference, dict(tokens=8192, n=4096, k=4096, groups=8), dict(tokens=512, n=256, k=128, groups=2),
            lambda tokens, n, k, groups: 2.0 * tokens * n * k, best=("program", _PLAIN)))


# ---- operands that are changed on the way -----------------------------------------------------------------------------


def _changed(change: Any, where: str, extra: dict[str, Any], b_dtype: str = "float16") -> Any:
    """C = f(A) B or A f(B).  change(value, vector, row, column): the new element.  where: "a in registers", "a in shared",
    "b"."""
    def program(m: int, n: int, k: int, bm: int = 128, bn: int = 128, bk: int = 64) -> Any:
        length = {"rows": m, "columns": k}.get(extra.get("vector", ""), 1)

        @T.prim_func
        def matmul(A: T.Tensor((m, k), "float16"), B: T.Tensor((n, k), b_dtype), V: T.Tensor((length,), "float32"),
                   C: T.Tensor((m, n), "float16")):
            with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=256) as (bx, by):
                a, b = T.alloc_shared((bm, bk), "float16"), T.alloc_shared((bn, bk), b_dtype)
                f = T.alloc_fragment((bm, bk), "float16")
                h = T.alloc_shared((bn, bk), "float16")
                c = T.alloc_fragment((bm, bn), "float32")
                T.clear(c)
                for step in T.Pipelined(T.ceildiv(k, bk), num_stages=3):
                    T.copy(A[by * bm, step * bk], a)
                    T.copy(B[bx * bn, step * bk], b)
                    if where == "a in registers":
                        for i, j in T.Parallel(bm, bk):
                            f[i, j] = change(a[i, j], V, by * bm + i, step * bk + j)
                        T.gemm(f, b, c, transpose_B=True)
                    elif where == "a in shared":
                        for i, j in T.Parallel(bm, bk):
                            a[i, j] = change(a[i, j], V, by * bm + i, step * bk + j)
                        T.gemm(a, b, c, transpose_B=True)
                    else:
                        for i, j in T.Parallel(bn, bk):
                            h[i, j] = T.cast(b[i, j], "float16")
                        T.gemm(a, h, c, transpose_B=True)
                T.copy(c, C[by * bm, bx * bn])

        return matmul

    return program


def _changed_tensors(vector: str = "", b_dtype: str = "float16") -> Any:
    def tensors(m: int, n: int, k: int) -> dict[str, Spec]:
        length = {"rows": m, "columns": k}.get(vector, 1)
        return {"A": Spec((m, k)), "B": Spec((n, k), b_dtype, "bytes" if b_dtype == "int8" else "normal"),
                "V": Spec((length,), "float32", "uniform"), "C": Spec((m, n), out=True)}

    return tensors


def _changed_reference(change: Any) -> Any:
    def compute(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
        a = change(t["A"].double(), t["V"].double())
        b = t["B"].double()
        want, size = a @ b.T, a.abs() @ b.abs().T
        return [("C", want, bounded(want, size, s["k"], "float16", 2.0**-11))]

    return compute


for _name, _where, _vector, _change, _torch in (
        ("relu of A in registers", "a in registers", "", lambda x, v, r, c: T.max(x, T.float16(0)), lambda a,
         v: a.clamp(min=0)),
        ("relu of A in shared memory", "a in shared", "", lambda x, v, r, c: T.max(x, T.float16(0)), lambda a,
         v: a.clamp(min=0)),
        ("A scaled by rows", "a in registers", "rows", lambda x, v, r, c: x * v[r], lambda a, v: a * v[:, None]),
        ("A scaled by columns", "a in registers", "columns", lambda x, v, r, c: x * v[c], lambda a, v: a * v[None, :])):
    enter(Plain(_name, "operands", _changed(_change, _where, {"vector": _vector}), _changed_tensors(_vector),
                _changed_reference(_torch), SQUARE, WHOLE, flops, best=("program", _PLAIN)))
enter(Plain("int8 weights", "operands", _changed(None, "b", {}, "int8"), _changed_tensors("", "int8"),
            _changed_reference(lambda a, v: a), SQUARE, WHOLE, flops, best=("program", _PLAIN)))

NF4 = (-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302, 0.2461123,
       0.33791524, 0.44070983, 0.5626170, 0.72295684, 1.0)


def packed(decode: Any, table: bool = False) -> Any:
    """C = A W^T with two weights of 4 bits in a byte, decoded in registers and written to shared memory."""
    def program(m: int, n: int, k: int, bm: int = 128, bn: int = 128, bk: int = 64) -> Any:
        @T.prim_func
        def matmul(A: T.Tensor((m, k), "float16"), B: T.Tensor((n, k // 2), "uint8"), V: T.Tensor((16,), "float16"),
                   C: T.Tensor((m, n), "float16")):
            with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=256) as (bx, by):
                a, q = T.alloc_shared((bm, bk), "float16"), T.alloc_shared((bn, bk // 2), "uint8")
                w = T.alloc_shared((bn, bk), "float16")
                values = T.alloc_shared((16,), "float16")
                c = T.alloc_fragment((bm, bn), "float32")
                T.copy(V, values)
                T.clear(c)
                for step in T.Pipelined(T.ceildiv(k, bk), num_stages=3):
                    T.copy(A[by * bm, step * bk], a)
                    T.copy(B[bx * bn, step * bk // 2], q)
                    for i, j in T.Parallel(bn, bk):
                        bits = (q[i, j // 2] >> T.cast(j % 2 * 4, "uint8")) & T.uint8(15)
                        w[i, j] = values[bits] if table else decode(bits)
                    T.gemm(a, w, c, transpose_B=True)
                T.copy(c, C[by * bm, bx * bn])

        return matmul

    return program


def _packed_reference(values: Any) -> Any:
    def compute(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
        q = t["B"].int()
        bits = (q[:, :, None] >> (q.new_tensor([0, 4]))) & 15
        w = values(bits.reshape(q.shape[0], -1), t).double()
        a = t["A"].double()
        want, size = a @ w.T, a.abs() @ w.abs().T
        return [("C", want, bounded(want, size, s["k"], "float16", 2.0**-11))]

    return compute


def _packed_tensors(m: int, n: int, k: int) -> dict[str, Spec]:
    return {"A": Spec((m, k)), "B": Spec((n, k // 2), "uint8", "bytes"),
            "V": Spec((16,), "float16", lambda torch, s, g, d: torch.tensor(NF4, device=d).half()), "C": Spec((m, n), out=True)}


def _fp4(bits: Any) -> Any:
    """e2m1: sign, two bits of exponent, one of mantissa."""
    e, mant = (bits >> T.uint8(1)) & T.uint8(3), bits & T.uint8(1)
    size = T.if_then_else(e == T.uint8(0), T.cast(mant, "float16") * T.float16(0.5),
                          (T.float16(1) + T.cast(mant, "float16") * T.float16(0.5)) *
                          T.cast(T.uint8(1) << (e - T.min(e, T.uint8(1))), "float16"))
    return T.if_then_else(bits >= T.uint8(8), -size, size)


def _fp4_torch(bits: Any, t: Tensors) -> Any:
    import torch

    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=bits.device)
    return torch.where(bits >= 8, -table[(bits & 7).long()], table[(bits & 7).long()])


for _name, _decode, _table, _values in (
        ("int4 weights", lambda bits: T.cast(bits, "float16") - T.float16(8), False, lambda bits, t: bits - 8),
        ("nf4 weights", None, True, lambda bits, t: t["V"].double()[bits.long()]), ("fp4 weights", _fp4, False, _fp4_torch)):
    enter(Plain(_name, "operands", packed(_decode, _table), _packed_tensors, _packed_reference(_values), SQUARE, WHOLE, flops,
                best=("program", _PLAIN)))


# ---- epilogues --------------------------------------------------------------------------------------------------------


def _epilogue(finish: Any) -> Any:
    def program(m: int, n: int, k: int, bm: int = 128, bn: int = 128, bk: int = 64) -> Any:
        @T.prim_func
        def matmul(A: T.Tensor((m, k), "float16"), B: T.Tensor((n, k), "float16"), R: T.Tensor((m, n), "float16"),
                   V: T.Tensor((n,), "float16"), C: T.Tensor((m, n), "float16")):
            with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=256) as (bx, by):
                a, b = T.alloc_shared((bm, bk), "float16"), T.alloc_shared((bn, bk), "float16")
                c = T.alloc_fragment((bm, bn), "float32")
                T.clear(c)
                for step in T.Pipelined(T.ceildiv(k, bk), num_stages=3):
                    T.copy(A[by * bm, step * bk], a)
                    T.copy(B[bx * bn, step * bk], b)
                    T.gemm(a, b, c, transpose_B=True)
                for i, j in T.Parallel(bm, bn):
                    c[i, j] = finish(c[i, j], R, V, by * bm + i, bx * bn + j)
                T.copy(c, C[by * bm, bx * bn])

        return matmul

    return program


def _epilogue_reference(finish: Any) -> Any:
    def compute(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
        x, size, k = product(t, False, True)
        want = finish(x, t["R"].double(), t["V"].double())
        return [("C", want, 1.2 * bounded(want, size, k, "float16") + 2.0**-20)]

    return compute


def _gelu(x: Any) -> Any:
    import torch

    return torch.nn.functional.gelu(x)


def _epilogue_tensors(m: int, n: int, k: int) -> dict[str, Spec]:
    return {"A": Spec((m, k)), "B": Spec((n, k)), "R": Spec((m, n)), "V": Spec((n,)), "C": Spec((m, n), out=True)}


for _name, _finish, _torch in (
        ("residual added", lambda x, r, v, i, j: x + T.cast(r[i, j], "float32"), lambda x, r, v: x + r),
        ("bias and gelu", lambda x, r, v, i, j: _gelu_tile(x + T.cast(v[j], "float32")), lambda x, r, v: _gelu(x + v)),
        ("times a gate", lambda x, r, v, i, j: x * T.sigmoid(T.cast(r[i, j], "float32")), lambda x, r, v: x * r.sigmoid())):
    enter(Plain(_name, "epilogues", _epilogue(_finish), _epilogue_tensors, _epilogue_reference(_torch), SQUARE, WHOLE, flops,
                best=("program", _PLAIN)))


def _gelu_tile(x: Any) -> Any:
    return 0.5 * x * (1.0 + T.erf(x * 0.7071067811865476))


# ---- several products -------------------------------------------------------------------------------------------------


def swiglu(m: int, n: int, k: int, bm: int = 128, bn: int = 128, bk: int = 64) -> Any:
    @T.prim_func
    def gated(A: T.Tensor((m, k), "float16"), B: T.Tensor((n, k), "float16"), G: T.Tensor((n, k), "float16"),
              C: T.Tensor((m, n), "float16")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=256) as (bx, by):
            a, b, g = [T.alloc_shared((x, bk), "float16") for x in (bm, bn, bn)]
            up, gate = T.alloc_fragment((bm, bn), "float32"), T.alloc_fragment((bm, bn), "float32")
            T.clear(up)
            T.clear(gate)
            for step in T.Pipelined(T.ceildiv(k, bk), num_stages=2):
                T.copy(A[by * bm, step * bk], a)
                T.copy(B[bx * bn, step * bk], b)
                T.copy(G[bx * bn, step * bk], g)
                T.gemm(a, b, up, transpose_B=True)
                T.gemm(a, g, gate, transpose_B=True)
            for i, j in T.Parallel(bm, bn):
                up[i, j] = up[i, j] * gate[i, j] * T.sigmoid(gate[i, j])
            T.copy(up, C[by * bm, bx * bn])

    return gated


def _swiglu_reference(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
    a, b, g = (t[x].double() for x in "ABG")
    up, gate = a @ b.T, a @ g.T
    silu = gate * gate.sigmoid()
    slack = s["k"] * 2.0**-24
    bound = 1.2 * slack * ((a.abs() @ b.abs().T) * silu.abs() + up.abs() * 1.1 * (a.abs() @ g.abs().T))
    want = up * silu
    return [("C", want, bound + 2.0**-10 * want.abs() + 1e-5)]


def lora(m: int, n: int, k: int, rank: int = 64, bm: int = 128, bn: int = 128, bk: int = 64) -> Any:
    """C = A B^T + (A L^T) R^T, both in one launch: two pipelined loops."""
    @T.prim_func
    def matmul(A: T.Tensor((m, k), "float16"), B: T.Tensor((n, k), "float16"), L: T.Tensor((rank, k), "float16"),
               R: T.Tensor((n, rank), "float16"), C: T.Tensor((m, n), "float16")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=256) as (bx, by):
            a, b = T.alloc_shared((bm, bk), "float16"), T.alloc_shared((bn, bk), "float16")
            low, up = T.alloc_shared((rank, bk), "float16"), T.alloc_shared((bn, rank), "float16")
            mid = T.alloc_shared((bm, rank), "float16")
            c, t = T.alloc_fragment((bm, bn), "float32"), T.alloc_fragment((bm, rank), "float32")
            T.clear(c)
            T.clear(t)
            for step in T.Pipelined(T.ceildiv(k, bk), num_stages=2):
                T.copy(A[by * bm, step * bk], a)
                T.copy(B[bx * bn, step * bk], b)
                T.copy(L[0, step * bk], low)
                T.gemm(a, b, c, transpose_B=True)
                T.gemm(a, low, t, transpose_B=True)
            T.copy(R[bx * bn, 0], up)
            T.copy(t, mid)
            T.gemm(mid, up, c, transpose_B=True)
            T.copy(c, C[by * bm, bx * bn])

    return matmul


def _lora_reference(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
    a, b, low, r = (t[x].double() for x in "ABLR")
    mid = a @ low.T
    want = a @ b.T + mid @ r.T
    size = a.abs() @ b.abs().T + (a.abs() @ low.abs().T) @ r.abs().T
    return [("C", want, bounded(want, size, 2 * s["k"], "float16") + 2.0**-11 * (mid.abs() @ r.abs().T))]


def mlp(m: int, k: int, hidden: int, bm: int = 128, bh: int = 64) -> Any:
    """C = relu(A U^T) D^T with the hidden layer in registers; A and C have k columns."""
    @T.prim_func
    def fused(A: T.Tensor((m, k), "float16"), U: T.Tensor((hidden, k), "float16"), D: T.Tensor((hidden, k), "float16"),
              C: T.Tensor((m, k), "float16")):
        with T.Kernel(T.ceildiv(m, bm), threads=256) as by:
            a, u, d = [T.alloc_shared((x, k), "float16") for x in (bm, bh, bh)]
            h, p = T.alloc_fragment((bm, bh), "float32"), T.alloc_fragment((bm, bh), "float16")
            c = T.alloc_fragment((bm, k), "float32")
            T.copy(A[by * bm, 0], a)
            T.clear(c)
            for step in T.Pipelined(T.ceildiv(hidden, bh), num_stages=2):
                T.copy(U[step * bh, 0], u)
                T.copy(D[step * bh, 0], d)
                T.gemm(a, u, h, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(bm, bh):
                    p[i, j] = T.max(h[i, j], 0.0)
                T.gemm(p, d, c)
            T.copy(c, C[by * bm, 0])

    return fused


def _mlp_reference(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
    a, u, d = (t[x].double() for x in "AUD")
    h = (a @ u.T).clamp(min=0)
    want, size = h @ d, (a.abs() @ u.abs().T) @ d.abs()
    return [("C", want, (s["k"] + s["hidden"]) * 2.0**-24 * size + 2.0**-10 * (h @ d.abs()) + 2.0**-10 * want.abs() + 1e-4)]


def two_operands(m: int, n: int, k: int, bm: int = 128, bn: int = 128, bk: int = 64) -> Any:
    """C = A B^T + E F^T in one loop."""
    @T.prim_func
    def matmul(A: T.Tensor((m, k), "float16"), B: T.Tensor((n, k), "float16"), E: T.Tensor((m, k), "float16"),
               F: T.Tensor((n, k), "float16"), C: T.Tensor((m, n), "float16")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=256) as (bx, by):
            a, b, e, f = [T.alloc_shared((128, bk), "float16") for _ in range(4)]
            c = T.alloc_fragment((bm, bn), "float32")
            T.clear(c)
            for step in T.Pipelined(T.ceildiv(k, bk), num_stages=2):
                T.copy(A[by * bm, step * bk], a)
                T.copy(B[bx * bn, step * bk], b)
                T.copy(E[by * bm, step * bk], e)
                T.copy(F[bx * bn, step * bk], f)
                T.gemm(a, b, c, transpose_B=True)
                T.gemm(e, f, c, transpose_B=True)
            T.copy(c, C[by * bm, bx * bn])

    return matmul


def _two_reference(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
    a, b, e, f = (t[x].double() for x in "ABEF")
    want, size = a @ b.T + e @ f.T, a.abs() @ b.abs().T + e.abs() @ f.abs().T
    return [("C", want, bounded(want, size, 2 * s["k"], "float16"))]


def block_scaled(m: int, n: int, k: int, bm: int = 128, bn: int = 128, bk: int = 128) -> Any:
    """float8 with scales of rows by blocks of 128 of A, and of 128 x 128 blocks of B."""
    @T.prim_func
    def matmul(A: T.Tensor((m, k), "float8_e4m3fn"), B: T.Tensor((n, k), "float8_e4m3fn"), SA: T.Tensor((m, k // bk),
                                                                                                        "float32"),
               SB: T.Tensor((n // bn, k // bk), "float32"), C: T.Tensor((m, n), "bfloat16")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=256) as (bx, by):
            a, b = T.alloc_shared((bm, bk), "float8_e4m3fn"), T.alloc_shared((bn, bk), "float8_e4m3fn")
            c, part = T.alloc_fragment((bm, bn), "float32"), T.alloc_fragment((bm, bn), "float32")
            T.clear(c)
            for step in T.Pipelined(T.ceildiv(k, bk), num_stages=3):
                T.copy(A[by * bm, step * bk], a)
                T.copy(B[bx * bn, step * bk], b)
                T.gemm(a, b, part, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(bm, bn):
                    c[i, j] += part[i, j] * SA[by * bm + i, step] * SB[bx, step]
            T.copy(c, C[by * bm, bx * bn])

    return matmul


def _block_scaled_reference(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
    a = t["A"].double() * t["SA"].double().repeat_interleave(128, 1)
    b = t["B"].double() * t["SB"].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    want, size = a @ b.T, a.abs() @ b.abs().T
    return [("C", want, bounded(want, size, s["k"], "bfloat16", 2.0**-11))]


_DOUBLE = dict(full=SQUARE, small=WHOLE, best=("program", _PLAIN))
enter(Plain("SwiGLU", "several products", swiglu,
            lambda m, n, k: {"A": Spec((m, k)), "B": Spec((n, k)), "G": Spec((n, k)), "C": Spec((m, n), out=True)},
            _swiglu_reference, flops=lambda m, n, k: 4.0 * m * n * k,
            full=SQUARE, small=WHOLE, best=("program", "gemm 128x256x64, 3 stages, 256 threads")),
      Plain("LoRA in two loops", "several products", lora,
            lambda m, n, k: {"A": Spec((m, k)), "B": Spec((n, k)), "L": Spec((64, k), scale=0.1), "R": Spec((n, 64), scale=0.1),
                             "C": Spec((m, n), out=True)},
            _lora_reference, flops=lambda m, n, k: 2.0 * m * n * k + 128.0 * k * m * (n // 128) + 128.0 * m * n, **_DOUBLE),
      Plain("fused MLP", "several products", mlp,
            lambda m, k, hidden: {"A": Spec((m, k)), "U": Spec((hidden, k), scale=0.1), "D": Spec((hidden, k), scale=0.1),
                                  "C": Spec((m, k), out=True)},
            _mlp_reference, dict(m=16896, k=128, hidden=4096), dict(m=256, k=64, hidden=256),
            lambda m, k, hidden: 4.0 * m * k * hidden, best=("program", "attention")),
      Plain("two products into one accumulator", "several products", two_operands,
            lambda m, n, k: {"A": Spec((m, k)), "B": Spec((n, k)), "E": Spec((m, k)), "F": Spec((n, k)), "C": Spec((m, n),
                                                                                                                   out=True)},
            _two_reference, flops=lambda m, n, k: 4.0 * m * n * k, **_DOUBLE),
      Plain("float8 with block scales", "several products", block_scaled,
            lambda m, n, k: {"A": Spec((m, k), "float8_e4m3fn"), "B": Spec((n, k), "float8_e4m3fn"),
                             "SA": Spec((m, k // 128), "float32", "uniform"), "SB": Spec((n // 128, k // 128), "float32",
                                                                                         "uniform"),
                             "C": Spec((m, n), "bfloat16", out=True)},
            _block_scaled_reference, SQUARE, WHOLE, flops, best=("program", "gemm fp8 nt")))
