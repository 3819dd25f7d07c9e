"""Accumulators in registers, stores under the last MMA."""
