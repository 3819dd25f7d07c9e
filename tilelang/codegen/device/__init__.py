"""C++ text that all GPU targets share: expressions, memory, statements, and those sections of the prelude that have no PTX."""
