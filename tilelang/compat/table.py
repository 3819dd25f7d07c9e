"""The table of older import paths: path -> (names by their own, modules whose public names it has).

A path with one module and no names of its own is that module.  A name is given as "module:attribute", or as "module" when it
is a module itself.
"""

from __future__ import annotations

from .unsupported import DIALECTS, UNSUPPORTED

Path = tuple[dict[str, str], tuple[str, ...]]


def _same(*modules: str, **names: str) -> Path:
    return names, modules


def _names(module: str, names: str) -> dict[str, str]:
    return {n: f"{module}:{n}" for n in names.split()}


_HELPERS, _HOOKS = "tilelang.compat.helpers", "register_c_postproc register_cuda_postproc register_hip_postproc"
_INTRINSICS: Path = (
    {"mma_layout": "tilelang.compat.mma_layout", "sparse_layout": "tilelang.compat.sparse_layout"}
    | _names("tilelang.language.tensor_core", "INT4TensorCoreIntrinEmitter TensorCoreIntrinEmitter get_ldmatrix_offset "
             "TensorCoreIntrinEmitterWithLadderTransform get_mma_micro_size get_swizzle_layout make_mma_swizzle_layout "
             "mma_store_index_map")
    | _names("tilelang.language", "SparseTensorCoreIntrinEmitter TCGEN05DescriptorParams TCGEN05TensorCoreIntrinEmitter "
             "TensorCoreIntrinEmitterSM120 WGMMADescriptorParams WGMMATensorCoreIntrinEmitter WGSparseTensorCoreIntrinEmitter "
             "compute_gmma_descriptor compute_umma_descriptor"), ())
_TENSORS = _names("tilelang.jit.supply", "TensorSupplyType") | _names("tilelang.jit.compare", "torch_assert_close")
_ADAPTERS = {f"{name}KernelAdapter": "tilelang.jit.kernel:Adapter"
             for name in ("Base", "CuTeDSL", "Cython", "Metal", "NVRTC", "TVMFFI")}

