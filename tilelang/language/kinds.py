"""Kinds of errors of the frontend: name, the builtin class it also is, what it is about, what to do."""

from __future__ import annotations

from tilelang.errors import register

_KINDS: tuple[tuple[str, type[Exception], str, str], ...] = (
    # functions and their source
    ("source-unavailable", ValueError, "the source text of a kernel function cannot be found",
     "define kernel functions with def, in a file or a notebook cell"),
    ("unsupported-syntax", NotImplementedError, "a Python construct that has no meaning in a kernel function",
     "see the language's table of constructs"),
    ("nested-function", NameError, "a def or class nested in a kernel function",
     "define it outside; T.macro functions are inlined where they are called"),
    ("parameter-annotation", ValueError, "a kernel parameter without a usable annotation",
     "annotate it with T.Tensor(shape, dtype), T.int32, T.ptr, …"),
    ("parameter-missing", TypeError, "a kernel parameter without an annotation",
     "write `A: T.Tensor(shape, dtype)` or a scalar type such as T.int32"),
    ("positional-only", TypeError, "positional-only parameters of a kernel function", "remove the `/` from the "
                                                                                      "signature"),
    ("return-value", RuntimeError, "returning something that is not a T.empty tensor",
     "return each T.empty tensor once, at the end of the function"),
    ("outputs-not-returned", RuntimeError, "T.empty tensors that are not returned", "return every T.empty tensor at "
                                                                                    "the end"),
    ("macro-reference", ValueError, "a T.Ref argument that cannot be assigned to",
     "pass a T.alloc_var, an element A[i] or a slice of a buffer"),
    ("macro-arguments", TypeError, "arguments that do not fit a macro's signature", "compare the call with the "
                                                                                    "definition"),
    ("symbol-name", ValueError, "a bad name of T.dynamic or T.const", 'write names as in T.dynamic("m, n")'),
    ("const-unused", RuntimeError, "a T.const that is no dimension or stride of a tensor",
     "make it a dimension of a tensor parameter, or a Python parameter of the function"),
    ("const-value", ValueError, "a T.const whose value cannot be found",
     "pass a tensor that has it as a dimension, or give it as a keyword"),
    ("eager-argument", TypeError, "an argument that does not fit an eager kernel function",
     "pass every parameter that has no default"),
    # names, values and control flow
    ("scope", RuntimeError, "a name used outside the loop, branch or kernel that defines it",
     "define it before, or carry the value out with T.alloc_var"),
    ("loop-carried-value", RuntimeError, "a Python value re-bound in a run-time loop or branch",
     "use T.alloc_var for a variable that changes while the kernel runs"),
    ("for-iterator", TypeError, "a for loop over something that is not a loop of the language",
     "iterate Python sequences in a comprehension or a T.macro, outside the kernel's loops"),
    ("condition", TypeError, "a condition that is neither a run-time nor a Python truth value", "compare an element of "
                                                                                                "it"),
    ("infinite-loop", RuntimeError, "while with a condition that is always true",
     "loop on a T.alloc_var, or use T.serial with break"),
    ("break-outside-loop", SyntaxError, "break or continue with no loop around it in the kernel",
     "end a thread with T.thread_return()"),
    ("break-in-parallel", ValueError, "break in T.Parallel, whose iterations have no order", "use T.serial"),
    ("return-in-control-flow", NotImplementedError, "return under run-time control flow",
     "assign to a T.alloc_var and return it after the loop or branch"),
    ("lazy-effect", RuntimeError, "a statement or macro in a lazily evaluated operand",
     "only the first operand of and/or and the test of `a if c else b` always run: call it in a statement before"),
    ("evaluation-order", RuntimeError, "a value read and changed by a macro or atomic within one statement",
     "bind one of them first: `old = x`, or `new = step(x)`"),
    ("whole-buffer-assignment", RuntimeError, "`buffer op= value`", "write a T.Parallel loop over its elements"),
    ("unpack", ValueError, "a wrong number of values to unpack", "name one variable per value"),
    ("store-target", TypeError, "element assignment to something that is not a buffer",
     "index the buffer itself; a T.alloc_var is assigned by its name, without [0]"),
    ("store-type", TypeError, "a stored value that is not a scalar or vector of the element type",
     "store a scalar in an element; use T.copy to move whole tiles and T.fill for constants"),
    ("raw-statement", ValueError, "a raw statement used out of order", "nest `with T.Then():` directly in `with "
                                                                       "T.If(c):`"),
    # expressions
    ("type", TypeError, "an operation that the types of its operands do not allow", "cast one of them: T.cast(x, "
                                                                                    "dtype)"),
    ("value", ValueError, "a value outside what the operation allows", "use a wider type or another value"),
    ("overflow", OverflowError, "an integer literal beyond 64 bits", "no element type holds it: use a float, or two "
                                                                     "words"),
    ("operation", RuntimeError, "an operation that is not defined", "cast the operands, or use the named function of "
                                                                    "T"),
    ("attribute", AttributeError, "an attribute that a value of the language does not have",
     "see dir() of the value for what it has"),
    ("math-type", TypeError, "a function of a type it is not defined on", "cast the argument: T.cast(x, 'float32')"),
    ("rounding-mode", ValueError, "an unknown rounding mode", "use one of the modes named above"),
    ("select-types", TypeError, "T.Select between different types", "cast one side, or use T.if_then_else, which "
                                                                    "promotes"),
    ("packed-type", ValueError, "a vector operation on a type it is not defined on",
     "use one of float32x2, float16x2, bfloat16x2 on all operands"),
    ("lane-range", IndexError, "T.extract_lane past the last lane", "lanes count from 0"),
    ("cast-option", ValueError, "a bad option of T.cast", "leave round, sat and rbits at their defaults"),
    ("bit-size", ValueError, "T.reinterpret between types of different size", "T.cast converts the value instead"),
    ("dtype-name", ValueError, "an unknown element type", "write a name such as 'float16', or T.float16"),
    ("gemm-dtypes", ValueError, "operand types T.gemm does not combine", "cast one operand to the other's type"),
    ("fp8-format", ValueError, "an unknown fp8 format name", "use 'e4m3' or 'e5m2'"),
    # tensors and subscripts
    ("tensor-shape", TypeError, "a bad shape", "use integers, T.dynamic or T.const symbols and integer expressions of "
                                               "them"),
    ("tensor-dtype", TypeError, "a bad element type of a tensor", "write T.float32, T.int32, …"),
    ("tensor-strides", ValueError, "strides that do not go with the shape", "give one stride per dimension, in "
                                                                            "elements"),
    ("tensor-arguments", TypeError, "arguments that T.Tensor and its kin do not take", "write T.Tensor((m, n), dtype)"),
    ("tensor-subscript", AssertionError, "T.Tensor[...] with one lone number", "write T.Tensor((n,), dtype)"),
    ("pointer", TypeError, "something that is not a pointer where one is needed", "declare the parameter as `p: "
                                                                                  "T.ptr`"),
    ("view-source", AttributeError, "a view of something that is not a whole, compact buffer", "view the whole buffer"),
    ("view-size", AssertionError, "a view of another size", "shape times element bits must stay the same"),
    ("access-type", ValueError, "a bad access_ptr argument", "use 'r', 'w' or 'rw', and indices instead of an offset"),
    ("index-count", IndexError, "a subscript with the wrong number of indices", "give one index or slice per "
                                                                                "dimension"),
    ("index-type", TypeError, "a subscript that is not an integer, an integer expression or a slice",
     "cast it: T.cast(i, 'int32')"),
    ("index-range", IndexError, "a constant index outside the buffer", "only accesses to global buffers are guarded"),
    ("slice-step", RuntimeError, "a slice with a step", "loop over the elements with T.Parallel"),
    ("slice-bounds", ValueError, "a slice that is empty, reversed or outside the buffer",
     "a slice needs start < stop, inside the buffer (only global buffers are guarded)"),
    ("slice-value", ValueError, "a slice used as a value that is not one vector along the last dimension",
     "use T.copy to move tiles, or T.Parallel to compute on them"),
    # allocation
    ("alloc-no-builder", ValueError, "an allocation outside a kernel function",
     "allocate in the body of a T.prim_func, a T.macro or a tilelang.jit function"),
    ("alloc-outside-kernel", ValueError, "an allocation of block or thread memory outside T.Kernel",
     "move it under `with T.Kernel(...)`"),
    ("alloc-arguments", TypeError, "bad arguments of an allocation", "write (shape, dtype)"),
    ("alloc-scope", ValueError, "an unknown memory scope", "use T.alloc_shared, T.alloc_fragment or T.alloc_local"),
    ("alloc-var", TypeError, "bad arguments of T.alloc_var", "write T.alloc_var(dtype, init=value)"),
    ("empty-after-kernel", ValueError, "T.empty after the first T.Kernel", "declare outputs before `with "
                                                                           "T.Kernel(...)`"),
    ("empty-shape", TypeError, "a bad shape of T.empty", "write T.empty((m, n), dtype) or T.empty(m, n, dtype=dtype)"),
    # launches and loops
    ("kernel-grid", ValueError, "a bad grid of T.Kernel", "give one to three extents that are not negative"),
    ("named-barrier", ValueError, "a number or count that named barriers do not have", "use a number from 1 to 15 and a "
                                                                                      "multiple of 32 threads"),
    ("kernel-threads", ValueError, "a bad thread extent of T.Kernel", "use one to three positive integers, at most "
                                                                      "1024 in all"),
    ("nested-kernel", ValueError, "T.Kernel inside T.Kernel", "close the first kernel's block before the second"),
    ("no-kernel", AssertionError, "something of a launch used outside T.Kernel", "move it under `with T.Kernel(...)`"),
    ("launch-dim", ValueError, "a launch dimension that does not exist", "dimensions count from 0 (x), as given to "
                                                                         "T.Kernel"),
    ("swizzle-order", ValueError, "T.use_swizzle with a bad order or panel size", "write T.use_swizzle(10, "
                                                                                  "order='row')"),
    ("swizzle-place", ValueError, "T.use_swizzle after statements that do work", "move it to the top of the kernel "
                                                                                 "body"),
    ("min-blocks", AssertionError, "annotate_min_blocks_per_sm without a positive integer", "give an integer of at "
                                                                                            "least 1"),
    ("warp-groups", AssertionError, "T.ws without warp groups", "name warp groups: T.ws(0), T.ws(1, 2)"),
    ("thread-tag", ValueError, "an unknown thread tag", "use blockIdx.x/y/z or threadIdx.x/y/z"),
    ("loop-step", ValueError, "a loop whose step is zero", "use a positive or negative step"),
    ("loop-bounds", TypeError, "a loop bound that is not an integer or integer expression", "integer division is `//`"),
    ("unroll-options", ValueError, "T.unroll with explicit and unroll_factor together", "choose one of them"),
    ("pipeline-arguments", ValueError, "T.Pipelined with a bad num_stages, order or stage",
     "give num_stages >= 0, or order and stage with one entry per scheduled statement"),
    ("parallel-extents", ValueError, "T.Parallel without extents, or with too large ones", "give one extent per loop variable"),
    # tile ops
    ("region-operand", TypeError, "a tile op's operand that is not a buffer, region or element",
     "pass a buffer, a slice A[a:b, k] or a start element A[i, j]"),
    ("copy-shapes", ValueError, "two whole buffers of different shapes", "slice one of them, or give its start "
                                                                         "element"),
    ("copy-extents", AssertionError, "operands from which no extents can be deduced",
     "give a whole buffer or a slice on one side"),
    ("copy-ranks", ValueError, "operands with a different number of non-unit extents",
     "the extents other than 1 must be as many on both sides"),
    ("copy-range", ValueError, "a source larger than the tile it is copied into", "slice the source to the tile's "
                                                                                  "size"),
    ("copy-overlap", ValueError, "a copy whose source and destination overlap", "copy through another buffer"),
    ("copy-option", ValueError, "a bad option of a tile op", "leave it out"),
    ("option-type", TypeError, "an option of a tile op or loop of another type", "leave it out"),
    ("eviction-policy", KeyError, "an unknown eviction policy", "use evict_normal, evict_first or evict_last"),
    ("gemm-clear", TypeError, "clear_accum that is not a bool", "write a comparison such as k == 0"),
    ("reduce-operand", AttributeError, "a reduction of something that is not a whole buffer",
     "copy the region to a buffer of its own, or use T.view"),
    ("reduce-kind", ValueError, "an unknown kind of reduction", "use T.reduce_sum, T.reduce_max, …"),
    ("reduce-batch", ValueError, "a bad batch of a reduction", "leave it out: it never changes results"),
    ("reduce-dim", ValueError, "a reduction over a dimension that does not exist", "dimensions count from 0, or from "
                                                                                   "-1 back"),
    ("reducer-type", AssertionError, "a reducer of a type its operation does not work on", "use an integer type"),
    ("reducer-operand", ValueError, "an operand of a reducer call that is not what it needs",
     "pass the result of T.alloc_reducer, and a fragment to write to"),
    ("reducer-element", ValueError, "T.reducer_update of something that is not an element", "write acc[i, j]"),
    ("reducer-order", ValueError, "reducer calls out of order",
     "T.reducer_init, then T.reducer_update in T.Parallel, then T.finalize_reducer"),
    ("im2col-operand", ValueError, "an operand of T.im2col of the wrong shape or type", "see the docstring of "
                                                                                        "T.im2col"),
    ("dp4a-type", ValueError, "T.dp4a on other types than int8 and int32", "use T.gemm, or cast the operands"),
    ("vote-operand", ValueError, "an operand T.any_of or T.all_of cannot test", "pass a bool or integer buffer"),
    ("fill-operand", ValueError, "T.fill or T.clear of something that is not a buffer or region", "pass a buffer or a "
                                                                                                  "slice"),
    ("scan-dim", ValueError, "a scan along a dimension that does not exist", "dimensions count from 0, or from -1 "
                                                                             "back"),
    ("transpose-operand", AssertionError, "an operand of T.transpose without two dimensions",
     "pass whole two-dimensional buffers or slices"),
    # Hopper
    ("barrier-count", ValueError, "a barrier with a bad number of arrivals",
     "T.alloc_barrier(128) or T.alloc_barrier([1, 256])"),
    ("barrier-place", ValueError, "a barrier allocated under control flow", "move it to the top of the kernel body"),
    ("barrier-operand", TypeError, "an operand of a barrier call that is not one barrier", "pass bar[i]"),
    ("barrier-cta", AssertionError, "an arrival at another block on a barrier that is the block's own",
     "use T.alloc_cluster_barrier"),
    ("descriptor-operand", ValueError, "a bad descriptor, or a bad field or operand of a raw wgmma",
     "see T.initialize_wgmma_descriptor and T.ptx_wgmma_ss"),
    ("tma-descriptor", ValueError, "a bad descriptor of a tensor, or a load that does not fit it",
     "see T.create_tma_descriptor"),
    ("cluster-mask", ValueError, "a bad mask of blocks in a cluster", "bit r stands for the block of rank r"),
    ("leader-scope", ValueError, "a bad number of threads that one leader stands for",
     "give a multiple of 32, or leave it out"),
    ("wait-count", ValueError, "a number of groups that is not known while compiling", "give a constant"),
    ("register-count", ValueError, "a number of registers that warp groups cannot have", "multiples of 8 from 24 to 256"),
    ("fence-operand", ValueError, "an operand of T.warpgroup_fence_operand that is no register array",
     "pass the accumulator fragment"),
    # atomics, threads, annotations, debugging
    ("atomic-order", KeyError, "an unknown memory order", "leave it out for relaxed order"),
    ("atomic-load-order", ValueError, "a memory order that a load or store does not support",
     "use 'relaxed' or 'seq_cst', or acquire loads and release stores"),
    ("atomic-operand", TypeError, "an atomic on something that is not an element or tile", "pass C[i, j], a slice or a "
                                                                                           "buffer"),
    ("atomic-previous", NotImplementedError, "an atomic form that works on one element only",
     "loop over the elements with T.Parallel"),
    ("atomic-option", NotImplementedError, "an option of atomics that is not available", "leave it out"),
    ("predicate-type", TypeError, "a warp or block vote on something that is not an integer or bool", "write a "
                                                                                                      "comparison"),
    ("source-kernel", ValueError, "T.CUDASourceCodeKernel without usable source",
     "give the text of a __global__ function, or a file, and its name as entry_name"),
    ("rng", AssertionError, "a random number without a generator, or a bad one",
     "call T.rng_init(seed) before the first draw of a kernel"),
    ("wide-operand", TypeError, "an operand of a wide load or store that names no consecutive elements",
     "pass a buffer, a region or an element A[i] of global (ldg, stg) or shared (lds, sts) memory"),
    ("lane-arguments", ValueError, "bad arguments of a warp primitive", "give the missing argument, as an integer"),
    ("lane-argument-type", TypeError, "a warp size that is not an integer", "leave it out for the warp size of the "
                                                                            "target"),
    ("extern-argument", TypeError, "an argument an extern call cannot take",
     "pass scalars, buffers (as pointers) or T.address_of(A[i])"),
    ("layout-annotation", ValueError, "a layout that does not go with its buffer",
     "give a T.Layout of the buffer's shape, or a function of its indices"),
    ("layout-fragment", AssertionError, "a fragment annotated with something that is not a T.Fragment",
     "use T.Fragment(shape, forward_fn=…)"),
    ("annotation", TypeError, "an annotation of something it does not apply to", "pass buffers"),
    ("l2-hint", AssertionError, "an L2 hint on a buffer that is not global", "pass tensor parameters"),
    ("assume-false", ValueError, "T.assume of a condition that is false", "remove it, or correct the condition"),
    ("print-operand", ValueError, "T.print of something it cannot print", "print scalars, elements or whole buffers"),
    ("print-message", AssertionError, "T.print without an operand and a message", "give one of them"),
    ("not-available", NotImplementedError, "a feature of the interface that this version does not have yet",
     "the changelog says what has become available"),
)  # fmt: skip

for _row in _KINDS:
    register(*_row)
