from tilelang.layout.cute import make_layout

make_layout((8, 4), (4, 1))
