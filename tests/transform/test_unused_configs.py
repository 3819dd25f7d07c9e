"""Pass configs without effect say so once; user passes are not ignored; warnings become errors on request."""

import warnings

import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import WARNINGS, TileLangWarning, warn
from tilelang.transform import PassConfigKey
from tilelang.transform.framework.config import ROWS, normalize_config


@T.prim_func
def fill(A: T.Tensor((8,), "float32")):
    with T.Kernel(1, threads=32):
        T.fill(A, 2)


@pytest.mark.parametrize("key", [k for k, row in ROWS.items() if row.unused], ids=lambda k: k.value)
def test_a_config_without_effect_was_accepted_in_silence(key):
    row = ROWS[key]
    value = not row.default if row.types[0] is bool else {"transitively_prove_inequalities": True} if dict in row.types else \
        (*row.choices, "another")[0]
    with pytest.warns(TileLangWarning, match=f"config-no-effect: pass config {key.value} has no effect") as seen:
        normalize_config({key: value})
    assert seen[0].message.code == "config-no-effect" and "config-no-effect" in WARNINGS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        normalize_config({key: row.default})


def test_a_code_can_be_filtered_and_a_place_is_named():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "config-no-effect")
        tilelang.compile(fill, target="cpu", pass_configs={"tl.force_let_inline": True})
    with pytest.warns(TileLangWarning) as seen:
        tilelang.compile(fill, target="cpu", pass_configs={"tl.force_let_inline": True})
    assert len(seen) == 1 and seen[0].filename == __file__


def test_passes_of_the_user_were_dropped():
    with pytest.raises(ValueError, match="add_lower_pass takes an empty list"):
        tilelang.compile(fill, target="cpu", pass_configs={"tirx.add_lower_pass": [(1, lambda f: f)]})
    normalize_config({"tirx.add_lower_pass": []})


def test_async_copies_were_not_switched_off_by_their_second_key():
    assert normalize_config({"tirx.use_async_copy": False})[PassConfigKey.TL_ENABLE_ASYNC_COPY.value] is False
    both = {"tl.enable_async_copy": True, "tirx.use_async_copy": False}
    assert normalize_config(both)[PassConfigKey.TL_ENABLE_ASYNC_COPY.value] is True


def test_strict_makes_warnings_errors(monkeypatch):
    monkeypatch.setenv("TILELANG_STRICT", "1")
    with pytest.raises(RuntimeError, match="config-no-effect: pass config tl.force_let_inline") as e:
        tilelang.compile(fill, target="cpu", pass_configs={"tl.force_let_inline": True})
    assert e.value.kind == "strict-warning"


def test_a_warning_has_a_known_code():
    with pytest.raises(TypeError, match="no warning has the code 'nothing'"):
        warn("nothing", "text", "hint")
