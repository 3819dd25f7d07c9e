from tilelang.runtime import world

world.fill(None, None, b"a cubin whose kernels ask for tl_world")
