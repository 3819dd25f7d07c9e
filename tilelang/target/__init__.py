"""Targets: the machines that kernels are compiled for, with tables of their instructions and intrinsics."""

from . import instructions as _instructions  # its rows join INTRINSICS
from . import rounded_functions as _rounded_functions  # as do these
from .intrinsics import INTRINSICS, Intrinsic, intrinsic, is_pure
from .target import Target, check_arch, determine_target, of_arch

__all__ = ["INTRINSICS", "Intrinsic", "Target", "check_arch", "determine_target", "intrinsic", "is_pure", "of_arch"]
