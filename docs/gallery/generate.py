"""The gallery, written from examples/ when the site is built: one page for each family of kernels.

mkdocs runs this file as a hook (mkdocs.yml).  `python docs/gallery/generate.py FOLDER` writes the pages to a folder.
A section has the example's docstring, its first kernel, recorded figures, how to run it, and the whole file.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
LONGEST = 48  # lines of a kernel that are shown


@dataclass(frozen=True)
class Example:
    """One row of the table in examples/README.md.  file: below examples/.  shows: what it is an example of."""

    family: str
    file: str
    shows: str

    @property
    def page(self) -> str:
        """Page of the family, below docs/gallery/."""
        return re.sub(r"\W+", "-", self.family.lower()).strip("-") + ".md"

    @property
    def anchor(self) -> str:
        """Heading of the section on its page."""
        return re.sub(r"\W+", "-", self.file.removesuffix(".py")).strip("-")


def examples() -> list[Example]:
    """The examples in the order of the table in examples/README.md; a row without a family belongs to the one above."""
    found, family = [], ""
    for line in (EXAMPLES / "README.md").read_text(encoding="utf-8").splitlines():
        row = re.match(r"\|([^|]*)\| `([\w/]+\.py)` \| (.*) \|$", line)
        if row:
            family = row[1].strip() or family
            found.append(Example(family[0].upper() + family[1:], row[2], row[3]))
    return found


# -- parts of a section --------------------------------------------------------------------------------------------------


def prose(doc: str) -> str:
    """A docstring as Markdown: `name    what it is` at the start of a line is an item of a list."""
    out = []
    for paragraph in doc.strip().split("\n\n"):
        lines: list[str] = []
        for line in paragraph.splitlines():
            item = re.match(r"([a-z][\w, ]*?) {2,}(\S.*)$", line)
            if item:
                lines.append(f"- **{item[1]}**: {item[2]}")
            elif lines and lines[-1].startswith("- ") and line.startswith(" "):
                lines[-1] += f" {line.strip()}"
            else:
                lines.append(line.strip())
        at = next((k for k, line in enumerate(lines) if line.startswith("- ")), 0)
        out.append("\n".join([*lines[:at], "", *lines[at:]] if at else lines))
    return re.sub(r"(?<![`\w])([A-Za-z_]*_[A-Za-z_]\w*)(?![`\w])", r"`\1`", "\n\n".join(out))


def kernel(text: str) -> str:
    """The first function of a file that holds a T.Kernel, or its first call of the library."""
    tree, lines = ast.parse(text), text.splitlines()
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    with_launch = [n for n in functions if "T.Kernel(" in (ast.get_source_segment(text, n) or "")]
    chosen = (with_launch or functions)[0]
    first = min([chosen.lineno, *(d.lineno for d in chosen.decorator_list)])
    shown = lines[first - 1:chosen.end_lineno]
    return "\n".join(shown if len(shown) <= LONGEST else [*shown[:LONGEST], "        ..."])


def recorded() -> tuple[str, dict[str, list[dict[str, Any]]]]:
    """(name of the newest recorded run of all examples, its measured launches by file)."""
    runs = sorted((ROOT / "benchmarks" / "results").glob("*-examples*.json"), reverse=True)
    for run in runs:
        calls: dict[str, list[dict[str, Any]]] = {}
        for row in json.loads(run.read_text(encoding="utf-8"))["rows"]:
            calls.setdefault(row["example"], []).extend({**c, "sizes": row["sizes"]} for c in row["calls"])
        if any(calls.values()):
            return run.name, calls
    return "", {}


def figures(calls: list[dict[str, Any]]) -> str:
    """Recorded times of an example as a table; "" where there are none."""
    if not calls:
        return ""
    rows = ["| kernel | sizes | ms | rate | the same in torch, ms |", "|---|---|---|---|---|"]
    for c in calls:
        rate = f"{c['tflops']:.0f} TFLOP/s" if c.get("tflops") else f"{c['gb_per_s']:.0f} GB/s" if c.get("gb_per_s") else ""
        peer = f"{c['peer_ms']:.3f} (`{c['peer']}`)" if c.get("peer_ms") else ""
        sizes = ", ".join(f"{name} {value}" for name, value in c["sizes"].items())
        rows.append(f"| `{c['kernel']}` | {sizes} | {c['ms']:.3f} | {rate} | {peer} |")
    return "\n".join(rows) + "\n\n"


def section(example: Example, run: str, calls: dict[str, list[dict[str, Any]]]) -> str:
    """One example: heading, docstring, kernel, figures, command, the whole file."""
    text = (EXAMPLES / example.file).read_text(encoding="utf-8")
    doc = ast.get_docstring(ast.parse(text)) or ""
    table = figures(calls.get(example.file, []))
    whole = "\n".join(f"    {line}".rstrip() for line in f"```python\n{text.rstrip()}\n```".splitlines())
    return "\n".join([
        f"## {example.file.removesuffix('.py')} {{ #{example.anchor} }}", "", f"*{example.shows}*", "", prose(doc), "",
        "```python", kernel(text), "```", "", f"Recorded on an H200 (`benchmarks/results/{run}`):\n\n{table}" if table else "",
        "```console", f"$ python examples/{example.file}", "```", "",
        f'??? example "examples/{example.file}, whole"', "", whole, "", ""])


# -- pages ---------------------------------------------------------------------------------------------------------------


def index(all_of_them: list[Example]) -> str:
    """The front page: families, and what each example shows."""
    text = ("# Gallery\n\nEvery example is a program: kernels, an independent reference in float64, and a check whose bound "
            "follows from the element types. They run on every backend, at small sizes without a GPU:\n\n```console\n"
            "$ python examples/softmax/softmax.py --target cpu\n$ python examples/run_all.py\n```\n\n"
            "| family | example | what it shows |\n|---|---|---|\n")
    last = ""
    for e in all_of_them:
        family = f"**[{e.family}]({e.page})**" if e.family != last else ""
        text += f"| {family} | [{e.file.removesuffix('.py')}]({e.page}#{e.anchor}) | {e.shows} |\n"
        last = e.family
    return text


def pages() -> dict[str, str]:
    """Path below docs/ -> text of every generated page."""
    found = examples()
    run, calls = recorded()
    out = {"gallery/index.md": index(found)}
    for e in found:
        path = f"gallery/{e.page}"
        out[path] = out.get(path, f"# {e.family}\n\n") + section(e, run, calls)
    return out


# -- the hook of mkdocs --------------------------------------------------------------------------------------------------

_PAGES: dict[str, str] = {}


def on_config(config: Any) -> Any:
    """Make the pages and complete the navigation's Gallery."""
    _PAGES.update(pages())
    for part in config.nav:
        (title, items), = part.items()
        if title == "Gallery":
            items += [p for p in _PAGES if p not in items]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for path, text in _PAGES.items():
        files.append(File.generated(config, path, content=text))
    return files


if __name__ == "__main__":
    for where, content in pages().items():
        target = Path(sys.argv[1]) / where
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, encoding="utf-8")
