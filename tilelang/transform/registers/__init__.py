"""Passes for registers: accumulators in named PTX registers, packed conversions, stores overlapped with the last MMA."""
