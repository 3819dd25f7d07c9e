"""Passes that give every shared and fragment buffer of a launch a layout."""
