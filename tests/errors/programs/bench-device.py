from tilelang.profiler import do_bench

do_bench(lambda: None, device="xpu")
