"""Targets, instruction rows and scalar intrinsics."""

from . import instructions as _instructions  # its rows join INTRINSICS
from .intrinsics import INTRINSICS, Intrinsic, intrinsic, is_pure
from .target import Target, check_arch, determine_target

__all__ = ["INTRINSICS", "Intrinsic", "Target", "check_arch", "determine_target", "intrinsic", "is_pure"]
