"""Every place that builds an error says what was expected, what was found and what to do, or its kind does."""

import ast
import pathlib

import pytest
from test_errors import all_kinds

import tilelang
from tilelang.errors import KINDS, error, register

PACKAGE = pathlib.Path(tilelang.__file__).parent
BUILDERS = {"error", "fault", "refuse"}  # errors.error and the functions that call it with a place of their own
LOGGERS = {"logger", "log"}


def calls():
    """(place, call) of every call that builds an error of a kind."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not any(f"{name}(" in text for name in BUILDERS):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            f = node.func
            name = f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "")
            of = f.value.id if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name) else ""
            kind = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
            if name in BUILDERS and of not in LOGGERS and kind in KINDS:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", kind, node


def test_every_place_says_what_was_expected_and_found_and_what_to_do():
    all_kinds()  # registers them
    silent, count = [], 0
    for place, kind, node in calls():
        given = {k.arg for k in node.keywords}
        hints = "hint" in given or len(node.args) > (3 if ".error" in ast.unparse(node.func) else 2)  # language.state.error
        message = ast.unparse(node.args[1]) if len(node.args) > 1 else ""
        said = {"expected": "expected" in given or "«" in message, "hint": hints,
                "found": "found" in given or any(mark in message for mark in ("‹", ", found ", ", got "))}
        silent += [f"{place} {kind}: {what}" for what, here in said.items() if not here and not getattr(KINDS[kind], what)]
        count += 1
    assert not silent, "\n".join(silent)
    assert count > 550


def test_an_error_without_what_was_found_is_refused():
    register("test-silent", ValueError, "for this test", "do it", expected="something")
    assert error("test-silent", "it is so", found="").found == "nothing"
    with pytest.raises(TypeError, match="what was found"):
        error("test-silent", "it is so")


def test_what_was_found_is_taken_from_the_end_of_the_message():
    register("test-found", ValueError, "for this test", "do it", expected="an even number")
    assert error("test-found", "a number is even, found 3").found == "3"
    assert error("test-found", "a number is even, found 3", found="an odd one").found == "an odd one"


def test_expected_and_found_are_marked_in_the_message():
    register("test-marks", ValueError, "for this test", "do it")
    made = error("test-marks", "T.f takes «an even number» of threads, not ‹3›: write T.g for «others»")
    assert (made.expected, made.found) == ("an even number", "3")
    assert made.message == "T.f takes an even number of threads, not 3: write T.g for «others»"
