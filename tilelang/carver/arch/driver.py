"""Properties of the present CUDA device.  Without one, RuntimeError "Failed to get device properties." is raised."""

from __future__ import annotations

from collections.abc import Callable
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


def get_device_attribute(attr: str, device_id: int = 0) -> int:
    """A driver attribute by its name in runtime.cuda_driver.ATTRIBUTES."""
    _properties(device_id)
    return cuda_driver.driver().attribute(attr, device_id)


def _count(name: str, attr: str, about: str) -> Callable[..., int]:
    def get(device_id: int = 0) -> int:
        return get_device_attribute(attr, device_id)

    get.__name__, get.__qualname__, get.__doc__ = name, name, about
    return get


def _size(name: str, attr: str, about: str) -> Callable[..., int]:
    def get(device_id: int = 0, format: str = "bytes") -> int:
        units = {"bytes": 1, "kb": 1 << 10, "mb": 1 << 20}
        value = get_device_attribute(attr, device_id)
        if format not in units:
            raise ValueError(f"Invalid format: {format!r}, expected one of {', '.join(units)}")
        return value // units[format]

    get.__name__, get.__qualname__, get.__doc__ = name, name, about
    return get


get_num_sms = _count("get_num_sms", "sm_count", "Number of SMs of a GPU.")
get_registers_per_block = _count("get_registers_per_block", "registers_per_block", "Most 32-bit registers of a block.")
get_persisting_l2_cache_max_size = _count("get_persisting_l2_cache_max_size", "persisting_l2_bytes",
                                          "Bytes of L2 that may be set aside for persisting accesses.")
get_shared_memory_per_block = _size("get_shared_memory_per_block", "max_shared_per_block",
                                    "Most static shared memory of a block, bytes.")
get_max_dynamic_shared_size_bytes = _size("get_max_dynamic_shared_size_bytes", "max_shared_optin",
                                          "Most dynamic shared memory that a block may opt in to, bytes.")
