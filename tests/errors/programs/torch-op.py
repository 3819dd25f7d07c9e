import tilelang

tilelang.torch_op(max)
