// Sections that take the place of those of the same name in the shared prelude, and those of this target's own calls.
//@ odd_float
TL_DEVICE float odd_float(float x) { return x; }
TL_DEVICE float odd_float(double x) {
  const float y = x;
  const double back = y;
  if (back == x || x != x) return y;
  const unsigned bits = __float_as_uint(y);
  return __uint_as_float((__builtin_fabs(back) > __builtin_fabs(x) ? bits - 1 : bits) | 1u);
}
TL_DEVICE float odd_float(int x) { return odd_float(double(x)); }
TL_DEVICE float odd_float(unsigned x) { return odd_float(double(x)); }
TL_DEVICE float odd_float(long long x) {
  const float y = __ll2float_rz(x);
  return __float2ll_rz(y) == x ? y : __uint_as_float(__float_as_uint(y) | 1u);
}
TL_DEVICE float odd_float(unsigned long long x) {
  const float y = __ull2float_rz(x);
  return __float2ull_rz(y) == x ? y : __uint_as_float(__float_as_uint(y) | 1u);
}
//@ ocp_code
// Nearest even; what is greater than all values, infinity too, becomes the greatest, of code MOST.
template <int MANTISSA, int BIAS, int MOST> TL_DEVICE unsigned char ocp_code(float x) {
  constexpr unsigned DROP = 23 - MANTISSA, UNIT = (151u - BIAS - MANTISSA) << 23;
  const unsigned bits = __float_as_uint(x), size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return 0x7f;
  unsigned code;
  if (size < (128u - BIAS) << 23)  // subnormal: a sum with this unit in the last place rounds to whole units
    code = __float_as_uint(__uint_as_float(size) + __uint_as_float(UNIT)) - UNIT;
  else
    code = ((size + (1u << DROP - 1) - 1 + (size >> DROP & 1)) >> DROP) - ((127u - BIAS) << MANTISSA);
  return (code < MOST ? code : MOST) | (bits >> 24 & 0x80);
}
//@ fp8_value
// The value of a code by the chip's own conversion, where the format is that of its instructions.
#if defined(__gfx942__)
#define TL_FNUZ_INSTRUCTIONS 1
#elif defined(__gfx950__)
#define TL_OCP_INSTRUCTIONS 1
#endif
template <bool E5> TL_DEVICE float fp8_value(unsigned char code) {
#if defined(TL_FNUZ_INSTRUCTIONS) || defined(TL_OCP_INSTRUCTIONS)
  if constexpr (E5) return __builtin_amdgcn_cvt_f32_bf8(code, 0);
  else return __builtin_amdgcn_cvt_f32_fp8(code, 0);
#else
  return 0.0f;
#endif
}
//@ fp8_e4_t
struct fp8_e4_t {
  unsigned char code;
  fp8_e4_t() = default;
  template <typename T> explicit TL_DEVICE fp8_e4_t(T x) : code(ocp_code<3, 7, 0x7e>(odd_float(x))) {}
  explicit TL_DEVICE operator float() const {
#ifdef TL_OCP_INSTRUCTIONS
    return fp8_value<false>(code);
#else
    const unsigned size = code & 0x7f, bits = size >> 3 ? (size << 20) + (120u << 23) : __float_as_uint(size * 0x1p-9f);
    return __uint_as_float((size == 0x7f ? 0x7fc00000u : bits) | (code & 0x80u) << 24);
#endif
  }
};
//@ fp8_e5_t
// The high byte of a half.
struct fp8_e5_t {
  unsigned char code;
  fp8_e5_t() = default;
  template <typename T> explicit TL_DEVICE fp8_e5_t(T x) : code(ocp_code<2, 15, 0x7b>(odd_float(x))) {}
  explicit TL_DEVICE operator float() const { return float(__builtin_bit_cast(_Float16, (unsigned short)(code << 8))); }
};
//@ fp8_e4_fnuz=3;8;false fp8_e5_fnuz=2;16;true
struct $0 {
  unsigned char code;
  $0() = default;
  template <typename T> explicit TL_DEVICE $0(T x) : code(fnuz_code<$1, $2>(odd_float(x))) {}
  explicit TL_DEVICE operator float() const {
#ifdef TL_FNUZ_INSTRUCTIONS
    return fp8_value<$3>(code);
#else
    return fnuz_value<$1, $2>(code);
#endif
  }
};
//@ to_number
// A conversion that is rounded once: to bfloat16 from what float does not hold exactly by way of an odd float.
template <typename T, typename S> TL_DEVICE T to_number(S x) { return T(x); }
template <> TL_DEVICE bfloat16_t to_number<bfloat16_t, int>(int x) { return bfloat16_t(odd_float(x)); }
template <> TL_DEVICE bfloat16_t to_number<bfloat16_t, unsigned>(unsigned x) { return bfloat16_t(odd_float(x)); }
template <> TL_DEVICE bfloat16_t to_number<bfloat16_t, long long>(long long x) { return bfloat16_t(odd_float(x)); }
template <> TL_DEVICE bfloat16_t to_number<bfloat16_t, unsigned long long>(unsigned long long x) { return bfloat16_t(odd_float(x)); }
template <> TL_DEVICE bfloat16_t to_number<bfloat16_t, double>(double x) { return bfloat16_t(odd_float(x)); }
template <> TL_DEVICE half_t to_number<half_t, double>(double x) { return half_t(odd_float(x)); }
//@ cast
template <typename T, typename S, int N> TL_DEVICE vec<T, N> cast(const vec<S, N>& x) {
  vec<T, N> out;
#pragma unroll
  for (int i = 0; i < N; ++i) out.v[i] = to_number<T, S>(x.v[i]);
  return out;
}
//@ to_int
template <typename T> TL_DEVICE T to_int(float x) {
  constexpr bool SIGNED = T(-1) < T(0);
  constexpr int BITS = 8 * sizeof(T), HIGH = sizeof(T) < 4 ? (1 << (BITS % 32 - SIGNED)) - 1 : 0, LOW = SIGNED ? -HIGH - 1 : 0;
  if constexpr (sizeof(T) == 8 && SIGNED) return T(__float2ll_rz(x));
  else if constexpr (sizeof(T) == 8) return T(__float2ull_rz(x));
  else if constexpr (sizeof(T) == 4 && SIGNED) return T(__float2int_rz(x));
  else if constexpr (sizeof(T) == 4) return T(__float2uint_rz(x));
  else return T(max(min(__float2int_rz(x), HIGH), LOW));
}
template <typename T> TL_DEVICE T to_int(double x) {
  constexpr bool SIGNED = T(-1) < T(0);
  constexpr int BITS = 8 * sizeof(T), HIGH = sizeof(T) < 4 ? (1 << (BITS % 32 - SIGNED)) - 1 : 0, LOW = SIGNED ? -HIGH - 1 : 0;
  if constexpr (sizeof(T) == 8 && SIGNED) return T(__double2ll_rz(x));
  else if constexpr (sizeof(T) == 8) return T(__double2ull_rz(x));
  else if constexpr (sizeof(T) == 4 && SIGNED) return T(__double2int_rz(x));
  else if constexpr (sizeof(T) == 4) return T(__double2uint_rz(x));
  else return T(max(min(__double2int_rz(x), HIGH), LOW));
}
//@ load_shifted
// 16 bytes from any element of a tensor that starts at a multiple of 16 bytes and ends at one of 8, by three aligned loads that
// are shifted.  Each of them reads a byte that is asked for, so they stay inside of the tensor.
template <typename T, int N, typename I> TL_DEVICE vec<T, N> load_shifted(const T* tensor, I at) {
  const unsigned skip = (unsigned)at % (8 / sizeof(T)), by = skip * sizeof(T) % 4 * 8;
  const uint2* from = reinterpret_cast<const uint2*>(tensor + (at - skip));
  const uint2 a = from[0], b = from[1], c = from[skip ? 2 : 1];
  const bool odd = skip & 4 / sizeof(T);
  const unsigned v = odd ? a.y : a.x, w = odd ? b.x : a.y, x = odd ? b.y : b.x, y = odd ? c.x : b.y, z = odd ? c.y : c.x;
  const uint4 words = {__funnelshift_r(v, w, by), __funnelshift_r(w, x, by), __funnelshift_r(x, y, by), __funnelshift_r(y, z, by)};
  return __builtin_bit_cast(vec<T, N>, words);
}
//@ bfloat16_of_bytes
template <int N, typename S> TL_DEVICE void bfloat16_of_bytes(bfloat16_t* to, const S* from) {
  float x[N];
  float_of_bytes<N>(x, from);
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = bfloat16_t(x[i]);
}
//@ cast_half=half_t cast_bfloat16=bfloat16_t
template <int N> TL_DEVICE vec<$1, N> $0(const vec<float, N>& x) {
  vec<$1, N> out;
#pragma unroll
  for (int i = 0; i < N; ++i) out.v[i] = $1(x.v[i]);
  return out;
}
//@ pack_half
// v_fma_mixhi_f16 rounds x * 1 - 0 into the upper half of a register; a conversion and a packing otherwise.
template <int N> TL_DEVICE void pack_half(half_t* to, const float* from) {
  float one = 1.0f, zero = -0.0f;
  asm("" : "+s"(one), "+v"(zero));  // else LLVM leaves the arithmetic out
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = half_t(i % 2 ? __builtin_fmaf(from[i], one, zero) : from[i]);
}
//@ pack_bfloat16
template <int N> TL_DEVICE void pack_bfloat16(bfloat16_t* to, const float* from) {
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = bfloat16_t(from[i]);
}
//@ vec_half
// Pairs of halves: the compiler finds the packed instructions (vec_arithmetic).
//@ vec_bfloat16
// As vec_half, by way of float.
//@ shift_left
// The amount counts as unsigned, and all bits go where it is the width or more; C leaves that undefined.
template <typename T> TL_DEVICE T shift_left(T x, T n) {
  if constexpr (sizeof(T) == 8) return (unsigned long long)n < 64 ? T((unsigned long long)x << (n & 63)) : T(0);
  else return unsigned(n) < 32 ? T(unsigned(x) << (unsigned(n) & 31)) : T(0);
}
//@ shift_right
// As shift_left; of a negative number ones remain.
template <typename T> TL_DEVICE T shift_right(T x, T n) {
  constexpr int BITS = sizeof(T) == 8 ? 64 : 32;
  const bool within = sizeof(T) == 8 ? (unsigned long long)n < 64 : unsigned(n) < 32;
  if constexpr (T(-1) < T(0)) return T(x >> (within ? n & (BITS - 1) : BITS - 1));
  else return within ? T(x >> (n & (BITS - 1))) : T(0);
}
//@ wide_product
TL_DEVICE unsigned long long wide_product(unsigned a, unsigned b) { return (unsigned long long)a * b; }
//@ negated
template <typename T> TL_DEVICE T negated(T x) { return sizeof(T) == 8 ? T(0ull - (unsigned long long)x) : T(0u - unsigned(x)); }
//@ sign_bits
template <typename T> TL_DEVICE T sign_bits(T x) { return x >> (8 * sizeof(T) - 1); }
//@ abs
// The least number of a type stays what it is.
template <typename T> TL_DEVICE T abs(T x) { return x < 0 ? negated(x) : x; }
//@ fast_exp2
// Results below 2^-126 are zero.
TL_DEVICE float fast_exp2(float x) { return __builtin_amdgcn_exp2f(x); }
//@ fast_rcp
TL_DEVICE float fast_rcp(float x) { return __builtin_amdgcn_rcpf(x); }
//@ exp_wide
TL_DEVICE float exp_wide(float x) { return exp2f(x * 1.44269504f); }
//@ erf_in_sum
TL_DEVICE float erf_in_sum(float x) {
  const float t = x != x ? x : fminf(fabsf(x), 4.0f);
  float q = fmaf(t, fmaf(t, 2.6778443e-4f, -4.34066374e-3f), 3.2206294e-2f);
  q = fmaf(t, fmaf(t, fmaf(t, q, -1.50812274e-1f), -9.17768047e-1f), -1.62796927f);
  return copysignf(1.0f - fast_exp2(t * q), x);
}
//@ row_quotient
// At most two units in the last place; for many elements with one divisor only the last two multiplications are done for each.
TL_DEVICE float row_quotient(float x, float y) {
  const float k = fabsf(y) > 0x1p64f ? 0x1p-64f : fabsf(y) < 0x1p-64f ? 0x1p64f : 1.0f;
  return (x * k) * fast_rcp(y * k);
}
//@ quotient
TL_DEVICE float quotient(float x, float y) { return x / y; }
//@ square_root
TL_DEVICE float square_root(float x) { return __builtin_sqrtf(x); }
//@ to_tf32
// To 10 digits behind the point, ties away from zero.
TL_DEVICE float to_tf32(float x) {
  const unsigned bits = __float_as_uint(x);
  return x != x || (bits & 0x7f800000u) == 0x7f800000u ? x : __uint_as_float((bits + 0x1000u) & 0xffffe000u);
}
//@ warp_idx_sync
TL_DEVICE int warp_idx_sync(int warp_size = 32) { return linear_thread() / warp_size; }
//@ warp_uniform
// The lanes of a program's warp are half of a wave, so that the value need not be one of a scalar register.
TL_DEVICE int warp_uniform(int x) { return x; }
//@ read_clock64
TL_DEVICE long long read_clock64() { return __builtin_readcyclecounter(); }
//@ read_clock
TL_DEVICE unsigned read_clock() { return __builtin_readcyclecounter(); }
//@ read_globaltimer
// Nanoseconds; the counter has 100 MHz.
TL_DEVICE unsigned long long read_globaltimer() { return 10 * __builtin_amdgcn_s_memrealtime(); }
//@ atomic_inc
template <int ORDER, typename T> TL_DEVICE T atomic_inc(T* p, T limit) {
  fence_before<ORDER>();
  T old = atomic_cas_loop(p, [=](T o) { return unsigned(o) >= unsigned(limit) ? T(0) : T(o + 1); });
  fence_after<ORDER>();
  return old;
}
//@ atomic_dec
template <int ORDER, typename T> TL_DEVICE T atomic_dec(T* p, T limit) {
  fence_before<ORDER>();
  T old = atomic_cas_loop(p, [=](T o) { return o == 0 || unsigned(o) > unsigned(limit) ? limit : T(o - 1); });
  fence_after<ORDER>();
  return old;
}
//@ atomic_load
// At the level that all compute units share: the caches of their dies are not kept alike for plain loads.
template <int ORDER, typename T> TL_DEVICE T atomic_load(const T* p) {
  fence_before<ORDER == 5 ? 5 : 0>();
  T x;
  __scoped_atomic_load(const_cast<T*>(p), &x, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  fence_after<ORDER>();
  return x;
}
//@ atomic_store
template <int ORDER, typename T> TL_DEVICE void atomic_store(T* p, T x) {
  fence_before<ORDER>();
  __scoped_atomic_store(p, &x, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  fence_after<ORDER == 5 ? 5 : 0>();
}
//@ tested
// The condition of a branch, of which LLVM knows nothing more.
TL_DEVICE bool tested(bool x) {
  int bit = x;
  asm("" : "+v"(bit));
  return bit;
}
//@ syncthreads_count
// How many threads of the block say so.  Each wave leaves its count in a word; the second barrier lets the words be used again.
template <int WAVES> TL_DEVICE int syncthreads_count(int pred, void* counts) {
  unsigned* const of_waves = reinterpret_cast<unsigned*>(counts);
  of_waves[linear_thread() / 64] = __popcll(__builtin_amdgcn_ballot_w64(pred != 0));
  __syncthreads();
  int all = 0;
#pragma unroll
  for (int i = 0; i < WAVES; ++i) all += of_waves[i];
  __syncthreads();
  return all;
}
//@ syncthreads_or
template <int WAVES> TL_DEVICE int syncthreads_or(int pred, void* counts) { return syncthreads_count<WAVES>(pred, counts) != 0; }
//@ syncthreads_and
template <int WAVES> TL_DEVICE int syncthreads_and(int pred, void* counts) { return syncthreads_count<WAVES>(!pred, counts) == 0; }
//@ assert_failed
TL_DEVICE void assert_failed(const char*) { __builtin_trap(); }
//@ sync_grid
// Waits for all threads of a cooperative launch.  The counter starts at zero: block 0 adds what flips its top bit once
// every other block has added one, so that it can be used again at once.
TL_DEVICE void sync_grid(unsigned* counter) {
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) {
    const unsigned blocks = gridDim.x * gridDim.y * gridDim.z;
    const bool first = blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0;
    __threadfence();
    const unsigned old = atomicAdd(counter, first ? 0x80000000u - (blocks - 1) : 1u);
    unsigned now;
    do {
      __builtin_amdgcn_s_sleep(1);
      __scoped_atomic_load(counter, &now, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
    } while (((old ^ now) & 0x80000000u) == 0);
    __threadfence();
  }
  __syncthreads();
}
//@ load
// As in the shared prelude.  While global memory is on its way into LDS, LLVM 22 lets every access of LDS wait for it unless the
// access has aliasing information, which __restrict__ gives.  The waits are the program's.
template <typename T, int N> TL_DEVICE vec<T, N> load(const void* __restrict__ p) {
  constexpr int BYTES = sizeof(T) * N, STEP = BYTES < 16 ? BYTES : 16;
  using R = typename raw_bytes<STEP>::type;
  vec<T, N> out;
#pragma unroll
  for (int i = 0; i < BYTES / STEP; ++i) reinterpret_cast<R*>(&out)[i] = reinterpret_cast<const R*>(p)[i];
  return out;
}
//@ store
template <typename T, int N> TL_DEVICE void store(void* __restrict__ p, const vec<T, N>& x) {
  constexpr int BYTES = sizeof(T) * N, STEP = BYTES < 16 ? BYTES : 16;
  using R = typename raw_bytes<STEP>::type;
#pragma unroll
  for (int i = 0; i < BYTES / STEP; ++i) reinterpret_cast<R*>(p)[i] = reinterpret_cast<const R*>(&x)[i];
}
//@ load_transposed
// Four rows of 16 elements of LDS, which 16 lanes load, transposed.
template <typename T, int N> TL_DEVICE vec<T, N> load_transposed(const T* p) {
  typedef short V __attribute__((ext_vector_type(4)));
  return __builtin_bit_cast(vec<T, N>, __builtin_amdgcn_ds_read_tr16_b64_v4i16((__attribute__((address_space(3))) V*)p));
}
//@ loaded
template <typename T> TL_DEVICE T loaded(const T* __restrict__ p) { return *p; }
//@ stored
template <typename T, typename V> TL_DEVICE void stored(T* __restrict__ p, V x) { *p = x; }
//@ buffer_of
// The descriptor of a tensor: loads beyond its bytes give 0, also into LDS.
TL_DEVICE __amdgpu_buffer_rsrc_t buffer_of(const void* p, unsigned bytes) {
  return __builtin_amdgcn_make_buffer_rsrc(const_cast<void*>(p), 0, bytes, 0x27000);
}
//@ load_within
// N elements from byte `at` of a tensor on where `inside`, else 0.
template <typename T, int N> TL_DEVICE vec<T, N> load_within(const void* p, unsigned bytes, unsigned at, bool inside) {
  constexpr int BYTES = sizeof(T) * N, STEP = BYTES < 16 ? BYTES : 16;
  static_assert(BYTES % STEP == 0 && (STEP & (STEP - 1)) == 0);
  typedef unsigned W2 __attribute__((ext_vector_type(2)));
  typedef unsigned W4 __attribute__((ext_vector_type(4)));
  const auto r = buffer_of(p, bytes);
  unsigned from = inside ? at : 0x80000000u;
  asm("" : "+v"(from));  // else LLVM moves a constant into the instruction, whose sum does not wrap where the rest is below 0
  vec<T, N> out;
#pragma unroll
  for (int i = 0; i < BYTES / STEP; ++i) {
    char* to = reinterpret_cast<char*>(&out) + i * STEP;
    if constexpr (STEP == 1) *to = __builtin_amdgcn_raw_buffer_load_b8(r, from, 0, 0);
    if constexpr (STEP == 2) *reinterpret_cast<short*>(to) = __builtin_amdgcn_raw_buffer_load_b16(r, from, 0, 0);
    if constexpr (STEP == 4) *reinterpret_cast<unsigned*>(to) = __builtin_amdgcn_raw_buffer_load_b32(r, from, 0, 0);
    if constexpr (STEP == 8) *reinterpret_cast<W2*>(to) = __builtin_amdgcn_raw_buffer_load_b64(r, from, 0, 0);
    if constexpr (STEP == 16) *reinterpret_cast<W4*>(to) = __builtin_amdgcn_raw_buffer_load_b128(r, from + i * 16, 0, 0);
  }
  return out;
}
//@ cp_async_within
// A copy into LDS past the registers, of zeros unless `inside`.  A wave's lanes write BYTES each, one after another from the first
// lane's place on.  It counts in vmcnt; the waits are the program's (wait_loads).  By a buffer: LLVM 22 believes that the global
// form counts in lgkmcnt too, and waits too little for loads of LDS beside it (llvm-project pull 179305).
template <int BYTES> TL_DEVICE void cp_async_within(void* to, const void* p, unsigned bytes, unsigned at, bool inside) {
  const auto shared = (__attribute__((address_space(3))) void*)to;
  const unsigned from = inside ? at : 0x80000000u;
  static_assert(BYTES == 4 || BYTES == 16);
  if constexpr (BYTES == 4) __builtin_amdgcn_raw_ptr_buffer_load_lds(buffer_of(p, bytes), shared, 4, from, 0, 0, 0);
#ifdef __gfx950__
  if constexpr (BYTES == 16) __builtin_amdgcn_raw_ptr_buffer_load_lds(buffer_of(p, bytes), shared, 16, from, 0, 0, 0);
#else
  static_assert(BYTES == 4);
#endif
}
//@ cp_async
// The same from any place: the descriptor begins 2^30 bytes in front of the first lane's, so that it reaches those of all lanes.
template <int BYTES> TL_DEVICE void cp_async(void* to, const void* from, bool inside = true) {
  const unsigned long long own = reinterpret_cast<unsigned long long>(from);
  const unsigned low = __builtin_amdgcn_readfirstlane((unsigned)own), high = __builtin_amdgcn_readfirstlane((unsigned)(own >> 32));
  const unsigned long long first = ((unsigned long long)high << 32 | low) - (1u << 30);
  cp_async_within<BYTES>(to, reinterpret_cast<const void*>(first), 0x7fffffffu, (unsigned)(own - first), inside);
}
//@ cp_async_commit
TL_DEVICE void cp_async_commit() {}
//@ wait_loads
// Until at most N of this wave's loads, stores and copies are in flight.  What stands in front of it is not scheduled behind it:
// the MFMAs under which the copies are in flight.
template <int N> TL_DEVICE void wait_loads() {
  __builtin_amdgcn_sched_barrier(0);
  asm volatile("" ::: "memory");
  __builtin_amdgcn_s_waitcnt(0x0f70 | (N & 15) | (N >> 4) << 14);
  asm volatile("" ::: "memory");
}
//@ cp_async_wait
// Until all of this wave's copies have landed: those of the last N groups are not counted.
template <int N> TL_DEVICE void cp_async_wait() { wait_loads<0>(); }
//@ loads_between
// The order in which LLVM issues what stands between two changes of priority: FIRST loads of LDS, then one more in front of each
// EACH matrix instructions, which so many loads early cover.
template <int FIRST, int N, int EACH> TL_DEVICE void loads_between() {
  __builtin_amdgcn_sched_group_barrier(0x100, FIRST, 0);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    __builtin_amdgcn_sched_group_barrier(0x100, 1, 0);
    __builtin_amdgcn_sched_group_barrier(0x8, EACH, 0);
  }
  __builtin_amdgcn_sched_group_barrier(0x8, FIRST * EACH, 0);
}
//@ wait_shared
template <int N> TL_DEVICE void wait_shared() {
  asm volatile("" ::: "memory");
  __builtin_amdgcn_s_waitcnt(0xc07f | N << 8);
  asm volatile("" ::: "memory");
}
