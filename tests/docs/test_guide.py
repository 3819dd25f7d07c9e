"""Every code block of the guide and of the front page runs, and the output that a page shows is what it prints."""

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from pages import DOCS, PageError, agrees, differences, names_read, renewed, rewrite, run_page

PAGES = sorted([DOCS / "index.md", *(DOCS / "guide").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_block_of_the_page_runs(page, tmp_path, request, monkeypatch):
    if "\n$ cc " in page.read_text(encoding="utf-8") and shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")  # of the pytest that a page runs
    monkeypatch.setenv("TILELANG_DEFAULT_TARGET", "cpu")  # the pages show what a machine without a GPU prints
    folder = tmp_path / "folder"
    folder.mkdir()
    try:
        outcome = run_page(page, folder)
    except PageError as e:
        pytest.fail(str(e), pytrace=False)
    update = request.config.getoption("--update-golden")
    for name in re.findall(r"!\[[^\]]*\]\((?:\.\./)?(pictures/[^)]*)\)", page.read_text(encoding="utf-8")):
        if (folder / name).exists():  # drawn by a block of the page
            same_picture(folder / name, DOCS / name, update)
        else:
            assert (DOCS / name).exists(), f"{page.name} shows {name}, which nothing draws"
    if update:
        rewrite(page, outcome)
        return
    wrong = differences(page, outcome)
    if wrong:
        pytest.fail("\n\n".join(wrong), pytrace=False)
    assert outcome.ran or page.stem in ("index", "what-runs-where", "amd-loops")  # which have no blocks
    assert all(importlib.util.find_spec(package) is None for package in outcome.skipped)


def same_picture(drawn, kept, update):
    if update:
        kept.parent.mkdir(exist_ok=True)
        kept.write_bytes(drawn.read_bytes())
    assert kept.exists() and words_of(kept) == words_of(drawn), f"{kept.name} is stale: run with --update-golden"


def words_of(picture):
    """What a picture says; pictures by matplotlib, whose versions place the same words differently, are compared by these."""
    data = picture.read_bytes()
    return sorted(re.findall(rb"<text[^>]*>([^<]*)</text>", data)) if b"matplotlib" in data else data


def page_of(tmp_path, text):
    path = tmp_path / "page.md"
    path.write_text(text, encoding="utf-8")
    return path


def test_shown_output_that_differs_is_found(tmp_path):
    page = page_of(tmp_path, "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n")
    outcome = run_page(page, tmp_path)
    assert len(differences(page, outcome)) == 1
    rewrite(page, outcome)
    assert not differences(page, run_page(page, tmp_path)) and "\n2\n" in page.read_text()


@pytest.mark.parametrize("text", [
    "```python\n1 / 0\n```\n", "```python {.raises}\n1 / 1\n```\n", "```python {.gpu}\nunknown_name(1)\n```\n",
    "```python {.gpu}\n1 +\n```\n", "```\nprose\n```\n", "```text\n1\n```\n", "```python {.slow}\n1\n```\n",
    '```{ .c title="f.c" }\nint f;\n```\n', '```{ .c title="f.c" }\nint f\n```\n\n```console\n$ cc -c f.c\n```\n',
    "```python\n1\n", "```console\n$ rm -r x\n```\n", "```console\n$ python -m tilelang show missing.py\n```\n",
])
def test_a_block_that_fails_is_found(tmp_path, text):
    if "$ cc" in text and shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    with pytest.raises((PageError, SystemExit)):
        run_page(page_of(tmp_path, text), tmp_path)


def test_blocks_share_a_namespace(tmp_path):
    page = page_of(tmp_path, "```python\nx = 4\n```\n\n```python\nprint(x)\n```\n\n```text\n4\n```\n")
    outcome = run_page(page, tmp_path)
    assert outcome.ran == 2 and len(outcome.shown) == 1 and not differences(page, outcome)


def test_dots_stand_for_text_and_lines():
    assert agrees(["a ... c", "...", "z"], "a b c\n1\n2\nz\n")
    assert not agrees(["a ... c"], "a b\n") and not agrees(["a", "...", "z"], "a\n1\n")


def test_names_of_a_block_that_is_only_compiled():
    assert names_read("import os\ndef f(x):\n    y = x\n    return os, y, z\nf(w)\n", "page") == {"z", "w"}


def test_renewed_output_keeps_its_dots():
    assert renewed(["one 1", "...", "last ... of 3"], ["one 2", "a", "b", "last one of 3"]) == ["one 2", "...", "last ... of 3"]
    assert renewed(["took ...", "x"], ["took 3 ms", "y"]) == ["took ...", "y"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_names_that_a_page_mentions_exist(page):
    import tilelang.language as T
    from tilelang import PassConfigKey

    text = re.sub(r"^```(?:text|console)$.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    names = set(re.findall(r"\bT\.([A-Za-z_]\w*)(?!\w*\*)", text))
    assert not [n for n in names if not hasattr(T, n)]
    if page.stem != "from-triton":  # where tl is Triton's
        keys = {k.value for k in PassConfigKey}
        assert not [k for k in re.findall(r"[`\"](tl\.\w+)", text) if k not in keys]
