import tilelang.language as T

T.WSSchedule(8, [T.WSRole("load", warps_lo=0, warps_hi=4), T.WSRole("multiply", warps_lo=3, warps_hi=8)])
