"""Cut a failing program down: the smallest script found whose output still contains a message.

    python -m tilelang.autodd kernel.py --err-msg "layout-conflict" -o small.py

What must stay is marked in the script: `# autodd: freeze` at the end of a line keeps its whole statement,
`# autodd: freeze-start` to `# autodd: end-freeze` the statements between, and

    from tilelang.autodd import __freeze__
    with __freeze__:              # keeps its body as it is
        ...
    x = __freeze__(expression)    # keeps the expression

where __freeze__ changes nothing when the script runs.
"""

from __future__ import annotations

from .freeze import __freeze__
from .main import main
from .reduce import Reduction, reduce_source

__all__ = ["Reduction", "__freeze__", "main", "reduce_source"]
