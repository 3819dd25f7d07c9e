"""Names of the memory scopes of buffers, as programs use them."""

GLOBAL = "global"
STATIC, DYNAMIC = "shared", "shared.dyn"  # shared memory of a block, of a size in the program or given by the launch
LOCAL, VARIABLE = "local", "local.var"  # a thread's own array, and a thread's own scalar
FRAGMENT = "local.fragment"  # a tile in the registers of all threads, by a Fragment layout
REDUCER = "local.reducer"  # a fragment of partial results
BARRIER, CLUSTER_BARRIER = "shared.barrier", "shared.cluster_barrier"  # mbarriers
TMEM = "shared.tmem"  # tensor memory

SHARED, PRIVATE = (STATIC, DYNAMIC), (LOCAL, VARIABLE)
SCOPES = (GLOBAL, STATIC, DYNAMIC, LOCAL, FRAGMENT, VARIABLE, REDUCER, BARRIER, CLUSTER_BARRIER, TMEM)
