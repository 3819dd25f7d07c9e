"""The language server: pygls speaks the protocol, a worker process analyses, nothing of the user's runs here."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tilelang.ir.record import record
from tilelang.language.whole import ALONE
from tilelang.version import __version__

from .texts import Outline, diagnostic, outline, word_at

try:
    from lsprotocol import types as lsp
    from pygls.lsp.server import LanguageServer
    from pygls.uris import from_fs_path, to_fs_path
except ImportError:
    raise SystemExit("tilelang-lsp needs pygls: pip install 'tilelang-py[lsp]'") from None

SECONDS, PAGE_SECONDS = 1.0, 30.0  # limits of an analysis (the option "seconds"), and of a page that the user asked for
PAUSE = 0.01  # seconds without a change before a text is analysed
PAGES = {"tile": "tile program", "source": "CUDA", "report": "report"}
_KINDS = {"function": lsp.CompletionItemKind.Function, "class": lsp.CompletionItemKind.Class,
          "type": lsp.CompletionItemKind.TypeParameter, "value": lsp.CompletionItemKind.Constant}


class Worker:
    """The process of worker.py.  One request at a time: a newer one ends an older one."""

    def __init__(self) -> None:
        self.process: asyncio.subprocess.Process | None = None
        self.ready = asyncio.Event()
        self.number = 0
        self.answers: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TILELANG_DISABLE_CACHE": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.ready.clear()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-B", "-m", "tilelang.tools.lsp.worker", stdin=asyncio.subprocess.PIPE, limit=1 << 28,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, env={**os.environ, **one})
        self.tasks.append(asyncio.create_task(self._read(self.process)))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            try:
                found = json.loads(line)
            except ValueError:  # a line that a stopped child did not finish
                continue
            if found.get("ready"):
                self.ready.set()
            elif queue := self.answers.get(found.get("id", 0)):
                queue.put_nowait(found)

    async def ask(self, seconds: float, **message: Any) -> Any:
        """Yield the answers to a request, the last one with "end"."""
        if self.process is None or self.process.returncode is not None:
            await self.start()
        await self.ready.wait()
        assert self.process is not None and self.process.stdin is not None
        self.number += 1
        number, queue = self.number, asyncio.Queue[dict[str, Any]]()
        self.answers[number] = queue
        self.process.stdin.write((json.dumps({"id": number, "seconds": seconds, **message}) + "\n").encode())
        try:
            while True:
                found = await asyncio.wait_for(queue.get(), seconds + 2)
                yield found
                if found.get("end"):
                    return
        except asyncio.TimeoutError:  # where it cannot fork, the worker is what takes too long
            self.process.kill()
            yield {"end": True, "late": True, "line": 1}
        finally:
            del self.answers[number]


class Server(LanguageServer):
    """known: uri -> what the last analysis said of its functions.  tasks: uri -> the analysis under way."""

    def __init__(self) -> None:
        super().__init__("tilelang-lsp", __version__)
        self.known: dict[str, list[dict[str, Any]]] = {}
        self.running: dict[str, asyncio.Task[None]] = {}
        self.checks, self.pages = Worker(), Worker()
        self.seconds = SECONDS

    def line(self, uri: str, number: int) -> str:
        lines = self.workspace.get_text_document(uri).lines
        return lines[number].rstrip("\n") if number < len(lines) else ""

    def schedule(self, uri: str) -> None:
        """Analyse a document soon; an analysis of an older text is given up."""
        if uri in self.running:
            self.running[uri].cancel()
        self.running[uri] = asyncio.create_task(self._check(uri))

    async def _check(self, uri: str) -> None:
        await asyncio.sleep(PAUSE)
        document = self.workspace.get_text_document(uri)
        if "tilelang" not in document.source:
            self._publish(uri, [])
            return
        said: list[dict[str, Any]] = []
        async for found in self.checks.ask(self.seconds, what="check", path=_path(uri), text=document.source):
            if "diagnostics" in found:
                said = found["diagnostics"]
                self._publish(uri, said)
            if "functions" in found:
                self.known[uri] = found["functions"]
            if found.get("late") and not any(d["code"] == "late" for d in said):
                text = f"the analysis was stopped after {self.seconds:g} s; hints and layouts are those of an earlier text"
                said = [*said, diagnostic("late", text, found["line"], severity=3)]
                self._publish(uri, said)
            shows_hints = getattr(self.client_capabilities.workspace, "inlay_hint", None) is not None
            if shows_hints and found.get("end") and not found.get("stopped"):
                self.workspace_inlay_hint_refresh(None)

    def _publish(self, uri: str, found: list[dict[str, Any]]) -> None:
        lines = self.workspace.get_text_document(uri).lines
        self.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(uri, [lsp.Diagnostic(
            _range(d, lines), d["text"], lsp.DiagnosticSeverity(d["severity"]), code=d["code"], source="tilelang",
            related_information=[lsp.DiagnosticRelatedInformation(lsp.Location(uri, _range(r, lines)), r["text"])
                                 for r in d["related"]]) for d in found]))


def _path(uri: str) -> str:
    return to_fs_path(uri) or unquote(urlsplit(uri).path) or "untitled.py"


def _range(d: dict[str, Any], lines: Sequence[str]) -> lsp.Range:
    """Places of Python (lines from 1, columns in bytes) as those of the protocol (lines from 0, columns in UTF-16 units)."""
    def at(line: int, column: int) -> lsp.Position:
        text = lines[line - 1].rstrip("\n") if 0 < line <= len(lines) else ""
        return lsp.Position(max(0, line - 1), len(text.encode()[:column].decode(errors="ignore").encode("utf-16-le")) // 2)

    first = lines[d["line"] - 1] if 0 < d["line"] <= len(lines) else ""
    begin = d["column"] or len(first) - len(first.lstrip())
    return lsp.Range(at(d["line"], begin), at(d["end_line"], d["end_column"] or 1 << 16))


server = Server()


@server.feature(lsp.INITIALIZE)
def configured(ls: Server, params: lsp.InitializeParams) -> None:
    """Takes the editor's options: {"seconds": limit of an analysis}."""
    options = params.initialization_options
    if isinstance(options, dict):
        ls.seconds = float(options.get("seconds", SECONDS))


