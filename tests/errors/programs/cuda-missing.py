from unittest import mock

from tilelang.runtime import cuda_driver

with mock.patch.object(cuda_driver, "load_libcuda", lambda: None):
    cuda_driver.Driver()
