"""Older name of tools.lower_trace: the differences that passes make, on a page."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from tilelang.env import env


def pass_diff(func_or_mod: Any, passes: Iterable[Any] | None = None, output: Any = None, context: int = 3,
              target: Any = None) -> list[dict[str, Any]]:
    """Run passes on a program, write <output>/<program>.html (default TILELANG_PASS_DIFF_OUTPUT), and return the records
    of tools.lower_trace, whose arguments and errors these are."""
    from tilelang.tools.lower_trace import lower_trace, only_program  # 764 ms

    folder = str(output if output is not None else env.TILELANG_PASS_DIFF_OUTPUT)
    path = os.path.join(folder, f"{only_program(func_or_mod).name}.html")
    return lower_trace(func_or_mod, passes, "html", context, path, target)


__all__ = ["pass_diff"]
