"""`tilelang.utils.target`: which spellings of a target there are."""

from tilelang.compat.cuda_target import check_hip_availability
from tilelang.target import Target, determine_target

AVAILABLE_TARGETS = {"auto": "the GPU of this machine, else its CPU", "cuda": "the GPU of this machine, or an arch: "
                     '{"kind": "cuda", "arch": "sm_90a"}', "cpu": "this machine's CPU", "llvm": "as cpu", "c": "as cpu"}
AVALIABLE_TARGETS = AVAILABLE_TARGETS  # sic: the name that programs import

__all__ = ["AVAILABLE_TARGETS", "AVALIABLE_TARGETS", "Target", "check_hip_availability", "determine_target"]
