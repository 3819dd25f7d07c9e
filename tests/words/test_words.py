"""Names, texts, docstrings, comments, file names and documents use the terms of docs/internals/glossary.md."""

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import words


def test_old_words_stand_where_they_are_kept_and_nowhere_else():
    found = words.find()
    new = {key: places[:5] for key, places in found.items() if key not in words.KEPT}
    assert not new, "write the glossary's term instead (docs/internals/glossary.md):\n" + "\n".join(
        f"{kind} {item!r}: `{word}`, say {words.WORDS[word].use}: {where}" for (kind, word, item), where in sorted(new.items()))
    assert not words.KEPT.keys() - found.keys()


@pytest.mark.parametrize("name, word", [
    ("split_products", "product"), ("RoleLoop", "role"), ("two_parts", "part"), ("deal_tiles", "share"),
    ("panel_layout", "panel"), ("early_scaling", "scaling"),
    ("CodedTile", "coded"), ("whole_registers", "own registers"), ("make_team", "team"),
])
def test_an_old_word_in_a_name_is_found(name, word):
    assert word in set(words.in_name(name))


@pytest.mark.parametrize("name", [
    "reduce_sum", "warp_role", "WarpRole", "alloc_shared", "round", "partition", "apartment", "returned", "participants",
    "particles", "background", "cumsum", "sharding", "warp_roles_of", "rasterisation_panel",
])
def test_an_ordinary_name_is_not(name):
    assert not list(words.in_name(name))


@pytest.mark.parametrize("text, word", [
    ("each product is waited for where it stands", "product"), ("tiles dealt out forth and back", "share"),
    ("warp groups take turns", "turn"), ("tiles of more than one round", "round"),
    ("written by all threads, from panels", "panel"),
    ("blocks share a multiprocessor", "multiprocessor"), ("a role of warp groups", "role"), ("a lower price", "price"),
    ("regions that lie apart", "apart"), ("int8 is refused here", "refuse"), ("the other executions", "execution"),
])
def test_an_old_word_in_prose_is_found(text, word):
    assert word in {w for w, _ in words.in_prose(text)}


@pytest.mark.parametrize("text", [
    "the dot product of two rows", "the product of the sizes to its right", "shared memory", "the sum of a row",
    "rounds to nearest", "part of the page", "warp roles and warp specialisation", "apart from this",
    "blocks share what they load", "it turns off TMA", "the rasterisation panel",
    "an execution backend", "hard-coded", "in turn", "means",
])
def test_ordinary_english_is_not(text):
    assert not list(words.in_prose(text))


def test_docstrings_are_no_texts_and_errors_are():
    tree = ast.parse('def f(x):\n    """A product of two tiles."""\n    raise error("k", f"a product of {x}")\n')
    assert list(words.texts_of(tree)) == ["a product of {}"]
    assert list(words.names_of(tree)) == ["f", "x"]


def test_docstrings_and_comments_are_read():
    source = 'def f():\n    """A product of two tiles."""\n    return 1  # takes turns\n'
    assert list(words.comments_of(source, ast.parse(source))) == ["A product of two tiles.", "# takes turns"]


def test_names_inside_functions_and_classes_are_read():
    tree = ast.parse("""
LIMIT: int = 1
class Box:
    rows: int
    sizes = ()
    def __init__(self, width):
        self.width, self._depth = width, 1
    def cut(self, *at, **more):
        local = 1
        def inner(lane):
            return lambda place: place
""")
    assert set(words.names_of(tree)) == {"LIMIT", "Box", "rows", "sizes", "__init__", "self", "width", "_depth", "cut", "at",
                                         "more", "inner", "lane", "place"}
