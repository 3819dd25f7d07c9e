"""GEMM: problem, plan, kernels and the cost model of their tiles."""
