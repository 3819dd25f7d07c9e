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


class PassConfigKey(str, Enum):
    """Names of pass configs. A member can be used wherever its string can: `{PassConfigKey.TL_ENABLE_FAST_MATH: True}`.

    row: what it accepts and does.
    """

    row: ConfigRow

    def __new__(cls, key: str, row: Any = None) -> PassConfigKey:
        out = str.__new__(cls, key)
        out._value_, out.row = key, row
        return out

    TL_DISABLE_WARP_SPECIALIZED = "tl.disable_warp_specialized", _flag("no automatic warp specialisation")
    TL_DISABLE_TMA_LOWER = "tl.disable_tma_lower", _flag("no implicit TMA", deprecated="use disable_tma=True of T.copy")
    TL_ENABLE_FAST_MATH = "tl.enable_fast_math", _flag("approximate math functions on the device")
    TL_DISABLE_FAST_MATH = "tl.disable_fast_math", _flag(
        "True: as tl.enable_fast_math=False, the default", deprecated="fast math is off unless tl.enable_fast_math asks for it")
    TL_ENABLE_PTXAS_VERBOSE_OUTPUT = "tl.enable_ptxas_verbose_output", _unused("kernel.report() gives registers and spills")
    TL_DISABLE_THREAD_STORAGE_SYNC = "tl.disable_thread_storage_sync", _flag("no automatic block barriers")
    TL_PTXAS_REGISTER_USAGE_LEVEL = "tl.ptxas_register_usage_level", ConfigRow(
        (int,), None, "ptxas register usage level, 0 to 10", choices=tuple(range(11)))
    TL_DEVICE_COMPILE_FLAGS = "tl.device_compile_flags", ConfigRow((str, list, tuple), (), "extra flags of the device compiler")
    TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE = "tl.enable_aggressive_shared_memory_merge", _unused(
        "buffers share space wherever their lives allow")
    TL_ENABLE_ASYNC_COPY = "tl.enable_async_copy", _flag("cp.async for eligible copies inside pipelined loops", True)
    TL_DISABLE_WGMMA = "tl.disable_wgmma", _flag("no wgmma")
    TL_ENABLE_HOPPER = "tl.enable_hopper", _flag("wgmma, TMA and warp roles on sm_90a", True)
    TL_PERSISTENT = "tl.persistent", ConfigRow(
        (int,), None, "launches with warp roles loop over tiles; a number above 1: in so many blocks")
    TL_CLUSTER = "tl.cluster", ConfigRow(
        (int, tuple, list), None, "blocks of a cluster that share what they load: 1, 2, or a pair, along "
        "the first two dimensions of the grid",
        allowed=(_is_cluster, f"1, 2 or a pair of positive ints of at most {PORTABLE} blocks"))
    TL_ENABLE_PDL = "tl.enable_pdl", _flag(
        "PDL: kernels are launched while the one before them on the stream ends, and wait for its end")
    TL_SCALE_PREFETCH = "tl.scale_prefetch", _flag(
        "scale factors that each iteration loads come by TMA, several iterations at once", True)
    TL_EXTRA_STAGES = "tl.extra_stages", _flag(
        "more stages than num_stages where a loop would wait for loads and shared memory is free", True)
    TL_RESIZE_BLOCKS = "tl.resize_blocks", _flag(
        "other rows, columns and warp groups of a block where the program leaves them open and wgmma can use them", True)
    TL_WGMMA_IN_FLIGHT = "tl.wgmma_in_flight", ConfigRow(
        (str,), "iterations", "how long wgmma of a loop may be in flight: over the end of an "
        "iteration, to its end, or until the next statement",
        choices=("iterations", "iteration", "statement"))
    TL_SHORTEN_ROUNDED = "tl.shorten_rounded", _flag(
        "functions whose results are only rounded to 16 or 8 bits take shorter forms, with an error "
        "below a hundredth of a unit of the narrow type", True)
    TL_GLOBAL_ALIGNMENT = "tl.global_alignment", ConfigRow(
        (int,), 16, "bytes that tensors are taken to start at multiples of (calls check it)", choices=(1, 2, 4, 8, 16))
    TL_ASSUME_ALIGNED_STRIDES = "tl.assume_aligned_strides", _flag("run-time strides are taken to suit TMA (calls check it)")
    TL_ENABLE_AUTO_SCHEDULE = "tl.enable_auto_schedule", _unused("every program is scheduled", True)
    TL_ENABLE_AUTO_WARP_SPECIALIZATION = "tl.enable_auto_warp_specialization", ConfigRow(
        (str,), "role_based", "accepted, no effect: the compiler has a schedule "
        "of its own", unused="no scheduler has this name")
    TL_ENABLE_FP32X2_REDUCTION = "tl.enable_fp32x2_reduction", _unused("sums of float32 pairs are for sm_100")
    TL_DISABLE_SAFE_MEMORY_ACCESS = "tl.disable_safe_memory_legalize", _flag(
        "no out-of-bounds guards (changes what out-of-range accesses mean)")
    TL_DISABLE_OUT_OF_BOUND_WARNING = "tl.disable_out_of_bound_warning", _unused(
        "accesses that may be out of range are guarded", True)
    TL_DISABLE_VECTORIZE_256 = "tl.disable_vectorize_256", _unused("accesses are at most 16 bytes wide")
    TL_ENABLE_LOWER_LDGSTG = "tl.enable_lower_ldgstg", _unused("NVRTC chooses ld.global and st.global")
    TL_ENABLE_LOWER_LDGSTG_PREDICATED = "tl.enable_lower_ldgstg_predicated", _unused("NVRTC chooses predicated accesses")
    TL_ENABLE_VECTORIZE_PLANNER_VERBOSE = "tl.enable_vectorize_planner_verbose", _unused("TILELANG_DEBUG=3 shows the loops")
    TL_DISABLE_SHARED_MEMORY_REUSE = "tl.disable_shared_memory_reuse", _flag("give every shared buffer its own storage")
    TL_DEBUG_MERGE_SHARED_MEMORY_ALLOCATIONS = "tl.debug_merge_shared_memory_allocations", _flag(
        "report where each shared buffer lies")
    TL_DISABLE_DATA_RACE_CHECK = "tl.disable_data_race_check", _flag(
        "no warning about racing parallel iterations (TILELANG_ENABLE_DATA_RACE_CHECK)", True)
    TL_STRICT = "tl.strict", _flag(
        "warnings are errors, and results are filled with NaN or -1 before a launch (TILELANG_STRICT)")
    TL_DISABLE_BUFFER_INIT_CHECK = "tl.disable_buffer_init_check", _flag("no warning about reads before writes")
    TL_DISABLE_PRELOWER_SEMANTIC_CHECK = "tl.disable_prelower_semantic_check", _flag("no semantic checks before lowering")
    TL_SIMPLIFY = "tl.Simplify", ConfigRow(
        (dict,), {}, "options of the simplifier: its sub-keys are accepted, no effect", unused=_NO_SIMPLIFIER_OPTION)
    TL_SIMPLIFY_TRANSITIVELY_PROVE_INEQUALITIES = "transitively_prove_inequalities", _unused(_NO_SIMPLIFIER_OPTION)
    TL_SIMPLIFY_CONVERT_BOOLEAN_TO_AND_OF_ORS = "convert_boolean_to_and_of_ors", _unused(_NO_SIMPLIFIER_OPTION)
    TL_SIMPLIFY_APPLY_CONSTRAINTS_TO_BOOLEAN_BRANCHES = "apply_constraints_to_boolean_branches", _unused(_NO_SIMPLIFIER_OPTION)
    TL_SIMPLIFY_PROPAGATE_KNOWNS_TO_PROVE_CONDITIONAL = "propagate_knowns_to_prove_conditional", _unused(_NO_SIMPLIFIER_OPTION)
    TL_SIMPLIFY_PROPAGATE_KNOWNS_TO_SIMPLIFY_EXPRESSIONS = "propagate_knowns_to_simplify_expressions", _unused(
        _NO_SIMPLIFIER_OPTION)
    TL_SIMPLIFY_ENABLE_LET_INLINE = "enable_simplify_let_inline", _unused(_NO_SIMPLIFIER_OPTION)
    TL_CONFIG_INDEX_BITWIDTH = "tl.config_index_bitwidth", ConfigRow(
        (int,), None, "accepted, no effect: each index is as wide as its tensor needs",
        choices=(32, 64), unused="each index is as wide as its tensor needs")
    TL_ENABLE_REDUCER_PLAN_VERBOSE = "tl.enable_reducer_plan_verbose", _unused("reducers have one lowering")
    TL_REDUCER_FORCE_BASELINE = "tl.reducer_force_baseline", _unused("reducers have one lowering")
    TL_LAYOUT_COST_MODEL = "tl.layout_cost_model", ConfigRow(
        (str,), None, "accepted, no effect: accesses and registers decide together",
        choices=("register-count", "io-aware"), unused="accesses and registers decide together")
    TL_DISABLE_SHUFFLE_ELECT = "tl.disable_shuffle_elect", _unused("T.shuffle_elect is elect.sync where it exists")
    TL_DISABLE_LOOP_UNSWITCHING = "tl.disable_loop_unswitching", _unused("loops are unswitched by NVRTC and LLVM only")
    TL_LOOP_UNSWITCHING_ALLOW_NON_TRIVIAL_ELSE = "tl.loop_unswitching_allow_non_trivial_else", _unused(
        "loops are unswitched by NVRTC and LLVM only")
    TL_IF_STMT_BINDING_INLINE_REPLAYABLE_BINDS = "tl.if_stmt_binding_inline_replayable_binds", _unused(
        "binds are inlined by NVRTC and LLVM", True)
    TL_FORCE_LET_INLINE = "tl.force_let_inline", _unused("binds are inlined by NVRTC and LLVM")
    TL_STORAGE_REWRITE_DETECT_INPLACE = "tl.storage_rewrite_detect_inplace", _unused("registers are given by NVRTC and LLVM")
    TL_AST_PRINT_ENABLE = "tl.ast_print_enable", _flag("print the program before the first pass")
    TL_LAYOUT_VISUALIZATION_ENABLE = "tl.layout_visualization_enable", _flag("draw the layouts")
    TL_LAYOUT_VISUALIZATION_FORMATS = "tl.layout_visualization_formats", ConfigRow(
        (str,), "txt", "comma list of txt, pdf, png, svg, all",
        allowed=(lambda v: v == "all" or {f.strip() for f in v.split(",")} <= {"txt", "pdf", "png", "svg"},
        "all, or a comma list of txt, pdf, png, svg"))
    TL_EMIT_LINE_DIRECTIVES = "tl.emit_line_directives", _flag("#line directives in device source")
    TL_ENABLE_DUMP_IR = "tl.enable_dump_ir", _flag("write the IR after every pass")
    TL_DUMP_IR_DIR = "tl.dump_ir_path", ConfigRow((str,), "./dump_ir/", "where tl.enable_dump_ir writes")
    TL_PASS_PROFILE = "tl.pass_profile", _flag("report the time of every pass")
    TL_PASS_PROFILE_THRESHOLD_MS = "tl.pass_profile_threshold_ms", ConfigRow(
        (int, float), 0.0, "leave out passes quicker than this, in ms")
    CUDA_KERNELS_OUTPUT_DIR = "cuda.kernels_output_dir", ConfigRow((str,), "", "keep the CUDA sources in this folder")
    TIR_ENABLE_EQUIV_TERMS_IN_CSE = "tir.enable_equiv_terms_in_cse_tir", _unused(_NO_CSE)
    TIR_DISABLE_CSE = "tirx.disable_cse_tir", _unused(_NO_CSE)
    TIR_SIMPLIFY = "tirx.Simplify", ConfigRow(
        (dict,), {}, f"accepted, no effect: {_NO_SIMPLIFIER_OPTION}", unused=_NO_SIMPLIFIER_OPTION)
    TIR_DISABLE_STORAGE_REWRITE = "tirx.disable_storage_rewrite", _unused(
        "tl.disable_shared_memory_reuse keeps shared buffers from each other's space")
    TIR_DISABLE_VECTORIZE = "tirx.disable_vectorize", _unused("tl.global_alignment=1 gives accesses no wider than an element")
    TIR_USE_ASYNC_COPY = "tirx.use_async_copy", _flag("False: as tl.enable_async_copy=False", True)
    TIR_ENABLE_DEBUG = "tirx.enable_debug", _unused("TILELANG_DEBUG sets what is shown and kept")
    TIR_MERGE_STATIC_SMEM = "tirx.merge_static_smem", _unused("buffers share space wherever their lives allow")
    TIR_ADD_LOWER_PASS = "tirx.add_lower_pass", ConfigRow(
        (list, tuple), (), "accepted, no effect: an empty list only, passes of the user's own are not run",
        allowed=(lambda v: not v, "an empty list: passes written for another intermediate representation cannot be run"))
    TIR_NOALIAS = "tirx.noalias", _flag("parameters do not alias; False: any may, and none is __restrict__", True)

    def __str__(self) -> str:
        return str(self.value)


