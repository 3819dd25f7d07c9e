"""Names of a program with postponed annotations are those of the functions it stands in, whoever calls them."""

from postponed_factory import make


def shapes(program):
    return [tuple(int(n) for n in b.shape) for _, b in program.func.buffers]


def test_locals_of_a_caller_mean_nothing_in_the_program():
    def caller():
        T, SIZE, n = "the caller's", 99, 77
        return make(8, "float32"), T, SIZE, n

    assert shapes(caller()[0]) == [(8,), (4,)]
    assert shapes(make(3, "int32")) == [(3,), (4,)]
    assert shapes(caller()[0]) == [(8,), (4,)]
