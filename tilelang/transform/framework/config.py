"""Pass configs: every key that a user may set, with its type, its default and a description."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from enum import Enum
from typing import Any

from tilelang.errors import error, register, register_warning, warn
from tilelang.ir.record import record
from tilelang.target.cluster import PORTABLE

register("config-key", AttributeError, "a pass config that does not exist", expected="a member of tilelang.PassConfigKey")
register("config-type", TypeError, "a pass config with a value of another type", "leave it out for its default")
register_warning("config-no-effect", "a pass config is set that has no effect in this compiler")
register("config-value", ValueError, "a pass config with a value outside of its choices", "leave it out for its default")


class PassConfigKey(str, Enum):
    """Names of pass configs. A member can be used wherever its string can: `{PassConfigKey.TL_ENABLE_FAST_MATH: True}`."""

    TL_DISABLE_WARP_SPECIALIZED = "tl.disable_warp_specialized"
    TL_DISABLE_TMA_LOWER = "tl.disable_tma_lower"
    TL_ENABLE_FAST_MATH = "tl.enable_fast_math"
    TL_DISABLE_FAST_MATH = "tl.disable_fast_math"
    TL_ENABLE_PTXAS_VERBOSE_OUTPUT = "tl.enable_ptxas_verbose_output"
    TL_DISABLE_THREAD_STORAGE_SYNC = "tl.disable_thread_storage_sync"
    TL_PTXAS_REGISTER_USAGE_LEVEL = "tl.ptxas_register_usage_level"
    TL_DEVICE_COMPILE_FLAGS = "tl.device_compile_flags"
    TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE = "tl.enable_aggressive_shared_memory_merge"
    TL_ENABLE_ASYNC_COPY = "tl.enable_async_copy"
    TL_DISABLE_WGMMA = "tl.disable_wgmma"
    TL_ENABLE_HOPPER = "tl.enable_hopper"
    TL_PERSISTENT = "tl.persistent"
    TL_CLUSTER = "tl.cluster"
    TL_ENABLE_PDL = "tl.enable_pdl"
    TL_SCALE_PREFETCH = "tl.scale_prefetch"
    TL_PING_PONG = "tl.ping_pong"
    TL_EXTRA_STAGES = "tl.extra_stages"
    TL_WGMMA_IN_FLIGHT = "tl.wgmma_in_flight"
    TL_SHORTEN_ROUNDED = "tl.shorten_rounded"
    TL_GLOBAL_ALIGNMENT = "tl.global_alignment"
    TL_ASSUME_ALIGNED_STRIDES = "tl.assume_aligned_strides"
    TL_ENABLE_AUTO_SCHEDULE = "tl.enable_auto_schedule"
    TL_ENABLE_AUTO_WARP_SPECIALIZATION = "tl.enable_auto_warp_specialization"
    TL_ENABLE_FP32X2_REDUCTION = "tl.enable_fp32x2_reduction"
    TL_DISABLE_SAFE_MEMORY_ACCESS = "tl.disable_safe_memory_legalize"
    TL_DISABLE_OUT_OF_BOUND_WARNING = "tl.disable_out_of_bound_warning"
    TL_DISABLE_VECTORIZE_256 = "tl.disable_vectorize_256"
    TL_ENABLE_LOWER_LDGSTG = "tl.enable_lower_ldgstg"
    TL_ENABLE_LOWER_LDGSTG_PREDICATED = "tl.enable_lower_ldgstg_predicated"
    TL_ENABLE_VECTORIZE_PLANNER_VERBOSE = "tl.enable_vectorize_planner_verbose"
    TL_DISABLE_SHARED_MEMORY_REUSE = "tl.disable_shared_memory_reuse"
    TL_DEBUG_MERGE_SHARED_MEMORY_ALLOCATIONS = "tl.debug_merge_shared_memory_allocations"
    TL_DISABLE_DATA_RACE_CHECK = "tl.disable_data_race_check"
    TL_STRICT = "tl.strict"
    TL_DISABLE_BUFFER_INIT_CHECK = "tl.disable_buffer_init_check"
    TL_DISABLE_PRELOWER_SEMANTIC_CHECK = "tl.disable_prelower_semantic_check"
    TL_SIMPLIFY = "tl.Simplify"
    TL_SIMPLIFY_TRANSITIVELY_PROVE_INEQUALITIES = "transitively_prove_inequalities"
    TL_SIMPLIFY_CONVERT_BOOLEAN_TO_AND_OF_ORS = "convert_boolean_to_and_of_ors"
    TL_SIMPLIFY_APPLY_CONSTRAINTS_TO_BOOLEAN_BRANCHES = "apply_constraints_to_boolean_branches"
    TL_SIMPLIFY_PROPAGATE_KNOWNS_TO_PROVE_CONDITIONAL = "propagate_knowns_to_prove_conditional"
    TL_SIMPLIFY_PROPAGATE_KNOWNS_TO_SIMPLIFY_EXPRESSIONS = "propagate_knowns_to_simplify_expressions"
    TL_SIMPLIFY_ENABLE_LET_INLINE = "enable_simplify_let_inline"
    TL_CONFIG_INDEX_BITWIDTH = "tl.config_index_bitwidth"
    TL_ENABLE_REDUCER_PLAN_VERBOSE = "tl.enable_reducer_plan_verbose"
    TL_REDUCER_FORCE_BASELINE = "tl.reducer_force_baseline"
    TL_LAYOUT_COST_MODEL = "tl.layout_cost_model"
    TL_DISABLE_SHUFFLE_ELECT = "tl.disable_shuffle_elect"
    TL_DISABLE_LOOP_UNSWITCHING = "tl.disable_loop_unswitching"
    TL_LOOP_UNSWITCHING_ALLOW_NON_TRIVIAL_ELSE = "tl.loop_unswitching_allow_non_trivial_else"
    TL_IF_STMT_BINDING_INLINE_REPLAYABLE_BINDS = "tl.if_stmt_binding_inline_replayable_binds"
    TL_FORCE_LET_INLINE = "tl.force_let_inline"
    TL_STORAGE_REWRITE_DETECT_INPLACE = "tl.storage_rewrite_detect_inplace"
    TL_AST_PRINT_ENABLE = "tl.ast_print_enable"
    TL_LAYOUT_VISUALIZATION_ENABLE = "tl.layout_visualization_enable"
    TL_LAYOUT_VISUALIZATION_FORMATS = "tl.layout_visualization_formats"
    TL_EMIT_LINE_DIRECTIVES = "tl.emit_line_directives"
    TL_ENABLE_DUMP_IR = "tl.enable_dump_ir"
    TL_DUMP_IR_DIR = "tl.dump_ir_path"
    TL_PASS_PROFILE = "tl.pass_profile"
    TL_PASS_PROFILE_THRESHOLD_MS = "tl.pass_profile_threshold_ms"
    CUDA_KERNELS_OUTPUT_DIR = "cuda.kernels_output_dir"
    TIR_ENABLE_EQUIV_TERMS_IN_CSE = "tir.enable_equiv_terms_in_cse_tir"
    TIR_DISABLE_CSE = "tirx.disable_cse_tir"
    TIR_SIMPLIFY = "tirx.Simplify"
    TIR_DISABLE_STORAGE_REWRITE = "tirx.disable_storage_rewrite"
    TIR_DISABLE_VECTORIZE = "tirx.disable_vectorize"
    TIR_USE_ASYNC_COPY = "tirx.use_async_copy"
    TIR_ENABLE_DEBUG = "tirx.enable_debug"
    TIR_MERGE_STATIC_SMEM = "tirx.merge_static_smem"
    TIR_ADD_LOWER_PASS = "tirx.add_lower_pass"
    TIR_NOALIAS = "tirx.noalias"

    def __str__(self) -> str:
        return self.value


@record
class ConfigRow:
    """One pass config: accepted value types, default, one line of description, and the warning when it is deprecated.

    choices: the accepted values, where they are few. allowed: otherwise (test of a value, what the test asks for in words).
    unused: why the config has no effect; users who set it are warned with this text.
    """

    types: tuple[type, ...]
    default: Any
    about: str
    deprecated: str = ""
    choices: tuple[Any, ...] = ()
    allowed: tuple[Callable[[Any], bool], str] | None = None
    unused: str = ""


_K = PassConfigKey
_FLAG = (bool, int)
_NO_CSE = "common subexpressions are left to NVRTC and LLVM"
_NO_SIMPLIFIER_OPTION = "the simplifier has no options"


def _flag(about: str, default: bool = False, deprecated: str = "") -> ConfigRow:
    return ConfigRow(_FLAG, default, about, deprecated)


def _unused(why: str, default: bool = False) -> ConfigRow:
    """A flag that is accepted and has no effect."""
    return ConfigRow(_FLAG, default, f"accepted, no effect: {why}", unused=why)


def _is_cluster(value: Any) -> bool:
    """Whether a value is valid for tl.cluster."""
    if isinstance(value, int):
        return value in (1, 2) and value is not True
    return len(value) == 2 and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in value) and \
        value[0] * value[1] <= PORTABLE


ROWS: dict[PassConfigKey, ConfigRow] = {
    _K.TL_DISABLE_WARP_SPECIALIZED: _flag("no automatic warp specialisation"),
    _K.TL_DISABLE_TMA_LOWER: _flag("no implicit TMA", deprecated="use disable_tma=True of T.copy"),
    _K.TL_ENABLE_FAST_MATH: _flag("approximate math functions on the device"),
    _K.TL_DISABLE_FAST_MATH: _flag("True: as tl.enable_fast_math=False, the default", deprecated="fast math is off unless "
                                   "tl.enable_fast_math asks for it"),
    _K.TL_ENABLE_PTXAS_VERBOSE_OUTPUT: _unused("kernel.report() gives registers and spills"),
    _K.TL_DISABLE_THREAD_STORAGE_SYNC: _flag("no automatic block barriers"),
    _K.TL_PTXAS_REGISTER_USAGE_LEVEL: ConfigRow((int,), None, "ptxas register usage level, 0 to 10", choices=tuple(range(11))),
    _K.TL_DEVICE_COMPILE_FLAGS: ConfigRow((str, list, tuple), (), "extra flags of the device compiler"),
    _K.TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE: _unused("buffers share space wherever their lives allow"),
    _K.TL_ENABLE_ASYNC_COPY: _flag("cp.async for eligible copies inside pipelined loops", True),
    _K.TL_DISABLE_WGMMA: _flag("no wgmma"),
    _K.TL_ENABLE_HOPPER: _flag("wgmma, TMA and warp roles on sm_90a", True),
    _K.TL_CLUSTER: ConfigRow((int, tuple, list), None, "blocks of a cluster that share what they load: 1, 2, or a pair, along "
                             "the first two dimensions of the grid",
                             allowed=(_is_cluster, f"1, 2 or a pair of positive ints of at most {PORTABLE} blocks")),
    _K.TL_ENABLE_PDL: _flag("PDL: kernels are launched while the one before them on the stream ends, and wait for its end"),
    _K.TL_SCALE_PREFETCH: _flag("scale factors that each iteration loads come by TMA, several iterations at once", True),
    _K.TL_PING_PONG: _unused("warp groups alternate without barriers between them", True),
    _K.TL_EXTRA_STAGES: _flag("more stages than num_stages where a loop would wait for loads and shared memory is free", True),
    _K.TL_WGMMA_IN_FLIGHT: ConfigRow((str,), "iterations", "how long wgmma of a loop may be in flight: over the end of an "
                                     "iteration, to its end, or until the next statement",
                                     choices=("iterations", "iteration", "statement")),
    _K.TL_SHORTEN_ROUNDED: _flag("functions whose results are only rounded to 16 or 8 bits take shorter forms, with an error "
                                  "below a hundredth of a unit of the narrow type", True),
    _K.TL_GLOBAL_ALIGNMENT: ConfigRow((int,), 16, "bytes that tensors are taken to start at multiples of (calls check it)",
                                      choices=(1, 2, 4, 8, 16)),
    _K.TL_ASSUME_ALIGNED_STRIDES: _flag("run-time strides are taken to suit TMA (calls check it)"),
    _K.TL_PERSISTENT: ConfigRow((int,), None, "launches with warp roles loop over tiles; a number above 1: in so many blocks"),
    _K.TL_ENABLE_AUTO_SCHEDULE: _unused("every program is scheduled", True),
    _K.TL_ENABLE_AUTO_WARP_SPECIALIZATION: ConfigRow((str,), "role_based", "accepted, no effect: the compiler has a schedule "
                                                     "of its own", unused="no scheduler has this name"),
    _K.TL_ENABLE_FP32X2_REDUCTION: _unused("sums of float32 pairs are for sm_100"),
    _K.TL_DISABLE_SAFE_MEMORY_ACCESS: _flag("no out-of-bounds guards (changes what out-of-range accesses mean)"),
    _K.TL_DISABLE_OUT_OF_BOUND_WARNING: _unused("accesses that may be out of range are guarded", True),
    _K.TL_DISABLE_VECTORIZE_256: _unused("accesses are at most 16 bytes wide"),
    _K.TL_ENABLE_LOWER_LDGSTG: _unused("NVRTC chooses ld.global and st.global"),
    _K.TL_ENABLE_LOWER_LDGSTG_PREDICATED: _unused("NVRTC chooses predicated accesses"),
    _K.TL_ENABLE_VECTORIZE_PLANNER_VERBOSE: _unused("TILELANG_DEBUG=3 shows the loops"),
    _K.TL_DISABLE_SHARED_MEMORY_REUSE: _flag("give every shared buffer its own storage"),
    _K.TL_DEBUG_MERGE_SHARED_MEMORY_ALLOCATIONS: _flag("report where each shared buffer lies"),
    _K.TL_STRICT: _flag("warnings are errors, and results are filled with NaN or -1 before a launch (TILELANG_STRICT)"),
    _K.TL_DISABLE_DATA_RACE_CHECK: _flag("no warning about racing parallel iterations (TILELANG_ENABLE_DATA_RACE_CHECK)", True),
    _K.TL_DISABLE_BUFFER_INIT_CHECK: _flag("no warning about reads before writes"),
    _K.TL_DISABLE_PRELOWER_SEMANTIC_CHECK: _flag("no semantic checks before lowering"),
    _K.TL_SIMPLIFY: ConfigRow((dict,), {}, "options of the simplifier: its sub-keys are accepted, no effect",
                              unused=_NO_SIMPLIFIER_OPTION),
    _K.TL_SIMPLIFY_TRANSITIVELY_PROVE_INEQUALITIES: _unused(_NO_SIMPLIFIER_OPTION),
    _K.TL_SIMPLIFY_CONVERT_BOOLEAN_TO_AND_OF_ORS: _unused(_NO_SIMPLIFIER_OPTION),
    _K.TL_SIMPLIFY_APPLY_CONSTRAINTS_TO_BOOLEAN_BRANCHES: _unused(_NO_SIMPLIFIER_OPTION),
    _K.TL_SIMPLIFY_PROPAGATE_KNOWNS_TO_PROVE_CONDITIONAL: _unused(_NO_SIMPLIFIER_OPTION),
    _K.TL_SIMPLIFY_PROPAGATE_KNOWNS_TO_SIMPLIFY_EXPRESSIONS: _unused(_NO_SIMPLIFIER_OPTION),
    _K.TL_SIMPLIFY_ENABLE_LET_INLINE: _unused(_NO_SIMPLIFIER_OPTION),
    _K.TL_CONFIG_INDEX_BITWIDTH: ConfigRow((int,), None, "accepted, no effect: each index is as wide as its tensor needs",
                                           choices=(32, 64), unused="each index is as wide as its tensor needs"),
    _K.TL_ENABLE_REDUCER_PLAN_VERBOSE: _unused("reducers have one lowering"),
    _K.TL_REDUCER_FORCE_BASELINE: _unused("reducers have one lowering"),
    _K.TL_LAYOUT_COST_MODEL: ConfigRow((str,), None, "accepted, no effect: accesses and registers decide together",
                                       choices=("register-count", "io-aware"), unused="accesses and registers decide together"),
    _K.TL_DISABLE_SHUFFLE_ELECT: _unused("T.shuffle_elect is elect.sync where it exists"),
    _K.TL_DISABLE_LOOP_UNSWITCHING: _unused("loops are unswitched by NVRTC and LLVM only"),
    _K.TL_LOOP_UNSWITCHING_ALLOW_NON_TRIVIAL_ELSE: _unused("loops are unswitched by NVRTC and LLVM only"),
    _K.TL_IF_STMT_BINDING_INLINE_REPLAYABLE_BINDS: _unused("binds are inlined by NVRTC and LLVM", True),
    _K.TL_FORCE_LET_INLINE: _unused("binds are inlined by NVRTC and LLVM"),
    _K.TL_STORAGE_REWRITE_DETECT_INPLACE: _unused("registers are given by NVRTC and LLVM"),
    _K.TL_AST_PRINT_ENABLE: _flag("print the program before the first pass"),
    _K.TL_LAYOUT_VISUALIZATION_ENABLE: _flag("draw the layouts"),
    _K.TL_LAYOUT_VISUALIZATION_FORMATS: ConfigRow(
        (str,), "txt", "comma list of txt, pdf, png, svg, all",
        allowed=(lambda v: v == "all" or {f.strip() for f in v.split(",")} <= {"txt", "pdf", "png", "svg"},
                 "all, or a comma list of txt, pdf, png, svg")),
    _K.TL_EMIT_LINE_DIRECTIVES: _flag("#line directives in device source"),
    _K.TL_ENABLE_DUMP_IR: _flag("write the IR after every pass"),
    _K.TL_DUMP_IR_DIR: ConfigRow((str,), "./dump_ir/", "where tl.enable_dump_ir writes"),
    _K.TL_PASS_PROFILE: _flag("report the time of every pass"),
    _K.TL_PASS_PROFILE_THRESHOLD_MS: ConfigRow((int, float), 0.0, "leave out passes quicker than this, in ms"),
    _K.CUDA_KERNELS_OUTPUT_DIR: ConfigRow((str,), "", "keep the CUDA sources in this folder"),
    _K.TIR_ENABLE_EQUIV_TERMS_IN_CSE: _unused(_NO_CSE),
    _K.TIR_DISABLE_CSE: _unused(_NO_CSE),
    _K.TIR_SIMPLIFY: ConfigRow((dict,), {}, f"accepted, no effect: {_NO_SIMPLIFIER_OPTION}", unused=_NO_SIMPLIFIER_OPTION),
    _K.TIR_DISABLE_STORAGE_REWRITE: _unused("tl.disable_shared_memory_reuse keeps shared buffers from each other's space"),
    _K.TIR_DISABLE_VECTORIZE: _unused("tl.global_alignment=1 gives accesses no wider than an element"),
    _K.TIR_USE_ASYNC_COPY: _flag("False: as tl.enable_async_copy=False", True),
    _K.TIR_ENABLE_DEBUG: _unused("TILELANG_DEBUG sets what is shown and kept"),
    _K.TIR_MERGE_STATIC_SMEM: _unused("buffers share space wherever their lives allow"),
    _K.TIR_ADD_LOWER_PASS: ConfigRow(
        (list, tuple), (), "accepted, no effect: an empty list only, passes of the user's own are not run",
        allowed=(lambda v: not v, "an empty list: passes written for another intermediate representation cannot be run")),
    _K.TIR_NOALIAS: _flag("parameters do not alias; False: any may, and none is __restrict__", True),
}


# Earlier names of keys: accepted with a DeprecationWarning.
RENAMED = {"tl.step_tiles": _K.TL_SCALE_PREFETCH, "tl.warp_group_turns": _K.TL_PING_PONG,
           "tl.dependent_launch": _K.TL_ENABLE_PDL}


def normalize_config(config: Mapping[Any, Any] | None) -> dict[str, Any]:
    """The user's pass configs by string key, checked.

    Raises AttributeError for a key that does not exist (the message lists the candidates), TypeError for a value of the
    wrong type, ValueError for a value that is not accepted. Deprecated keys give a DeprecationWarning.
    """
    out: dict[str, Any] = {}
    for key, value in (config or {}).items():
        name = key.value if isinstance(key, PassConfigKey) else str(key)
        if name in RENAMED:
            warnings.warn(f"pass config {name} is now {RENAMED[name].value}", DeprecationWarning, stacklevel=3)
            name = RENAMED[name].value
        try:
            row = ROWS[PassConfigKey(name)]
        except ValueError:
            raise _unknown(name, [k.value for k in PassConfigKey]) from None
        if row.deprecated and value:
            warnings.warn(f"pass config {name} is deprecated: {row.deprecated}", DeprecationWarning, stacklevel=3)
        if value is not None and not isinstance(value, row.types):
            wanted = " or ".join(t.__name__ for t in row.types)
            raise error("config-type", f"pass config {name} takes {wanted}, found {type(value).__name__} {value!r}",
                        expected=wanted, found=f"{type(value).__name__} {value!r}")
        if value is not None and row.choices and value not in row.choices:
            choices = f"one of {', '.join(map(repr, row.choices))}"
            raise error("config-value", f"pass config {name} takes {choices}, found {value!r}", expected=choices,
                        found=repr(value))
        if value is not None and row.allowed and not row.allowed[0](value):
            raise error("config-value", f"pass config {name} takes {row.allowed[1]}, found {value!r}",
                        expected=row.allowed[1], found=repr(value))
        if row.unused and value is not None and value != row.default:
            warn("config-no-effect", f"pass config {name} has no effect: {row.unused}", "leave it out")
        if name == PassConfigKey.TIR_USE_ASYNC_COPY.value and not value:
            out.setdefault(PassConfigKey.TL_ENABLE_ASYNC_COPY.value, False)
        if name == PassConfigKey.TL_SIMPLIFY.value and isinstance(value, Mapping):
            _check_simplify(value)
        if name == PassConfigKey.TL_CLUSTER.value and isinstance(value, list):
            value = tuple(value)
        out[name] = bool(value) if row.types is _FLAG else value
    if out.get(PassConfigKey.TL_DISABLE_FAST_MATH.value) and out.get(PassConfigKey.TL_ENABLE_FAST_MATH.value):
        raise error("config-value", "tl.enable_fast_math and tl.disable_fast_math are both set", expected="one of the two",
                    found="both True")
    return out


def _unknown(name: str, known: list[str]) -> Exception:
    near = get_close_matches(name, known, 1)
    return error("config-key", f"Invalid config option '{name}' candidates are: {', '.join(known)}", found=f"'{name}'",
                 hint=f"did you mean {near[0]}?" if near else "leave it out, or use a member of tilelang.PassConfigKey")


def _check_simplify(value: Mapping[Any, Any]) -> None:
    """Check the sub-keys of tl.Simplify."""
    known = [k.value for k in PassConfigKey if k.name.startswith("TL_SIMPLIFY_")]
    for part in value:
        if (part.value if isinstance(part, PassConfigKey) else part) not in known:
            raise _unknown(f"tl.Simplify.{part}", known)


def default_of(key: PassConfigKey | str) -> Any:
    """Default of a pass config."""
    return ROWS[PassConfigKey(key)].default


__all__ = ["ROWS", "ConfigRow", "PassConfigKey", "default_of", "normalize_config"]
