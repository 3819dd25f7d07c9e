"""Choices of the tile model that a later process finds on disk."""

from dataclasses import fields, replace

import pytest

from tilelang.env import env
from tilelang.library.gemm import plan, tile_cost
from tilelang.library.gemm.tile import Tile, TileProblem, chip_of
from tilelang.library.gemm.plan import choose_tile
from tilelang.target import Target

CHIP = replace(chip_of(Target({"kind": "cuda", "arch": "sm_90a"})), sms=132)
SMALL = TileProblem(512, 512, 512, b_k=True, may_swap_ab=True, may_overlap=True)
# No field is as it would be.
TILE = Tile(192, 160, 64, 5, 384, 2, 3, 1.25e-5 / 3, True, True, True, 192, True, (2, 4), True, "column")
PRICED = tile_cost.choose_tile


def forget():
    """What a process knows."""
    for choose in (choose_tile, PRICED):
        choose.cache_clear()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "_WORTH", 0.0)
    forget()
    with env.using(TILELANG_CACHE_DIR=str(tmp_path)):
        yield tmp_path
    forget()


def never(*_):
    raise AssertionError("priced again")


def test_a_later_process_prices_nothing_and_chooses_the_same(monkeypatch):
    assert not any(x == f.default for x, f in zip(vars(TILE).values(), fields(Tile)))
    monkeypatch.setattr(tile_cost, "choose_tile", lambda chip, p: TILE)
    assert choose_tile(CHIP, SMALL) == TILE
    forget()
    monkeypatch.setattr(tile_cost, "choose_tile", never)
    assert choose_tile(CHIP, SMALL) == TILE
    assert hash(choose_tile(CHIP, SMALL)) == hash(TILE)  # it is a key of kernels


def test_what_is_chosen_first_is_the_models_choice():
    assert choose_tile(CHIP, SMALL) == tile_cost.choose_tile(CHIP, SMALL)


@pytest.mark.parametrize("other", ["problem", "chip", "compiler", "no cache", "damage"])
def test_another_question_is_priced(other, monkeypatch, folder):
    choose_tile(CHIP, SMALL)
    forget()
    monkeypatch.setattr(tile_cost, "choose_tile", never)
    chip, p = CHIP, SMALL
    if other == "problem":
        p = replace(SMALL, staged=True)
    elif other == "chip":
        chip = replace(CHIP, sms=114)
    elif other == "compiler":
        monkeypatch.setattr(plan, "compiler_stamp", lambda: "another")
    elif other == "no cache":
        monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")
    else:
        (manifest,) = folder.glob("*/*/choices/*/manifest.json")
        manifest.write_text(manifest.read_text().replace('"stages": ', '"stages": 1'))
    with pytest.raises(AssertionError, match="priced again"):
        choose_tile(chip, p)
    assert other == "damage" or list(folder.glob("*/*/choices/*/manifest.json"))


def test_quick_choices_are_not_kept(monkeypatch, folder):
    monkeypatch.setattr(plan, "_WORTH", 60.0)
    choose_tile(CHIP, SMALL)
    assert not list(folder.rglob("manifest.json"))
