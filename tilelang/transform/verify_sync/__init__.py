"""Independent check of the final program's synchronisation.  It uses no code of `transform/sync`."""
