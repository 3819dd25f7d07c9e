"""In the manner of linear-attention libraries: retention, state space models, the gated delta rule."""

from . import delta_rule, retention, state_space

PROGRAMS = [
    *retention.PROGRAMS,
    *state_space.PROGRAMS,
    *delta_rule.PROGRAMS,
]
