"""2-D convolutions of ResNet-50's 3x3 layers beside cuDNN: forward, gradient of the images, gradient of the weights.

    python benchmarks/convolution.py [--only 56,s2] [--images 32,128] [--out FILE.json]
    python benchmarks/convolution.py --kernels     # without a GPU: tiles, registers, spills

Images and weights have the channels last.  cuDNN chooses among all its algorithms (torch.backends.cudnn.benchmark).  Results
are compared with float64 first: ours may be 1.5 times as far off as cuDNN's.  Then both take turns in bursts, replayed from
graphs.  host: what the host takes to queue one of ours.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from tilelang.library.training.convolution import CONV2D  # noqa: E402

# (height and width, channels, features, stride) of the 3x3 layers
LAYERS = [(56, 64, 64, 1), (28, 128, 128, 1), (14, 256, 256, 1), (7, 512, 512, 1), (56, 128, 128, 2), (28, 256, 256, 2),
          (14, 512, 512, 2)]
WAYS = "forward", "images", "weights"
PEAK = 800e12


def name_of(images: int, layer: tuple[int, ...], kind: str) -> str:
    size, channels, features, stride = layer
    return f"{images}x{size}x{size}x{channels} f{features} s{stride} {kind}"


def calls(images: int, layer: tuple[int, ...], dtype: torch.dtype) -> tuple[dict[str, Any], ...]:
    """(ours, cuDNN's, exact results): each way's function, or result in float64."""
    size, channels, features, stride = layer
    g = torch.Generator(device="cuda").manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=g)

    x, w = made(images, size, size, channels).to(dtype), (made(features, 3, 3, channels) / (9 * channels)**0.5).to(dtype)
    out = (size - 1) // stride + 1
    dy = made(images, out, out, features).to(dtype)
    last = [t.permute(0, 3, 1, 2) for t in (x, w, dy)]  # in channels_last memory
    options = [stride] * 2, [1, 1], [1, 1], None

    def backward(t: list[torch.Tensor], *needs: bool) -> Any:
        return torch.ops.aten.convolution_backward(t[2], t[0], t[1], None, [stride] * 2, [1, 1], [1, 1], False, [0, 0], 1,
                                                   [*needs, False])

    def ours(*needs: bool) -> Any:
        return CONV2D.backward(x, w, list(needs), *options, dy)

    here: dict[str, Callable[[], Any]] = {
        "forward": lambda: CONV2D.forward(x, w, *options)[0], "images": lambda: ours(True, False)[0],
        "weights": lambda: ours(False, True)[1]}
    there: dict[str, Callable[[], Any]] = {
        "forward": lambda: F.conv2d(last[0], last[1], None, stride, 1),
        "images": lambda: backward(last, True, False)[0], "weights": lambda: backward(last, False, True)[1]}
    few = [t.double() for t in last]
    with torch.backends.cudnn.flags(benchmark=False):  # a search among algorithms for float64 takes seconds
        exact = {"forward": F.conv2d(few[0], few[1], None, stride, 1), "images": backward(few, True, False)[0],
                 "weights": backward(few, False, True)[1]}
    return here, there, exact


def measure(images: int, layer: tuple[int, ...], kind: str, rounds: int) -> list[dict[str, Any]]:
    from suite.measuring import CudaMeter

    here, there, exact = calls(images, layer, getattr(torch, kind))
    meter, rows = CudaMeter(0.02), []
    size, channels, features, stride = layer
    flops = 2.0 * 9 * images * ((size - 1) // stride + 1)**2 * channels * features
    for way in WAYS:
        row: dict[str, Any] = {"name": name_of(images, layer, kind), "way": way, "floor": flops / PEAK * 1e6}
        try:
            found = {"ours": here[way]().permute(0, 3, 1, 2), "cudnn": there[way]()}
            row["errors"] = {who: float((y.double() - exact[way]).norm() / exact[way].norm()) for who, y in found.items()}
            ready = {"ours": meter.prepare(here[way], math.inf), "cudnn": meter.prepare(there[way], math.inf)}
            row["how"] = {who: p.how for who, p in ready.items()}
            row["host_us"] = {who: p.host_us for who, p in ready.items()}
            times: dict[str, list[float]] = {who: [] for who in ready}
            for r in range(rounds):
                for who in sorted(ready, reverse=bool(r % 2)):
                    times[who].append(meter.window(ready[who], 6.0).ms * 1e3)
            row["us"] = {who: [median(t), min(t), max(t)] for who, t in times.items()}
        except Exception as e:
            row["error"] = f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"
        rows.append(row)
    return rows


def line(row: dict[str, Any]) -> str:
    text = f"{row['name']:32s} {row['way']:8s} floor {row['floor']:7.1f} us"
    if "error" in row:
        return f"{text} | {row['error']}"
    (ours, least, most), theirs = row["us"]["ours"], row["us"]["cudnn"][0]
    e = row["errors"]
    graphs = all(how == "graph" for how in row["how"].values())
    worse = e["ours"] > 1.5 * e["cudnn"] + 1e-6
    return (f"{text} | ours {ours:7.1f} ({least:.1f}-{most:.1f}) | cuDNN {theirs:7.1f} | ratio {theirs / ours:.2f} | errors "
            f"{e['ours']:.1e} {e['cudnn']:.1e}{' TOO LARGE' * worse} | host {row['host_us']['ours']:.0f} us"
            f"{' no graph' * (not graphs)}")


def kernels(images: int, layer: tuple[int, ...], kind: str) -> list[str]:
    """Each kernel, compiled for sm_90a and not run."""
    from tilelang.library.place import Place
    from tilelang.library.training import convolution as c
    from tilelang.target import Target

    size, channels, features, stride = layer
    x, w = torch.empty((images, size, size, channels), dtype=getattr(torch, kind)), torch.empty(
        (features, 3, 3, channels), dtype=getattr(torch, kind))
    at = Place(Target({"kind": "cuda", "arch": "sm_90a"}), None, 132)
    f, found = c._form(x, w, [stride] * 2, [1, 1], [1, 1]), []
    rows = c.power(images) * f.out[0] * f.out[1]
    for program, g in ((c.convolution, c.tiled(f, at, rows)), (c.image_gradient, c.tiled(f, at, rows, True)),
                       (c.weight_gradient, c.tiled_for_weights(f, at, rows))):
        t, options = g.tile, c.SPLIT if program is c.weight_gradient else {"cluster": g.tile.cluster or None}
        for k in at.kernel(program, g, **options).report_data["kernels"]:
            found.append(f"    {k['name']:40s} {t.bm}x{t.bn}x{t.bk} stages {t.stages} cluster {t.cluster} splits {g.splits} "
                         f"{k['registers']} registers, {k['spills']} spills, {k['schedule']}")
    return found


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", help="layers whose names contain one of these")
    options.add_argument("--images", default="32,128")
    options.add_argument("--kinds", default="bfloat16")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--kernels", action="store_true")
    options.add_argument("--out", default="", help="write the rows as JSON")
    o = options.parse_args()
    torch.backends.cudnn.benchmark = True
    rows: list[dict[str, Any]] = []
    for kind in o.kinds.split(","):
        for images in map(int, o.images.split(",")):
            for layer in LAYERS:
                name = name_of(images, layer, kind)
                if o.only and not any(w in name for w in o.only.split(",")):
                    continue
                if o.kernels:
                    print(name, *kernels(images, layer, kind), sep="\n", flush=True)
                    continue
                rows += measure(images, layer, kind, o.rounds)
                print(*map(line, rows[-3:]), sep="\n", flush=True)
                if o.out:
                    Path(o.out).write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
