from tilelang.language.fp8 import determine_fp8_type

determine_fp8_type("e3m4")
