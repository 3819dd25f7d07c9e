"""A launch: its functions, and the call that runs them on the worker threads.

    entry(tensor pointers, scalars, symbols) -> error text or null
        host statements; per launch: fill a context record, tl_parallel_for(blocks, context, count, arena bytes)
    blocks(context, first, last, arena)      for each linear block id: block(values…, storage…)
    block(values…, storage…)                 the statements of one block

tl_parallel_for is provided by the engine (runtime/cpu_pool.py). Storage of large shared buffers and fragments are noalias
parameters of the block function, so that LLVM knows that they do not overlap.
"""

from __future__ import annotations

from tilelang.ir import Alloc, Assert, Bind, Evaluate, For, If, Seq, Stmt, walk, GLOBAL
from tilelang.target.cpu import unsupported
from tilelang.target.cpu_launch import CpuLaunch

from .block_function import Captured, LaunchFrame, captured_values, open_block, print_body
from .coroutine_launch import CoroutineLaunch
from .code import HostFunction, bind_value, check_size, count_of
from .state import Bound, LaneFaults
from .text import Fn, clean
from .threads import check_not_null

_NO_MEMORY = "out of memory for the storage of a block"


def print_launch(host: HostFunction, s: CpuLaunch) -> None:
    """Print the functions of a launch and its call. There are two forms of it where a pointer may be null and that form is
    slower."""
    if s.when_null is None:
        _print_form(host, s)
        return
    f, other = host.code.f, s.when_null
    null = "false"
    for p in s.pointers:
        null = f.let(f"or i1 {null}, {f.let(f'icmp eq ptr {host.code.value(p)}, null')}")
    f.branch(null, lambda: _print_form(host, other), lambda: _print_form(host, s))


