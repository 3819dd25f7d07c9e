"""The decoder against LLVM's disassembler: recorded words and texts of each chip (isa_record_encodings.py); unknown words."""

from __future__ import annotations

import pathlib
from types import SimpleNamespace

import isa_compile
import isa_decode
import isa_machine
import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).parent


def recorded(chip: str) -> list[tuple[tuple[int, ...], str]]:
    lines = (FOLDER / f"encodings_gfx{chip}.txt").read_text().splitlines()
    split = [line.split(" | ", 1) for line in lines]
    return [(tuple(int(word, 16) for word in words.split()), text) for words, text in split]


@pytest.mark.parametrize("chip", isa_decode.CHIPS)
def test_texts_are_those_of_llvm(chip: str) -> None:
    decoder, cases = isa_decode.Decoder(chip), recorded(chip)
    assert len(cases) > 1000
    wrong = []
    for words, text in cases:
        found = decoder.one((*words, 0x12345678))
        if (found.text, found.words) != (text, words):
            wrong.append((words, text, found.text))
    assert not wrong, wrong[:5]


@pytest.mark.parametrize("chip", isa_decode.CHIPS)
def test_every_row_of_the_tables_is_recorded(chip: str) -> None:
    """But for the few whose words LLVM writes otherwise, or refuses for some chip."""
    decoder = isa_decode.Decoder(chip)
    seen = {decoder.one((*words, 0)).name.replace("mfma_scale_", "mfma_") for words, _ in recorded(chip)}
    rows = {row.name for form, table in decoder.table.items() for row in table.values() if form not in ("DS", "FLAT", "SMEM")}
    assert rows - seen <= {"v_nop", "v_accvgpr_mov_b32", "s_setreg_imm32_b32", "v_writelane_b32"}


@pytest.mark.parametrize("chip", isa_decode.CHIPS)
def test_every_recorded_instruction_can_run(chip: str) -> None:
    """On a wave of noise: it computes, or says what it does not model."""
    noise = np.random.default_rng(0)
    group = isa_machine.Group(SimpleNamespace(scratch=64), isa_machine.Memory(), noise, isa_machine.Shared(512, 1, noise), 0,
                              SimpleNamespace(compares=lambda pc: False))
    decoder, ran = isa_decode.Decoder(chip), 0
    with np.errstate(all="ignore"):
        for words, text in recorded(chip):
            wave = isa_machine.Wave(group, 0)
            wave.mode = 0xF0
            try:
                isa_compile.compiled(decoder.one((*words, 0)), chip).run(wave)
                ran += 1
            except isa_machine.Fault:
                pass
            except Exception as error:
                raise AssertionError(text) from error
    assert ran > 700


@pytest.mark.parametrize("words", [(0xFFFFFFFF, 0), (0xD2FF0000, 0), (0xBFFF0000, 0), (0xC8000000, 0), (0x7E00FE00, 0)])
def test_unknown_words_are_named(words: tuple[int, int]) -> None:
    with pytest.raises(isa_decode.UnknownCode, match=f"unknown words {words[0]:08x} {words[1]:08x}"):
        isa_decode.Decoder("942").one(words)


def test_an_instruction_of_another_chip_is_unknown() -> None:
    """v_mov_b64 came with gfx942, v_mfma_f32_16x16x32_f16 with gfx950."""
    assert isa_decode.Decoder("942").one((0x7E047104,)).text == "v_mov_b64_e32 v[2:3], v[4:5]"
    for chip, words in (("90a", (0x7E047104,)), ("942", (0xD3D48000, 0x04020900))):
        with pytest.raises(isa_decode.UnknownCode):
            isa_decode.Decoder(chip).one(words)
    assert isa_decode.Decoder("950").one((0xD3D48000, 0x04020900)).name == "v_mfma_f32_16x16x32_f16"
