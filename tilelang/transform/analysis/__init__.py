"""Analyses of programs that several passes use: effects, access tables, divergence, liveness."""
