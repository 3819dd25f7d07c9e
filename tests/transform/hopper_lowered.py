"""Programs lowered for sm_90a, and what tests look for in their launches."""

from tilelang.ir import Store, walk
from tilelang.ir.expr import Call
from tilelang.target import Target
from tilelang.transform.pipeline import lower


def lowered(program, arch="sm_90a", **options):
    """options: pass configs without their `tl.`.  Blocks stay as written: programs of tests have few blocks."""
    return lower(getattr(program, "func", program), Target({"kind": "cuda", "arch": arch}),
                 {"tl.enable_hopper": True, "tl.resize_blocks": False, **{f"tl.{k}": v for k, v in options.items()}})


def launch_of(program, **options):
    """The launch of a program with one kernel."""
    (kernel,) = lowered(program, **options).kernels
    return kernel.launch


def ops(node):
    """Names of all calls below a node, in order."""
    return [x.op for x in walk(node) if isinstance(x, Call)]


def report(launch):
    return " ".join(launch.plan.report)


def plain_stores(launch):
    """Stores of threads to global memory."""
    return [x for x in walk(launch) if isinstance(x, Store) and x.buffer.scope_name == "global"]