@server.feature(lsp.INITIALIZED)
async def started(ls: Server, params: lsp.InitializedParams) -> None:
    await ls.checks.start()
    for module in ("tilelang.language", "tilelang.library", "tilelang"):  # the first completion need not wait for imports
        await asyncio.to_thread(public, module)


@server.feature(lsp.SHUTDOWN)
def stopped(ls: Server, params: None) -> None:
    """Ends the processes."""
    for worker in (ls.checks, ls.pages):
        if worker.process is not None and worker.process.returncode is None:
            worker.process.kill()


@server.feature(lsp.TEXT_DOCUMENT_DID_OPEN)
@server.feature(lsp.TEXT_DOCUMENT_DID_CHANGE)
async def changed(ls: Server, params: lsp.DidOpenTextDocumentParams | lsp.DidChangeTextDocumentParams) -> None:
    ls.schedule(params.text_document.uri)


@server.feature(lsp.TEXT_DOCUMENT_DID_CLOSE)
async def closed(ls: Server, params: lsp.DidCloseTextDocumentParams) -> None:
    uri = params.text_document.uri
    ls.known.pop(uri, None)
    if uri in ls.running:
        ls.running.pop(uri).cancel()


@server.feature(lsp.TEXT_DOCUMENT_COMPLETION, lsp.CompletionOptions(trigger_characters=["."]))
def complete(ls: Server, params: lsp.CompletionParams) -> lsp.CompletionList:
    """The public names of the module in front of the dot, with their signatures."""
    uri, at = params.text_document.uri, params.position
    before = ls.line(uri, at.line)[:at.character]
    prefix, dot, _ = word_at(before, len(before)).rpartition(".")
    about = outline_of(ls.workspace.get_text_document(uri).source)
    found = public(module_of(prefix, about.aliases)) if dot else {}
    return lsp.CompletionList(False, [lsp.CompletionItem(
        n.name, label_details=lsp.CompletionItemLabelDetails(n.signature), kind=_KINDS[n.kind],
        documentation=lsp.MarkupContent(lsp.MarkupKind.Markdown, markdown(n, f"{prefix}."))) for n in found.values()])


@server.feature(lsp.TEXT_DOCUMENT_SIGNATURE_HELP, lsp.SignatureHelpOptions(trigger_characters=["(", ","]))
def signature(ls: Server, params: lsp.SignatureHelpParams) -> lsp.SignatureHelp | None:
    """The signature of the call that the cursor is in."""
    uri, at = params.text_document.uri, params.position
    call = re.search(r"([\w.]+)\([^()]*(?:\([^()]*\)[^()]*)*$", ls.line(uri, at.line)[:at.character])
    n = described(call[1], outline_of(ls.workspace.get_text_document(uri).source).aliases) if call else None
    return None if n is None or call is None else lsp.SignatureHelp([lsp.SignatureInformation(
        f"{call[1]}{n.signature}", lsp.MarkupContent(lsp.MarkupKind.Markdown, n.doc))], 0)


