"""Printers of lowered programs."""
