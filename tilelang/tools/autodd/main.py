"""The command: python -m tilelang.autodd SOURCE --err-msg MSG -o OUT."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from .reduce import reduce_source
from .running import BACKENDS, Runs


def build_parser() -> argparse.ArgumentParser:
    """The argument parser."""
    p = argparse.ArgumentParser(
        prog="python -m tilelang.autodd", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Cut a failing script down while its output still contains a message.",
        epilog="Kept as they are: statements with '# autodd: freeze' at their end, those between '# autodd: freeze-start' and\n"
               "'# autodd: end-freeze', and 'with __freeze__:' and '__freeze__(x)' of tilelang.autodd.\n"
               "Exit status: 0 reduced, 1 the script does not print the message, 2 it cannot be read.")
    p.add_argument("source", metavar="SOURCE", help="the failing script")
    p.add_argument("--err-msg", required=True, metavar="MSG", help="text that the output (errors included) must contain")
    p.add_argument("-o", "--output", required=True, metavar="OUT", help="file of the smallest script found so far")
    p.add_argument("--backend", choices=BACKENDS, default="runner",
                   help="runner: forked from a process that has the packages loaded (default); subproc: a new process")
    p.add_argument("--timeout", type=float, default=60, metavar="S", help="seconds a run may take (default 60)")
    p.add_argument("-j", "--jobs", type=int, default=1, metavar="N", help="runs at once (default 1)")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = build_parser().parse_args(argv)
    path, out = Path(args.source), Path(args.output)
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        print(f"{path} cannot be read: {e}", file=sys.stderr)
        return 2
    jobs = max(1, args.jobs)

    def improved(text: str) -> None:
        temporary = out.with_name(out.name + ".part")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, out)
        print(f"{len(text.splitlines())} lines, {len(text)} characters", flush=True)

    with Runs(args.backend, args.timeout, str(path.parent), jobs) as runs:
        first = runs.output(source)
        if args.err_msg not in first:
            tail = "\n".join(first.splitlines()[-5:])
            print(f"the output of {path} does not contain {args.err_msg!r}; it ends:\n{tail}", file=sys.stderr)
            return 1
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            improved(source)
            small = reduce_source(source, lambda text: args.err_msg in runs.output(text), jobs, improved)
        except (SyntaxError, ValueError) as e:
            print(f"{path}: {e}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(f"stopped: the smallest so far is in {out}", file=sys.stderr)
            return 0
        print(f"{out}: {len(small.splitlines())} of {len(source.splitlines())} lines, {runs.count} runs")
    return 0
