"""Printers of lowered programs: LLVM IR for the CPU, CUDA C++ for GPUs."""
