"""Checks that reject, at the user's line, programs that no target can compile."""
