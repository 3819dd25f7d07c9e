"""The error kinds of the simulators, each with a default hint; `fault` makes an error of one."""

from __future__ import annotations

from tilelang.errors import error as fault, register

register("sim-address", ValueError, "an address that a program computed or read leads to no memory it may touch",
         "addresses come from T.ptr arguments, tables of them (torch: x.data_ptr()) or T.address_of; keep their memory alive")
register("sim-argument", ValueError, "an argument given to a simulator does not fit the program's parameters",
         "compare the arrays with the tensor annotations of the program")
register("sim-assert", RuntimeError, "an assertion of the program failed while it was simulated",
         "the condition is the program's own: check the arguments against it", expected="a condition that holds",
         found="a condition that is false")
register("sim-async", RuntimeError, "shared memory was touched while an asynchronous copy into it was still under way",
         "wait for the group of that copy (cp_async_wait) and put a barrier after it",
         expected="an asynchronous copy that has landed before its memory is touched")
register("sim-barrier", RuntimeError, "a barrier is reached by some threads only: on a device this hangs",
         "a barrier must not stand under a condition or in a loop that differs between threads",
         expected="a barrier that all threads reach equally often")
register("sim-cluster", RuntimeError, "blocks of a cluster reach each other outside the time that all of them run",
         "cluster_sync() before the first access to another block's shared memory and at the end of the kernel",
         expected="blocks of a cluster that run while they are reached")
register("sim-mbarrier", RuntimeError, "an mbarrier used before it is set up, or by more threads than it counts",
         "initialise it once by one thread, then put a block barrier; count every arrival of a phase")
register("sim-misaligned", RuntimeError, "a vector access whose address is not a multiple of its size",
         "the vector width must divide the row length and the start of the region")
register("sim-nreg", RuntimeError, "set_max_nreg asks for registers that the block does not have", "multiples of 8 from 24 to "
         "256 whose sum over the warp groups fits the launch")
register("sim-out-of-bounds", IndexError, "an access outside a buffer while simulated", "check the extent of the loop or "
         "region that indexes it")
register("sim-proxy", RuntimeError, "TMA or wgmma touches what ordinary stores wrote or loads read, with no proxy fence "
         "between", "each thread that wrote executes fence_proxy_async(), then a barrier, then the read is issued",
         expected="fence_proxy_async by the thread that accessed it, then a barrier")
register("sim-race", RuntimeError, "two threads access the same memory, one of them writing, with no barrier between",
         "put T.sync_threads() between the two accesses", expected="a barrier between the two accesses")
register("sim-rank", RuntimeError, "a program names a rank that does not run it", "ranks are 0 to T.get_num_ranks() - 1")
register("sim-thread-dependent", RuntimeError, "a value that must be the same for all threads differs between them",
         "compute it from block indices and parameters only", expected="one value for all threads")
register("sim-tma", RuntimeError, "a bulk copy that the hardware does not accept", "compare box, swizzle, strides and "
         "alignment with the limits of tensor maps")
register("sim-uninitialized", RuntimeError, "memory was read before anything was written to it",
         "initialise it (T.clear, T.fill, T.copy) or check the order of the statements",
         expected="memory that has been written")
register("sim-unsupported", NotImplementedError, "the simulator has no meaning for a construct",
         "write it with the constructs that the simulator runs, or test this kernel on a device",
         expected="a construct that the simulator has a meaning for")
register("sim-warp-divergence", RuntimeError, "a warp-level operation was reached by only some lanes of a warp",
         "all lanes of a warp must reach it together: move it out of conditions that differ within a warp",
         expected="all lanes of the warp")
register("sim-wgmma", RuntimeError, "registers of a wgmma are touched while it is under way, or it lacks its fence",
         "wgmma_fence, the instructions, wgmma_commit, then wgmma_wait before the registers are touched",
         expected="wgmma_fence before it, and registers left alone until wgmma_wait")

__all__ = ["fault"]
