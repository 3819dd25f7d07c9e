from tilelang.ir import Buffer, dtype
from tilelang.target.tensor_map import TensorMap

TensorMap("A_map", Buffer("A", (64, 100), dtype("float16")), (64, 64), 128).check()
