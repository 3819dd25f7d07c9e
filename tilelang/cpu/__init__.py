"""Names for the CPU target."""
