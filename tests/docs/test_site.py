"""The site: generated pages hold every name, pass, error kind and setting, and are the same at every build."""

import importlib.util
import inspect
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
GENERATE = ROOT / "docs" / "reference" / "generate.py"


def load(path: pathlib.Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate():
    return load(GENERATE)


@pytest.fixture(scope="module")
def pages(generate):
    return generate.pages()


def test_two_processes_write_the_same_pages(tmp_path):
    for seed in ("1", "2"):
        subprocess.run([sys.executable, str(GENERATE), str(tmp_path / seed)], check=True,
                       env={**os.environ, "PYTHONHASHSEED": seed})
    files = sorted(p.relative_to(tmp_path / "1") for p in (tmp_path / "1").rglob("*.md"))
    assert len(files) > 30
    assert all((tmp_path / "1" / f).read_text() == (tmp_path / "2" / f).read_text() for f in files)


def test_every_name_of_the_language_is_on_a_page(pages):
    import tilelang.language as T

    text = "\n".join(t for p, t in pages.items() if p.startswith("reference/language/"))
    names = [n for n in T.__all__ if callable(getattr(T, n)) and getattr(T, n).__module__ != "typing"]
    assert len(names) > 600
    missing = [n for n in names if f"`T.{n}`" not in text]
    assert not missing, missing
    assert "reference/language/other.md" not in pages, "give these names a family in docs/reference/generate.py"


def test_the_page_of_passes_has_them_in_their_order(pages):
    from tilelang.transform.cpu import CPU_PASSES
    from tilelang.transform.pipeline import DEVICE_PASSES, TILE_PASSES

    found = re.findall(r"^### `(\w+)`$", pages["internals/passes.md"], re.MULTILINE)
    assert found == [p.__name__ for p in (*TILE_PASSES, *DEVICE_PASSES, *CPU_PASSES)]


def test_every_setting_key_and_error_kind_is_on_its_page(pages):
    from tilelang import PassConfigKey
    from tilelang.env import env
    from tilelang.errors import KINDS

    assert all(f"`{k.value}`" in pages["reference/pass-configs.md"] for k in PassConfigKey)
    assert all(f"`{v.key}`" in pages["reference/environment.md"] for v in env.settings().values())
    kinds = [k for k in KINDS if not k.startswith("test-")]
    assert len(kinds) > 150
    assert all(f"## {k}\n" in pages[f"reference/errors-{k[0]}.md"] for k in kinds)


def test_docstrings_become_markdown(generate):
    doc = "Copy a_b.\n\nsrc, dst: buffers.\n    x = 1\nRaises copy-shape.\n\n>>> f(1)\n2\n"
    assert generate.markdown(inspect.cleandoc(doc)) == (
        "Copy a\\_b.\n\n- **src, dst**: buffers.\n\n```text\nx = 1\n```\n\n\nRaises copy-shape.\n\n\n```text\n>>> f(1)\n2\n```")


def test_every_example_is_in_the_gallery_with_a_kernel():
    gallery = load(ROOT / "docs" / "gallery" / "generate.py")
    checks = load(ROOT / "examples" / "checks.py")
    pages = gallery.pages()
    found = {e.file: e for e in gallery.examples()}
    assert found.keys() == {c.file for c in checks.CHECKS}
    for e in found.values():
        text = pages[f"gallery/{e.page}"]
        part = text[text.index(f"{{ #{e.anchor} }}"):]
        shown = part.split("```python\n", 1)[1].split("\n```", 1)[0]
        assert "T.Kernel(" in shown or e.file.endswith("library.py"), e.file
        source = (ROOT / "examples" / e.file).read_text(encoding="utf-8")
        assert all(line in source for line in shown.splitlines() if line.strip() != "..."), e.file
        assert f"({e.page}#{e.anchor})" in pages["gallery/index.md"] and f"$ python examples/{e.file}" in part
    assert pages == gallery.pages()


def test_the_gallery_shows_the_recorded_figures():
    gallery = load(ROOT / "docs" / "gallery" / "generate.py")
    run, calls = gallery.recorded()
    first = calls["softmax/softmax.py"][0]
    assert f"| {first['ms']:.3f} |" in gallery.pages()["gallery/softmax.md"] and run in gallery.pages()["gallery/softmax.md"]


def test_the_page_on_architecture_is_short():
    assert len((ROOT / "docs/internals/architecture.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_docstrings_cite_nothing_that_readers_do_not_have():
    """Paths of documents in the package exist, and no text names the documents that the project was specified in."""
    wrong = []
    for path in sorted((ROOT / "tilelang").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        where = path.relative_to(ROOT)
        wrong += [f"{where}: {m}" for m in re.findall(r"\bspec/\w+\.md|\bDESIGN\b|\bstyle\.md|§ ?\d+|\(language \d+\.\d", text)]
        wrong += [f"{where}: {m}" for m in re.findall(r"\bdocs/[\w./-]+\.md", text) if not (ROOT / m).exists()]
    assert not wrong, "\n".join(wrong)


def test_the_page_and_picture_of_speed_are_those_of_the_newest_run():
    out = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "page.py"), "--check"], capture_output=True, text=True)
    assert out.returncode == 0, out.stdout + out.stderr
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "docs/performance.svg" in readme and (ROOT / "docs" / "performance.svg").exists()


def test_the_picture_shows_the_recorded_numbers():
    page = load(ROOT / "benchmarks" / "page.py")
    name, data = page.newest()
    rows = {r.name: r for r in page.rows_of(data)}
    times = [r["tilelang"]["burst"]["ms"] for r in data["rows"]["M5-nt-f16"]["rounds"] if "tilelang" in r]
    assert rows["M5-nt-f16"].ours == pytest.approx(data["rows"]["M5-nt-f16"]["flops"] / sorted(times)[len(times) // 2] * 1e-9)
    assert f">{rows['M5-nt-f16'].ours:.0f}<" in page.picture(data)
    assert name in page.page(name, data)


def test_paths_on_the_pages_exist():
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / n for n in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
    wrong = []
    for page in pages:
        for path in re.findall(r"`([a-z_]+/[\w./-]+(?:\.(?:py|md|json|txt)|/))`", page.read_text(encoding="utf-8")):
            if not any((folder / path).exists() for folder in (ROOT, ROOT / "tilelang")):
                wrong.append(f"{page.relative_to(ROOT)}: {path}")
    assert not wrong, "\n".join(wrong)
