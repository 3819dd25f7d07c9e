from tilelang.autotuner.param import AutotuneResult, CompileArgs

AutotuneResult.load_from_disk("nowhere", CompileArgs())