@server.feature(lsp.TEXT_DOCUMENT_HOVER)
def hover(ls: Server, params: lsp.HoverParams) -> lsp.Hover | None:
    """A name of the language with its documentation; a buffer with shape, scope, layout and size; a variable; a kernel."""
    uri, at = params.text_document.uri, params.position
    word = word_at(ls.line(uri, at.line), at.character)
    n = described(word, outline_of(ls.workspace.get_text_document(uri).source).aliases)
    lines = [markdown(n, f"{word.rpartition('.')[0]}." if "." in word else "")] if n is not None else []
    inside = [f for f in ls.known.get(uri, []) if f["line"] <= at.line + 1 <= f["end"]]
    for f in inside or ls.known.get(uri, []):  # a macro's lines are in no kernel
        lines += [f"`{b['name']}`: {b['text']}" + (f"  \n{f['layouts'][word]['text']}" if word in f.get("layouts", {}) else "")
                  for b in f["buffers"] if b["name"] == word]
        lines += [f"`{v['name']}`: {v['text']}" for v in f["variables"] if v["name"] == word]
    for f in inside:
        if word.endswith("Kernel") or word == f["name"]:
            assumed = ", ".join(f"{k}={v}" for k, v in f["assumed"].items())
            lines += [f"{k} ({f['target']})" for k in f.get("kernel", [])] + ([f"with {assumed} assumed"] if assumed else [])
    text = "\n\n".join(dict.fromkeys(lines))
    return lsp.Hover(lsp.MarkupContent(lsp.MarkupKind.Markdown, text)) if text else None


