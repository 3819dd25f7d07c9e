"""Programs that no target can compile are refused here, at the user's line."""
