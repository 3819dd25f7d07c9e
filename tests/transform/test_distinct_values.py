"""Different values without numpy.ma."""

import numpy as np
import pytest

from tilelang.transform.verify_sync.values import distinct


@pytest.mark.parametrize("shape", ((0,), (1,), (3, 0), (7,), (4, 5)))
def test_the_different_values_of_an_array_in_order(shape):
    rng = np.random.default_rng(len(shape))
    for low, high in ((0, 1), (-3, 3), (-100, 100)):
        values = rng.integers(low, high, shape)
        assert np.array_equal(distinct(values), np.unique(values))
