import tilelang


def double(x):
    return 2 * x


tilelang.jax_call(double)