ROWS = {key: key.row for key in PassConfigKey}


def normalize_config(config: Mapping[Any, Any] | None) -> dict[str, Any]:
    """The user's pass configs by string key, checked.

    Raises AttributeError for a key that does not exist (the message lists the candidates), TypeError for a value of the
    wrong type, ValueError for a value that is not accepted. Deprecated keys give a DeprecationWarning.
    """
    out: dict[str, Any] = {}
    for key, value in (config or {}).items():
        name = key.value if isinstance(key, PassConfigKey) else str(key)
        try:
            row = ROWS[PassConfigKey(name)]
        except ValueError:
            raise _unknown(name, [k.value for k in PassConfigKey]) from None
        if row.deprecated and value:
            warnings.warn(f"pass config {name} is deprecated: {row.deprecated}", DeprecationWarning, stacklevel=3)
        if value is not None and not isinstance(value, row.types):
            wanted = " or ".join(t.__name__ for t in row.types)
            raise error("config-type", f"pass config {name} takes «{wanted}», found {type(value).__name__} {value!r}")
        if value is not None and row.choices and value not in row.choices:
            choices = f"one of {', '.join(map(repr, row.choices))}"
            raise error("config-value", f"pass config {name} takes «{choices}», found {value!r}")
        if value is not None and row.allowed and not row.allowed[0](value):
            raise error("config-value", f"pass config {name} takes «{row.allowed[1]}», found {value!r}")
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
