from tilelang.profiler import do_bench

do_bench(lambda: None, device="cpu", quantiles=[2.0])
