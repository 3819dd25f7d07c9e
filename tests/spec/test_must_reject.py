"""What the specification says must be refused: the class of the exception and the words users match, on every target."""

import pytest
from everywhere import SM80, SM90A

import tilelang.language as T
from tilelang.target import Target
from tilelang.transform.pipeline import lower

ROWS = []


def refused(row, exception, words, kind):
    """Add `body(X, S, F)`: statements of a kernel over X (8, 8), shared S (8, 8) and a fragment F (8, 8), float32."""
    def add(body):
        ROWS.append(pytest.param(T.macro(body), exception, words, kind, id=f"{row}-{len(ROWS)}"))
        return body

    return add


@T.macro
def bump(x: T.Ref):
    x = x + 1


REFERENCE = ValueError, "To pass as reference, argument `x` is expected to be a variable or a buffer region", "macro-reference"


@refused("2.4-reference", *REFERENCE)
def _(X, S, F):
    bump(3)


@refused("2.4-reference", *REFERENCE)
def _(X, S, F):
    bump(X[0, 0] + 1)


@refused("2.4-reference", *REFERENCE)
def _(X, S, F):
    bump(T.bind(X[0, 0]))


@refused("2.4-reference", *REFERENCE)
def _(X, S, F):
    bump(X)


@refused("4.1-lanes", TypeError, "Cannot match type float32x4 vs float32x2", "type")
def _(X, S, F):
    T.evaluate(T.Broadcast(T.float32(1), 4) + T.Broadcast(T.float32(1), 2))


@refused("4.3-cast-options", ValueError, "Invalid round", "cast-option")
def _(X, S, F):
    X[0, 0] = T.cast(X[0, 1], "float16", round="up")


@refused("4.3-cast-options", ValueError, "sat", "cast-option")
def _(X, S, F):
    X[0, 0] = T.cast(X[0, 1], "float16", sat=1)


@refused("4.3-cast-options", ValueError, "rbits", "cast-option")
def _(X, S, F):
    X[0, 0] = T.cast(X[0, 1], "float16", rbits=T.uint32(1))


@refused("4.3-select", TypeError, "mismatched types", "select-types")
def _(X, S, F):
    X[0, 0] = T.Select(X[0, 1] > 0, X[0, 1], T.int32(1))


@refused("9-element-rank", AssertionError, "Can't deduce copy extents", "copy-extents")
def _(X, S, F):
    U = T.alloc_shared((2, 8, 8), "float32")
    T.copy(X[0, 0], U)


@refused("9-whole-buffers", ValueError, "StructuralEqual check failed", "copy-shapes")
def _(X, S, F):
    U = T.alloc_shared((1, 8, 8), "float32")
    T.copy(X, U)


@refused("10-overlap", ValueError, "source and destination overlap in `S`", "copy-overlap")
def _(X, S, F):
    T.copy(S[0:4, 0:8], S[2:6, 0:8])


@refused("11-leading", AssertionError, "all but the last two must be 1", "gemm-rank")
def _(X, S, F):
    U = T.alloc_shared((2, 8, 8), "float32")
    T.gemm(U, S, F)


@refused("11-accumulator-scope", AssertionError, "local_buf must be a fragment", "gemm-accumulator")
def _(X, S, F):
    H, C = T.alloc_shared((16, 16), "float16"), T.alloc_shared((16, 16), "float32")
    T.gemm(H, H, C)


@refused("12-output-shape", ValueError, "Invalid reduce output shape, buffer shape is", "reduce-shape")
def _(X, S, F):
    R = T.alloc_fragment((4,), "float32")
    T.reduce_sum(F, R, dim=1)


@refused("12-batch", ValueError, "batch", "reduce-batch")
def _(X, S, F):
    R = T.alloc_fragment((8,), "float32")
    T.reduce_sum(F, R, dim=1, batch=0)


@refused("12-scan", ValueError, "Dimension 2 is out of bounds", "scan-dim")
def _(X, S, F):
    T.cumsum(S, dim=2)


@refused("12-scan", ValueError, "cumsum dst shape .* must match src shape", "scan-shape")
def _(X, S, F):
    U = T.alloc_shared((8, 4), "float32")
    T.cumsum(S, U, dim=1)


@refused("15-predicate", TypeError, "requires an integer or boolean predicate", "predicate-type")
def _(X, S, F):
    T.evaluate(T.any_sync(X[0, 0]))


@refused("18-fragment-layout", AssertionError, "must be a T.Fragment", "layout-fragment")
def _(X, S, F):
    T.annotate_layout({F: T.Layout((8, 8), lambda i, j: i * 8 + j)})


@refused("19-view-size", AssertionError, "T.reshape/view shape check failed", "view-size")
def _(X, S, F):
    T.reshape(S, (8, 9))


@refused("19-view-size", AssertionError, "T.reshape/view shape check failed", "view-size")
def _(X, S, F):
    T.view(S, dtype="float16")


@refused("10-async-copy-converts", ValueError, "T.async_copy moves bytes as they are", "copy-option")
def _(X, S, F):
    T.async_copy(X, T.alloc_shared((8, 8), "float16"))


@pytest.mark.spec("must:10-overlap", "must:11-accumulator-scope", "must:11-leading", "must:12-batch",
                  "must:12-output-shape", "must:12-scan", "must:15-predicate", "must:18-fragment-layout",
                  "must:19-view-size", "must:2.4-reference", "must:4.1-lanes", "must:4.3-cast-options",
                  "must:4.3-select", "must:9-element-rank", "must:9-whole-buffers")
@pytest.mark.parametrize("body,exception,words,kind", ROWS)
def test_a_statement_that_must_be_refused(body, exception, words, kind):
    for target in ("cpu", SM80, SM90A):
        with pytest.raises(exception, match=words) as e:
            @T.prim_func
            def f(X: T.Tensor((8, 8), "float32")):
                with T.Kernel(1, threads=32):
                    S = T.alloc_shared((8, 8), "float32")
                    F = T.alloc_fragment((8, 8), "float32")
                    body(X, S, F)

            lower(f.func, Target(target), {})
        assert e.value.kind == kind
