"""The pass framework: what a pass is, its runner, options, observers and traces."""
