"""The frontend: rewrites a kernel function's source into calls on a builder and runs it once to make a program."""
