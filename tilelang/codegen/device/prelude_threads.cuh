// Device functions that generated kernels use: lanes, thread numbers, fences, atomics, assertions (prelude.py).
//@ shuffled
// A value of any size up to 8 bytes through a 32- or 64-bit shuffle.
template <typename T, typename F> TL_DEVICE T shuffled(T x, F f) {
  if constexpr (sizeof(T) <= 4) {
    unsigned bits = 0;
    memcpy(&bits, &x, sizeof(T));
    bits = f(bits);
    memcpy(&x, &bits, sizeof(T));
  } else {
    unsigned long long bits;
    memcpy(&bits, &x, sizeof(T));
    bits = f(bits);
    memcpy(&x, &bits, sizeof(T));
  }
  return x;
}
//@ shfl_sync=lane shfl_xor_sync=lanes shfl_up_sync=delta shfl_down_sync=delta
template <typename T> TL_DEVICE T $0(T x, int $1, int width, unsigned mask) {
  return shuffled(x, [=](auto bits) { return __$0(mask, bits, $1, width); });
}
//@ any_sync all_sync
TL_DEVICE int $0(int pred, unsigned mask = 0xffffffffu) { return __$0(mask, pred); }
//@ ballot_sync
TL_DEVICE unsigned long long ballot_sync(int pred, unsigned mask = 0xffffffffu) { return __ballot_sync(mask, pred); }
//@ match_any_sync
template <typename T> TL_DEVICE unsigned match_any_sync(T value, unsigned mask = 0xffffffffu) {
  return __match_any_sync(mask, value);
}
//@ match_all_sync
template <typename T> TL_DEVICE unsigned match_all_sync(T value, unsigned mask = 0xffffffffu) {
  int pred;
  return __match_all_sync(mask, value, &pred);
}
//@ linear_thread
TL_DEVICE int linear_thread() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
//@ lane_idx=% warp_idx=/
TL_DEVICE int $0(int warp_size = 32) { return linear_thread() $1 warp_size; }
//@ warp_idx_sync
TL_DEVICE int warp_idx_sync(int warp_size = 32) { return __shfl_sync(0xffffffffu, linear_thread() / warp_size, 0); }
//@ warp_group_idx
TL_DEVICE int warp_group_idx(int warp_size = 32, int warps = 4) { return linear_thread() / (warp_size * warps); }
//@ warp_uniform
// What all lanes of a warp have computed alike, from an instruction whose result the assembler knows to be one per warp:
// what follows from it is computed once a warp (uniform registers).
TL_DEVICE int warp_uniform(int x) {
  int y;
  asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}
