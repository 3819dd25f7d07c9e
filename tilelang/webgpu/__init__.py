"""Names for WebGPU: this version does not compile for it."""
