"""The decorator and context of a pass, and the runner that times, verifies and reports passes."""

from __future__ import annotations

import functools
import json
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy

from tilelang.env import env, is_truthy
from tilelang.errors import InternalError, TileLangError
from tilelang.ir import Func, Launch, rewrite_launches, with_options
from tilelang.ir.record import record
from tilelang.ir.verify import verify
from tilelang.log import phase
from tilelang.ir.phases import CPU, DEVICE, PHASES, SYNCED, THREADS_BOUND, TILE

from .config import PassConfigKey, default_of, normalize_config
from .observe import PassEvent, current_pass_phase, text_of, trace_mode, watchers


@record
class PassContext:
    """The inputs of a pass besides the program.

    target: tilelang.target.Target, or None where no pass reads it. config: pass configs by string key.
    debug: TILELANG_DEBUG level. verify: check the program between passes. report: called with each line of the
    debug trace. seconds: filled by the runner, of each pass by its name. host: the tilelang.target.cpu.HostCpu that passes of
    the CPU target plan for, None for this processor.
    """

    target: Any = None
    config: Mapping[str, Any] = field(default_factory=dict)
    debug: int = field(default_factory=lambda: int(env.TILELANG_DEBUG or 0))
    verify: bool = field(default_factory=lambda: is_truthy(env.TILELANG_VERIFY))
    report: Callable[[str], None] = field(default=lambda line: print(line, file=sys.stderr))
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    host: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", normalize_config(self.config))

    def option(self, key: PassConfigKey) -> Any:
        """Value of a pass config, or its default when the user set none."""
        value = self.config.get(key.value)
        return default_of(key) if value is None else value


PassFn = Callable[[Func, PassContext], Func]


def pass_(needs: str, gives: str | None = None, of: type = Func,
          when: Callable[[PassContext], Any] = lambda cx: True) -> Callable[[Callable[[Any, PassContext], Any]], PassFn]:
    """Decorator of a pass: a function (Func, PassContext) -> Func.

    needs: phase the program must be in; gives: phase it is in afterwards (default: the same). The decorated function
    sets the Func's `phase` attribute. Running it on a program in another phase raises InternalError.
    Its attribute `needs` names the phase.
    of: Launch for a function that takes each launch, and gives what replaces it (None: itself).
    when: whether the pass applies to a target and its options; elsewhere the program stays as it is.
    """
    after = gives or needs
    if needs not in PHASES or after not in PHASES:
        raise ValueError(f"unknown phase {needs} or {after}: phases are {', '.join(PHASES)}")

    def wrap(fn: Callable[[Any, PassContext], Any]) -> PassFn:
        @functools.wraps(fn)
        def run(func: Func, cx: PassContext) -> Func:
            at = func.facts.phase
            if at != needs:
                raise InternalError(f"pass {fn.__name__} needs a program in phase {needs}, found {at}")
            out: Func = func if not when(cx) else rewrite_launches(func, lambda n: fn(n, cx)) if of is Launch else fn(func, cx)
            return out if out.facts.phase == after else with_options(out, phase=after)

        run.needs = needs  # type: ignore[attr-defined]
        return run

    return wrap


def run_passes(func: Func, passes: Iterable[PassFn], cx: PassContext) -> Func:
    """Run passes in order. Times each one, verifies between them when cx.verify, traces when cx.debug >= 3.

    A TileLangError (the user's mistake) is passed on. Any other failure, and a program that fails verification, raises an
    InternalError that names the folder with the program before the pass. Observers (observe.py) see every pass.
    """
    if getattr(cx.target, "chip", None) is not None:
        func = with_options(func, chip=cx.target.arch)
    seen_by = watchers()
    for o in seen_by:
        o.on_pipeline_start(func, cx.target)
    try:
        # A program in TILE is the user's: the first pass diagnoses mistakes better than the verifier, which runs after it.
        checked = cx.verify and func.facts.phase != TILE
        if checked:
            _check(func, None, (func, "verify"), cx)
        if cx.option(PassConfigKey.TL_AST_PRINT_ENABLE) and func.facts.phase == TILE:
            cx.report(f"# {func.name} before the first pass\n{text_of(func)}")
        for k, p in enumerate(passes):
            name = p.__name__
            for o in seen_by:
                o.on_pass_start(name, func)
            if k == 0 or func.facts.phase != CPU:
                start = func, name  # the last program whose text parses, and the pass that ran on it
            began = time.perf_counter()
            out = _run(p, name, start, func, cx)
            seconds, changed = time.perf_counter() - began, _changed(func, out)
            event = PassEvent(name, func, out, seconds, changed, k, cx.target, current_pass_phase())
            cx.seconds[name] = cx.seconds.get(name, 0.0) + seconds
            _tell(event, cx)
            if cx.verify and (changed or not checked):
                _check(out, name, start, cx)
                checked = True
            func = out
            for o in seen_by:
                o.on_pass(event)
    finally:
        for o in seen_by:
            o.on_pipeline_end(func, cx.target)
    return func


