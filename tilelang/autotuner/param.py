"""Settings and results of the autotuner."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilelang.errors import error, register
from tilelang.ir import parse, to_text
from tilelang.jit import JITKernel, compile
from tilelang.jit.supply import TensorSupplyType

register("tune-result", ValueError, "a folder does not hold a tuning result",
         expected="a folder written by AutotuneResult.save_to_disk")

BEST_CONFIG_PATH = "best_config.json"
FUNCTION_PATH = "function.pkl"
OUT_IDX_PATH = "out_idx.json"
LATENCY_PATH = "latency.json"
DEVICE_KERNEL_PATH = "device_kernel.cu"
HOST_KERNEL_PATH = "host_kernel.cu"
EXECUTABLE_PATH = "executable.so"
KERNEL_LIB_PATH = "kernel_lib.so"
KERNEL_CUBIN_PATH = "kernel.cubin"
KERNEL_PY_PATH = "kernel.py"
PARAMS_PATH = "params.pkl"


@dataclass(frozen=True)
class CompileArgs:
    """How candidates are compiled."""

    out_idx: Any = None
    execution_backend: str | None = None
    target: Any = None
    target_host: Any = None
    verbose: bool | None = None
    pass_configs: Any = None

    def compile_program(self, program: Any) -> JITKernel:
        """Compile a PrimFunc with these settings."""
        return compile(program, self.out_idx, self.execution_backend, self.target, self.target_host, self.verbose,
                       self.pass_configs)

    def __hash__(self) -> int:
        return hash(self.text())

    def text(self) -> str:
        """The settings as text, for keys."""
        return json.dumps([self.out_idx, self.execution_backend, str(self.target), self.pass_configs], default=str)


@dataclass(frozen=True)
class ProfileArgs:
    """How candidates are measured and checked.  warmup, rep: most runs.  timeout: seconds a step of a candidate may take.
    cache_input_tensors: accepted; candidates whose parameters have equal types and shapes always share their inputs."""

    warmup: int = 25
    rep: int = 100
    timeout: float = 30
    supply_type: TensorSupplyType = TensorSupplyType.Auto
    ref_prog: Callable[..., Any] | None = None
    supply_prog: Callable[..., Any] | None = None
    rtol: float = 1e-2
    atol: float = 1e-2
    max_mismatched_ratio: float = 0.01
    skip_check: bool = False
    manual_check_prog: Callable[..., Any] | None = None
    cache_input_tensors: bool = False
    backend: str = "event"

    @property
    def is_cacheable(self) -> bool:
        """Whether a result may be kept on disk: the settings contain no function of the caller."""
        return self.ref_prog is None and self.supply_prog is None and self.manual_check_prog is None

    def text(self) -> str:
        """The settings as text, for keys."""
        return json.dumps([self.warmup, self.rep, self.supply_type.name, self.rtol, self.atol,
                           self.max_mismatched_ratio, self.skip_check, self.backend])


@dataclass
class AutotuneResult:
    """latency, ref_latency: ms.  config: the best one.  func: its program.  kernel: compiled.  libcode: its source."""

    latency: float | None = None
    config: dict[str, Any] | None = None
    ref_latency: float | None = None
    libcode: str | None = None
    func: Any = None
    kernel: JITKernel | None = None
    failures: dict[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Any]:
        """latency, config, ref_latency: `best_latency, best_config, ref_latency = result`."""
        return iter((self.latency, self.config, self.ref_latency))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the best kernel."""
        assert self.kernel is not None
        return self.kernel(*args, **kwargs)

    def save_to_disk(self, path: Any, verbose: bool = False) -> None:
        """Write configuration, latency and source as JSON and text."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / BEST_CONFIG_PATH).write_text(json.dumps(self.config), encoding="utf-8")
        times = {"latency": self.latency, "ref_latency": self.ref_latency}
        (folder / LATENCY_PATH).write_text(json.dumps(times), encoding="utf-8")
        if self.kernel is not None:
            (folder / DEVICE_KERNEL_PATH).write_text(self.kernel.get_kernel_source(), encoding="utf-8")
            (folder / HOST_KERNEL_PATH).write_text(self.kernel.get_host_source(), encoding="utf-8")
            (folder / OUT_IDX_PATH).write_text(json.dumps(self.kernel.out_idx), encoding="utf-8")
        if self.func is not None:
            (folder / KERNEL_PY_PATH).write_text(to_text(getattr(self.func, "func", self.func)), encoding="utf-8")
        if verbose:
            print(f"saved the tuning result to {folder}")

    @classmethod
    def load_from_disk(cls, path: Any, compile_args: CompileArgs) -> AutotuneResult:
        """Read configuration and latency back; the program is compiled again from its text.

        Raises ValueError when the folder does not hold a result.
        """
        folder = Path(path)
        try:
            config = json.loads((folder / BEST_CONFIG_PATH).read_text(encoding="utf-8"))
            times = json.loads((folder / LATENCY_PATH).read_text(encoding="utf-8"))
            text = (folder / KERNEL_PY_PATH).read_text(encoding="utf-8")
        except (OSError, ValueError) as e:
            raise error("tune-result", f"{folder} holds no tuning result: ‹{e}›",
                        hint="give a folder written by AutotuneResult.save_to_disk") from None
        program = parse(text)
        kernel = compile_args.compile_program(program)
        return cls(times["latency"], config, times["ref_latency"], kernel.get_kernel_source(), program, kernel)
