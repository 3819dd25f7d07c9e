"""The kernel cache as an object, for programs that hold one."""

from __future__ import annotations

from typing import Any

from tilelang.jit.kernel_cache import disk

from tilelang.jit.caching import cached, clear_cache


class KernelCache:
    """The one cache of this process; every instance is the same object."""

    _instance: KernelCache | None = None

    def __new__(cls) -> KernelCache:
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    def cached(self, *args: Any, **kwargs: Any) -> Any:
        """tilelang.cache.cached."""
        return cached(*args, **kwargs)

    def clear_cache(self) -> None:
        """Empty memory and disk."""
        clear_cache()

    @property
    def path(self) -> Any:
        """Folder of the entries on disk."""
        return disk.root


_dispatch_map = {name: KernelCache() for name in ("tvm_ffi", "cython", "nvrtc")}
