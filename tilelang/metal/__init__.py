"""Names for Apple GPUs: this version compiles for none, and each name says so."""
