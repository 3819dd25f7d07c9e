"""Small programs by hand, and a launcher whose kernel is a Python function, for tests of the host stub."""

import ctypes

from tilelang.ir import I32, Buffer, For, Func, Store, Var, const, dtype, load, seq, FuncFacts
from tilelang.runtime.host_engine import HostLibrary, compile_object
from tilelang.runtime.host_frame import CPU
from tilelang.runtime.host_stub import modes_of, stub_text
from tilelang.runtime.signature import ScalarArg, signature_of

HANDLE = dtype("handle")


def tensor(name, shape, dt="float32", strides=None):
    return Buffer(name, shape, dtype(dt), strides_=strides)


def program(*params, name="main", touch=None, facts=None):
    """Func whose body stores into every buffer of `touch` (default: all); params: Buffers and scalar Vars."""
    variables, buffers = [], []
    for p in params:
        if isinstance(p, Buffer):
            variables.append(Var(p.name + "_handle", HANDLE))
            buffers.append((variables[-1], p))
        else:
            variables.append(p)
    used = [p for p in params if isinstance(p, Buffer)] if touch is None else touch
    stores = [Store(b, tuple(const(0) for _ in b.shape), load(b, tuple(const(0) for _ in b.shape))) for b in used]
    loop = For(Var("i", I32), const(0), const(1), "serial", seq(*stores))
    return Func(name, tuple(variables), tuple(buffers), loop, facts=facts or FuncFacts())


class Recorder:
    """Launcher that hands addresses and values to Python; `calls` lists {name: value}."""

    device = CPU

    def __init__(self, align=1):
        self.align, self.calls, self.sig = align, [], None
        self.callback = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_int64))(self._called)

    def declarations(self):
        return "declare void @record(ptr)\n"

    def alignment(self, arg):
        return self.align

    def emit(self, w, frame, sig):
        self.sig, self.frame = sig, frame
        w.do("call void @record(ptr %frame)")

    def _called(self, frame):
        out = {}
        for a in self.sig.args:
            at = self.frame.of_arg(a.index)
            value = frame[at // 8]
            if isinstance(a, ScalarArg) and a.var.dtype.is_float:
                value = ctypes.c_double.from_buffer(ctypes.c_int64(value)).value
            out[a.name] = value
        for k, v in enumerate(self.sig.symbols):
            out[v.name] = frame[self.frame.of_symbol(k) // 8]
        self.calls.append(out)


def build(func, out_idx=None, align=1, needed=None):
    """(mode -> callable, recorder)."""
    sig = signature_of(func, out_idx)
    recorder = Recorder(align)
    text = stub_text(sig, recorder, set(sig.symbols) if needed is None else needed, ("call", "full", "check"))
    address = ctypes.cast(recorder.callback, ctypes.c_void_p).value
    library = HostLibrary(compile_object(text), ("tl_call", "tl_full", "tl_check"), {"record": address})
    functions = {m: library.function(f"tl_{m}", recorder) for m in ("call", "full", "check")}
    assert set(modes_of(sig)) <= set(functions)
    return functions, recorder
