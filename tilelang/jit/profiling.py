"""Profiler: inputs for a kernel, its time, and comparison with a reference program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilelang.errors import error, register
from tilelang.runtime.signature import KernelParam
from tilelang.arith import simplify
from tilelang.ir import Var, as_dim, const, substitute, walk

from .artifact import INTERPRETED
from .compare import assert_results_close
from .supply import TensorSupplyType, get_tensor_supply
from .timing import do_bench

register("profiler-symbol", ValueError, "inputs are made and a symbolic dimension is given no value",
         expected="a value for every symbolic dimension")
register("profiler-supply", TypeError, "inputs are to be made in a way that is none", "write tilelang.TensorSupplyType.Auto",
         "a member of tilelang.TensorSupplyType")


class Profiler:
    """Runs and measures a kernel.

    params: KernelParams in signature order.  result_idx: positions of outputs.  supply_type: how inputs are made.
    adapter: the kernel, or a function of its inputs.
    """

    def __init__(self, params: list[KernelParam], result_idx: list[int],
                 supply_type: TensorSupplyType = TensorSupplyType.Auto, adapter: Any = None,
                 device: Any = None) -> None:
        n = len(params)
        self.params, self.result_idx = params, [i % n for i in (result_idx or [])]
        if not isinstance(supply_type, TensorSupplyType):
            raise error("profiler-supply", f"tensor_supply_type is a TensorSupplyType, found {supply_type!r}")
        self.supply_type, self.adapter, self.device = supply_type, adapter, device
        self.supply = get_tensor_supply(supply_type, device)

    def with_default_adapter(self, adapter: Any) -> Profiler:
        """This profiler with another kernel."""
        self.adapter = adapter
        return self

    @property
    def func(self) -> Any:
        return self.adapter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.adapter(*args, **kwargs)

    def _get_params(self, with_output: bool = False) -> list[KernelParam]:
        return [p for i, p in enumerate(self.params) if with_output or i not in self.result_idx]

    def _get_inputs(self, with_output: bool = False,
                    dynamic_symbolic_constraints: dict[str, int] | None = None) -> list[Any]:
        """Fresh inputs; dynamic_symbolic_constraints: symbol name -> extent."""
        return [self.supply(self._concrete(p, dynamic_symbolic_constraints)) for p in self._get_params(with_output)]

    def _concrete(self, p: KernelParam, values: dict[str, int] | None) -> KernelParam:
        if values is None or all(isinstance(d, int) for d in p.shape):
            return p
        shape: list[Any] = []
        for d in p.shape:
            if not isinstance(d, int):
                symbols = [v for v in walk(d) if isinstance(v, Var)]
                for v in symbols:
                    if v.name not in values:
                        raise error("profiler-symbol", f"Dynamic symbolic variable '{v.name}' not found in constraints: "
                                    f"‹{values}›", expected=f"a value for {v.name}",
                                    hint=f"add it: dynamic_symbolic_constraints={{\"{v.name}\": …}}")
                d = substitute(d, {v: const(int(values[v.name]), v.dtype) for v in symbols})
                d = as_dim(d if isinstance(d, int) else simplify(d))
            shape.append(d)
        return KernelParam(p.dtype, shape)

    def _inputs(self, input_tensors: Sequence[Any] | None, symbols: dict[str, int] | None = None) -> list[Any]:
        return list(input_tensors) if input_tensors is not None else self._get_inputs(False, symbols)

    def do_bench(self, func: Callable[..., Any] | None = None, warmup: float = 25, rep: float = 100, n_warmup: int = 0,
                 n_repeat: int = 0, input_tensors: Sequence[Any] | None = None, backend: str = "event",
                 quantiles: Sequence[float] | None = None, return_mode: str | None = None,
                 dynamic_symbolic_constraints: dict[str, int] | None = None, device: Any = None,
                 early_stop_baseline: float | None = None) -> Any:
        """Milliseconds of the kernel, or of func, on inputs made here or given.  Options: see tilelang.profiler.do_bench."""
        inputs = self._inputs(input_tensors, dynamic_symbolic_constraints)
        run = self._runs(func)
        return do_bench(lambda: run(*inputs), warmup, rep, n_warmup, n_repeat, quantiles, backend=backend,
                        return_mode=return_mode, device=device if device is not None else self.device or "cpu",
                        early_stop_baseline=early_stop_baseline)

    def run_once(self, func: Callable[..., Any] | None = None) -> Any:
        """Run the kernel, or func, on fresh inputs."""
        return self._runs(func)(*self._get_inputs())

    def _runs(self, func: Callable[..., Any] | None) -> Callable[..., Any]:
        run = func if func is not None else self.adapter
        if not callable(run):
            raise ValueError("this Profiler has no kernel: take it from kernel.get_profiler(), or call "
                             "with_default_adapter(kernel.adapter)")
        return run

    def _both(self, reference: Callable[..., Any], input_tensors: Sequence[Any] | None) -> tuple[list[Any], list[Any]]:
        inputs = self._inputs(input_tensors)
        wanted = as_list(reference(*inputs))
        return as_list(self._runs(None)(*inputs)), wanted

    def assert_allclose(self, reference_program: Callable[..., Any], input_tensors: Sequence[Any] | None = None,
                        atol: float = 1e-2, rtol: float = 1e-2, max_mismatched_ratio: float = 0.01) -> None:
        """Run both on the same inputs and compare every output.  Raises AssertionError."""
        assert_results_close(*self._both(reference_program, input_tensors), rtol, atol, max_mismatched_ratio)

    def manual_assert_close(self, reference_program: Callable[..., Any], input_tensors: Sequence[Any] | None = None,
                            manual_check_prog: Callable[..., Any] | None = None) -> None:
        """Run both on the same inputs and pass the two lists of outputs to manual_check_prog."""
        got, wanted = self._both(reference_program, input_tensors)
        if manual_check_prog is None:
            raise ValueError("manual_assert_close needs manual_check_prog(outputs, reference_outputs)")
        manual_check_prog(got, wanted)

    def assert_consistent(self, repeat: int = 10) -> None:
        """Run the kernel repeatedly on the same inputs.  Raises AssertionError when results differ."""
        inputs = self._get_inputs()
        first = [t.clone() if hasattr(t, "clone") else t.copy() for t in as_list(self.adapter(*inputs))]
        for _ in range(repeat):
            for a, b in zip(first, as_list(self.adapter(*inputs))):
                assert bool((a == b).all()), "two runs on the same inputs gave different results"


def as_list(x: Any) -> list[Any]:
    """The results of a call as a list: none, one or several."""
    return [] if x is None else list(x) if isinstance(x, (list, tuple)) else [x]


def device_of(kernel: Any) -> str | None:
    """torch's device of a kernel's tensors: "cuda" for every GPU, None for the CPU.

    Raises cuda-missing, hip-missing, cuda-driver or hip-driver where the GPU that the kernel needs is not here.
    """
    if not kernel.target.is_gpu or kernel.execution_backend in INTERPRETED:
        return None
    from tilelang.runtime.hip_driver import driver_of  # 3 ms

    driver_of(kernel.target.kind).device_count()
    return "cuda"


def make_profiler(kernel: Any, supply_type: TensorSupplyType | None = None) -> Profiler:
    """The Profiler of a kernel: inputs on its device."""
    return Profiler(kernel.params, kernel.out_idx, supply_type or TensorSupplyType.Auto, kernel, device_of(kernel))
