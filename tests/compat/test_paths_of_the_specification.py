"""Every module and name of the specification imports; what has a meaning here does it, and what has none says so when used."""

import copy
import importlib
import pathlib

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang import tvm
from tilelang.compat.unsupported import UNSUPPORTED

LINES = (pathlib.Path(__file__).parent / "specification_paths.txt").read_text(encoding="utf-8").splitlines()
NAMES = {module: names.split() for module, _, names in (line.partition(":") for line in LINES)}
CPU = {"target": "cpu"}


def scale(factor=2.0):
    @T.prim_func
    def main(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(2, threads=32) as bx:
            for i in T.Parallel(32):
                B[bx * 32 + i] = A[bx * 32 + i] * factor + T.cast(bx, "float32")

    return main


def result(program):
    a, b = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    tilelang.compile(program, **CPU)(a, b)
    return b


@pytest.mark.parametrize("module", sorted(NAMES))
def test_a_path_of_the_specification_was_missing(module):
    for name in NAMES[module]:
        if name == "_TORCH_DTYPE_TO_STR":
            pytest.importorskip("torch")
        exec(f"from {module} import {name}", {})


def test_names_without_a_meaning_say_so_when_they_are_called():
    called = 0
    for module, (_, names) in UNSUPPORTED.items():
        found = importlib.import_module(module)
        for name in names.split():
            with pytest.raises(NotImplementedError, match=f"{module}.{name} is (a pass|not available|for )"):
                getattr(found, name)()
            called += 1
        with pytest.raises(ImportError):
            exec(f"from {module} import no_such_name", {})
    assert called > 60
    with pytest.raises(NotImplementedError, match="LayoutInference is a pass over another compiler's programs"):
        tilelang.transform.LayoutInference()
    with pytest.raises(AttributeError, match="no_such_pass"):
        tilelang.transform.no_such_pass  # noqa: B018


def test_ir_transform_was_missing():
    from tvm.tirx import BufferStore, IntImm
    from tvm.tirx.stmt_functor import ir_transform, pre_order_visit, substitute

    program = scale()
    seen = []

    def doubled(node):
        seen.append(type(node).__name__)
        return BufferStore(node.buffer, node.indices, node.value * T.float32(2))

    changed = program.with_body(ir_transform(program.body, None, doubled, ["tirx.BufferStore"]))
    assert seen == ["Store"] and (result(changed) == 2 * result(program)).all()
    assert ir_transform(program.body, None, lambda node: None) is program.body
    # preorder: what it returns is not visited; None visits what is below
    kept = ir_transform(program.body, lambda node: node, doubled, ["tir.BufferStore"])
    assert kept is program.body and len(seen) == 1
    order = []
    pre_order_visit(program, lambda n: order.append(n) or not isinstance(n, BufferStore))
    assert isinstance(order[-1], BufferStore) and not any(isinstance(n, tvm.tirx.BufferLoad) for n in order)
    n = T.Var("n", "int32")
    assert str(substitute(n * 4 + 1, {n: 3})) == str(substitute(n * 4 + 1, lambda v: IntImm("int32", 3)))
    with pytest.raises(NotImplementedError, match="no nodes of kind tirx.AttrStmt"):
        ir_transform(program.body, None, doubled, ["tirx.AttrStmt"])
    with pytest.raises(NotImplementedError, match="no such node"):
        tvm.tirx.SBlock()
    assert not isinstance(program.body, tvm.tirx.SBlock)


def test_a_shared_subexpression_was_visited_once_for_each_use():
    from tvm.tirx.stmt_functor import ir_transform, post_order_visit

    x = T.Var("x", "float32")
    y = x
    for _ in range(40):
        y = y * y + y
    seen = []
    post_order_visit(y, seen.append)
    assert len(seen) == 81 and seen[0] is x
    assert ir_transform(y, None, lambda node: None) is y


def test_passes_over_programs_of_a_module():
    @tvm.tirx.transform.prim_func_pass(opt_level=0)
    def renamed(func, mod, ctx):
        assert isinstance(func, tvm.tirx.PrimFunc) and mod["main"] is func and ctx.config == {}
        return func.with_attr("note", 3).with_attr("global_symbol", "other")

    other = renamed(tvm.IRModule.from_expr(scale()))["main"]
    assert other.name == "other" and other.attrs["note"] == 3 and "note" not in other.without_attr("note").attrs


def test_hooks_by_another_compilers_names():
    from tilelang.jit.hooks import has_hook, remove_hook

    @tvm.register_func("tilelang_callback_c_postproc", override=True)
    def edited(code, target):
        return code + "\n"

    try:
        assert has_hook("c")
        with pytest.raises(ValueError, match="registered already"):
            tvm.ffi.register_global_func("tilelang_callback_c_postproc", edited)
    finally:
        remove_hook("c")
    with pytest.raises(NotImplementedError, match="tilelang_callback_other"):
        tvm.register_func("tilelang_callback_other", edited)


def test_the_names_that_programs_missed():
    from tilelang.cuda.intrinsics.macro import mma_macro_generator
    from tilelang.jit.adapter.base import BaseKernelAdapter

    assert T.DataType("bfloat16").bits == 16 and T.DataType is tilelang.DataType
    assert mma_macro_generator.TensorCoreIntrinEmitter is T.TensorCoreIntrinEmitter
    kernel = tilelang.compile(scale(), out_idx=[-1], **CPU)
    assert isinstance(kernel.adapter, BaseKernelAdapter)
    assert copy.copy(kernel.adapter).result_idx == kernel.adapter.result_idx == kernel.out_idx
    assert BaseKernelAdapter._legalize_result_idx(kernel.adapter, -1) == [1]
    assert kernel.adapter._legalize_result_idx([1, -2]) == [1, 0] and kernel.adapter._legalize_result_idx(None) == []
    with pytest.raises(ValueError, match="result_idx should be an integer between -2 and 1"):
        kernel.adapter._legalize_result_idx([2])
    with pytest.raises(ValueError, match="result_idx should be a list of integers"):
        kernel.adapter._legalize_result_idx("1")
