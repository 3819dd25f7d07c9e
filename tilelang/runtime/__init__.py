"""Host side: NVRTC, driver, CPU engine, host stub, cache."""
