from tilelang.library import softmax

softmax([1.0, 2.0])
