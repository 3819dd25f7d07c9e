"""Programs of these tests, as IR; and until every op has its effects, the ones these tests need."""

import pytest

from tilelang import ops
from tilelang.ops import Access
from tilelang.transform.framework.pass_ import PassContext

_DOUBLES = {
    ops.Copy: lambda s: (Access(s.src, "read"), Access(s.dst, "write")),
    ops.Fill: lambda s: (Access(s.dst, "write"),),
    ops.Gemm: lambda s: (Access(s.a, "read"), Access(s.b, "read"), Access(s.c, "readwrite")),
    ops.Reduce: lambda s: (Access(s.src, "read"), Access(s.dst, "write" if s.clear else "readwrite")),
    ops.AtomicTile: lambda s: (Access(s.dst, "atomic"),),
}
for _op, _fn in _DOUBLES.items():
    if not hasattr(_op, "accesses"):
        _op.accesses = _fn


@pytest.fixture
def cx():
    return PassContext(verify=True)