@server.feature(lsp.TEXT_DOCUMENT_INLAY_HINT)
def inlay(ls: Server, params: lsp.InlayHintParams) -> list[lsp.InlayHint]:
    """Layouts behind allocations, stages behind pipelined loops, resources behind launches."""
    uri, out = params.text_document.uri, {}
    for f in ls.known.get(uri, []):
        stages = ", ".join(f"{n} of {name}" for name, n in f.get("stages", {}).items())
        for b in f["buffers"]:
            if b["line"] and b["name"] in f.get("layouts", {}):
                out[b["line"]] = f["layouts"][b["name"]]["short"]
        for v in f["variables"]:
            if v["line"] and v["kind"] == "pipelined" and stages:
                out[v["line"]] = f"stages: {stages}"
            elif v["line"] and "block index" in v["text"] and f.get("kernel"):
                out[v["line"]] = f["kernel"][0].partition(";")[0]
    first, last = params.range.start.line, params.range.end.line
    return [lsp.InlayHint(lsp.Position(n - 1, len(ls.line(uri, n - 1).encode("utf-16-le")) // 2), text, padding_left=True)
            for n, text in sorted(out.items()) if first <= n - 1 <= last]


@server.feature(lsp.TEXT_DOCUMENT_DEFINITION)
def definition(ls: Server, params: lsp.DefinitionParams) -> lsp.Location | None:
    """The macro, the kernel, the helper, or the function of the language under the cursor."""
    uri, at = params.text_document.uri, params.position
    source = ls.workspace.get_text_document(uri).source
    found = place_of(word_at(ls.line(uri, at.line), at.character), source, _path(uri), outline_of(source))
    if found is None:
        return None
    place = lsp.Position(found[1] - 1, 0)
    return lsp.Location(uri if found[0] == _path(uri) else from_fs_path(found[0]) or uri, lsp.Range(place, place))


@server.feature(lsp.TEXT_DOCUMENT_CODE_ACTION)
def actions(ls: Server, params: lsp.CodeActionParams) -> list[lsp.CodeAction]:
    """Pages of the kernel under the cursor."""
    uri = params.text_document.uri
    about = outline_of(ls.workspace.get_text_document(uri).source)
    line = params.range.start.line + 1
    names = [n.name for n in about.kernels if n.lineno - len(n.decorator_list) <= line <= (n.end_lineno or 0)]
    return [lsp.CodeAction(f"Show {title} of {name}", command=lsp.Command(f"Show {title}", "tilelang.show", arguments=[
        uri, name, what])) for name in names for what, title in PAGES.items()]


@server.command("tilelang.show")
async def show(ls: Server, uri: str, function: str, what: str) -> dict[str, str]:
    """A page: {"title", "language", "text"}.  The editor opens it beside the file."""
    document = ls.workspace.get_text_document(uri)
    text = "no answer"
    async for found in ls.pages.ask(PAGE_SECONDS, what=what, path=_path(uri), text=document.source, function=function):
        text = found.get("page", f"stopped after {PAGE_SECONDS:g} s" if found.get("late") else text)
    return {"title": f"{function}: {PAGES.get(what, what)}", "text": text,
            "language": {"tile": "python", "source": "cuda-cpp"}.get(what, "plaintext")}


def main() -> None:
    """`tilelang-lsp`: the protocol on standard input and output."""
    server.start_io()


# ---- names of the language --------------------------------------------------------------------------------------------

_ROOMS = {"tilelang", "tilelang.language", "tilelang.library"}


@record
class Name:
    """A public name.  kind: "function", "class", "type" or "value".  signature: "(a, b=1)", "" for what is not called."""

    name: str
    kind: str
    signature: str
    doc: str


@cache
def public(module: str) -> dict[str, Name]:
    """The public names of tilelang, tilelang.language or tilelang.library; {} for other modules, which are never imported."""
    if module not in _ROOMS:
        return {}
    found = import_module(module)
    further = ALONE if module == "tilelang.language" else ()  # functions of whole tensors
    return {n: _described(n, getattr(found, n)) for n in (*found.__all__, *sorted(further)) if not n.startswith("_")}


def _described(name: str, value: Any) -> Name:
    kind = "class" if inspect.isclass(value) else "function" if callable(value) else "value"
    if type(value).__name__ == "dtype":
        return Name(name, "type", "", f"element type {value}")
    try:
        signature = str(inspect.signature(value)) if kind != "value" else ""
    except (TypeError, ValueError):
        signature = ""
    return Name(name, kind, signature, inspect.getdoc(value) or "" if kind != "value" else "")


def module_of(prefix: str, aliases: dict[str, str]) -> str:
    """The module that a prefix names in a file: T is tilelang.language."""
    first, _, rest = prefix.partition(".")
    return ".".join(filter(None, (aliases.get(first, ""), rest)))


def described(word: str, aliases: dict[str, str]) -> Name | None:
    """The public name that a dotted word is, if it is one."""
    module, _, name = module_of(word, aliases).rpartition(".")
    return public(module).get(name)


def markdown(n: Name, prefix: str = "") -> str:
    """A name as an editor shows it."""
    return f"```python\n{prefix}{n.name}{n.signature}\n```\n\n{n.doc}".strip()


def place_of(word: str, text: str, path: str, about: Outline) -> tuple[str, int] | None:
    """(file, line from 1) of the definition of a word: in this text, in a module beside it, or in the language."""
    if here := _line_of(text, word):
        return path, here
    where = module_of(word, about.aliases)
    module, _, name = where.rpartition(".")
    if described(word, about.aliases) is not None:
        value = inspect.unwrap(getattr(import_module(module), name))
        try:
            return inspect.getsourcefile(value) or "", inspect.getsourcelines(value)[1]
        except (TypeError, OSError):
            return None
    level = len(module) - len(module.lstrip("."))
    file = Path(path).parents[max(0, level - 1)].joinpath(*module[level:].split(".")).with_suffix(".py")
    line = _line_of(file.read_text(encoding="utf-8"), name) if module and file.is_file() else 0
    return (str(file), line) if line else None


def _line_of(text: str, name: str) -> int:
    """The line of the function or class of this name, 0 without one; it need not parse."""
    found = re.search(rf"^[ \t]*(?:def|class) {re.escape(name)}\b", text, re.MULTILINE)
    return text.count("\n", 0, found.end()) + 1 if found else 0


def outline_of(text: str) -> Outline:
    """The outline of a text; of one that does not parse, that of its imports."""
    try:
        return outline(ast.parse(text))
    except (SyntaxError, ValueError):
        imports = re.findall(r"^(?:import [\w., ]*\w|from [\w.]+ import [\w, ]*\w)$", text, re.MULTILINE)
        return outline(ast.parse("\n".join(imports)))


if __name__ == "__main__":
    main()
