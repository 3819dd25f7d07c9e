"""Passes that schedule work: software pipelines, warp specialisation and persistent launches."""
