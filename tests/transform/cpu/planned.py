"""The text of a program as the CPU target runs it."""

import re

from tilelang.ir.printer import to_text
from tilelang.transform import cpu
from tilelang.transform.framework.pass_ import PassContext, run_passes


def plan_cpu(func, host=None):
    """A program in phase TILE after the passes of the CPU target alone, for this processor or `host`."""
    return run_passes(func, cpu.CPU_PASSES, PassContext(host=host))


def planned_body(program, host=None):
    """The body of a program after planning."""
    return plan_cpu(getattr(program, "func", program), host).body


def text_of(program, warp_role=0, host=None):
    """Statements of a warp role, without declarations of buffers."""
    code = planned_body(program, host).codes[warp_role]
    lines = [line for line in to_text(code.body).split("\n") if not re.search(r"T\.(decl_buffer|alloc)\(|^ *# body$", line)]
    return "\n".join(lines)
