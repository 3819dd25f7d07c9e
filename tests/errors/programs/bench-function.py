from tilelang.profiler import do_bench

do_bench(3, device="cpu")
