"""Libraries are loaded without stopping other threads."""

import ctypes
import ctypes.util

import pytest

from tilelang.target import probe


def test_a_library_is_opened_and_its_functions_called():
    name = ctypes.util.find_library("m")
    assert name is not None
    cos = probe.open_library(name).cos
    cos.restype, cos.argtypes = ctypes.c_double, [ctypes.c_double]
    assert cos(0.0) == 1.0


def test_what_is_no_library_is_an_error(tmp_path):
    with pytest.raises(OSError, match="nowhere.so"):
        probe.open_library(str(tmp_path / "nowhere.so"))
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(OSError, match="text.so"):
        probe.open_library(str(tmp_path / "text.so"))


def test_systems_without_dlopen_load_by_ctypes_alone(monkeypatch):
    opened = []

    def cdll(path):
        opened.append(path)
        if path is None:
            raise TypeError("no main program here")
        return "library"

    monkeypatch.setattr(ctypes, "CDLL", cdll)
    assert probe.open_library("x.dll") == "library" and opened == [None, "x.dll"]
