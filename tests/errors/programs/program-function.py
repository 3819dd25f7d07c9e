import numpy

import tilelang


tilelang.program(numpy.exp)
