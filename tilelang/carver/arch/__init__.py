"""Descriptions of architectures, and properties read from the device driver."""

from . import driver
from .device import (CDNA, CPU, CUDA, METAL, RDNA, TileDevice, auto_infer_current_arch, check_sm_version, get_arch,
                     has_mma_support, is_ada_arch, is_ampere_arch, is_cdna_arch, is_cuda_arch, is_hopper_arch, is_rdna_arch,
                     is_tensorcore_supported_precision, is_volta_arch)

__all__ = ["CDNA", "CPU", "CUDA", "METAL", "RDNA", "TileDevice", "auto_infer_current_arch", "check_sm_version", "driver",
           "get_arch", "has_mma_support", "is_ada_arch", "is_ampere_arch", "is_cdna_arch", "is_cuda_arch", "is_hopper_arch",
           "is_rdna_arch", "is_tensorcore_supported_precision", "is_volta_arch"]
