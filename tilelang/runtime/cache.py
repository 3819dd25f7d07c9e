"""Disk cache of compiled kernels: content-addressed folders of JSON and binaries, never pickle.

    <TILELANG_CACHE_DIR>/<version>/<platform>-<machine>/kernels/<key>/manifest.json, device_kernel.cu, ...

An entry is written to `.staging` and renamed into place, so a reader sees all of it or none, without locks.  The
manifest names every file with its SHA-256 and carries a digest of itself; an entry that does not match in every
respect (truncated, damaged, copied from elsewhere) is removed and reported as missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterable
from dataclasses import field
from functools import lru_cache
from pathlib import Path
from typing import Any
import shutil

from tilelang.env import env, is_truthy
from tilelang.ir.record import record
from tilelang.log import logger
from tilelang.log import phase
from tilelang.version import __version__

FORMAT = 1  # raised when the meaning of an entry changes
STALE_STAGING_SECONDS = 3600
_MANIFEST = "manifest.json"


@record
class Entry:
    """meta: JSON values.  files: name -> content."""

    meta: dict[str, Any]
    files: dict[str, bytes] = field(default_factory=dict)


def remove_folder(folder: Path) -> None:
    """Remove a folder and what is in it, or the file that stands in its place, as far as that can be done."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.unlink(missing_ok=True)
    except OSError:
        pass


def digest(parts: Iterable[Any]) -> str:
    """SHA-256 (hex) of JSON values, strings included, in order."""
    return hashlib.sha256(json.dumps(list(parts), sort_keys=True, default=str).encode()).hexdigest()


@lru_cache(maxsize=1)
def package_stamp() -> str:
    """Digest over name, size and time of every source file of the package: another compiler, other keys."""
    rows: list[str] = []

    def add(folder: str, shown: str) -> None:
        for entry in sorted(os.scandir(folder), key=lambda e: e.name):
            if entry.name.endswith((".py", ".cuh")):
                st = entry.stat()
                rows.append(f"{shown}/{entry.name} {st.st_size} {st.st_mtime_ns}")
            elif entry.name != "__pycache__" and entry.is_dir():
                add(entry.path, f"{shown}/{entry.name}")

    add(str(Path(__file__).resolve().parent.parent), "")
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


@lru_cache(maxsize=1)
def library_stamp() -> str:
    """Digest over the content of the package's sources (TILELANG_KERNEL_CACHE_USE_LIB_STAMP=1)."""
    root = Path(__file__).resolve().parent.parent
    h = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        h.update(path.read_bytes())
    return h.hexdigest()


def compiler_stamp() -> str:
    """What identifies this compiler in a key."""
    return library_stamp() if is_truthy(env.TILELANG_KERNEL_CACHE_USE_LIB_STAMP) else package_stamp()


class DiskCache:
    """Entries under one folder.  kind: "kernels" or "autotuner"."""

    def __init__(self, kind: str = "kernels") -> None:
        self.kind = kind
        self._swept: set[str] = set()

    @property
    def root(self) -> Path:
        return (Path(env.TILELANG_CACHE_DIR) / __version__ / f"{sys.platform}-{platform.machine()}" / self.kind)

    @property
    def staging(self) -> Path:
        return self.root / ".staging"

    def path(self, key: str) -> Path:
        return self.root / key

    def load(self, key: str) -> Entry | None:
        """The entry, or None.  A damaged one is removed with a warning."""
        folder = self.path(key)
        try:
            raw = (folder / _MANIFEST).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            if os.path.lexists(folder):
                self._discard(folder, "it is no folder with a manifest")
            return None
        except OSError as e:
            logger.warning("cannot read cache entry %s: %s", folder, e)
            return None
        try:
            return self._read(folder, key, json.loads(raw))
        except (ValueError, KeyError, TypeError, OSError, AttributeError) as e:
            self._discard(folder, str(e) or type(e).__name__)
            return None

    def read_folder(self, folder: Path) -> Entry | None:
        """The entry kept in a folder, which may lie anywhere but has its key as its name; None for a damaged one."""
        try:
            return self._read(folder, folder.name, json.loads((folder / _MANIFEST).read_bytes()))
        except (ValueError, KeyError, TypeError, OSError, AttributeError):
            return None

    def _read(self, folder: Path, key: str, manifest: dict[str, Any]) -> Entry:
        stated = manifest.pop("digest")
        if stated != digest([manifest]):
            raise ValueError("its manifest does not match its digest")
        if manifest["key"] != key or manifest["format"] != FORMAT:
            raise ValueError("it belongs to another key or format")
        files = {}
        for name, sha in manifest["files"].items():
            if os.path.basename(name) != name:
                raise ValueError(f"it names a file outside its folder: {name}")
            files[name] = (folder / name).read_bytes()
            if hashlib.sha256(files[name]).hexdigest() != sha:
                raise ValueError(f"{name} does not match its digest")
        return Entry(manifest["meta"], files)

    def store(self, key: str, entry: Entry) -> bool:
        """Write an entry; False when that was not possible (which never stops a compilation)."""
        with phase(f"write {self.kind}"):
            return self._store(key, entry)

    def _store(self, key: str, entry: Entry) -> bool:
        temporary = self.staging / f"{os.getpid()}-{os.urandom(16).hex()}"
        try:
            temporary.mkdir(parents=True)
            self._sweep()
            manifest: dict[str, Any] = {"key": key, "format": FORMAT, "meta": entry.meta, "files": {
                name: hashlib.sha256(data).hexdigest() for name, data in entry.files.items()}}
            manifest = json.loads(json.dumps(manifest))  # what a reader will see, tuples as lists
            manifest["digest"] = digest([manifest])
            for name, data in entry.files.items():
                (temporary / name).write_bytes(data)
            (temporary / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
            return self._publish(temporary, key)
        except OSError as e:
            logger.warning("cannot write the kernel cache under %s: %s", self.root, e)
            return False
        finally:
            remove_folder(temporary)

    def _publish(self, temporary: Path, key: str) -> bool:
        final = self.path(key)
        for _ in range(3):
            try:
                os.rename(temporary, final)
                return True
            except OSError:
                if self.load(key) is not None:  # another process was faster: the same content, keep its entry
                    return True
        return False

    def _discard(self, folder: Path, why: str) -> None:
        logger.warning("cache entry %s is damaged (%s): it is rebuilt", folder.name, why)
        aside = self.staging / f"bad-{os.urandom(16).hex()}"
        try:
            aside.parent.mkdir(parents=True, exist_ok=True)
            os.rename(folder, aside)  # atomic, so that no reader meets a half-removed entry
            remove_folder(aside)
        except OSError:
            pass

    def _sweep(self) -> None:
        """Remove staging folders left by processes that died, once per folder and process."""
        if str(self.staging) in self._swept:
            return
        self._swept.add(str(self.staging))
        for folder in self.staging.iterdir():
            try:
                if time.time() - folder.stat().st_mtime > STALE_STAGING_SECONDS:
                    remove_folder(folder)
            except OSError:
                pass

    def remove(self, key: str) -> None:
        """Remove an entry, if there is one."""
        remove_folder(self.path(key))

    def clear(self) -> None:
        """Remove every entry."""
        remove_folder(self.root)
        self._swept.clear()
