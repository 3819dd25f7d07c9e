"""Names of tile operations that programs import."""
