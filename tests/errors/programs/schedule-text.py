from tilelang.transform import Schedule

Schedule.parse("loop k")
