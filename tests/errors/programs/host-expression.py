from tilelang.ir import I32, Bind, Buffer, Func, Launch, Store, Var, const, dtype, load, seq
from tilelang.runtime.host_stub import stub_text
from tilelang.runtime.launchers import GpuLauncher
from tilelang.runtime.signature import signature_of
from tilelang.transform.lower.device_program import split_host

a = Buffer("A", (4,), dtype("float32"))
threads = tuple(Var(f"t{c}", I32) for c in "xyz")
kernel = Launch((const(1),), (Var("bx", I32),), (32, 1, 1), threads, Store(a, (const(0),), load(a, (const(1),))))
n = Var("n", I32)
body = seq(Bind(n, load(a, (const(0),)).astype("int32")), kernel)
func = Func("main", (a.data,), ((a.data, a),), body)
program = split_host(func)
signature = signature_of(func)
stub_text(signature, GpuLauncher(program.host, program.kernels), set())