def _run(p: PassFn, name: str, start: tuple[Func, str], func: Func, cx: PassContext) -> Func:
    try:
        with phase(name):
            return p(func, cx)
    except TileLangError:
        raise
    except Exception as e:
        folder = save_report(start, name, cx, traceback.format_exc())
        raise InternalError(f"pass {name} failed on `{func.name}`: {type(e).__name__}: {e}\nreport: {folder}") from e


def _tell(event: PassEvent, cx: PassContext) -> None:
    """Write what the options ask to see of a pass."""
    if cx.option(PassConfigKey.TL_ENABLE_DUMP_IR):
        _dump(event, cx)
    ms = event.seconds * 1e3
    if cx.option(PassConfigKey.TL_PASS_PROFILE) or env.is_pass_profile_enabled():
        if ms >= max(cx.option(PassConfigKey.TL_PASS_PROFILE_THRESHOLD_MS), env.get_pass_profile_threshold_ms()):
            cx.report(f"{event.name}: {ms:.2f} ms")
    if cx.debug >= 3 or trace_mode() in ("1", "terminal", "both") or is_truthy(env.get_pass_diff_mode()):
        cx.report(f"# after {event.name}  {ms:.1f} ms" + ("" if event.changed else "  (unchanged)"))
        if event.changed:
            cx.report(text_of(event.after))


def _dump(event: PassEvent, cx: PassContext) -> None:
    """Write the program after a pass into the folder of tl.dump_ir_path, numbered."""
    folder = Path(cx.option(PassConfigKey.TL_DUMP_IR_DIR))
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{event.index:02d}_{event.after.name}_{event.name}.tl"
    (folder / name).write_text(text_of(event.after) + "\n", encoding="utf-8")


def _changed(before: Func, after: Func) -> bool:
    """Whether more than the phase attribute differs."""
    if before is after:
        return False
    if before.body is not after.body or before.params != after.params or before.buffers != after.buffers:
        return True
    return before.attrs != after.attrs or before.facts.having(phase=None) != after.facts.having(phase=None)


def _check(func: Func, name: str | None, start: tuple[Func, str], cx: PassContext) -> None:
    findings = verify(func, func.facts.phase)
    if findings:
        text = "\n".join(str(f) for f in findings)
        who = f"after pass {name}" if name else "before the first pass"
        folder = save_report(start, name or "verify", cx, f"{text}\n\n{text_of(func)}")
        raise InternalError(f"`{func.name}` is not a valid {func.facts.phase} program {who}:\n{text}\n"
                            f"report: {folder}")


def save_report(start: tuple[Func, str], pass_name: str, cx: PassContext, what: str) -> str:
    """Write a folder that reproduces a failure: before.tl, error.txt, facts.json with the command. Returns its path.

    start: the program that before.tl holds, and the pass that ran on it: the one that failed, or one before.
    Returns a note instead when nothing can be written, so that the failure itself is still reported.
    """
    func, first = start
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"tilelang-{func.name}-{pass_name}-"))
        (folder / "before.tl").write_text(text_of(func) + "\n", encoding="utf-8")
        (folder / "error.txt").write_text(what + "\n", encoding="utf-8")
        facts = {"pass": pass_name, "from": first, "target": _target_facts(cx.target),
                 "config": {k: json.dumps(v, default=repr) for k, v in cx.config.items()},
                 "python": sys.version, "platform": platform.platform(), "numpy": numpy.__version__,
                 "argv": sys.argv, "command": f"python -m tilelang.transform.replay {folder}"}
        (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        return str(folder)
    except OSError as e:
        return f"(no report could be written: {e})"


def _target_facts(target: Any) -> dict[str, Any] | None:
    """The arguments from which Target(facts) makes the same target again."""
    kind = getattr(target, "kind", None)
    if kind is None:
        return None
    arch = {"arch": target.arch} if getattr(target, "arch", None) else {}
    return {"kind": str(kind), **arch, **{k: list(v) if isinstance(v, tuple) else v for k, v in target.options}}


__all__ = ["CPU", "DEVICE", "PHASES", "SYNCED", "THREADS_BOUND", "TILE", "PassConfigKey", "PassContext", "pass_", "run_passes",
           "save_report"]
