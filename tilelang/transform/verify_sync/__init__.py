"""Independent check of the final program's synchronisation.  Shares no code with `transform/sync`."""
