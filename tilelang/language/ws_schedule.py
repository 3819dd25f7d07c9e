"""Schedule objects for warp specialisation: warp roles, and the pipelines between them.

A schedule is only a hint.  This compiler chooses warp roles, rings and barriers itself
(transform/schedule/specialize_warps.py).  It checks a schedule and notes it in the launch's report; the results of the
kernel are those of its statements in program order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from tilelang.errors import facts, register
from tilelang.ir import SHARED, Buffer

from .annotations import entries
from .kernel import need_kernel
from .loops import WSID
from .tracing.builder import need_builder
from .tracing.state import describe, error, example

register("ws-schedule", AssertionError, "a warp-specialisation schedule whose parts do not fit together",
         "warp roles are ranges of the schedule's warps, operations and pipelines are named by what it holds",
         expected="warp roles of different warps, and operations and pipelines that name them")
register("ws-name", ValueError, "an operation or a part of a schedule needs a name", 'write with T.ws_op("load"):',
         expected="a text that is not empty")


def _named(name: Any, what: str) -> str:
    if not isinstance(name, str) or not name:
        raise error("ws-name", f"{what} is a text that is not empty, found {describe(name)}")
    return name


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise error("ws-schedule", message, found=message)


@dataclass(frozen=True)
class WSRole:
    """A warp role of warps warps_lo to warps_hi - 1.  max_nreg: registers per thread, 0: compiler's choice."""

    name: str
    warps_lo: int = field(kw_only=True)
    warps_hi: int = field(kw_only=True)
    max_nreg: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        _named(self.name, "the name of a warp role")
        _require(0 <= self.warps_lo < self.warps_hi,
                 f"warp role {self.name!r} has warps {self.warps_lo} up to {self.warps_hi}: none")
        _require(0 <= self.max_nreg <= 255, f"warp role {self.name!r} wants {self.max_nreg} registers a thread, more than 255")


@dataclass(frozen=True)
class WSPipeline:
    """A ring of buffers that a producer fills and consumers read, with `depth` stages of each buffer."""

    name: str
    buffers: tuple[Any, ...]
    depth: int

    def __init__(self, name: str, buffers: Any, depth: int) -> None:
        _named(name, "the name of a pipeline")
        held = (buffers,) if isinstance(buffers, (Buffer, str)) else tuple(buffers)
        _require(isinstance(depth, int) and depth >= 1, f"pipeline {name!r} has depth {depth!r}, at least 1 is needed")
        for attribute, value in (("name", name), ("buffers", held), ("depth", depth)):
            object.__setattr__(self, attribute, value)


class WSInstr:
    """Base class of the instructions of a warp role: WSOpRef and WSSync."""


@dataclass(frozen=True)
class WSOpRef(WSInstr):
    """A reference to the operation of the kernel that T.ws_op or annotations={T.WSID: …} named so."""

    id: str

    def __post_init__(self) -> None:
        _named(self.id, "the name of an operation")


class WSSyncKind(Enum):
    """The kinds of WSSync: waits and signals."""

    PRODUCER_ACQUIRE = "producer_acquire"
    PRODUCER_COMMIT = "producer_commit"
    CONSUMER_WAIT = "consumer_wait"
    CONSUMER_RELEASE = "consumer_release"


@dataclass(frozen=True)
class WSSync(WSInstr):
    """A step of the protocol of a pipeline.  pipeline: its name, or the WSPipeline.  stage: how many iterations ahead."""

    kind: WSSyncKind
    pipeline: Any
    stage: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", WSSyncKind(self.kind))
        _named(self.pipeline_name, "the name of a pipeline")

    @property
    def pipeline_name(self) -> str:
        return getattr(self.pipeline, "name", self.pipeline)

    @classmethod
    def producer_acquire(cls, pipeline: Any, stage: int = 0) -> WSSync:
        """Wait until the stage may be filled."""
        return cls(WSSyncKind.PRODUCER_ACQUIRE, pipeline, stage)

    @classmethod
    def producer_commit(cls, pipeline: Any, stage: int = 0) -> WSSync:
        """Signal that the stage is filled."""
        return cls(WSSyncKind.PRODUCER_COMMIT, pipeline, stage)

    @classmethod
    def consumer_wait(cls, pipeline: Any, stage: int = 0) -> WSSync:
        """Wait until the stage is filled."""
        return cls(WSSyncKind.CONSUMER_WAIT, pipeline, stage)

    @classmethod
    def consumer_release(cls, pipeline: Any, stage: int = 0) -> WSSync:
        """Release the stage: it may be filled again."""
        return cls(WSSyncKind.CONSUMER_RELEASE, pipeline, stage)


@dataclass(frozen=True)
class WSScope:
    """The instructions of each warp role in one scope of the kernel: WSScope.ROOT, or the operation (a loop) of that name.

    bodies: name of a warp role -> its instructions in order; a string means WSOpRef.
    """

    id: str
    bodies: Any = ()

    ROOT: ClassVar[str] = "root"

    def __post_init__(self) -> None:
        _named(self.id, "the name of a scope")
        items = self.bodies.items() if isinstance(self.bodies, Mapping) else self.bodies
        bodies = tuple((_named(role, "the name of a warp role"), tuple(map(_instruction, steps))) for role, steps in items)
        object.__setattr__(self, "bodies", bodies)


def _instruction(x: Any) -> WSInstr:
    if isinstance(x, WSInstr):
        return x
    if isinstance(x, str):
        return WSOpRef(x)
    raise facts(TypeError(f"an instruction of a warp role is a WSOpRef, a WSSync or a name, found {type(x).__name__}"),
                "a WSOpRef, a WSSync or a name", f"a {type(x).__name__}")


