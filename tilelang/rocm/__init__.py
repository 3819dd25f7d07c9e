"""Names for AMD GPUs: this version compiles for none, and each name says so."""
