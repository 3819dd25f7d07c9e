"""Two elements of a layout go to one place."""

import tilelang.language as T

T.Layout((4, 4), lambda i, j: i * 3 + j)
