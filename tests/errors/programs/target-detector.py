from tilelang.backend.target import register_target_detector

register_target_detector("cuda", lambda: "cpu")
