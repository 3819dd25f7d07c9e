"""Different values and pairs of integer arrays, as np.unique tells them; and why it is not np.unique."""

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tilelang.layout.distinct import distinct, distinct_pairs, meets_several

few = st.integers(-3, 3) | st.integers(-2**62, 2**62)


@given(st.lists(few, max_size=40))
def test_values_as_numpy_has_them(values):
    x = np.array(values, np.int64)
    assert np.array_equal(distinct(x), np.unique(x)) and np.array_equal(distinct(x.reshape(-1, 1)), np.unique(x))


@given(st.lists(st.tuples(few, few), max_size=40))
def test_pairs_as_a_set_has_them(pairs):
    a, b = (np.array([p[k] for p in pairs], np.int64) for k in (0, 1))
    assert list(zip(*(x.tolist() for x in distinct_pairs(a, b)))) == sorted(set(pairs))
    assert meets_several(a, b) == (len(set(pairs)) > len({p[0] for p in pairs}))


def test_compiling_attention_loads_no_masked_arrays():
    program = """if True:
        import sys
        import numpy
        from tilelang.library.attention.form import AttentionForm, Tile
        from tilelang.library.attention.kernels import dense_attention
        from tilelang.library.attention.problem import Mask, Sizes
        from tilelang.target import Target
        from tilelang.transform.pipeline import lower
        laid = (256 * 128, 128, 64, 1)
        program = dense_attention(AttentionForm(Sizes(1, 256, 256, 2, 2, 64, 64), (laid,) * 4, "bshd", "float16",
                                                Mask(right=0), Tile(128, 128, 2, 384), False))
        before = "numpy.ma" in sys.modules
        lower(program.func, Target({"kind": "cuda", "arch": "sm_90a"}), {})
        print(before, "numpy.ma" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "False"], done.stdout + done.stderr
