"""python -m tilelang.tools.pass_visualizer.viewer FILE: writes the page of a program's passes."""

from __future__ import annotations

import argparse
import sys

from tilelang.cli import _settings as settings, find_program
from tilelang.errors import TileLangError

from . import build_pass_data, emit_html, outline_text


def build_parser() -> argparse.ArgumentParser:
    """The argument parser."""
    p = argparse.ArgumentParser(prog="python -m tilelang.tools.pass_visualizer.viewer",
                                description="Write a page of what each pass does to a program.")
    p.add_argument("file", help="Python file, or FILE:NAME for one of several kernels in it")
    p.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="argument of a kernel factory")
    p.add_argument("--arch", default=None, help="GPU to compile for, present or not: sm_80, sm_90a, … (default: the device)")
    p.add_argument("--out", default="pass_visualizer.html", help="page to write (default pass_visualizer.html)")
    p.add_argument("--passes", default=None, metavar="NAMES", help="only these passes, a comma list")
    p.add_argument("--structure", action="store_true", help="print the program's outline instead")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command.  User errors are printed without a trace."""
    args = build_parser().parse_args(argv)
    try:
        program = find_program(args.file, settings(args.set))
        if args.structure:
            print(outline_text(program.func if hasattr(program, "func") else program))
            return 0
        target = {"kind": "cuda", "arch": args.arch} if args.arch else None
        data = build_pass_data(program, target, args.passes.split(",") if args.passes else None)
        emit_html(data, args.out, f"{program.name}: passes")
    except (TileLangError, LookupError, FileNotFoundError, ValueError) as e:
        print(e, file=sys.stderr)
        return 2
    print(f"{len(data)} passes, {sum(r['changed'] for r in data)} changed {program.name}: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
