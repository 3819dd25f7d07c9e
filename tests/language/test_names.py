"""Every public name exists, and those that cannot be used yet say so."""

import inspect
import pathlib
import re

import pytest

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import dtype
from tilelang.language.unavailable import UNAVAILABLE

NAMES = (pathlib.Path(__file__).parent / "names.txt").read_text().split()


def test_every_public_name_exists_and_is_listed():
    missing = [n for n in NAMES if n not in ("JITFunc",) and not hasattr(T, n)]
    assert not missing, missing
    assert not set(NAMES) - set(T.__all__)
    assert T.__tilelang_dialect__ == "cuda"


def test_unavailable_names_refuse_by_name():
    for name, refuse in UNAVAILABLE.items():
        with pytest.raises(NotImplementedError, match=f"T.{name}") as e:
            refuse(1, key=2)
        assert isinstance(e.value, TileLangError) and e.value.hint
    assert not {"copy", "gemm", "Kernel"} & set(UNAVAILABLE)


def test_a_prompt_completed_names_that_only_raise():
    assert not set(dir(T)) & set(UNAVAILABLE) and {"copy", "gemm", "Kernel", "float16"} <= set(dir(T))
    stub = pathlib.Path(T.__file__).with_name("__init__.pyi").read_text(encoding="utf-8")
    for name in UNAVAILABLE:  # they still raise their own error, and editors strike them out
        assert callable(getattr(T, name)) and re.search(rf"^{name}: _Unavailable\d$", stub, re.MULTILINE)
    assert stub.count("@_deprecated(") == len(set(map(inspect.getdoc, UNAVAILABLE.values())))


@pytest.mark.spec("L3.1:dtype")
def test_dtype_names_are_strings():
    assert T.float16 == "float16" and T.half == "float16" and T.long == "int64" and T.float == "float32"
    assert all(isinstance(getattr(T, n), dtype) for n in ("int8x4", "float8_e4m3fnx16", "bfloat16x2", "bool", "uint"))
    assert T.dtype("float") == T.float32 and T.float16.bits == 16


@pytest.mark.spec("L3.1:dtype")
def test_calling_a_dtype():
    assert T.float32(1.5).value == 1.5 and T.int32(1.7).value == 1 and T.int32(3).dtype == "int32"
    assert T.float16x2(T.float16(1), T.float16(2)).dtype == "float16x2" and T.int32().dtype == "int32"
    with pytest.raises(ValueError):
        T.int8(300)
    with pytest.raises(TypeError):
        T.float32("inf")


@pytest.mark.spec("L3.2:float8")
def test_fp8_helpers():
    from tilelang.language.fp8 import determine_fp8_type

    assert determine_fp8_type() == "float8_e4m3fn" and determine_fp8_type("e5m2") == "float8_e5m2"
    with pytest.raises(ValueError):
        determine_fp8_type("e3m4")
