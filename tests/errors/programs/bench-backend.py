from tilelang.profiler import do_bench

do_bench(lambda: None, backend="clock")
