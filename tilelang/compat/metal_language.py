"""The dialect of Apple GPUs: the common language; its own names raise errors."""

from tilelang.language.dialect import dialect

globals().update(dialect("metal", "is for Apple GPUs, which are not available", """make_filled_simdgroup_matrix
    simdgroup_load simdgroup_multiply_accumulate simdgroup_store cooperative_tensor_fill cooperative_tensor_load
    cooperative_tensor_store cooperative_tensor_multiply_accumulate"""))
