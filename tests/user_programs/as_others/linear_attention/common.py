"""What several modules of this folder use."""



BF16, F16, F32 = "bfloat16", "float16", "float32"
