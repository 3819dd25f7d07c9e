"""The words that the glossary replaces (docs/internals/glossary.md).  `python tests/words/words.py` lists where they stand."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from tilelang import PassConfigKey

ROOT = Path(__file__).resolve().parent.parent.parent
GLOSSARY = ROOT / "docs" / "internals" / "glossary.md"


@dataclass(frozen=True)
class Word:
    """One word that is not used.

    name: tokens of a name (`two_parts` has the tokens two, parts) that mean it.  prose: a regular expression of its
    private meaning in text.  keep: names in which the token has its ordinary meaning.  use: what the glossary says instead.
    after: a token that gives the next one its ordinary meaning (warp_role).
    """

    name: frozenset[str]
    prose: re.Pattern[str]
    use: str
    keep: frozenset[str] = frozenset()
    after: str = ""


def _word(name: str, prose: str, use: str, keep: str = "", after: str = "") -> Word:
    return Word(frozenset(name.split()), re.compile(prose, re.IGNORECASE), use, frozenset(keep.split()), after)


# (kind, word, item) -> why it stays.
KEPT: dict[tuple[str, str, str], str] = {
    ("name", "role", "roles"): "WSSchedule(roles=...) is public",
    ("name", "sum", "Sums"): "running sums of the softmax; the name of a kernel's parameter, which the generated code prints",
}


WORDS: dict[str, Word] = {
    "product": _word(
        "product products",
        r"(?<!dot )(?<!inner )(?<!outer )(?<!matrix )(?<!cartesian )(?<!cross )(?<!exact )(?<!element )\bproducts?\b"
        r"(?! of (the |its |all |two |thread and |register )?"
        r"(sizes?|extents?|dimensions|integers|numbers|factors|shapes?|strides|values|floats))",
        "GEMM, MMA, accumulator", "two_product"),
    "part": _word(
        "part parts",
        r"\bin (\w+ )?parts\b|\bparts of (k|a product|its|the) (columns|sums|product)|\b(its|each|one) parts?\b|\ba part's\b"
        r"|\bparts (summed|by)\b",
        "split, sub-tile, chunk, warp role"),
    "share": _word(
        "share shares deal deals dealt",
        r"\b(shared|sharing|shares|dealt) out\b|\bdealt\b|\b(equal|own|its|a) shares?\b",
        "work partition, tile scheduler"),
    "sum": _word(
        "sums",
        r"(?<!partial )\bsums of (a |the |several |rows?|products?|lanes?)|\btotals\b|\blane sums\b",
        "accumulator, partial sum, reduction", "sums_of_magnitudes", "partial"),
    "turn": _word(
        "turn turns",
        r"\b(takes?|taking|by|in|of|later|whole|two|several|five|other) turns\b"
        r"|\b(a|an|the|this|that|one|each|every|its|last|first|next) turn\b",
        "iteration, ping-pong"),
    "round": _word(
        "rounds round",
        r"\b(one|two|several|last|each|every|next|whole|of|in|full|more) rounds?\b",
        "wave, phase", "round round_tf32 round_trip test_round_trip"),
    "turned": _word(
        "turned",
        r"\bturned (tiles?|products?|sums|copy|copies)\b|\bturned or not\b|\bmoved tiles?\b",
        "transposed, swap-AB, overlapping edge tile"),
    "apart": _word("apart", r"\bapart\b(?! from)", "disjoint, non-aliasing"),
    "panel": _word(
        "panel panels", r"(?<!rasterisation )\bpanels?\b(?! size)", "TMA box, swizzle atom", "panel_size", "rasterisation"),
    "multiprocessor": _word(
        "multiprocessor multiprocessors",
        r"(?<!streaming )\bmultiprocessors?\b|\bidle units\b|\bunits idle\b",
        "SM"),
    "own registers": _word(
        "",
        r"\bown registers\b|\bregisters of (their|its) own\b|\bwhole registers\b",
        "register-resident, named PTX registers"),
    "coded": _word("coded", r"(?<!hard-)\bcoded\b", "quantised"),
    "price": _word(
        "price prices priced pricing dear cheap cheaper cheapest",
        r"\bpric(e|es|ed|ing)\b|\bdear(er|est)?\b|\bcheap(er|est|ly)?\b",
        "cost, estimate"),
    "leave": _word("leave totals", r"\bways? out\b", "epilogue, store", "leave"),  # leave: a scope, a loop
    "team": _word("team teams", r"\bteams?\b", "cluster"),
    "role": _word("role roles", r"(?<!warp )(?<!warp-)\broles?\b(?!-)", "warp role", "WSRole", "warp"),
    "execution": _word(
        "executions",
        r"\bexecutions\b|\b(an|each|every|other|another|any|four|three) execution\b(?! backend)",
        "backend"),
    "meaning": _word("meaning meanings", r"\b(tile|device) meanings?\b|\bmeanings\b", "reference interpreter"),
    "told": _word("told", r"\b(is|are|was|were) told\b", "diagnosed, reported"),
    "refuse": _word(
        "refuse refused refuses refusal refusals",
        r"\brefus(e|es|ed|al|als|ing)\b",
        "unsupported, rejected, diagnosed"),
    "give way": _word("", r"\bgiv(e|es|en|ing) way\b", "fall back, yield"),
    "step tiles": _word("", r"\bstep[_ ]tiles\b", "scale prefetch"),
    "dependent launch": _word("", r"\bdependent_launch\b", "PDL"),
    "stagger": _word("stagger staggers staggered", r"\bstagger(s|ed|ing)?\b", "ping-pong barriers"),
    "scaling": _word("", r"\b(early|lazy)_scaling\b", "early rescaling, lazy rescaling"),
}

_PHRASES = {
    "own_registers": "own registers", "whole_registers": "own registers", "give_way": "give way", "step_tiles": "step tiles",
    "dependent_launch": "dependent launch", "moved_tile": "turned", "early_scaling": "scaling", "lazy_scaling": "scaling",
}


def in_name(name: str) -> Iterator[str]:
    """Words of the table that this identifier or file name contains."""
    spelled = "_".join(t.lower() for t in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+|[A-Z]", name))
    tokens = spelled.split("_")
    for key, word in WORDS.items():
        meant = any(t in word.name and (i == 0 or tokens[i - 1] != word.after) for i, t in enumerate(tokens))
        if meant and name.strip("_") not in word.keep:
            yield key
    for phrase, key in _PHRASES.items():
        if phrase in spelled:
            yield key


def in_prose(text: str) -> Iterator[tuple[str, str]]:
    """(word, the place) for each private use in a text."""
    for key, word in WORDS.items():
        for found in word.prose.finditer(text):
            yield key, text[max(0, found.start() - 30):found.end() + 30]


@functools.lru_cache(maxsize=1)
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a module; three functions ask for them in turn."""
    return list(ast.walk(tree))


