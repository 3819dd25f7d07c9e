"""Two simulators: `run_tile` executes tile programs (the oracle), `run_device` lowered ones, thread by thread."""

from .tile import run_tile

__all__ = ["run_tile"]
