"""Software pipelines, warp specialisation and persistent launches."""
