from tilelang.backend.target import register_target_detector, unregister_target_detector
from tilelang.target import Target

register_target_detector("mine", lambda: "auto", priority=100)
try:
    Target("auto")
finally:
    unregister_target_detector("mine")
