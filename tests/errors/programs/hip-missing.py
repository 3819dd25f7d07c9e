from unittest import mock

from tilelang.runtime import hip_driver

with mock.patch.object(hip_driver, "load_rocm", lambda: None):
    hip_driver.HipDriver()
