"""Runs the code blocks of a Markdown page from top to bottom in one namespace and compares shown output with actual output.

The language of a fence says what happens with it:

    ```python                 run; what it prints is kept
    ```python {.torch}        the same, left out where torch is not installed ({.jax} likewise)
    ```python {.gpu}          needs a GPU: compiled only, and every name it reads must exist at that point
    ```python {.raises}       must raise; the error's text is added to what it prints
    ```{ .python title="f.py" }   the block is also written to the file f.py, in the folder where commands run
    ```{ .c title="f.c" }     written to the file f.c, which a command must name
    ```console                commands behind `$ `, each with the output shown under it: `python -m tilelang …` runs in this
                              process, commands in BUILDS run where there is a C compiler, commands in SHOWN do not run
    ```text                   what the Python block in front of it printed

Marks can be joined: {.torch .gpu}.  In expected output `...` stands for any text within a line, and a line of only `...` for
any number of lines.  A fence of any other language is an error: nothing on a page goes unchecked.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import difflib
import importlib.util
import io
import linecache
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import symtable
import sys
import time
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^(?P<ticks>`{3,})(?P<info>.*)$")
SHOWN = ("pip install ", "python -m venv ", "git clone ", "cd ", "ncu ", "nsys ", "export ")  # commands that are shown, not run
BUILDS = ("cc ", "./")
PACKAGES = {"torch", "jax", "matplotlib"}
MARKS = {*PACKAGES, "gpu", "raises"}


@dataclass
class Block:
    """A fenced block of a page.  line: number of its first line of code, from 1."""

    language: str
    marks: frozenset[str]
    title: str | None
    lines: list[str]
    line: int

    @property
    def code(self) -> str:
        return "".join(f"{x}\n" for x in self.lines)


@dataclass
class Outcome:
    """What a page did.  skipped: the package that each block left out wants.  shown: (block of expected output, actual output).

    file, source: name and lines of the file that the Python blocks without a title would make, one below the other.
    seconds: processor time of each block, by its line.
    """

    file: str = ""
    source: list[str] = field(default_factory=list)
    seconds: dict[int, float] = field(default_factory=dict)
    ran: int = 0
    skipped: list[str] = field(default_factory=list)
    shown: list[tuple[Block, str]] = field(default_factory=list)


class PageError(AssertionError):
    """A block that failed or whose shown output differs, with the page and line."""


def blocks_of(page: pathlib.Path) -> list[Block]:
    """The fenced blocks of a page, in order.  Raises PageError for a fence that does not end."""
    out: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    i = 0
    while i < len(lines):
        opening = FENCE.match(lines[i].strip())
        if opening is None:
            i += 1
            continue
        indent = len(lines[i]) - len(lines[i].lstrip())
        end = next((j for j in range(i + 1, len(lines)) if lines[j].strip() == opening["ticks"]), None)
        if end is None:
            raise PageError(f"{page.name}:{i + 1}: this fence does not end")
        language, marks, title = _parsed(opening["info"])
        out.append(Block(language, marks, title, [x[indent:] for x in lines[i + 1:end]], i + 2))
        i = end + 1
    return out


def _parsed(info: str) -> tuple[str, frozenset[str], str | None]:
    """Language, marks and title of the text behind the opening backticks."""
    title = re.search(r'title="([^"]*)"', info)
    rest = re.sub(r'title="[^"]*"', "", info)
    classes = re.findall(r"\.([\w-]+)", "".join(re.findall(r"\{(.*?)\}", rest)))
    language = re.sub(r"\{.*?\}", "", rest).strip() or (classes.pop(0) if classes else "")
    return language, frozenset(classes), title[1] if title else None


def run_page(page: pathlib.Path, folder: pathlib.Path) -> Outcome:
    """Run the blocks of a page.  folder: where files with a title are written and commands run.

    Raises PageError at the first block that fails.  Differences of output are left to `differences`.
    """
    namespace: dict[str, object] = {"__name__": f"guide_{page.stem}".replace("-", "_")}
    outcome, printed = Outcome(file=f"{page.stem}.py".replace("-", "_")), None
    before, written = pathlib.Path.cwd(), set[str]()
    if not (folder / "benchmarks").exists():
        (folder / "benchmarks").symlink_to(ROOT / "benchmarks")  # pages read recorded figures as from a checkout
    os.chdir(folder)
    environment = dict(os.environ)
    sys.path.insert(0, str(folder))  # a block imports the files that earlier ones wrote, as a program in this folder does
    try:
        for block in blocks_of(page):
            start = time.process_time()
            where = f"{page.name}:{block.line}"
            if block.language == "python":
                printed = _python(block, where, namespace, outcome)
            elif block.language == "console":
                printed = None
                _console(block, where, outcome)
                written -= {name for name in written if any(name in line for line in block.lines)}
            elif block.language == "c" and block.title:
                pathlib.Path(block.title).write_text(block.code, encoding="utf-8")
                written.add(block.title)
            elif block.language == "text":
                if printed is None:
                    raise PageError(f"{where}: no block stands in front of this output")
                if printed is not SKIPPED:
                    outcome.shown.append((block, str(printed)))
                printed = None
            else:
                raise PageError(f"{where}: a fence of language {block.language!r} would go unchecked")
            outcome.seconds[block.line] = time.process_time() - start
        if written:
            raise PageError(f"{page.name}: no command names {', '.join(sorted(written))}")
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(environment)
        sys.path.remove(str(folder))
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(f"{folder}{os.sep}"):
                del sys.modules[name]
    return outcome


SKIPPED = object()


def _python(block: Block, where: str, namespace: dict[str, object], outcome: Outcome) -> object:
    """Run a Python block; what it printed, or SKIPPED."""
    if block.marks - MARKS:
        raise PageError(f"{where}: unknown marks {sorted(block.marks - MARKS)}")
    name = block.title or outcome.file
    if block.title:
        pathlib.Path(block.title).write_text(block.code, encoding="utf-8")
    above = [] if block.title else outcome.source
    lines = [*above, *block.lines, ""]
    try:
        code = _compiled(above, block.code, name)
    except SyntaxError as e:
        raise PageError(f"{where}: {e}") from e
    missing = [p for p in block.marks & PACKAGES if importlib.util.find_spec(p) is None]
    if missing:
        outcome.skipped += missing
        return SKIPPED
    linecache.cache[name] = (1, None, [f"{x}\n" for x in lines], name)
    if not block.title:
        outcome.source = lines
    if "gpu" in block.marks:
        unknown = sorted(names_read(block.code, name) - set(namespace) - set(dir(builtins)))
        if unknown:
            raise PageError(f"{where}: compiled only, and these names do not exist: {', '.join(unknown)}")
        for node in ast.walk(ast.parse(block.code)):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                exec(compile(ast.Module([node], []), name, "exec"), namespace)
        outcome.ran += 1
        return SKIPPED
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(code, namespace)
    except Exception as e:
        if "raises" not in block.marks:
            raise PageError(f"{where}: {type(e).__name__}: {e}") from e
        out.write(f"{e}\n")
    else:
        if "raises" in block.marks:
            raise PageError(f"{where}: an error is announced, and there is none")
    outcome.ran += 1
    return out.getvalue()


def _compiled(above: list[str], code: str, name: str) -> object:
    """A block as a part of the file that it makes with the blocks above: functions have the code that the whole text has.

    Python compiles calls of an imported module's functions in another way, so the imports above stand in a dead branch.
    """
    tree = ast.parse("\n" * len(above) + code, name)
    imports = [n for n in ast.parse("\n".join(above)).body if isinstance(n, (ast.Import, ast.ImportFrom))]
    if imports:
        tree.body.insert(0, ast.fix_missing_locations(ast.If(ast.Constant(False, lineno=1, col_offset=0), imports, [],
                                                             lineno=1, col_offset=0)))
    return compile(tree, name, "exec", dont_inherit=True)


def names_read(code: str, name: str) -> set[str]:
    """Global names that a module's text reads and does not bind itself."""
    bound, read = set(), set()
    tables = [symtable.symtable(code, name, "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for s in table.get_symbols():
            at_top = table.get_type() == "module"
            if s.is_global() or at_top:
                if s.is_referenced():
                    read.add(s.get_name())
                if at_top and (s.is_assigned() or s.is_imported() or s.is_namespace()):
                    bound.add(s.get_name())
    return read - bound


def _console(block: Block, where: str, outcome: Outcome) -> None:
    """Run the commands of a console block; lines behind a command are what it prints."""
    parts: list[tuple[str, list[str]]] = []
    for line in block.lines:
        if line.startswith("$ "):
            parts.append((line[2:], []))
        elif not parts:
            raise PageError(f"{where}: a line in front of the first command")
        else:
            parts[-1][1].append(line)
    for command, shown in parts:
        if command.startswith(BUILDS):
            if shutil.which("cc") is None:
                continue
            printed = _build(command, where)
        elif not command.startswith("python -m tilelang "):
            if not command.startswith(SHOWN) or shown:
                raise PageError(f"{where}: `{command}` is neither run nor one of the commands that are only shown")
            continue
        else:
            printed = _command(command, where)
        outcome.ran += 1
        if shown:
            outcome.shown.append((Block("text", frozenset(), None, shown, block.line), printed))


def _build(command: str, where: str) -> str:
    """What a command of the shell prints."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    if done.returncode:
        raise PageError(f"{where}: `{command}` ends with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _command(command: str, where: str) -> str:
    """What `[NAME=VALUE …] python -m tilelang …` prints to standard output."""
    from tilelang import cli

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = cli.main(shlex.split(command)[3:])
    if code:
        raise PageError(f"{where}: `{command}` ends with {code}:\n{out.getvalue()}")
    return out.getvalue()


def agrees(expected: list[str], actual: str) -> bool:
    """Whether output is as shown: `...` stands for text within a line, a line of `...` for any lines."""
    pattern = "".join(r"(?:[^\n]*\n)*?" if x.strip() == "..." else re.escape(x.rstrip()).replace(r"\.\.\.", "[^\n]*") + "\n"
                      for x in expected)
    text = "".join(f"{x.rstrip()}\n" for x in actual.splitlines())
    return re.fullmatch(pattern, text) is not None


def differences(page: pathlib.Path, outcome: Outcome) -> list[str]:
    """A text for every shown output that is not the actual one."""
    return [f"{page.name}:{block.line}: shown:\n{block.code}\nactual:\n{actual}"
            for block, actual in outcome.shown if not agrees(block.lines, actual)]


def renewed(shown: list[str], actual: list[str]) -> list[str]:
    """The actual output, with the dots of the shown one: in lines that still fit, and for lines that were left out."""
    dotted = [x for x in shown if "..." in x and x.strip() != "..."]
    renew = lambda x: next((d for d in dotted if agrees([d], x)), x)  # noqa: E731
    if "..." not in map(str.strip, shown):
        return [renew(x) for x in actual]
    out, at = [], 0
    for line in shown:
        if line.strip() == "...":
            out.append(line)
            continue
        like = [1.0 if agrees([line], x) else difflib.SequenceMatcher(None, line, x).ratio() for x in actual[at:]]
        if not like or max(like) < 0.5:
            return [renew(x) for x in actual]
        found = at + like.index(max(like))
        out.append(renew(actual[found]))
        at = found + 1
    return out if agrees(out, "".join(f"{x}\n" for x in actual)) else [renew(x) for x in actual]


def rewrite(page: pathlib.Path, outcome: Outcome) -> None:
    """Put the actual output in place of the `text` blocks that differ.

    Console blocks stay as they are.
    """
    lines = page.read_text(encoding="utf-8").splitlines()
    for block, actual in sorted(outcome.shown, key=lambda x: -x[0].line):
        first = block.line - 1
        if lines[first - 1].strip().endswith("text") and not agrees(block.lines, actual):
            lines[first:first + len(block.lines)] = renewed(block.lines, [x.rstrip() for x in actual.splitlines()])
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


__all__ = ["DOCS", "PageError", "agrees", "blocks_of", "differences", "names_read", "rewrite", "run_page"]

if __name__ == "__main__":  # python tests/docs/pages.py PAGE…: run pages by hand
    import tempfile

    sys.path.insert(0, str(ROOT))
    for argument in sys.argv[1:]:
        path = pathlib.Path(argument).resolve()
        with tempfile.TemporaryDirectory() as where_:
            done = run_page(path, pathlib.Path(where_))
        slow = [f"{k}: {v:.1f} s" for k, v in done.seconds.items() if v > 0.2]
        print(f"{path.name}: {done.ran} blocks ran, {len(done.skipped)} skipped", *slow, *differences(path, done), sep="\n\n")
