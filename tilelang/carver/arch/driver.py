"""Properties of the CUDA device at hand.  Raises RuntimeError "Failed to get device properties." without one."""

from __future__ import annotations

from typing import Any

from tilelang.runtime import cuda_driver
from tilelang.target.probe import device_capability


def get_cuda_device_properties(device_id: int = 0) -> Any:
    """DeviceProperties of a GPU, None without one."""
    return cuda_driver.driver().properties(device_id) if device_capability() is not None else None


def _properties(device_id: int) -> Any:
    found = get_cuda_device_properties(device_id)
    if found is None:
        raise RuntimeError("Failed to get device properties.")
    return found


def get_device_name(device_id: int = 0) -> str:
    """Name of a GPU."""
    return _properties(device_id).name


def get_num_sms(device_id: int = 0) -> int:
    """Multiprocessors of a GPU."""
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
    """Static shared memory a block may have."""
    return _in_unit(get_device_attribute("max_shared_per_block", device_id), format)


def get_max_dynamic_shared_size_bytes(device_id: int = 0, format: str = "bytes") -> int:
    """Dynamic shared memory a block may opt in to."""
    return _in_unit(_properties(device_id).max_shared_optin, format)


def get_registers_per_block(device_id: int = 0) -> int:
    """32-bit registers a block may have."""
    return get_device_attribute("registers_per_block", device_id)


def get_persisting_l2_cache_max_size(device_id: int = 0) -> int:
    """Bytes of L2 that may be set aside for persisting accesses."""
    return get_device_attribute("persisting_l2_bytes", device_id)
