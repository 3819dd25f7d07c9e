"""Planning for the CPU target: a program in phase TILE becomes loops over threads that codegen/cpu prints as LLVM.

The passes and their order: CPU_PASSES in transform/pipeline.py.
"""
