"""Records: dataclasses that are cheap to define."""

from dataclasses import field, replace

import pytest

from tilelang.ir.record import record


@record
class Point:
    """x, y: where.  note: not part of the value."""

    x: int
    y: int = 2
    note: list[str] = field(default_factory=list, compare=False, repr=False)


@record
class Other:
    x: int
    y: int = 2

    def __hash__(self) -> int:
        return 7


@record
class Empty:
    pass


def test_records_are_equal_by_value_and_class():
    assert Point(1) == Point(1, 2, ["a"]) != Point(1, 3)
    assert Point(1) != Other(1) and Empty() == Empty() != 3
    assert hash(Point(1)) == hash(Point(1, note=["b"])) and len({Point(1), Point(1, 2), Point(2)}) == 2
    assert hash(Other(1)) == 7 and hash(Empty()) == hash(Empty())


def test_records_are_dataclasses():
    assert replace(Point(1), y=5) == Point(1, 5) and repr(Point(1)) == "Point(x=1, y=2)"
    match Point(3, 4):
        case Point(x, y):
            assert (x, y) == (3, 4)
    with pytest.raises(TypeError, match="missing 1 required"):
        Point()
