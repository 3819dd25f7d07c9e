"""Passes that lower tile operations and parallel loops to the program of one thread."""