def names_of(tree: ast.Module) -> Iterator[str]:
    """Names that a module defines: its variables, and all functions, parameters, classes and fields, nested ones too."""
    for node in nodes_of(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for s in node.body:
                if isinstance(s, (ast.Assign, ast.AnnAssign)):
                    targets = s.targets if isinstance(s, ast.Assign) else [s.target]
                    yield from (t.id for top in targets for t in ast.walk(top) if isinstance(t, ast.Name))


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Strings of a module that are prose: errors, reports, notes, descriptions.  Docstrings are not among them."""
    docs = {id(n.body[0].value) for n in nodes_of(tree)
            if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef)) and n.body and isinstance(n.body[0], ast.Expr)}
    inside: set[int] = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(v) for v in ast.walk(node) if v is not node}
            text = "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs and id(node) not in inside:
            text = node.value
        else:
            continue
        if text.strip().count(" ") >= 1 and (isinstance(node, ast.JoinedStr) or "\n" not in text.strip()):
            yield text


# Files whose docstrings and comments name the product of two numbers.
ARITHMETIC = ("arith/", "target/rounding.py", "target/wgmma.py", "language/generators.py", "codegen/cpu/mathlib.py",
              "library/agreement.py", "library/attention/kernels.py")


# Strings first, so that a # in one begins no comment.  The tokenizer finds the same in ten times the time.
_STRING_OR_COMMENT = re.compile(r"""\"{3}(?:[^\\]|\\.)*?\"{3}|'{3}(?:[^\\]|\\.)*?'{3}"""
                                r"""|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|(#[^\n]*)""", re.DOTALL)


