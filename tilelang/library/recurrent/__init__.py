"""Linear attention and state space models, computed in chunks."""
