"""Targets, instruction rows and scalar intrinsics."""

from .target import Target, check_arch, determine_target

__all__ = ["Target", "check_arch", "determine_target"]