def comments_of(source: str, tree: ast.AST) -> Iterator[str]:
    """Docstrings and comments of a module."""
    for node in nodes_of(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (doc := ast.get_docstring(node)):
            yield doc
    yield from filter(None, _STRING_OR_COMMENT.findall(source))


def files() -> list[str]:
    """Paths of the repository's files, found by walking: a copy without a repository has the same."""
    found = [p for p in ROOT.iterdir() if p.is_file()]
    for folder in (".ci", "benchmarks", "docs", "examples", "tests", "tilelang"):
        found += [p for p in (ROOT / folder).rglob("*") if p.is_file() and p.suffix != ".pyc"]
    return sorted(p.relative_to(ROOT).as_posix() for p in found)


def pages() -> list[Path]:
    """The documents that readers see."""
    return [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / n for n in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))]


def without_code(text: str) -> str:
    """Markdown without blocks of code, output and addresses."""
    return re.sub(r"^( *)```.*?^\1```$|\]\([^)\s]*\)", "", text, flags=re.MULTILINE | re.DOTALL)


def generated() -> dict[str, str]:
    """The reference pages that are made of docstrings."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "reference" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: text for name, text in module.pages_without_errors().items() if name.startswith("reference/")}


def prose_of_page(page: Path) -> str:
    """The text of a page without code, output and addresses; of the glossary without the list of the words themselves."""
    text = without_code(page.read_text(encoding="utf-8"))
    return text.split("## Words that are not used")[0] if page == GLOSSARY else text


def find() -> dict[tuple[str, str, str], list[str]]:
    """(kind, word, item) -> places.  Kinds: name, key (of a pass config), file, text, comment, reference, page."""
    out: dict[tuple[str, str, str], list[str]] = {}

    def add(kind: str, word: str, item: str, place: str) -> None:
        out.setdefault((kind, word, item), []).append(place)

    for path in sorted((ROOT / "tilelang").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        tree, where = ast.parse(source), str(path.relative_to(ROOT))
        for name in names_of(tree):
            for word in in_name(name):
                add("name", word, name, where)
        for text in texts_of(tree):
            for word, place in in_prose(" ".join(text.split())):
                add("text", word, " ".join(place.split()), where)
        for text in comments_of(source, tree):
            for word, place in in_prose(" ".join(text.split())):
                if word != "product" or not where.removeprefix("tilelang/").startswith(ARITHMETIC):
                    add("comment", word, " ".join(place.split()), where)
    for key in PassConfigKey:
        for word in in_name(key.value.split(".")[-1]):
            add("key", word, key.value, "PassConfigKey")
    for name in files():
        if not name.startswith(("benchmarks/results/", "tests/errors/programs/")):
            stem = Path(name).stem
            prose = (word for word, _ in in_prose(stem.replace("-", " ")))  # a page's name is its title
            for word in prose if name.endswith(".md") else in_name(stem.replace("-", "_")):
                add("file", word, Path(name).name, name)
    for name, text in generated().items():
        for word, place in in_prose(" ".join(without_code(text).split())):
            add("reference", word, " ".join(place.split()), name)
    for page in pages():
        where = str(page.relative_to(ROOT))
        for word, place in in_prose(" ".join(prose_of_page(page).split())):
            add("page", word, where, place)
    return out


if __name__ == "__main__":
    for (kind, word, item), places in sorted(find().items()):
        print(kind, word, item, *places[:4], sep="\t")
