"""Planning for the CPU target: a program in phase TILE becomes loops over threads that codegen/cpu prints as LLVM.

The passes stand here in their order, behind TILE_PASSES of transform/pipeline.py.
"""

from tilelang.transform.framework.pass_ import PassFn
from tilelang.transform.legalize.drop_assumptions import drop_assumptions

from .expand_combines import expand_combines
from .guard_accesses import guard_accesses
from .host_blocks import launch_host_statements
from .plan_gemm import plan_gemms
from .plan_launches import plan_launches
from .plan_reductions import plan_reductions
from .speculate_operands import speculate_operands

CPU_PASSES: tuple[PassFn, ...] = (
    drop_assumptions,
    expand_combines,
    launch_host_statements,
    plan_launches,  # TILE -> CPU
    plan_gemms,  # before guard_accesses, which makes loop nests of the other tile ops
    guard_accesses,
    plan_reductions,  # after guard_accesses, which marks the accesses in the bounds of a Reduce
    speculate_operands,  # last: guard_accesses proves less about operands that are always evaluated
)
