"""Products from tilelang.library: called, read, and taken apart.

`matmul` and `grouped_matmul` choose a kernel and its tiles by a cost model, compile it once and keep it.  `--show` prints
the tile program behind a product and what the model expects of its tiles: it is plain text of the language, in
tilelang/library/gemm/kernels.py, to be copied and changed where a product needs more than bias and activation.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import EPS, HERE, Comparison, Place, compare, main, normal, product_bound, wide

import tilelang
from tilelang.library import grouped_matmul, matmul
from tilelang.library.gemm.kernels import Form, gemm
from tilelang.library.gemm.tile import TileProblem, chip_of
from tilelang.library.gemm.tile_cost import choose_tile
from tilelang.target import determine_target


def torch_layer(x, w, b):
    """The same by torch."""
    import torch

    return torch.nn.functional.linear(x, w, b).relu()


def check_layer(m: int = 4096, n: int = 4096, k: int = 4096, dtype: str = "float16", on: Place = HERE) -> Comparison:
    """A layer, relu(x @ w + b), with w stored (n, k) as torch.nn.Linear does."""
    x, w, b = normal((m, k), dtype), normal((n, k), dtype, 1), normal((n,), dtype, 2)
    got = on.library(matmul)(x, w, transpose_b=True, bias=b, activation="relu")
    on.work(2.0 * m * n * k)
    on.peer("torch linear, relu", torch_layer, x, w, b)
    want = np.maximum(wide(x) @ wide(w).T + wide(b), 0)
    bound = product_bound(wide(x), wide(w).T, dtype, dtype) + 2 * EPS[dtype] * abs(wide(b)).max()
    return compare("library layer", got, want, bound)


def check_experts(tokens: int = 8192, n: int = 2048, k: int = 2048, experts: int = 8, on: Place = HERE) -> Comparison:
    """Tokens sorted by expert, each group multiplied by its expert's matrix; the sizes of groups are read on the device."""
    cuts = np.sort(np.random.default_rng(0).integers(0, tokens + 1, experts - 1))
    sizes = np.diff([0, *cuts, tokens]).astype(np.int32)
    x, w = normal((tokens, k), "float16"), normal((experts, k, n), "float16", 1)
    got = on.library(grouped_matmul)(x, w, sizes)
    on.work(2.0 * tokens * n * k)
    rows = np.split(x, np.cumsum(sizes)[:-1])
    want = np.concatenate([wide(part) @ wide(one) for part, one in zip(rows, w)])
    bound = max(product_bound(wide(x), wide(one), "float16", "float16") for one in w)
    return compare("library experts", got, want, bound)


def check_taken_apart(m: int = 1024, n: int = 1024, k: int = 1024, show: bool = False, on: Place = HERE) -> Comparison:
    """The same program without the function around it: a form, the model's tile, and tilelang.compile."""
    target = determine_target(on.target, return_object=True)
    tile = choose_tile(chip_of(target), TileProblem(m, n, k, may_split=False))
    program = gemm(Form(m, n, k, ("float16", "float16", "float16", "float32"), tile))
    if show:
        print(f"{tile}\nexpected on {target}: {tile.seconds * 1e6:.1f} us\n{program.script()}")
    a, b, one = normal((m, k), "float16"), normal((k, n), "float16", 1), np.ones(1, np.float32)
    configs = {tilelang.PassConfigKey.TL_ENABLE_HOPPER: True} if target.has_wgmma else {}
    got = on.compile(program, out_idx=[5], pass_configs=configs)(a, b, one, one, one)
    return compare("library gemm", got, wide(a) @ wide(b), product_bound(wide(a), wide(b), "float16", "float16"))


if __name__ == "__main__":
    main(check_layer, check_experts, check_taken_apart)
