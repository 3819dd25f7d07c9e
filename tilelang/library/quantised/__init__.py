"""GEMM with quantised weights: problem, plan, kernels."""