PATHS: dict[str, Path] = {
    # what programs and tools import by a short path
    "tilelang.analysis": _same("tilelang.tools.analysis"),
    "tilelang.autodd": _same("tilelang.tools.autodd"),
    "tilelang.cache": _same("tilelang.jit.caching"),
    "tilelang.cache.kernel_cache": (_names(_HELPERS, "KernelCache _dispatch_map cached clear_cache disk"), ()),
    "tilelang.instrumentation": _same("tilelang.tools.instrumentation"),
    "tilelang.libinfo": (_names("tilelang.version", "__version__") | _names(_HELPERS, "find_lib_path package_path"), ()),
    "tilelang.math": _same("tilelang.arith.integers"),
    "tilelang.profiler": (_names("tilelang.jit.profiling", "Profiler") | _names("tilelang.jit.supply", "TensorSupplyType")
                          | _names("tilelang.jit.timing", "do_bench") | _names("tilelang.jit.caching", "cached"), ()),
    "tilelang.profiler.bench": (_names("tilelang.jit.timing", "do_bench"), ()),
    "tilelang.quantize": _same("tilelang.compat.quantize"),
    "tilelang.transform.simplify": (_names("tilelang.transform", "simplify_prim_func"), ()),
    "tilelang.tvm": _same("tilelang.compat.tvm"),
    **{f"tilelang.tvm.{tir}": _same("tilelang.compat.tvm_tirx") for tir in ("tirx", "tir")},
    **{f"tilelang.tvm.{tir}.stmt_functor": (_names("tilelang.compat.tvm_tirx", "ir_transform post_order_visit pre_order_visit "
                                                   "substitute"), ()) for tir in ("tirx", "tir")},
    **{f"tilelang.tvm.{tir}.transform": (_names("tilelang.compat.tvm", "prim_func_pass"), ()) for tir in ("tirx", "tir")},
    "tilelang.tvm.error": (_names("tilelang.errors", "InternalError") | _names("tilelang.compat.tvm", "TVMError"), ()),
    "tilelang.tvm.ffi": ({"register_global_func": "tilelang.compat.tvm:register_func"}, ()),
    "tilelang.tvm.ir": (_names("tilelang.compat.tvm", "IRModule assert_structural_equal")
                        | _names("tilelang.compat.tvm_tirx", "PrimExpr") | _names("tilelang.language", "Range"), ()),
    "tilelang.tvm.runtime": (_names("tilelang.compat.tvm", "DataType enabled"), ()),
    "tilelang.tvm.script": ({"tirx": "tilelang.language", "tir": "tilelang.language", "ir": "tilelang.tvm.ir"}, ()),
    "tilelang.tvm.target": (_names("tilelang.target", "Target"), ()),
    "tilelang.tvm.testing": _same("tilelang.testing"),
    "tilelang.tvm.transform": (_names("tilelang.transform", "PassContext get_pass_context"), ()),
    # the compiler's parts
    "tilelang.backend": _same("tilelang.compat.backend"),
    "tilelang.backend.target": (_names("tilelang.compat.backend", "auto_detect_target determine_target")
                                | _names("tilelang.target.detect", "list_target_detectors list_target_normalizers "
                                         "register_target_detector register_target_normalizer unregister_target_detector "
                                         "unregister_target_normalizer"), ()),
    "tilelang.contrib": _same(),
    "tilelang.contrib.nvcc": _same("tilelang.compat.nvcc"),
    "tilelang.engine": (_names("tilelang.jit.artifact", "CompiledArtifact")
                        | _names("tilelang.runtime.signature", "KernelParam")
                        | {"callback": "tilelang.engine.callback", "lower": "tilelang.engine.lower"}, ()),
    "tilelang.engine.callback": (_names("tilelang.jit.hooks", _HOOKS)
                                 | _names(_HELPERS, " ".join(f"{name}_callback" for name in _HOOKS.split())), ()),
    "tilelang.engine.lower": (_names("tilelang.jit.artifact", "CompiledArtifact") | _names("tilelang.jit.lowering", "lower")
                              | {"extrac_params": "tilelang.jit.lowering:parameters"}, ()),
    "tilelang.engine.param": (_names("tilelang.jit.artifact", "CompiledArtifact")
                              | _names("tilelang.runtime.signature", "KernelParam"), ()),
    # targets
    **{f"tilelang.{target}": _same() for target in ("cuda", *DIALECTS)},
    **{f"tilelang.{target}.language": ({}, ("tilelang.language.common",)) for target in DIALECTS},
    "tilelang.rocm.language": ({}, ("tilelang.language.rocm", "tilelang.language.common")),
    "tilelang.cuda.backend": (_names("tilelang.compat.nvcc", "tilelang_callback_cuda_compile"), ()),
    "tilelang.cuda.debug": (_names("tilelang.language", "device_assert"), ()),
    "tilelang.cuda.intrinsics": _INTRINSICS,
    "tilelang.cuda.intrinsics.layout": ({"mma_layout": "tilelang.compat.mma_layout"}, ()),
    "tilelang.cuda.intrinsics.layout.mma_layout": _same("tilelang.compat.mma_layout"),
    **{f"tilelang.{p}.{m}_macro_generator": _INTRINSICS
       for p in ("cuda.intrinsics.macro", "intrinsics") for m in ("mma", "mma_sp", "tcgen05", "wgmma", "wgmma_sp")},
    "tilelang.cuda.intrinsics.macro": _INTRINSICS,
    "tilelang.cuda.intrinsics.sparse_layout": _same("tilelang.compat.sparse_layout"),
    "tilelang.cuda.language": _same("tilelang.language"),
    "tilelang.cuda.target": _same("tilelang.compat.cuda_target"),
    "tilelang.intrinsics": _INTRINSICS,
    "tilelang.intrinsics.mma_layout": _same("tilelang.compat.mma_layout"),
    "tilelang.intrinsics.utils": (_names("tilelang.language.tensor_core", "get_ldmatrix_offset get_mma_micro_size "
                                         "mma_store_index_map"), ()),
    "tilelang.jit.adapter": (_ADAPTERS, ()),
    "tilelang.jit.adapter.base": ({"BaseKernelAdapter": _ADAPTERS["BaseKernelAdapter"]}, ()),
    "tilelang.jit.adapter.nvrtc": ({"is_nvrtc_available": "tilelang.runtime.nvrtc:find_nvrtc"}, ()),
    "tilelang.metal.target": (_names("tilelang.compat.cuda_target", "check_metal_availability target_is_metal"), ()),
    "tilelang.rocm.intrinsics": _same(),
    **{f"tilelang.rocm.intrinsics.{m}_macro_generator": ({}, ("tilelang.rocm.language",)) for m in ("mfma", "wmma")},
    "tilelang.rocm.target": (_names("tilelang.compat.cuda_target", "check_hip_availability check_rocm_availability "
                                    "target_is_cdna target_is_gfx950 target_is_hip target_is_rdna target_is_rocm"), ()),
    "tilelang.tileop": _same(),
    "tilelang.tileop.base": (_names("tilelang.ops", "GemmWarpPolicy"), ()),
    # helpers of tests and scripts
    "tilelang.utils": (_TENSORS | _names("tilelang.version", "build_date"), ("tilelang.compat.buffers",
                                                                             "tilelang.compat.deprecation")),
    "tilelang.utils.deprecation": _same("tilelang.compat.deprecation"),
    "tilelang.utils.device": (_names(_HELPERS, "get_available_cpu_count get_current_device"), ()),
    "tilelang.utils.language": _same("tilelang.compat.buffers"),
    "tilelang.utils.pass_diff": (_names(_HELPERS, "pass_diff"), ()),
    "tilelang.utils.scopes": _same("tilelang.compat.buffers"),
    "tilelang.utils.sparse": _same("tilelang.compat.sparse"),
    "tilelang.utils.target": (_names("tilelang.target", "Target determine_target") | _names(
        "tilelang.compat.cuda_target", "AVAILABLE_TARGETS AVALIABLE_TARGETS check_hip_availability"),
        ("tilelang.compat.cuda_target",)),
    "tilelang.utils.tensor": (_TENSORS | _names("tilelang.jit.compare", "fp8_remove_negative_zeros_ is_float8_dtype")
                              | _names("tilelang.jit.supply", "get_tensor_supply")
                              | {"map_torch_type": "tilelang.language.dtypes:resolve_torch_storage_dtype"}, ()),
    # submodules of the language
    "tilelang.language.eager": _same("tilelang.language.tracing.eager_function"),
    "tilelang.language.eager.ast": (_names("tilelang.language.tracing.rewrite", "rewrite_function")
                                    | {"mutate": "tilelang.language.tracing.rewrite:rewrite_function"}, ()),
    "tilelang.language.eager.builder": (_names("tilelang.language.tracing.builder", "Builder Emitted")
                                        | _names("tilelang.language.tracing.state", "current")
                                        | {"BaseBuilder": "tilelang.language.tracing.builder:Builder"}, ()),
    "tilelang.language.eager.function": _same("tilelang.language.tracing.eager_function"),
    "tilelang.language.experimental": _same(),
    "tilelang.language.intrinsics": _INTRINSICS,
    "tilelang.language.experimental.gemm_sp_op": (_names("tilelang.language.sparse", "gemm_sp"), ()),
    "tilelang.language.overrides": _same(),
    "tilelang.language.proxy": (_names("tilelang.language.tensor", "FragmentBuffer LocalBuffer SharedBuffer StridedTensor "
                                       "Tensor handle make_tensor make_tensor_from_addr ptr")
                                | {"Buffer": "tilelang.language.tensor:Buffer_"}, ()),
    "tilelang.language.tile_schedule": (_names("tilelang.language.meta", "BaseTileScheduler PersistentTileScheduler"), ()),
    "tilelang.language.tir": ({n: f"tilelang.language.tir.{n}" for n in ("ir", "op")}, ()),
    "tilelang.language.tir.ir": (_names("tilelang.language.loops", "grid parallel serial unroll vectorized")
                                 | _names("tilelang.language.raw",
                                          "Assert Let attr bind decl_buffer launch_thread let meta_var")
                                 | _names("tilelang.language.thread", "Else Then buffer_store evaluate")
                                 | {"If": "tilelang.language.thread:If_", "While": "tilelang.language.thread:While_"}, ()),
    "tilelang.language.tir.op": (_names("tilelang.language.raw", "call_intrin")
                                 | _names("tilelang.language.extern", "call_extern call_pure_extern")
                                 | _names("tilelang.language",  # which take whole tensors too
                                          "abs atan2 bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp cos erf exp "
                                          "exp2 fabs floor floordiv floormod if_then_else isfinite isinf isnan log log1p "
                                          "log2 max min nearbyint pow round rsqrt shift_left shift_right sigmoid sin sqrt "
                                          "tan tanh trunc"),
                                 ("tilelang.language.math",)),
    "tilelang.language.utils": (_names("tilelang.language.tracing.regions", "BufferSlice whole_region"), ()),
}
PATHS.update({path: ({}, ()) for path in UNSUPPORTED if path not in PATHS})

# Modules that programs import and that have no meaning here -> what to use.
INSTEAD = {
    "tilelang.primitives": "T.gemm, T.copy and T.reduce_sum are in tilelang.language",
}

CALLABLE = frozenset({"tilelang.engine.lower"})  # modules that may be called

__all__ = ["CALLABLE", "PATHS", "UNSUPPORTED"]
