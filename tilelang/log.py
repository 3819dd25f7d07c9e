"""The logger `tilelang`: level INFO, own handler that keeps progress bars whole, no propagation."""

from __future__ import annotations

import logging
import sys
from typing import Any

FORMAT = "%(asctime)s  [TileLang:%(name)s:%(levelname)s] (%(filename)s:%(lineno)d): %(message)s"


class BarAwareHandler(logging.StreamHandler):
    """Writes to the stderr of the moment; through tqdm when a program uses it, so that bars are not torn."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: object) -> None:
        pass

    def emit(self, record: logging.LogRecord) -> None:
        tqdm = sys.modules.get("tqdm")
        if tqdm is None:
            super().emit(record)
            return
        try:
            tqdm.tqdm.write(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)


def _make_logger() -> logging.Logger:
    log = logging.getLogger("tilelang")
    if not any(isinstance(h, BarAwareHandler) for h in log.handlers):
        handler = BarAwareHandler()
        handler.setFormatter(logging.Formatter(FORMAT, "%Y-%m-%d %H:%M:%S"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
    return log


logger = _make_logger()


def set_log_level(level: str | int) -> None:
    """Level of the package's logger: a name in any case, or a number.  Raises ValueError for unknown names."""
    if isinstance(level, str):
        number = logging.getLevelName(level.upper())
        if not isinstance(number, int):
            raise ValueError(f"Unknown log level {level!r}; one of DEBUG, INFO, WARNING, ERROR, CRITICAL")
        level = number
    logger.setLevel(level)
