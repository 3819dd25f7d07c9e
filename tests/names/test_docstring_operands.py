"""The docstring of every public function of T that takes tensors says the shape and the memory scope of each tensor operand.

A docstring describes operands by entries: `src, dst: a tile in shared memory, ...`.  An entry ends where the next one begins or
at a blank line.  The entry of a tensor operand has a word of SHAPE and a word of SCOPE, or refers to another function
(`as T.reduce`) whose docstring describes the operand.
"""

from __future__ import annotations

import inspect
import re
from types import FunctionType

import tilelang.language as T
from tilelang.language.unavailable import UNAVAILABLE

TENSORS = {"A", "A_buf", "A_desc", "A_sparse", "B", "B_desc", "C", "C_data", "E", "acc", "base", "buf", "buf_or_ptr",
           "buffer", "col", "data", "dst", "dst_access_ptr", "dst_ptr", "element", "img", "obj", "out", "result", "src",
           "src_access_ptr", "src_ptr"}
ALSO = {"ptx_mma": {"a", "b", "c"}}  # names that are scalars in other functions
WITHOUT_TENSOR = {"decl_buffer", "match_buffer",  # their `data` is a pointer that a tensor is made of
                  "__fns", "ramp",  # their `base` is a scalar
                  "get_swizzle_layout"}  # its `col` is a number
SHAPE = re.compile(r"\bshape|\belements?\b|\bextents?\b|\([^()]*,[^()]*\)")
SCOPE = re.compile(r"\bglobal\b|\bshared\b|\bfragment|\blocal\b|\bregisters?\b|\bprivate\b|\bscopes?\b")
ENTRY = re.compile(r"(?:^|(?<=[.;] )|(?<=  ))((?:\w+, )*\w+): ", re.MULTILINE)


def entries(doc: str) -> dict[str, str]:
    """The operands that a docstring describes, each with the text of its entry."""
    out: dict[str, str] = {}
    for paragraph in doc.partition("\nExample:")[0].split("\n\n"):
        found = list(ENTRY.finditer(paragraph))
        for m, end in zip(found, [*(f.start() for f in found[1:]), len(paragraph)]):
            out |= dict.fromkeys(m[1].split(", "), paragraph[m.end():end])
    return out


def faults(name: str, value: FunctionType) -> list[str]:
    """The tensor operands of T.name whose shape or scope is not described."""
    described, out = entries(inspect.getdoc(value) or ""), []
    for operand in inspect.signature(value).parameters:
        if operand in TENSORS | ALSO.get(name, set()):
            text = described.get(operand, "")
            other = re.search(r"\bas T\.(\w+)", text)
            if not (SHAPE.search(text) and SCOPE.search(text)) and not (
                    other and other[1] != name and operand in entries(inspect.getdoc(getattr(T, other[1])) or "")):
                out.append(f"T.{name}: {operand}: {text.strip() or 'no entry'}")
    return out


def test_every_tensor_operand_has_its_shape_and_memory_scope_described():
    names = [n for n in T.__all__ if n not in UNAVAILABLE and n not in WITHOUT_TENSOR and inspect.isfunction(getattr(T, n))]
    checked = {n: getattr(T, n) for n in names
               if (TENSORS | ALSO.get(n, set())) & inspect.signature(getattr(T, n)).parameters.keys()}
    assert {"copy", "gemm", "fill", "transpose", "print", "copy_cluster", "view", "ptx_mma", "atomic_add"} <= checked.keys()
    assert "\n".join(x for n, f in checked.items() for x in faults(n, f)) == ""


def test_an_operand_without_its_scope_is_found():
    def incomplete(src, dst):
        """dst = src.

        src: a (M, N) tile in shared memory.  dst: of src's shape.

        Example:
            T.copy(src, dst)   # src: shared, dst: fragment
        """

    assert faults("incomplete", incomplete) == ["T.incomplete: dst: of src's shape."]
