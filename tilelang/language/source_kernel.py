"""T.CUDASourceCodeKernel: a launch of a kernel that the user wrote in CUDA."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from tilelang.ir import AddressOf, Const, Evaluate, Launch, Stmt, StringConst, call, dtype as DType, replace, with_options

from .tracing.builder import Builder, need_builder
from .kernel import ClusterKernel, KernelLaunchFrame
from .tracing.state import error, example

# `__global__ void [__launch_bounds__(…)] name(`, whether or not extern "C" stands in front
_ENTRY = re.compile(r"(extern\s+\"C\"\s+)?__global__\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?void\s+"
                    r"(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(")


class SourceKernelFrame(KernelLaunchFrame):
    """The launch of a `__global__` function of user source.  Statements in its block are rejected."""

    source: str
    entry: str

    def close(self, b: Builder) -> Stmt:
        if self.stmts:
            raise error("source-kernel", "statements stand in the block of T.CUDASourceCodeKernel", expected="pass as the body",
                        found=f"{len(self.stmts)} statements", hint="its body is the CUDA source: write `pass`")
        zero = Const(0, DType("int32"))
        args = [AddressOf(buffer, (zero,) * len(buffer.shape)) if buffer is not None else var
                for var, buffer in b.params.values()]
        self.stmts.append(Evaluate(call("source_kernel", (StringConst(self.entry), *args), "void", span=self.span),
                                   span=self.span))
        out = super().close(b)
        assert isinstance(out, Launch)  # what a launch frame closes to
        return with_options(replace(out), cuda_source=self.source, cuda_entry=self.entry)


@example('with T.CUDASourceCodeKernel(32, threads=128, source_code_or_path=SOURCE, entry_name="scale"):', "    pass")
def CUDASourceCodeKernel(*blocks: Any, threads: Any = None, source_code_or_path: str, entry_name: str = "main_kernel",
                         cluster_dims: int | Sequence[int] | None = None, prelude: str | None = None) -> SourceKernelFrame:
    """`with T.CUDASourceCodeKernel(grid, threads=128, source_code_or_path=…): pass` launches a `__global__` function.

    source_code_or_path: CUDA source, or the path of a file with it.  entry_name: the function; its parameters are those of
    the prim_func, in order: tensors as pointers, scalars by value.  Runs on CUDA only.  Raises source-kernel,
    FileNotFoundError.
    """
    need_builder("T.CUDASourceCodeKernel")
    text = source_code_or_path
    if not isinstance(text, str) or not text.strip():
        raise error("source-kernel", "T.CUDASourceCodeKernel needs «CUDA source or the path of a file», found nothing",
                    found=f"{'nothing' if isinstance(text, str) else type(text).__name__}")
    if not isinstance(entry_name, str) or not entry_name:
        raise error("source-kernel", f"the entry of T.CUDASourceCodeKernel is «the name of a function», found {entry_name!r}")
    if "\n" not in text and "__global__" not in text:
        if not os.path.exists(text):
            raise FileNotFoundError(f"T.CUDASourceCodeKernel: no file {text!r}")
        with open(text, encoding="utf-8") as f:
            text = f.read()
    found = {m.group(2): m for m in _ENTRY.finditer(text)}
    if entry_name not in found:
        raise error("source-kernel", f"the source has no __global__ function `{entry_name}`. Available entries: "
                    f"{', '.join(found) or 'none'}", expected=f"one of {', '.join(found) or 'none'}", found=repr(entry_name))
    if not found[entry_name].group(1):  # add extern "C", so that the name is not mangled
        at = found[entry_name].start()
        text = f'{text[:at]}extern "C" {text[at:]}'
    frame = SourceKernelFrame(blocks, threads, prelude)
    if cluster_dims is not None:
        frame.plan = ClusterKernel(*blocks, cluster_dims=cluster_dims, threads=threads).plan
    frame.source, frame.entry = text, entry_name
    return frame
