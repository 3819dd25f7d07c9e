"""Every shared and fragment buffer of a launch gets a layout."""
