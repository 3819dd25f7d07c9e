"""Which tile a block computes next."""

from .meta import BaseTileScheduler, PersistentTileScheduler

__all__ = ["BaseTileScheduler", "PersistentTileScheduler"]