def _print_form(host: HostFunction, s: CpuLaunch) -> None:
    cx, f = host.code, host.code.f
    number, host.launches = host.launches, host.launches + 1
    name = f"{clean(host.func.name)}_kernel" + (f"_{number}" if number else "")
    for n in walk(s.launch.body, Alloc):
        if n.buffer.scope() == GLOBAL:
            host.allocate(n)  # one workspace for all blocks of the launch
    captured = captured_values(host, s.launch)
    faults = LaneFaults()
    fault_word = ""
    if s.null_checks or s.lane_faults:
        fault_word = f.alloca("i64", hint="lane_fault")
        f.do(f"store i64 0, ptr {fault_word}")
        captured.append(Captured(faults.word, "ptr", fault_word))
        faults.add_null_checks(s.null_checks)
    frame = LaunchFrame(host, s, name, tuple(captured), faults)
    run = CoroutineLaunch(frame) if s.waits else None
    block = "" if run is not None else _block_function(frame)
    scratch = max(c.scratch for c in s.codes)
    sizes = []
    for t in s.slots:
        check_size(host, t.buffer, _NO_MEMORY)
        size = t.buffer.dtype.bytes
        part = t.copies * t.unit if t.unit > size else 0  # the last unit may be incomplete
        sizes.append(f.let(f"and i64 {f.add(f.mul(count_of(cx, t.buffer), str(t.copies * size)), str(63 + part))}, -64"))
    grid = [cx.index(g) for g in s.launch.grid] + ["1"] * (3 - len(s.launch.grid))
    count = "1"
    for g in grid:
        count = f.mul(count, f.smax(g, "0"))
    total = str(-(-scratch // 64) * 64)  # bytes of the arena, for the blocks that one worker thread runs at a time
    if run is not None:
        total = f.add(run.group_bytes(f, sizes, count), total)
        run.check_grid(grid)
    else:
        for x in sizes:
            total = f.add(x, total)
    record = [(c.type, c.operand) for c in captured] + [("i64", g) for g in grid[:2]] + [("i64", x) for x in sizes]
    failed = ""
    if run is not None:
        failed = f.alloca("i32", hint="failed")
        f.do(f"store i32 0, ptr {failed}")
        record += [("i64", count), ("ptr", failed)]
    kind, context = _stored(f, record)
    if run is not None:
        run.print_blocks(kind, len(captured) + 2, len(record) - 2, len(record) - 1)
        count = run.groups(count)
    else:
        _blocks_function(frame, block, kind, scratch)
    start = f.module.declare("tl_parallel_for", "i32", "ptr, ptr, i64, i64")
    status = f.let(f"call i32 {start}(ptr @{name}, ptr {context}, i64 {count}, i64 {total})")
    if "printf" in f.module.entries:
        f.do(f"call i32 {f.module.declare('fflush', 'i32', 'ptr')}(ptr null)")
    message = f.module.string(_NO_MEMORY)
    host.fail_if(f.let(f"icmp ne i32 {status}, 0"), message)
    if run is not None:
        run.report(failed)
    _report_faults(host, faults, fault_word)


def _stored(f: Fn, record: list[tuple[str, str]]) -> tuple[str, str]:
    """The (type, address) of a structure on the host's stack with these (type, value) members."""
    kind = "{ " + ", ".join(t for t, _ in record) + " }"
    context = f.alloca(kind, 16, "context")
    for k, (t, v) in enumerate(record):
        at = f.let(f"getelementptr inbounds {kind}, ptr {context}, i32 0, i32 {k}")
        f.do(f"store {t} {v}, ptr {at}")
    return kind, context


def _report_faults(host: HostFunction, faults: LaneFaults, fault_word: str) -> None:
    """Fail the call if the fault word holds the number of a text."""
    f = host.code.f
    for code, text in enumerate(faults.texts, 1):
        message = f.module.string(f"kernel {host.func.name}: {text}")
        host.fail_if(f.let(f"icmp eq i64 {f.let(f'load i64, ptr {fault_word}')}, {code}"), message)


def _block_function(frame: LaunchFrame) -> str:
    """Print define void @name_block(block ids, captured values, storage, scratch); returns its name."""
    host, aliased = frame.host, {id(v) for v in frame.plan.may_alias}
    params = [("i64", f"b{d}", "") for d in range(3)]
    for name, c in zip(frame.value_names, frame.captured):
        tensor = c.type == "ptr" and c.var in host.code.storage and id(c.var) not in aliased
        params.append((c.type, name, "noalias" if tensor else ""))
    params += [("ptr", p, "noalias nonnull align 64") for p in frame.slot_names]
    params.append(("ptr", "scratch", "noalias nonnull align 64"))
    f = Fn(host.code.f.module, f"{frame.name}_block", "void", params, attrs="nounwind noinline")
    (code,) = frame.plan.codes
    cx = open_block(frame, f, code)
    for v in host.func.params:
        if v in frame.faults.nulls:
            check_not_null(cx, v)
    print_body(cx, code)
    if not f.ended:
        f.end("ret void")
    f.finish()
    return f.name


def _blocks_function(frame: LaunchFrame, block: str, kind: str, scratch: int) -> None:
    """Print define void @name(context, first, last, arena), which runs the blocks [first, last) one after another."""
    f = Fn(frame.host.code.f.module, frame.name, "void",
           [("ptr", "context", "noalias readonly"), ("i64", "first", ""), ("i64", "last", ""),
            ("ptr", "arena", "noalias")])

    def read(k: int, t: str) -> str:
        return f.let(f"load {t}, ptr {f.let(f'getelementptr inbounds {kind}, ptr %context, i32 0, i32 {k}')}")

    values = [(c.type, read(k, c.type)) for k, c in enumerate(frame.captured)]
    n = len(frame.captured)
    gx, gy = read(n, "i64"), read(n + 1, "i64")
    at, places = str(-(-scratch // 64) * 64), []
    for k in range(len(frame.plan.slots)):
        places.append(f.at("%arena", "i8", at))
        at = f.add(at, read(n + 2 + k, "i64"))
    with f.loop("%first", "%last", hint="block") as i:
        x = f.let(f"urem i64 {i}, {gx}")
        rest = f.let(f"udiv i64 {i}, {gx}")
        y, z = f.let(f"urem i64 {rest}, {gy}"), f.let(f"udiv i64 {rest}, {gy}")
        args = [f"i64 {v}" for v in (x, y, z)] + [f"{t} {v}" for t, v in values]
        args += [f"ptr {p}" for p in places] + ["ptr %arena"]
        f.do(f"call void @{block}({', '.join(args)})")
    f.end("ret void")
    f.finish()


# ---- statements of the host program ----------------------------------------------------------------------------------

class HostPrinter:
    """Prints host statements into the entry function."""

    def __init__(self, host: HostFunction) -> None:
        self.host, self.cx = host, host.code

    def stmt(self, s: Stmt) -> None:
        """Print a host statement. Raises cpu-unsupported for statements that are supported only in a kernel."""
        cx, f = self.cx, self.cx.f
        if s.span is not None:
            cx.span = s.span
        match s:
            case CpuLaunch():
                print_launch(self.host, s)
            case Seq():
                for x in s.stmts:
                    self.stmt(x)
            case Bind():
                bind_value(cx, s.var, s.value)
            case Assert():
                message = f.module.string(s.message)
                f.branch(cx.value(s.cond), lambda: None, lambda: self.host.fail(message))
            case Alloc():
                self.host.allocate(s)
            case If():
                orelse = s.orelse
                f.branch(cx.value(s.cond), lambda: self.stmt(s.then), None if orelse is None else lambda: self.stmt(orelse))
            case For():
                start = cx.index(s.start)
                with f.loop("0", cx.index(s.extent), hint=clean(s.var.name)) as i:
                    cx.vars[s.var] = Bound(wide=f.add(i, start))
                    self.stmt(s.body)
            case Evaluate():
                pass  # those with an effect are launches
            case _:
                raise unsupported(f"{type(s).__name__} outside a kernel", span=s.span or cx.span)
