"""What a pass is: its runner, options, observers and traces."""
