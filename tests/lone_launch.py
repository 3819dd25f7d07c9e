"""The model's seconds of a GEMM tile whose launch does not start early (PDL): as tiles were timed, one launch after another."""

from unittest import mock

from tilelang.library.gemm import tile_cost


def lone_seconds(chip, p, t):
    with mock.patch.object(tile_cost, "_pdl", lambda *_: False):
        return tile_cost.estimate_seconds(chip, p, t)
