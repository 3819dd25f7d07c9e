"""Tile operations and parallel loops become the program of one thread."""
