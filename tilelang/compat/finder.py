"""Serves the import paths of `table.py`: `import tilelang.engine.lower`, `from tilelang.utils.tensor import …`.

The finder stands at the end of `sys.meta_path`, so that it is asked only for modules that no file holds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PREFIX = "tilelang."
GUEST = "tvm"  # programs import another compiler's package; its names that they use are those of tilelang.tvm


class OlderModule(ModuleType):
    """A module of the table without a file of its own.  Its names load on first use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in ("__all__", "__version__", "__tilelang_dialect__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        from .table import PATHS, UNSUPPORTED  # 2 ms

        names, modules = PATHS[self.__name__]
        value: Any = None
        if name == "__all__":
            others = UNSUPPORTED.get(self.__name__, ("", ""))[1].split()
            value = sorted({*names, *others, *(n for m in modules for n in exported(import_module(m)))})
        elif name == "__tilelang_dialect__" and self.__name__.endswith(".language"):
            value = self.__name__.split(".")[1]
        elif name in names:
            module, _, attribute = names[name].partition(":")
            value = getattr(import_module(module), attribute) if attribute else import_module(module)
        elif f"{self.__name__}.{name}" in PATHS:
            value = import_module(f"{self.__name__}.{name}")
        elif name in UNSUPPORTED.get(self.__name__, ("", ""))[1].split():  # also where another dialect has such a name
            value = _unsupported(self.__name__, name)
        else:
            for m in modules:
                found = import_module(m)
                if hasattr(found, name):
                    value = getattr(found, name)
                    break
            else:
                value = _unsupported(self.__name__, name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self.__getattr__("__all__")})


def _unsupported(module: str, name: str) -> Any:
    """A name of another compiler's insides, which raises not-available when it is called."""
    from .table import UNSUPPORTED  # 2 ms

    reason, names = UNSUPPORTED.get(module, ("", ""))
    if name not in names.split():
        raise AttributeError(f"module {module!r} has no attribute {name!r}" + (f": {module} {reason}" if reason else ""))
    return import_module("tilelang.language.unavailable").unavailable_names(reason, name, module)[name]


class CallableModule(OlderModule):
    """`tilelang.engine.lower` is a module and, called, the function `lower` in it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.lower(*args, **kwargs)


def exported(module: ModuleType) -> list[str]:
    """The public names of a module: its `__all__`, else every name without a leading underscore."""
    return list(getattr(module, "__all__", None) or (n for n in vars(module) if not n.startswith("_")))


class _OlderLoader:
    """Makes the modules of the table.  The base class of importlib.abc costs 10 ms at import and adds nothing."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        from .table import CALLABLE  # 2 ms

        module = (CallableModule if spec.name in CALLABLE else OlderModule)(spec.name)
        module.__doc__ = f"Older import path, kept for programs that use it: see {__package__}.table."
        return module

    def exec_module(self, module: ModuleType) -> None:
        from .table import PATHS, UNSUPPORTED  # 2 ms

        names, modules = PATHS[module.__name__]
        own = module.__name__ in UNSUPPORTED or any(p.startswith(f"{module.__name__}.") for p in PATHS)
        if not names and len(modules) == 1 and not own:
            sys.modules[module.__name__] = import_module(modules[0])  # one module under two names: it is the same object


class _GuestLoader:
    """`tvm.tirx` is the module `tilelang.tvm.tirx`."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(PREFIX + module.__name__)


class OlderPaths:
    """Finds the modules of the table."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None,
                  target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of an older path; None for every other name."""
        guest = fullname.partition(".")[0] == GUEST
        if not guest and not fullname.startswith(PREFIX):
            return None
        from .table import INSTEAD, PATHS  # 2 ms

        if fullname in INSTEAD:
            raise ModuleNotFoundError(f"No module named {fullname!r}: {INSTEAD[fullname]}", name=fullname)
        if guest and PREFIX + fullname in PATHS:
            return ModuleSpec(fullname, _GuestLoader(), is_package=True)  # type: ignore[arg-type]
        if fullname not in PATHS:
            return None
        loader: Any = _OlderLoader()
        spec = ModuleSpec(fullname, loader, is_package=any(p.startswith(f"{fullname}.") for p in PATHS))
        names, modules = PATHS[fullname]
        if not names and len(modules) == 1 and spec.submodule_search_locations is None:
            real = find_spec(modules[0])  # `python -m` runs what stands in the folder of a package
            spec.submodule_search_locations = real.submodule_search_locations if real else None
        return spec


def install() -> None:
    """Add the finder once."""
    if not any(isinstance(f, OlderPaths) for f in sys.meta_path):
        sys.meta_path.append(OlderPaths())


__all__ = ["CallableModule", "OlderModule", "OlderPaths", "exported", "install"]
