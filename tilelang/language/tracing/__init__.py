"""How a kernel function becomes a program: its source is rewritten into calls on a builder, and run once."""
