"""Whole-tensor programs: what is computed, without tiles; lowered to tile programs that a person can read."""
