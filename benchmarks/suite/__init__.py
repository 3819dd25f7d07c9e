"""The parts of benchmarks/peers.py and benchmarks/stress.py: workloads, inputs, providers, measuring, reports."""