//@ shuffle_elect
// One thread of each group of `extent` threads (0: of the block).
TL_DEVICE bool shuffle_elect(int extent) {
  return extent == 0 ? linear_thread() == 0 : linear_thread() % extent == 0;
}
//@ read_clock
// The clocks of the SM and of the device.  Memory accesses stay on their side of it.
TL_DEVICE unsigned read_clock() { unsigned x; asm volatile("mov.u32 %0, %%clock;" : "=r"(x) :: "memory"); return x; }
//@ read_clock64
TL_DEVICE long long read_clock64() { long long x; asm volatile("mov.u64 %0, %%clock64;" : "=l"(x) :: "memory"); return x; }
//@ read_globaltimer
TL_DEVICE unsigned long long read_globaltimer() {
  unsigned long long x;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(x) :: "memory");
  return x;
}
//@ ordering_fence
// Memory orders: 0 relaxed, 1 consume, 2 acquire, 3 release, 4 acq_rel, 5 seq_cst.
template <int ORDER> TL_DEVICE void ordering_fence() {
#if __CUDA_ARCH__ >= 700
  if constexpr (ORDER != 5) {  // __threadfence is sequentially consistent, which takes longer
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    return;
  }
#endif
  __threadfence();
}
//@ fence_before
template <int ORDER> TL_DEVICE void fence_before() { if constexpr (ORDER >= 3) ordering_fence<ORDER>(); }
//@ fence_after
template <int ORDER> TL_DEVICE void fence_after() {
  if constexpr (ORDER == 1 || ORDER == 2 || ORDER >= 4) ordering_fence<ORDER>();
}
//@ atomic_cas_loop
// *p = f(*p) in one step, for element types without an atomic instruction.  Returns the old value.
template <typename T, typename F> TL_DEVICE T atomic_cas_loop(T* p, F f) {
  using B = typename raw_bytes<sizeof(T) == 8 ? 1 : sizeof(T)>::type;
  if constexpr (sizeof(T) == 8) {
    unsigned long long *at = reinterpret_cast<unsigned long long*>(p), old = *at, seen;
    do {
      seen = old;
      old = atomicCAS(at, seen, reinterpret<unsigned long long>(f(reinterpret<T>(seen))));
    } while (old != seen);
    return reinterpret<T>(old);
  } else {
    B *at = reinterpret_cast<B*>(p), old = *at, seen;
    do {
      seen = old;
      old = atomicCAS(at, seen, reinterpret<B>(f(reinterpret<T>(seen))));
    } while (old != seen);
    return reinterpret<T>(old);
  }
}
//@ is_integer
template <typename T> struct is_integer { static constexpr bool value = false; };
template <> struct is_integer<int> { static constexpr bool value = true; };
template <> struct is_integer<unsigned> { static constexpr bool value = true; };
template <> struct is_integer<long long> { static constexpr bool value = true; };
template <> struct is_integer<unsigned long long> { static constexpr bool value = true; };
//@ atomic_add
template <int ORDER, typename T> TL_DEVICE T atomic_add(T* p, T x) {
  fence_before<ORDER>();
  T old;
  if constexpr (is_integer<T>::value && sizeof(T) == 8)
    old = T(atomicAdd(reinterpret_cast<unsigned long long*>(p), (unsigned long long)x));
  else
    old = atomicAdd(p, x);
  fence_after<ORDER>();
  return old;
}
//@ atomic_max=Max;> atomic_min=Min;<
template <int ORDER, typename T> TL_DEVICE T $0(T* p, T x) {
  fence_before<ORDER>();
  T old;
  if constexpr (is_integer<T>::value) old = atomic$1(p, x);
  else old = atomic_cas_loop(p, [=](T o) { return (x $2 o || o != o) ? x : o; });
  fence_after<ORDER>();
  return old;
}
//@ atomic_or=| atomic_and=& atomic_xor=^
template <int ORDER, typename T> TL_DEVICE T $0(T* p, T x) {
  fence_before<ORDER>();
  T old = atomic_cas_loop(p, [=](T o) { return T(o $1 x); });
  fence_after<ORDER>();
  return old;
}
//@ atomic_exchange
template <int ORDER, typename T> TL_DEVICE T atomic_exchange(T* p, T x) {
  fence_before<ORDER>();
  T old = atomic_cas_loop(p, [=](T) { return x; });
  fence_after<ORDER>();
  return old;
}
//@ atomic_cas
template <int ORDER, typename T> TL_DEVICE T atomic_cas(T* p, T x, T compare) {
  fence_before<ORDER>();
  T old;
  if constexpr (sizeof(T) == 8)
    old = T(atomicCAS(reinterpret_cast<unsigned long long*>(p), (unsigned long long)compare, (unsigned long long)x));
  else
    old = T(atomicCAS(reinterpret_cast<unsigned*>(p), unsigned(compare), unsigned(x)));
  fence_after<ORDER>();
  return old;
}
//@ atomic_inc=Inc atomic_dec=Dec
template <int ORDER, typename T> TL_DEVICE T $0(T* p, T limit) {
  fence_before<ORDER>();
  T old = T(atomic$1(reinterpret_cast<unsigned*>(p), unsigned(limit)));
  fence_after<ORDER>();
  return old;
}
//@ atomic_load
template <int ORDER, typename T> TL_DEVICE T atomic_load(const T* p) {
  fence_before<ORDER == 5 ? 5 : 0>();
  T x = *const_cast<const volatile T*>(p);
  fence_after<ORDER>();
  return x;
}
//@ atomic_store
template <int ORDER, typename T> TL_DEVICE void atomic_store(T* p, T x) {
  fence_before<ORDER>();
  *const_cast<volatile T*>(p) = x;
  fence_after<ORDER == 5 ? 5 : 0>();
}
//@ atomic_addx2=2 atomic_addx4=4
// Consecutive elements, each added atomically.  Returns the old ones.
template <typename T> TL_DEVICE vec<T, $1> $0(T* p, const vec<T, $1>& x) {
  vec<T, $1> old;
#pragma unroll
  for (int i = 0; i < $1; ++i) old.v[i] = atomicAdd(p + i, x.v[i]);
  return old;
}
//@ assert_failed
TL_DEVICE void assert_failed(const char* text) {
  printf("%s", text);
  __trap();
}
//@ infinity
#define TL_INFINITY __int_as_float(0x7f800000)
#define TL_NAN __int_as_float(0x7fffffff)
