"""What several modules of this folder use."""


from ..catalogue import Bound

FLAGS = ["-O3", "-DENABLE_BF16", "--ptxas-options=-v,--register-usage-level=10", "-Wno-deprecated-declarations"]

LOG2E = 1.44269504

HALF = Bound("float16", via=(("float16", 1.0),))
