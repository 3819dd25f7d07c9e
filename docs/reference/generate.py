"""The reference pages, written from the package's docstrings and tables when the site is built.

mkdocs runs this file as a hook (mkdocs.yml).  `python docs/reference/generate.py FOLDER` writes the pages to a folder.
The same package gives the same pages.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent

# page -> (title, modules of tilelang.language whose names it lists)
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "programs": ("Programs and macros", ("prim_func", "macro", "meta", "symbolics", "language", "errors", "decorator")),
    "types": ("Element types", ("dtypes", "dtype")),
    "tensors": ("Tensors, pointers and views", ("tensor", "addresses", "proxy")),
    "allocation": ("Allocation", ("alloc",)),
    "launch": ("Kernel launch", ("kernel",)),
    "loops": ("Loops and control flow", ("loops",)),
    "tile-ops": ("Tile operations: copy, GEMM, reductions",
                 ("tile", "combine", "reducer", "blockscaled", "sparse", "allreduce", "select")),
    "atomics": ("Atomics", ("atomic",)),
    "math": ("Scalar arithmetic", ("math", "fastmath")),
    "threads": ("Warps and threads", ("thread", "extern")),
    "synchronisation": ("Barriers, asynchronous copies, TMA and wgmma", ("barriers", "hopper", "hopper_raw")),
    "ranks": ("Programs of several devices", ("distributed", "scale", "nvshmem")),
    "annotations": ("Annotations and layouts", ("annotations", "layout", "fragment")),
    "debugging": ("Printing, assertions, random numbers", ("debug", "random")),
    "schedules": ("Warp-specialisation schedules", ("ws_schedule",)),
    "tensor-cores": ("Tensor cores by hand, wide accesses", ("tensor_core", "wide")),
    "composed": ("Composed operations", ("composed",)),
    "expressions": ("Expression nodes and raw statements", ("nodes", "raw", "expr")),
    "unavailable": ("Names that are not available yet", ("unavailable",)),
}


# -- docstrings as Markdown --------------------------------------------------------------------------------------------


def escape(text: str) -> str:
    """Text in which Markdown shows every character as it is; what stands in backticks is left alone."""
    pieces = re.split(r"(`[^`\n]*`)", text)
    return "".join(p if k % 2 else re.sub(r"([\\*_<>\[\]|#])", r"\\\1", p) for k, p in enumerate(pieces))


def markdown(doc: str) -> str:
    """A docstring as Markdown: indented lines are code, `name: what it is` at the start of a line is an item of a list."""
    out: list[str] = []
    code: list[str] = []

    def close() -> None:
        while code and not code[-1].strip():
            code.pop()
        if code:
            least = min(len(line) - len(line.lstrip()) for line in code if line.strip())
            out.extend(["", "```text", *(line[least:] for line in code), "```", ""])
            code.clear()

    for line in doc.splitlines():
        literal = line.startswith((">>>", "Before:")) or (code and code[0].startswith((">>>", "Before:")) and line.strip())
        if line.startswith("    ") or literal or (code and not line.strip()):
            code.append(line)
            continue
        close()
        item = re.match(r"((?:[a-z_*]\w*|[A-Z]\w?)(?:, [\w*]+)*): +(.*)", line)
        if item:
            if out and out[-1].strip() and not out[-1].startswith("- "):
                out.append("")
            out.append(f"- **{escape(item[1])}**: {escape(item[2])}")
        else:
            if line.startswith("Raises"):
                out.append("")
            out.append(escape(line))
    close()
    return "\n".join(out).strip()


def _parameter(p: inspect.Parameter) -> str:
    """One parameter: name, type where it says something, default."""
    kind = p.annotation if isinstance(p.annotation, str) else getattr(p.annotation, "__name__", str(p.annotation))
    text = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "") + p.name
    typed = p.annotation is not p.empty and kind not in ("Any", "_typing.Any", "object")
    if typed:
        text += f": {kind}"
    if p.default is not p.empty:
        text += (" = " if typed else "=") + re.sub(r" at 0x[0-9a-f]+", "", repr(p.default))
    return text


def signature(name: str, value: Any) -> str:
    """How a function or class is called, one parameter a line where it is long."""
    try:
        parameters = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):
        return f"{name}(...)"
    shown: list[str] = []
    starred = False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not starred:
            shown.append("*")
        starred = starred or p.kind in (p.VAR_POSITIONAL, p.KEYWORD_ONLY)
        shown.append(_parameter(p))
    line = f"{name}({', '.join(shown)})"
    return line if len(line) <= 100 else f"{name}(\n    " + ",\n    ".join(shown) + ",\n)"


def entry(name: str, value: Any, level: int = 2) -> str:
    """Heading, signature and docstring of one name."""
    lines = [f"{'#' * level} `{name}`", ""]
    if callable(value) and not (inspect.isclass(value) and issubclass(value, (enum.Enum, Exception))):
        lines += ["```python", signature(name, value), "```", ""]
    lines += [markdown(inspect.getdoc(value) or ""), ""]
    if inspect.isclass(value):
        for method, function in sorted(vars(value).items()):
            doc = inspect.getdoc(function)
            if not method.startswith("_") and doc and (inspect.isfunction(function) or isinstance(function, property)):
                lines.append(f"- `.{method}`: {escape(' '.join(doc.split(chr(10) + chr(10))[0].split()))}")
        lines.append("")
    return "\n".join(lines)


def table(heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(r) + " |" for r in rows)]) + "\n"


# -- pages ---------------------------------------------------------------------------------------------------------------


def _home(value: Any) -> str:
    """Last component of the module that defines a name of T."""
    return str(getattr(value, "__module__", "")).rsplit(".", 1)[-1]


def language_pages() -> dict[str, str]:
    """One page a family of names of T."""
    import tilelang.language as T
    from tilelang.ir.dtype import dtype

    of_module = {module: page for page, (_, modules) in FAMILIES.items() for module in modules}
    members: dict[str, list[tuple[str, Any]]] = {page: [] for page in FAMILIES}
    types: list[tuple[str, Any]] = []
    other: list[tuple[str, Any]] = []
    for name in sorted(T.__all__):
        value = getattr(T, name)
        if isinstance(value, dtype):
            types.append((name, value))
        elif callable(value) and value.__module__ != "typing":
            page = of_module.get(_home(value))
            (members[page] if page else other).append((name, value))
    pages = {}
    for page, (title, _) in FAMILIES.items():
        text = f"# T: {title}\n\n"
        if page == "types":
            text += "Each is called to convert: `T.float16(x)`.\n\n"
            text += table(("name", "type", "bits of a lane", "lanes"),
                          ((f"`T.{n}`", f"`{v}`", str(v.bits), str(v.lanes)) for n, v in types)) + "\n"
        if page == "unavailable":
            text += "These names exist so that programs that name them can be read. Each raises an error that says why.\n\n"
            text += table(("name", "why"), ((f"`T.{n}`", escape(inspect.getdoc(v) or "")) for n, v in members[page]))
        else:
            ordered = sorted(members[page], key=lambda member: (inspect.isclass(member[1]), member[0]))
            text += "\n".join(entry(f"T.{n}", v) for n, v in ordered)
        pages[f"reference/language/{page}.md"] = text
    if other:
        pages["reference/language/other.md"] = "# T: Other names\n\n" + "\n".join(entry(f"T.{n}", v) for n, v in other)
    return pages


def package_page() -> str:
    """`tilelang`: what `import tilelang` offers."""
    import tilelang

    names = ("jit", "compile", "par_compile", "first_fitting", "lower", "JITKernel", "autotune", "AutoTuner", "Profiler",
             "do_bench", "TensorSupplyType", "Layout", "Fragment", "DataType", "PassConfigKey", "enable_cache", "disable_cache",
             "is_cache_enabled", "set_log_level", "cdiv", "next_power_of_2", "register_cuda_postproc", "register_c_postproc",
             "build_date", "torch_op", "autograd", "jax_call", "from_fx")
    text = "# tilelang\n\nWhat `import tilelang` offers beside the [language](language/programs.md).\n\n"
    return text + "\n".join(entry(f"tilelang.{n}", getattr(tilelang, n)) for n in names)


def distributed_page() -> str:
    """`tilelang.distributed`."""
    import tilelang.distributed as distributed

    text = "# tilelang.distributed\n\n" + markdown(inspect.getdoc(distributed) or "") + "\n\n"
    return text + "\n".join(entry(n, getattr(distributed, n)) for n in distributed.__all__)


def program_page() -> str:
    """`tilelang.program`: the decorator, programs, and the functions of whole tensors, by name of T."""
    from tilelang import program

    text = "# Whole-tensor programs\n\n" + markdown(inspect.getdoc(program) or "") + "\n\n"
    text += entry("tilelang.program", program.program) + entry("Program", program.Program)
    text += "## Functions of whole tensors\n\nIn a program, `T.name`; those that take a tensor first are its methods too.\n\n"
    names: dict[Any, list[str]] = {}
    for name, fn in program.FUNCTIONS.items():
        names.setdefault(fn, []).append(name)
    for fn, spelled in sorted(names.items(), key=lambda item: item[1][0]):
        text += entry(f"T.{spelled[0]}", fn, 3)
        text += f"Also: {', '.join(f'`T.{n}`' for n in spelled[1:])}.\n\n" if spelled[1:] else ""
    return text


def library_page() -> str:
    """`tilelang.library`."""
    import tilelang.library as library

    text = "# tilelang.library\n\n" + markdown(inspect.getdoc(library) or "") + "\n\n"
    from tilelang.library.support import MACHINES, support_rows

    heads = ("function", "elements", *MACHINES)
    lines = [heads, ("---",) * len(heads), *((f"`{n}`", kind, *rest) for n, kind, *rest in support_rows())]
    text += ("## What runs where\n\nElement types of the first operand. `tf32`: rounded to tf32 in GEMMs. `-`: rejected.\n"
             "`python -m tilelang library` prints this table.\n\n")
    text += "\n".join(f"| {' | '.join(row)} |" for row in lines) + "\n\n"
    text += "\n".join(entry(n, getattr(library, n)) for n in library.__all__)
    from tilelang.library import attention_engine

    text += "\n\n# tilelang.library.attention_engine\n\n" + markdown(inspect.getdoc(attention_engine) or "") + "\n\n"
    public = [n for n, x in vars(attention_engine).items() if inspect.isclass(x) and x.__module__ == attention_engine.__name__]
    return text + "\n".join(entry(n, getattr(attention_engine, n)) for n in public)


def config_page() -> str:
    """Every PassConfigKey."""
    from tilelang.transform import PassConfigKey

    config = importlib.import_module(inspect.getmodule(PassConfigKey).__name__)  # type: ignore[union-attr]

    def types(row: Any) -> str:
        return " or ".join(f"`{t.__name__}`" for t in row.types)

    rows = ((f"`{key.value}`", f"`{key.name}`", types(row), f"`{row.default!r}`",
             escape(row.about + (f" (deprecated: {row.deprecated})" if row.deprecated else "")))
            for key, row in config.ROWS.items())
    return ("# PassConfigKey\n\nPass configs are given to `tilelang.compile(..., pass_configs={...})` or "
            "`@tilelang.jit(pass_configs={...})`, by the key's text or by the member of `tilelang.PassConfigKey`.\n\n"
            + table(("key", "member", "type", "default", "what it does"), rows))


def environment_page() -> str:
    """Every environment variable."""
    from tilelang.env import env

    places = {"TILELANG_CACHE_DIR": "`~/.tilelang/cache`", "TILELANG_TMP_DIR": "`tmp` in the cache root"}

    def default(v: Any) -> str:
        if callable(v.default):
            return places.get(v.key, "found on the machine")
        return "" if v.default in ("", None) else f"`{v.default}`"

    rows = ((f"`{v.key}`", default(v), escape(v.about)) for v in env.settings().values())
    return ("# Environment variables\n\nEach is read when it is needed. `from tilelang.env import env` gives them as "
            "attributes; `with env.using(TILELANG_DEBUG=3): ...` sets one for a block.\n\n"
            + table(("variable", "default", "what it does"), rows))


def error_pages() -> dict[str, str]:
    """Every error kind with a program that meets it and its text."""
    import tilelang
    from tilelang.errors import KINDS, WARNINGS

    for m in pkgutil.walk_packages(tilelang.__path__, "tilelang."):
        if not m.name.endswith("__main__"):
            importlib.import_module(m.name)
    kinds = sorted(k for k in KINDS if not k.startswith("test-"))
    text = ("# Error kinds\n\nEvery error has a kind, shows the place in the user's program, and ends with a hint. "
            "It is also an instance of one of Python's classes, so `except ValueError` catches those that raise ValueError. "
            "`err.kind` is the name.\n\n")
    text += table(("kind", "raises", "what it is"), ((f"[`{k}`](errors-{k[0]}.md#{k})", f"`{KINDS[k].raises.__name__}`",
                                                     escape(KINDS[k].about)) for k in kinds))
    text += ("\n## Warnings\n\nA `tilelang.errors.TileLangWarning` has a code, with which its text starts: "
             '`warnings.filterwarnings("ignore", "config-no-effect")` switches one code off. '
             "With `TILELANG_STRICT=1` a warning is an error of the kind `strict-warning`.\n\n")
    text += table(("code", "what it is"), ((f"`{c}`", escape(WARNINGS[c])) for c in sorted(WARNINGS)))
    pages = {"reference/errors.md": text}
    for letter in sorted({k[0] for k in kinds}):
        body = f"# Error kinds: {letter}\n\n"
        for k in (k for k in kinds if k[0] == letter):
            body += f"## {k}\n\n{escape(KINDS[k].about)}; raises `{KINDS[k].raises.__name__}`.\n\n"
            program = ROOT / "tests" / "errors" / "programs" / f"{k}.py"
            body += f"```python\n{program.read_text(encoding='utf-8').strip()}\n```\n\n"
            body += f"```text\n{program.with_suffix('.txt').read_text(encoding='utf-8').strip()}\n```\n\n"
        pages[f"reference/errors-{letter}.md"] = body
    return pages


def command_page() -> str:
    """`python -m tilelang`, each command with its help."""
    import argparse
    import os

    from tilelang.cli import build_parser

    os.environ["COLUMNS"] = "100"
    parser = build_parser()
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    text = f"# Command line\n\n```text\n{parser.format_help().strip()}\n```\n\n"
    for name, sub in commands.choices.items():
        text += f"## {name}\n\n```text\n{sub.format_help().strip()}\n```\n\n"
    return text


def passes_page() -> str:
    """Every pass in its order, with its docstring."""
    from tilelang.transform.cpu import CPU_PASSES
    from tilelang.transform.pipeline import DEVICE_PASSES, TILE_PASSES

    text = ("# Passes\n\nThe passes in the order in which they run (`tilelang/transform/pipeline.py`). "
            "The first section is shared by all targets.\n\n")
    for title, passes in (("Every target", TILE_PASSES), ("GPU targets", DEVICE_PASSES),
                          ("The CPU target", CPU_PASSES)):
        text += f"## {title}\n\n"
        for p in passes:
            function = inspect.unwrap(getattr(p, "fn", p))
            doc = inspect.getdoc(p) or inspect.getdoc(function) or ""
            text += f"### `{p.__name__}`\n\nModule `{p.__module__}`.\n\n{markdown(doc)}\n\n"
    return text


def pages_without_errors() -> dict[str, str]:
    """The generated pages but those of the errors, for which all modules are imported."""
    if str(ROOT) not in sys.path:  # mkdocs takes back what a hook enters while it is loaded
        sys.path.insert(0, str(ROOT))
    makers: dict[str, Callable[[], str]] = {
        "reference/distributed.md": distributed_page, "reference/program.md": program_page,
        "reference/tilelang.md": package_page, "reference/library.md": library_page, "reference/pass-configs.md": config_page,
        "reference/environment.md": environment_page, "reference/command-line.md": command_page,
        "internals/passes.md": passes_page,
    }
    return {**language_pages(), **{path: make() for path, make in makers.items()}}


def pages() -> dict[str, str]:
    """Path below docs/ -> text of every generated page."""
    return {**pages_without_errors(), **error_pages()}


# -- the hook of mkdocs --------------------------------------------------------------------------------------------------

_PAGES: dict[str, str] = {}


def _titled(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(ROOT / "docs")) for p in folder.glob("*.md"))


def on_config(config: Any) -> Any:
    """Complete the navigation: pages of guide/ that mkdocs.yml does not list, the decisions, the generated pages."""
    _PAGES.update(pages())
    letters = sorted(p for p in _PAGES if p.startswith("reference/errors-"))
    for section in config.nav:
        (title, items), = section.items()
        if not isinstance(items, list):
            continue
        listed = {next(iter(i.values())) if isinstance(i, dict) else i for i in items}
        if title == "Guide":
            items += [p for p in _titled(ROOT / "docs" / "guide") if p not in listed]
        if title == "Decisions":
            items.append({"All": [p for p in _titled(ROOT / "docs" / "decisions") if p not in listed]})
        if title == "Reference":
            items.insert(1, {"T": [p for p in _PAGES if p.startswith("reference/language/")]})
            items.append({"Error kinds": ["reference/errors.md", *letters]})
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
