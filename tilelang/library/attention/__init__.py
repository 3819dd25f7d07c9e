"""Attention: problem, plan, kernels and the cost model of their tiles, for prefill and for decode steps."""
