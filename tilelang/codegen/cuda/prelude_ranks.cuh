// Device functions of programs that several ranks run together: this rank, addresses on others, signals (prelude.py).
//@ tl_world
// This rank among those that run the program; runtime/world.py fills it when the module is loaded.  Addresses from `heap` on,
// `bytes` of them, are symmetric: rank r has the same thing `shift[r]` bytes further.  report: host memory that keeps why a
// kernel has stopped.
struct World {
  int rank, ranks;
  unsigned long long limit, heap, bytes, report;
  long long shift[64];
};
extern "C" { __constant__ World tl_world; }
//@ world_failed
// Stops the kernel; the first thread to come leaves the reason: 1 an address outside of the heap, 2 no such rank, 3 a signal.
// The others give it time to do so: the first trap ends all threads.
TL_DEVICE void world_failed(int kind, int line, unsigned long long at, long long want, long long found) {
  unsigned long long* out = reinterpret_cast<unsigned long long*>(tl_world.report);
  volatile long long* said = reinterpret_cast<volatile long long*>(out);
  if (out && atomicCAS_system(out, 0ull, ~0ull) == 0) {
    said[1] = line; said[2] = at - tl_world.heap; said[3] = want; said[4] = found; said[5] = blockIdx.x;
    __threadfence_system();
    said[0] = kind;
    __threadfence_system();
  }
#pragma unroll 1
  for (int k = 0; k < 10000 && out && said[0] == -1; ++k) {}
  __trap();
}
//@ world_rank
TL_DEVICE int world_rank() { return tl_world.rank; }
//@ world_size
TL_DEVICE int world_size() { return tl_world.ranks; }
//@ remote_address
// Where `rank` has what this rank has at p.
TL_DEVICE void* remote_address(const volatile void* p, int rank) {
  const unsigned long long at = reinterpret_cast<unsigned long long>(p);
  if (at - tl_world.heap >= tl_world.bytes) world_failed(1, 0, at, 0, 0);
  if (unsigned(rank) >= unsigned(tl_world.ranks)) world_failed(2, 0, at, tl_world.ranks, rank);
  return reinterpret_cast<void*>(at + tl_world.shift[rank]);
}
//@ fence_sys
TL_DEVICE void fence_sys() { asm volatile("fence.sc.sys;" ::: "memory"); }
//@ atomic_load_sys
// Atomics of system scope, on integers of 32 or 64 bits.
template <int ORDER, typename T> TL_DEVICE T atomic_load_sys(const T* p) {
  if constexpr (ORDER == 5) asm volatile("fence.sc.sys;" ::: "memory");
  T x;
  if constexpr (sizeof(T) == 8) {
    if constexpr (ORDER == 0) asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
    else asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
  } else {
    if constexpr (ORDER == 0) asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    else asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  }
  return x;
}
//@ atomic_store_sys
template <int ORDER, typename T> TL_DEVICE void atomic_store_sys(T* p, T x) {
  if constexpr (ORDER == 5) asm volatile("fence.sc.sys;" ::: "memory");
  if constexpr (sizeof(T) == 8) {
    if constexpr (ORDER == 0) asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
    else asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
  } else {
    if constexpr (ORDER == 0) asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
    else asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
  }
}
//@ atomic_add_sys
// One instruction: a fence of its own in front of it would also discard the lines of L1, and the old value would be fetched.
template <int ORDER, typename T> TL_DEVICE T atomic_add_sys(T* p, T x) {
  if constexpr (ORDER == 5) asm volatile("fence.sc.sys;" ::: "memory");
  T old;
#define TL_ADD(order, type, word) \
  asm volatile("atom." order ".sys.global.add." type " %0, [%1], %2;" : "=" word(old) : "l"(p), word(x) : "memory")
#define TL_ADD_AS(order) if constexpr (sizeof(T) == 8) TL_ADD(order, "u64", "l"); else TL_ADD(order, "u32", "r")
  if constexpr (ORDER == 0) TL_ADD_AS("relaxed");
  else if constexpr (ORDER == 3) TL_ADD_AS("release");
  else if constexpr (ORDER == 2) TL_ADD_AS("acquire");
  else TL_ADD_AS("acq_rel");
#undef TL_ADD
#undef TL_ADD_AS
  return old;
}
//@ wait_signal
// The value at p once it compares so with `want`: 0 eq, 1 ne, 2 ge, 3 le, 4 gt, 5 lt.  The global timer limits the wait.
template <int COMPARE, typename T> TL_DEVICE T wait_signal(const T* p, T want, int line) {
  auto holds = [=](T x) {
    return COMPARE == 0 ? x == want : COMPARE == 1 ? x != want : COMPARE == 2 ? x >= want
         : COMPARE == 3 ? x <= want : COMPARE == 4 ? x > want : x < want;
  };
  T seen = atomic_load_sys<2>(p);
  if (holds(seen)) return seen;
  const unsigned long long start = read_globaltimer();
  while (true) {
#pragma unroll 1
    for (int k = 0; k < 64; ++k)
      if (holds(seen = atomic_load_sys<2>(p))) return seen;
    if (tl_world.limit && read_globaltimer() - start > tl_world.limit)
      world_failed(3, line, reinterpret_cast<unsigned long long>(p), (long long)want, (long long)atomic_load_sys<0>(p));
  }
}
//@ rank_barrier
// The barrier of the blocks of one number on all ranks.  pad: for each rank how often it has come, then how often this rank has
// waited for it; the counts never return to zero, so that a rank which is ahead by a barrier harms none.
TL_DEVICE void rank_barrier(long long* pad, int words, int line) {
  __syncthreads();
  const int peer = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  if (peer < tl_world.ranks) {
    if (2 * tl_world.ranks > words) world_failed(2, line, reinterpret_cast<unsigned long long>(pad), words / 2, tl_world.ranks);
    const long long turn = ++pad[words / 2 + peer];
    atomic_add_sys<3>(reinterpret_cast<long long*>(remote_address(pad, peer)) + tl_world.rank, 1ll);
    wait_signal<2>(pad + peer, turn, line);
  }
  __syncthreads();
}
