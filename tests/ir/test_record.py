"""Records: dataclasses that are cheap to define."""

import inspect
from dataclasses import FrozenInstanceError, field, replace
from typing import ClassVar

import pytest

from tilelang.ir import Buffer, Const, Load, dtype
from tilelang.ir.record import entity, record, state, with_init


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


@record
class Late:
    x: int
    made: list[int] = field(default_factory=list)
    COUNT: ClassVar[int] = 3

    def __post_init__(self) -> None:
        self.made.append(self.x)


@with_init
class Changing:
    """A dataclass of which only `__init__` is made."""

    field1: int
    field0: int = 7


def test_factories_and_what_comes_after():
    assert Late(1).made == [1] and Late(2).made == [2] and Late(x=3, made=[0]).made == [0, 3]
    assert str(inspect.signature(Late)) == "(x: int, made: list[int] = <factory>) -> None"
    with pytest.raises(TypeError, match=r"Late.__init__\(\) missing 1 required positional argument: 'x'"):
        Late()
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        Late(1, z=2)


def test_names_of_the_shared_code_are_no_names_of_fields():
    c = Changing(5)
    c.field0 += 1
    assert (c.field1, c.field0) == (5, 8) and Changing(field0=1, field1=2).field1 == 2


def test_nodes_refuse_assignments():
    n = Load(Buffer("A", (4,), dtype("float32")), (Const(1, dtype("int32")),), dtype("float32"))
    for change in (lambda: setattr(n, "buffer", None), lambda: setattr(n, "other", None), lambda: delattr(n, "buffer")):
        with pytest.raises(FrozenInstanceError):
            change()
    assert replace(n, indices=()).indices == () and replace(n) == n


@pytest.mark.parametrize("fields", ({"x": field(init=False)}, {"x": field(kw_only=True)}, {"x": 1, "y": field()}))
def test_fields_that_are_not_given_in_order_are_refused(fields):
    with pytest.raises(TypeError, match="are given in order|non-default argument 'y' follows"):
        record(type("Bad", (), {"__annotations__": dict.fromkeys(fields, "int"), **fields}))


@state
class Counter:
    n: int
    seen: list[int] = field(default_factory=list)


@entity
class Place:
    n: int


def test_states_are_equal_by_value_and_entities_to_themselves():
    a, b = Counter(1), Counter(1)
    assert a == b and repr(a) == "Counter(n=1, seen=[])"
    a.n += 1
    assert a != b
    with pytest.raises(TypeError, match="unhashable"):
        hash(a)
    p = Place(1)
    assert p != Place(1) and p == p and len({p, Place(1)}) == 2 and repr(p) == "Place(n=1)" and replace(p, n=2).n == 2
