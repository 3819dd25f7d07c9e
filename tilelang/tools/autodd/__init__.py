"""Reduces a failing script to a small one whose output still contains a given message.

    python -m tilelang.autodd kernel.py --err-msg "layout-conflict" -o small.py

Marks in the script protect code from the reduction: `# autodd: freeze` at the end of a line keeps its whole statement,
`# autodd: freeze-start` to `# autodd: end-freeze` keep the statements between them, and

    from tilelang.autodd import __freeze__
    with __freeze__:              # keeps its body as it is
        ...
    x = __freeze__(expression)    # keeps the expression

keep a body or an expression.  __freeze__ has no effect when the script runs.
"""

from __future__ import annotations

from .freeze import __freeze__
from .main import main
from .reduce import Reduction, reduce_source

__all__ = ["Reduction", "__freeze__", "main", "reduce_source"]
