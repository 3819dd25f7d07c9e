"""How long the language server takes to answer, over the protocol; and a picture of what it answers.

    python benchmarks/editor.py                          # milliseconds: median and worst of 21 edits
    python benchmarks/editor.py --picture FILE.svg       # a kernel as an editor shows it, drawn from the answers

Needs pygls (pip install '.[lsp]').  The file that is edited has 200 lines: ten kernels and a macro.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
from html import escape
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "tools"))

from editor import HEAD, LONG, MACRO, MATMUL, Editor
from lsprotocol import types as lsp

SLOW = "import time\n\n\ndef slow():\n    time.sleep(100)\n\n\n" + HEAD + MACRO + MATMUL.replace("T.clear(acc)", "slow()")


def measure(editor: Editor, edits: int) -> dict[str, list[float]]:
    """Name -> milliseconds of each try."""
    uri, out = editor.open("long.py", LONG), {}
    editor.wait(uri, seconds=60)
    time.sleep(3)
    whole = lsp.Range(lsp.Position(0, 0), lsp.Position(300, 0))
    dot, tile = editor.at(uri, LONG, "T.copy", 2), editor.at(uri, LONG, "As =")
    requests = {
        "completion of T.": ("text_document_completion", lsp.CompletionParams(**dot)),
        "hover on a tile": ("text_document_hover", lsp.HoverParams(**tile)),
        "inlay hints of the file": ("text_document_inlay_hint", lsp.InlayHintParams(lsp.TextDocumentIdentifier(uri), whole))}

    def ask(name: str, request: tuple[str, Any]) -> None:
        start = time.perf_counter()
        editor.ask(*request)
        out.setdefault(name, []).append(1e3 * (time.perf_counter() - start))

    for k in range(edits):
        text = LONG.replace("0.5", f"0.{k}5")
        wrong = text.replace("Bs, acc)\n", "As, acc)\n", 1)
        for name, edited in (("errors after a change, none", text), ("errors after a change, one", wrong)):
            start = editor.change(uri, edited)
            out.setdefault(name, []).append(1e3 * (editor.wait(uri, after=start)[0] - start))
        before = editor.refreshes
        start = editor.change(uri, LONG.replace("0.5", f"0.{k}7"))
        while editor.refreshes == before and time.perf_counter() < start + 5:
            time.sleep(0.002)
        out.setdefault("layouts and stages after a change", []).append(1e3 * (time.perf_counter() - start))
        for name, request in requests.items():
            ask(name, request)
    slow = editor.open("slow.py", SLOW)
    time.sleep(0.2)
    ask("completion while a file hangs", requests["completion of T."])
    start = time.perf_counter()
    editor.wait(slow, lambda found: any(d.code == "late" for d in found))
    return out


def picture(editor: Editor) -> str:
    """A kernel with hints, an error and a hover, as SVG."""
    good, text = HEAD + MACRO + MATMUL, HEAD + MACRO + MATMUL.replace("T.gemm(As, Bs, acc)", "T.gemm(As, As, acc)")
    uri = editor.open("matmul.py", "")
    editor.settled(uri, good)
    hints = editor.ask("text_document_inlay_hint", lsp.InlayHintParams(
        lsp.TextDocumentIdentifier(uri), lsp.Range(lsp.Position(0, 0), lsp.Position(99, 0))))
    hover = editor.ask("text_document_hover", lsp.HoverParams(**editor.at(uri, good, "acc = "))).contents.value
    start = editor.change(uri, text)
    (error,) = editor.wait(uri, bool, after=start)[1]
    return drawn(text.rstrip("\n").split("\n"), {h.position.line: h.label for h in hints}, error, hover)


def _spaced(text: str) -> str:
    return escape(text).replace(" ", "\u00a0")  # renderers that know no `white-space: pre` drop other spaces


def drawn(lines: list[str], hints: dict[int, str], error: Any, hover: str) -> str:
    wide, high, left, out = 8.4, 19, 44, []
    y = {k: 24 + high * k for k in range(len(lines))}
    for k, line in enumerate(lines):
        out.append(f'<text x="10" y="{y[k]}" class="n">{k + 1:2}</text>')
        out.append(f'<text x="{left}" y="{y[k]}" class="c">{_spaced(line)}</text>')
        if k in hints:
            out.append(f'<text x="{left + wide * (len(line) + 2):.0f}" y="{y[k]}" class="h">{_spaced(hints[k][:60])}</text>')
    at, a, b = error.range.start.line, error.range.start.character, error.range.end.character
    begin, steps = left + wide * a, range(1, int((b - a) * wide / 3))
    squiggle = " ".join(f"L{begin + 3 * j:.0f},{y[at] + (6 if j % 2 else 3)}" for j in steps)
    out.append(f'<path d="M{begin:.0f},{y[at] + 3} {squiggle}" fill="none" stroke="#dc2626"/>')
    bottom = y[len(lines) - 1] + 24
    boxes = [("error " + error.code, error.message.split("\n"), "#fee2e2"),
             ("hover: acc", hover.replace("`", "").split("\n"), "#e0f2fe")]
    for title, said, colour in boxes:
        said = [s[:118] + ("…" if len(s) > 118 else "") for s in said if s.strip()]
        height = 26 + high * len(said)
        out.append(f'<rect x="{left}" y="{bottom}" width="1010" height="{height}" fill="{colour}" rx="4"/>'
                   f'<text x="{left + 8}" y="{bottom + 18}" class="b">{escape(title)}</text>')
        out += [f'<text x="{left + 8}" y="{bottom + 18 + high * (j + 1)}" class="c">{_spaced(s.strip())}</text>'
                for j, s in enumerate(said)]
        bottom += height + 10
    style = (".c,.h,.n,.b{font:14px monospace;fill:#1e293b}.n{fill:#94a3b8}.h{fill:#7c3aed;font-style:italic}"
             ".b{font-weight:bold}")
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1080 {bottom}" width="1080"><style>{style}</style>'
            f'<rect width="1080" height="{bottom}" fill="white"/>{"".join(out)}</svg>\n')


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--picture", metavar="FILE", help="draw the answers into an SVG file, measure nothing")
    parser.add_argument("--edits", type=int, default=21)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        editor = Editor(Path(folder), seconds=20 if args.picture else 1)
        if args.picture:
            Path(args.picture).write_text(picture(editor), encoding="utf-8")
        else:
            machine = platform.processor() or platform.machine()
            print(f"{machine}, Python {platform.python_version()}; {len(LONG.splitlines())} lines")
            for name, times in measure(editor, args.edits).items():
                print(f"  {name:36} {statistics.median(times):6.0f} ms median, {max(times):6.0f} worst of {len(times)}")
        editor.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
