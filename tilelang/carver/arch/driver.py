"""Properties of the present CUDA device.  Without one, RuntimeError "Failed to get device properties." is raised."""

from __future__ import annotations

from typing import Any

from tilelang.runtime import cuda_driver
from tilelang.target.probe import device_capability


def get_cuda_device_properties(device_id: int = 0) -> Any:
    """DeviceProperties of a GPU; None without a GPU."""
    return cuda_driver.driver().properties(device_id) if device_capability() is not None else None


def _properties(device_id: int) -> Any:
    found = get_cuda_device_properties(device_id)
    if found is None:
        raise RuntimeError("Failed to get device properties.")
    return found


def get_device_name(device_id: int = 0) -> str:
    """The name of a GPU."""
    return _properties(device_id).name


def get_num_sms(device_id: int = 0) -> int:
    """Number of SMs of a GPU."""
    return _properties(device_id).sm_count


def get_device_attribute(attr: str, device_id: int = 0) -> int:
    """A driver attribute by its name in runtime.cuda_driver.ATTRIBUTES."""
    _properties(device_id)
    return cuda_driver.driver().attribute(attr, device_id)


_UNITS = {"bytes": 1, "kb": 1 << 10, "mb": 1 << 20}


def _in_unit(value: int, unit: str) -> int:
    if unit not in _UNITS:
        raise ValueError(f"Invalid format: {unit!r}, expected one of {', '.join(_UNITS)}")
    return value // _UNITS[unit]


def get_shared_memory_per_block(device_id: int = 0, format: str = "bytes") -> int:
    """Most static shared memory of a block, bytes."""
    return _in_unit(get_device_attribute("max_shared_per_block", device_id), format)


def get_max_dynamic_shared_size_bytes(device_id: int = 0, format: str = "bytes") -> int:
    """Most dynamic shared memory that a block may opt in to, bytes."""
    return _in_unit(_properties(device_id).max_shared_optin, format)


def get_registers_per_block(device_id: int = 0) -> int:
    """Most 32-bit registers of a block."""
    return get_device_attribute("registers_per_block", device_id)


def get_persisting_l2_cache_max_size(device_id: int = 0) -> int:
    """Bytes of L2 that may be set aside for persisting accesses."""
    return get_device_attribute("persisting_l2_bytes", device_id)
