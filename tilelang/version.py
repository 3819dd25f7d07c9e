"""Version of the package."""

from __future__ import annotations

import re

__version__ = "0.1.0"


def build_date(version: str | None = None) -> str | None:
    """YYYYMMDD of the `.dYYYYMMDD` part of a version string (this package's by default); None without one."""
    m = re.search(r"\.d(\d{8})(?!\d)", __version__ if version is None else version)
    return m.group(1) if m else None
