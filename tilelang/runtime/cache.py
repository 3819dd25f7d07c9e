"""Disk cache of compiled kernels: content-addressed folders of JSON and binaries, never pickle.

    <TILELANG_CACHE_DIR>/<version>/<platform>-<machine>/kernels/<key>/manifest.json, device_kernel.cu, ...

An entry is written to `.staging` and renamed into place, so that a reader sees all of it or nothing, without locks.  The
manifest contains the name and SHA-256 of every file and a digest of itself.  An entry that does not match it (truncated,
damaged, copied from elsewhere) is removed and reported as missing.
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

from tilelang.env import env, is_truthy
from tilelang.ir.record import record
from tilelang.log import logger, phase
from tilelang.version import __version__

FORMAT = 1  # to be incremented when the format of an entry changes
STALE_STAGING_SECONDS = 3600
_MANIFEST = "manifest.json"


@record
class Entry:
    """meta: JSON values.  files: name -> content."""

    meta: dict[str, Any]
    files: dict[str, bytes] = field(default_factory=dict)


def remove_folder(folder: Path) -> None:
    """Remove a folder with its contents, or a file of that name.  Errors are ignored."""
    import shutil  # 3 ms

    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.unlink(missing_ok=True)
    except OSError:
        pass


def digest(values: Iterable[Any]) -> str:
    """SHA-256 (hex) of a sequence of JSON values."""
    return hashlib.sha256(json.dumps(list(values), sort_keys=True, default=str).encode()).hexdigest()


@lru_cache(maxsize=2)
def package_stamp(contents: bool = False) -> str:
    """Digest of the name, size and time of every source file of the package, so that keys change with the compiler.

    contents: of their contents, in place of size and time."""
    rows: list[str] = []

    def add(folder: str, shown: str) -> None:
        for entry in sorted(os.scandir(folder), key=lambda e: e.name):
            if entry.name.endswith((".py", ".cuh", ".hip")):
                st, inside = entry.stat(), Path(entry.path).read_bytes() if contents else b""
                facts = hashlib.sha256(inside).hexdigest() if contents else f"{st.st_size} {st.st_mtime_ns}"
                rows.append(f"{shown}/{entry.name} {facts}")
            elif entry.name != "__pycache__" and entry.is_dir():
                add(entry.path, f"{shown}/{entry.name}")

    add(str(Path(__file__).resolve().parent.parent), "")
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def compiler_stamp() -> str:
    """The text that identifies this compiler in a key."""
    return package_stamp(is_truthy(env.TILELANG_KERNEL_CACHE_USE_LIB_STAMP))


class DiskCache:
    """The cache entries in one folder.  kind: "kernels" or "autotuner"."""

    def __init__(self, kind: str = "kernels") -> None:
        self.kind = kind
        self._swept: set[str] = set()

    @property
    def root(self) -> Path:
        return Path(env.TILELANG_CACHE_DIR, __version__, f"{sys.platform}-{platform.machine()}", self.kind)

    @property
    def staging(self) -> Path:
        return self.root / ".staging"

    def path(self, key: str) -> Path:
        return self.root / key

    def load(self, key: str) -> Entry | None:
        """The entry of a key, or None.  A damaged entry is removed with a warning."""
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
        """The entry in a folder, or None if it is damaged.  The folder may be anywhere, but its name must be the key."""
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
        """Write an entry.  Returns False if that was not possible, which does not stop the compilation."""
        with phase(f"write {self.kind}"):
            return self._store(key, entry)

    def _store(self, key: str, entry: Entry) -> bool:
        temporary = self.staging / f"{os.getpid()}-{os.urandom(16).hex()}"
        try:
            temporary.mkdir(parents=True)
            self._sweep()
            manifest: dict[str, Any] = {"key": key, "format": FORMAT, "meta": entry.meta, "files": {
                name: hashlib.sha256(data).hexdigest() for name, data in entry.files.items()}}
            manifest = json.loads(json.dumps(manifest))  # the values as a reader gets them: tuples become lists
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
                if self.load(key) is not None:  # another process has written the same content: keep its entry
                    return True
        return False

    def _discard(self, folder: Path, why: str) -> None:
        logger.warning("cache entry %s is damaged (%s): it is rebuilt", folder.name, why)
        aside = self.staging / f"bad-{os.urandom(16).hex()}"
        try:
            aside.parent.mkdir(parents=True, exist_ok=True)
            os.rename(folder, aside)  # atomic, so that no reader sees a partly removed entry
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