@dataclass(frozen=True)
class WSSchedule:
    """The warp roles of a block of num_warps warps (a multiple of 4), the pipelines between them, and their instructions.

    Raises AssertionError where these are inconsistent: warp roles that overlap or go beyond the warps, names used twice,
    bodies of warp roles or steps of pipelines that do not exist.
    """

    num_warps: int
    roles: tuple[WSRole, ...]
    pipelines: tuple[WSPipeline, ...]
    scopes: tuple[WSScope, ...]

    def __init__(self, num_warps: int, roles: Iterable[WSRole], pipelines: Iterable[WSPipeline] = (),
                 scopes: Iterable[WSScope] = ()) -> None:
        _require(isinstance(num_warps, int) and not isinstance(num_warps, bool) and num_warps > 0 and num_warps % 4 == 0,
                 f"num_warps must be a positive multiple of 4, found {num_warps!r}")
        parts: tuple[tuple[str, Sequence[Any], type], ...] = (
            ("roles", tuple(roles), WSRole), ("pipelines", tuple(pipelines), WSPipeline), ("scopes", tuple(scopes), WSScope))
        object.__setattr__(self, "num_warps", num_warps)
        for name, values, wanted in parts:
            for v in values:
                if not isinstance(v, wanted):
                    raise facts(TypeError(f"{name} holds {wanted.__name__} objects, found {type(v).__name__}"),
                                f"{wanted.__name__} objects", f"a {type(v).__name__}")
            keys = [v.id if wanted is WSScope else v.name for v in values]
            _require(len(set(keys)) == len(keys), f"{name} of a schedule have different names, found {keys}")
            object.__setattr__(self, name, values)
        self._check()

    def _check(self) -> None:
        owners: dict[int, str] = {}
        for r in self.roles:
            _require(r.warps_hi <= self.num_warps, f"warp role {r.name!r} has warps up to {r.warps_hi}, of {self.num_warps}")
            for w in range(r.warps_lo, r.warps_hi):
                _require(w not in owners, f"warp {w} has two warp roles: {owners.get(w)!r} and {r.name!r}")
                owners[w] = r.name
        known, held = {r.name for r in self.roles}, {p.name for p in self.pipelines}
        for s in self.scopes:
            for role, steps in s.bodies:
                _require(role in known, f"scope {s.id!r} has a body of warp role {role!r}, which is not there")
                for step in steps:
                    _require(not isinstance(step, WSSync) or step.pipeline_name in held,
                             f"scope {s.id!r} synchronises pipeline {getattr(step, 'pipeline_name', '')!r}, which is not there")


def annotate_ws_schedule(schedule: WSSchedule) -> None:
    """Annotate the enclosing kernel with a schedule, as a hint.

    The compiler checks it and notes it in the report, but chooses its own schedule.  Raises TypeError for anything but a
    WSSchedule.

    Example:
        load, multiply = T.WSRole("load", warps_lo=0, warps_hi=4), T.WSRole("multiply", warps_lo=4, warps_hi=8)
        T.annotate_ws_schedule(T.WSSchedule(8, [load, multiply]))
    """
    need_builder("T.annotate_ws_schedule")
    if not isinstance(schedule, WSSchedule):
        raise facts(TypeError(f"T.annotate_ws_schedule takes a WSSchedule, found {type(schedule).__name__}"),
                    "a WSSchedule", f"a {type(schedule).__name__}")
    roles = ", ".join(f"{r.name} {r.warps_lo}-{r.warps_hi - 1}" for r in schedule.roles)
    k = need_kernel("T.annotate_ws_schedule")
    k.set(report=(*k.plan.report, f"the annotated schedule of warp roles ({roles}): the compiler's own is used"))


@example("T.annotate_ws_pipeline_depth({A_s: 3, B_s: 2})")
def annotate_ws_pipeline_depth(depths: dict[Buffer, int]) -> None:
    """Annotate how many versions a schedule keeps of shared tiles that are overwritten in each iteration, as a hint.

    depths: {buffer in shared memory: versions, from 1}.  The compiler checks it and notes it in the report, but chooses the
    number itself.  Raises option-type for other things.
    """
    k, what = need_kernel("T.annotate_ws_pipeline_depth"), "T.annotate_ws_pipeline_depth"
    for buffer, depth in entries(depths, what):
        if not isinstance(buffer, Buffer) or buffer.scope_name not in SHARED or isinstance(depth, bool) or not isinstance(
                depth, int) or depth < 1:
            raise error("option-type", f"{what} takes numbers of versions of shared tiles, found {describe(buffer)}: {depth!r}",
                        f"write {what}({{A_s: 3}})", expected="shared tiles and integers from 1")
        k.set(report=(*k.plan.report, f"the annotated depth {depth} of `{buffer.name}`: the compiler's own is used"))


class ws_op:
    """`with T.ws_op("load"):` names the operations inside for a WSSchedule.

    Raises ValueError for a name that is empty or no text.
    """

    def __init__(self, id: str) -> None:
        need_builder("T.ws_op")
        self.id = _named(id, "the name of an operation")

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        return None


__all__ = ["WSID", "WSInstr", "WSOpRef", "WSPipeline", "WSRole", "WSSchedule", "WSScope", "WSSync", "WSSyncKind",
           "annotate_ws_pipeline_depth", "annotate_ws_schedule", "ws_op"]
