// Device functions that generated kernels use.  Only the sections a kernel needs are printed before it: each starts
// with a line "//@ name" of what it defines, and uses only earlier ones.  Instructions: PTX ISA.
//@ vec
// N elements that move as one access.
template <typename T, int N> struct alignas(sizeof(T) * N > 16 ? 16 : sizeof(T) * N) vec {
  T v[N];
};
//@ raw_bytes
// An integer type of BYTES bytes, for accesses of that width.
template <int BYTES> struct raw_bytes { using type = uint4; };
template <> struct raw_bytes<1> { using type = unsigned char; };
template <> struct raw_bytes<2> { using type = unsigned short; };
template <> struct raw_bytes<4> { using type = unsigned; };
template <> struct raw_bytes<8> { using type = uint2; };
//@ load
template <typename T, int N> TL_DEVICE vec<T, N> load(const void* p) {
  constexpr int BYTES = sizeof(T) * N, STEP = BYTES < 16 ? BYTES : 16;
  using R = typename raw_bytes<STEP>::type;
  vec<T, N> out;
#pragma unroll
  for (int i = 0; i < BYTES / STEP; ++i) reinterpret_cast<R*>(&out)[i] = reinterpret_cast<const R*>(p)[i];
  return out;
}
//@ store
template <typename T, int N> TL_DEVICE void store(void* p, const vec<T, N>& x) {
  constexpr int BYTES = sizeof(T) * N, STEP = BYTES < 16 ? BYTES : 16;
  using R = typename raw_bytes<STEP>::type;
#pragma unroll
  for (int i = 0; i < BYTES / STEP; ++i) reinterpret_cast<R*>(p)[i] = reinterpret_cast<const R*>(&x)[i];
}
//@ copy
// N elements from one place to another in the widest accesses.
template <typename T, int N> TL_DEVICE void copy(void* to, const void* from) { store<T, N>(to, load<T, N>(from)); }
//@ splat
template <typename T, int N> TL_DEVICE vec<T, N> splat(T x) {
  vec<T, N> out;
#pragma unroll
  for (int i = 0; i < N; ++i) out.v[i] = x;
  return out;
}
//@ ramp
template <typename T, int N> TL_DEVICE vec<T, N> ramp(T base, T stride) {
  vec<T, N> out;
#pragma unroll
  for (int i = 0; i < N; ++i) out.v[i] = base + T(i) * stride;
  return out;
}
//@ cast
template <typename T, typename S, int N> TL_DEVICE vec<T, N> cast(const vec<S, N>& x) {
  vec<T, N> out;
#pragma unroll
  for (int i = 0; i < N; ++i) out.v[i] = T(x.v[i]);
  return out;
}
//@ to_int
// A float cut to an integer: beyond the range its nearest end, NaN zero.  C++ leaves both undefined.
template <typename T> TL_DEVICE T to_int(float x) {
  constexpr bool SIGNED = T(-1) < T(0);
  if constexpr (sizeof(T) == 8) {
    if constexpr (SIGNED) return x != x ? T(0) : T(__float2ll_rz(x));
    else return T(x != x ? 0ull : __float2ull_rz(x));
  } else if constexpr (sizeof(T) == 4) {
    if constexpr (SIGNED) return T(__float2int_rz(x));
    else return T(__float2uint_rz(x));
  } else {
    int y;
    if constexpr (sizeof(T) == 1 && SIGNED) asm("cvt.rzi.s8.f32 %0, %1;" : "=r"(y) : "f"(x));
    else if constexpr (sizeof(T) == 1) asm("cvt.rzi.u8.f32 %0, %1;" : "=r"(y) : "f"(x));
    else if constexpr (SIGNED) asm("cvt.rzi.s16.f32 %0, %1;" : "=r"(y) : "f"(x));
    else asm("cvt.rzi.u16.f32 %0, %1;" : "=r"(y) : "f"(x));
    return T(y);
  }
}
template <typename T> TL_DEVICE T to_int(double x) {
  constexpr bool SIGNED = T(-1) < T(0);
  if (x != x) return T(0);
  if constexpr (sizeof(T) == 8 && SIGNED) return T(__double2ll_rz(x));
  else if constexpr (sizeof(T) == 8) return T(__double2ull_rz(x));
  else if constexpr (sizeof(T) == 4 && SIGNED) return T(__double2int_rz(x));
  else if constexpr (sizeof(T) == 4) return T(__double2uint_rz(x));
  else {
    constexpr int BITS = 8 * sizeof(T), HIGH = (1 << (BITS - SIGNED)) - 1, LOW = SIGNED ? -HIGH - 1 : 0;
    return T(::max(::min(__double2int_rz(x), HIGH), LOW));
  }
}
//@ cast_int
template <typename T, typename S, int N> TL_DEVICE vec<T, N> cast_int(const vec<S, N>& x) {
  vec<T, N> out;
#pragma unroll
  for (int i = 0; i < N; ++i) out.v[i] = to_int<T>(x.v[i]);
  return out;
}
//@ cast_half
// float -> half in pairs: one cvt.rn.f16x2 for two elements.
template <int N> TL_DEVICE vec<half_t, N> cast_half(const vec<float, N>& x) {
  static_assert(N % 2 == 0, "pairs");
  vec<half_t, N> out;
#pragma unroll
  for (int i = 0; i < N; i += 2)
    *reinterpret_cast<__half2*>(&out.v[i]) = __floats2half2_rn(x.v[i], x.v[i + 1]);
  return out;
}
//@ cast_bfloat16
template <int N> TL_DEVICE vec<bfloat16_t, N> cast_bfloat16(const vec<float, N>& x) {
  static_assert(N % 2 == 0, "pairs");
  vec<bfloat16_t, N> out;
#pragma unroll
  for (int i = 0; i < N; i += 2)
    *reinterpret_cast<__nv_bfloat162*>(&out.v[i]) = __floats2bfloat162_rn(x.v[i], x.v[i + 1]);
  return out;
}
//@ pack_half
// N floats in registers to halves in registers, a pair a word: the compiler takes less time over words than over halves.
template <int N> TL_DEVICE void pack_half(half_t* to, const float* from) {
#if __CUDA_ARCH__ >= 800
#pragma unroll
  for (int i = 0; i < N; i += 2)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(reinterpret_cast<unsigned*>(to)[i / 2]) : "f"(from[i + 1]), "f"(from[i]));
#else
#pragma unroll
  for (int i = 0; i < N; ++i)
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(reinterpret_cast<unsigned short*>(to)[i]) : "f"(from[i]));
#endif
}
//@ pack_bfloat16
template <int N> TL_DEVICE void pack_bfloat16(bfloat16_t* to, const float* from) {
#if __CUDA_ARCH__ >= 800
#pragma unroll
  for (int i = 0; i < N; i += 2)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(reinterpret_cast<unsigned*>(to)[i / 2]) : "f"(from[i + 1]), "f"(from[i]));
#else
#pragma unroll
  for (int i = 0; i < N; ++i) {  // to the nearest, ties to even; NaN as the headers give it
    const unsigned bits = __float_as_uint(from[i]);
    reinterpret_cast<unsigned short*>(to)[i] = from[i] != from[i] ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
#endif
}
//@ map
template <typename F, typename T, int N> TL_DEVICE auto map(F f, const vec<T, N>& x) {
  vec<decltype(f(x.v[0])), N> out;
#pragma unroll
  for (int i = 0; i < N; ++i) out.v[i] = f(x.v[i]);
  return out;
}
template <typename F, typename T, typename U, int N> TL_DEVICE auto map(F f, const vec<T, N>& x, const vec<U, N>& y) {
  vec<decltype(f(x.v[0], y.v[0])), N> out;
#pragma unroll
  for (int i = 0; i < N; ++i) out.v[i] = f(x.v[i], y.v[i]);
  return out;
}
template <typename F, typename T, typename U, typename W, int N>
TL_DEVICE auto map(F f, const vec<T, N>& x, const vec<U, N>& y, const vec<W, N>& z) {
  vec<decltype(f(x.v[0], y.v[0], z.v[0])), N> out;
#pragma unroll
  for (int i = 0; i < N; ++i) out.v[i] = f(x.v[i], y.v[i], z.v[i]);
  return out;
}
//@ wraps_as
// The type in which arithmetic on T wraps around instead of being undefined.
template <typename T> struct wraps_as { using type = T; };
template <> struct wraps_as<int> { using type = unsigned; };
template <> struct wraps_as<long long> { using type = unsigned long long; };
//@ vec_arithmetic
#define TL_VEC_ARITHMETIC(op)                                                                        \
  template <typename T, int N> TL_DEVICE vec<T, N> operator op(const vec<T, N>& a, const vec<T, N>& b) { \
    using W = typename wraps_as<T>::type;                                                            \
    vec<T, N> out;                                                                                   \
    _Pragma("unroll") for (int i = 0; i < N; ++i) out.v[i] = T(W(a.v[i]) op W(b.v[i]));              \
    return out;                                                                                      \
  }
TL_VEC_ARITHMETIC(+) TL_VEC_ARITHMETIC(-) TL_VEC_ARITHMETIC(*)
//@ vec_bits
#define TL_VEC_BITS(op)                                                                              \
  template <typename T, int N> TL_DEVICE vec<T, N> operator op(const vec<T, N>& a, const vec<T, N>& b) { \
    vec<T, N> out;                                                                                   \
    _Pragma("unroll") for (int i = 0; i < N; ++i) out.v[i] = T(a.v[i] op b.v[i]);                    \
    return out;                                                                                      \
  }
TL_VEC_BITS(/) TL_VEC_BITS(%) TL_VEC_BITS(<<) TL_VEC_BITS(>>) TL_VEC_BITS(&) TL_VEC_BITS(|) TL_VEC_BITS(^)
//@ vec_compare
#define TL_VEC_COMPARE(op)                                                                           \
  template <typename T, int N> TL_DEVICE vec<bool, N> operator op(const vec<T, N>& a, const vec<T, N>& b) { \
    vec<bool, N> out;                                                                                \
    _Pragma("unroll") for (int i = 0; i < N; ++i) out.v[i] = a.v[i] op b.v[i];                       \
    return out;                                                                                      \
  }
TL_VEC_COMPARE(<) TL_VEC_COMPARE(<=) TL_VEC_COMPARE(>) TL_VEC_COMPARE(>=) TL_VEC_COMPARE(==) TL_VEC_COMPARE(!=)
TL_VEC_COMPARE(&&) TL_VEC_COMPARE(||)
//@ vec_half
// Pairs of halves in one instruction.
#define TL_VEC_HALF(op, fn)                                                                          \
  template <int N> TL_DEVICE vec<half_t, N> operator op(const vec<half_t, N>& a, const vec<half_t, N>& b) { \
    static_assert(N % 2 == 0, "pairs");                                                              \
    vec<half_t, N> out;                                                                              \
    _Pragma("unroll") for (int i = 0; i < N / 2; ++i) reinterpret_cast<__half2*>(&out)[i] =          \
        fn(reinterpret_cast<const __half2*>(&a)[i], reinterpret_cast<const __half2*>(&b)[i]);        \
    return out;                                                                                      \
  }
TL_VEC_HALF(+, __hadd2) TL_VEC_HALF(-, __hsub2) TL_VEC_HALF(*, __hmul2)
//@ vec_bfloat16
#define TL_VEC_BFLOAT16(op, fn)                                                                      \
  template <int N> TL_DEVICE vec<bfloat16_t, N> operator op(const vec<bfloat16_t, N>& a, const vec<bfloat16_t, N>& b) { \
    static_assert(N % 2 == 0, "pairs");                                                              \
    vec<bfloat16_t, N> out;                                                                          \
    _Pragma("unroll") for (int i = 0; i < N / 2; ++i) reinterpret_cast<__nv_bfloat162*>(&out)[i] =   \
        fn(reinterpret_cast<const __nv_bfloat162*>(&a)[i], reinterpret_cast<const __nv_bfloat162*>(&b)[i]); \
    return out;                                                                                      \
  }
TL_VEC_BFLOAT16(+, __hadd2) TL_VEC_BFLOAT16(-, __hsub2) TL_VEC_BFLOAT16(*, __hmul2)
//@ add2
// The packed functions work on pairs of float, half or bfloat16; sections vec_half, vec_bfloat16 give theirs in one step.
template <typename V> TL_DEVICE V add2(const V& a, const V& b) { return a + b; }  // vec_arithmetic
//@ sub2
template <typename V> TL_DEVICE V sub2(const V& a, const V& b) { return a - b; }  // vec_arithmetic vec_half vec_bfloat16
//@ mul2
template <typename V> TL_DEVICE V mul2(const V& a, const V& b) { return a * b; }  // vec_arithmetic vec_half vec_bfloat16
//@ fma_of
TL_DEVICE float fma_of(float x, float y, float z) { return fmaf(x, y, z); }
TL_DEVICE half_t fma_of(half_t x, half_t y, half_t z) { return __hfma(x, y, z); }
TL_DEVICE bfloat16_t fma_of(bfloat16_t x, bfloat16_t y, bfloat16_t z) { return __hfma(x, y, z); }
//@ fma2
template <typename V> TL_DEVICE V fma2(const V& a, const V& b, const V& c) {
  return map([](auto x, auto y, auto z) { return fma_of(x, y, z); }, a, b, c);
}
//@ max2
template <typename V> TL_DEVICE V max2(const V& a, const V& b) {
  using T = decltype(a.v[0] + a.v[0]);
  return map([](T x, T y) { return T(fmaxf(float(x), float(y))); }, a, b);
}
//@ min2
template <typename V> TL_DEVICE V min2(const V& a, const V& b) {
  using T = decltype(a.v[0] + a.v[0]);
  return map([](T x, T y) { return T(fminf(float(x), float(y))); }, a, b);
}
//@ abs2
template <typename V> TL_DEVICE V abs2(const V& a) {
  using T = decltype(a.v[0] + a.v[0]);
  return map([](T x) { return T(fabsf(float(x))); }, a);
}
//@ nonzero
// What an integer may be divided by.  x / 0 is undefined in C: compilers pack 8- and 16-bit quotients into words as if none
// overflowed, so that one lane's division by 0 changed the lanes beside it.
template <typename T> TL_DEVICE T nonzero(T b) { return b == 0 ? T(1) : b; }
//@ floordiv
// Quotient and remainder that round to minus infinity; C's round to zero.
template <typename T> TL_DEVICE T floordiv(T a, T b) {
  if (sizeof(T) < 4) b = nonzero(b);
  T q = a / b;
  return (a % b != 0 && ((a < 0) != (b < 0))) ? q - 1 : q;
}
//@ floormod
template <typename T> TL_DEVICE T floormod(T a, T b) {
  if (sizeof(T) < 4) b = nonzero(b);
  T r = a % b;
  return (r != 0 && ((r < 0) != (b < 0))) ? r + b : r;
}
//@ abs
template <typename T> TL_DEVICE T abs(T x) { return x < T(0) ? T(-x) : x; }
//@ select_both
template <typename T> struct select_both {  // its fields are evaluated in order, by all lanes
  bool c;
  T a, b;
  TL_DEVICE T pick() const { return c ? a : b; }
};
//@ popcount
template <typename T> TL_DEVICE T popcount(T x) {
  constexpr unsigned long long MASK = sizeof(T) == 8 ? ~0ull : (1ull << (8 * (sizeof(T) % 8))) - 1;
  return T(sizeof(T) == 8 ? __popcll((unsigned long long)x) : __popc((unsigned)((unsigned long long)x & MASK)));
}
//@ clz
template <typename T> TL_DEVICE T clz(T x) {
  constexpr unsigned long long MASK = sizeof(T) == 8 ? ~0ull : (1ull << (8 * (sizeof(T) % 8))) - 1;
  return T(__clzll((long long)((unsigned long long)x & MASK)) - (64 - 8 * (int)sizeof(T)));
}
//@ ffs
template <typename T> TL_DEVICE int ffs(T x) {
  constexpr unsigned long long MASK = sizeof(T) == 8 ? ~0ull : (1ull << (8 * (sizeof(T) % 8))) - 1;
  return __ffsll((long long)((unsigned long long)x & MASK));
}
//@ reinterpret
template <typename T, typename S> TL_DEVICE T reinterpret(const S& x) {
  static_assert(sizeof(T) == sizeof(S), "reinterpret keeps the size");
  T out;
  memcpy(&out, &x, sizeof(T));
  return out;
}
//@ sigmoid
// By exp(-|x|), which does not overflow: small results keep their bits.
TL_DEVICE float sigmoid(float x) {
  const float t = expf(-fabsf(x));
  return (x < 0.0f ? t : 1.0f) / (1.0f + t);
}
TL_DEVICE double sigmoid(double x) {
  const double t = exp(-fabs(x));
  return (x < 0.0 ? t : 1.0) / (1.0 + t);
}
//@ fast_exp2
TL_DEVICE float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
//@ fast_rcp
TL_DEVICE float fast_rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
//@ to_tf32
TL_DEVICE float to_tf32(float x) {
  unsigned y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return __uint_as_float(y);
}
//@ next_after
// The neighbour of a 16-bit float towards y.
template <typename T> TL_DEVICE T next_after(T x, T y) {
  const float a = float(x), b = float(y);
  if (a != a || b != b) return T(a + b);
  if (a == b) return y;
  unsigned short bits = reinterpret<unsigned short>(x);
  if (a == 0.0f) bits = b > 0.0f ? 0x0001 : 0x8001;
  else bits += ((b > a) == (a > 0.0f)) ? 1 : -1;
  return reinterpret<T>(bits);
}
//@ shared_address
TL_DEVICE unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
//@ cp_async
// Asynchronous copy of BYTES bytes to shared memory; a false predicate writes zeros and reads nothing.
template <int BYTES> TL_DEVICE void cp_async(void* dst, const void* src) {
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(dst)), "l"(src) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(dst)), "l"(src), "n"(BYTES) : "memory");
}
template <int BYTES> TL_DEVICE void cp_async(void* dst, const void* src, bool pred) {
  const int bytes = pred ? BYTES : 0;
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(dst)), "l"(src), "r"(bytes) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(dst)), "l"(src), "n"(BYTES), "r"(bytes) : "memory");
}
//@ cp_async_commit
TL_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
//@ cp_async_wait
template <int N> TL_DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
//@ ldmatrix_x1
TL_DEVICE void ldmatrix_x1(void* dst, const void* src) {
  unsigned* r = reinterpret_cast<unsigned*>(dst);
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(shared_address(src)) : "memory");
}
//@ ldmatrix_x1_trans
TL_DEVICE void ldmatrix_x1_trans(void* dst, const void* src) {
  unsigned* r = reinterpret_cast<unsigned*>(dst);
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(shared_address(src)) : "memory");
}
//@ ldmatrix_x2
TL_DEVICE void ldmatrix_x2(void* dst, const void* src) {
  unsigned* r = reinterpret_cast<unsigned*>(dst);
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(src)) : "memory");
}
//@ ldmatrix_x2_trans
TL_DEVICE void ldmatrix_x2_trans(void* dst, const void* src) {
  unsigned* r = reinterpret_cast<unsigned*>(dst);
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(src)) : "memory");
}
//@ ldmatrix_x4
TL_DEVICE void ldmatrix_x4(void* dst, const void* src) {
  unsigned* r = reinterpret_cast<unsigned*>(dst);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(src)) : "memory");
}
//@ ldmatrix_x4_trans
TL_DEVICE void ldmatrix_x4_trans(void* dst, const void* src) {
  unsigned* r = reinterpret_cast<unsigned*>(dst);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(src)) : "memory");
}
//@ stmatrix_x1
TL_DEVICE void stmatrix_x1(void* dst, const void* src) {
  const unsigned* r = reinterpret_cast<const unsigned*>(src);
  asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(shared_address(dst)), "r"(r[0]) : "memory");
}
//@ stmatrix_x2
TL_DEVICE void stmatrix_x2(void* dst, const void* src) {
  const unsigned* r = reinterpret_cast<const unsigned*>(src);
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};"
               ::"r"(shared_address(dst)), "r"(r[0]), "r"(r[1]) : "memory");
}
//@ stmatrix_x4
TL_DEVICE void stmatrix_x4(void* dst, const void* src) {
  const unsigned* r = reinterpret_cast<const unsigned*>(src);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(shared_address(dst)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
//@ stmatrix_x1_trans
TL_DEVICE void stmatrix_x1_trans(void* dst, const void* src) {
  const unsigned* r = reinterpret_cast<const unsigned*>(src);
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(shared_address(dst)), "r"(r[0]) : "memory");
}
//@ stmatrix_x2_trans
TL_DEVICE void stmatrix_x2_trans(void* dst, const void* src) {
  const unsigned* r = reinterpret_cast<const unsigned*>(src);
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
               ::"r"(shared_address(dst)), "r"(r[0]), "r"(r[1]) : "memory");
}
//@ stmatrix_x4_trans
TL_DEVICE void stmatrix_x4_trans(void* dst, const void* src) {
  const unsigned* r = reinterpret_cast<const unsigned*>(src);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(shared_address(dst)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
//@ sync_grid
// Waits for all threads of a cooperative launch.  The counter starts at zero: block 0 adds what flips its top bit once
// every other block has added one, so that it can be used again at once.
TL_DEVICE void sync_grid(unsigned* counter) {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) {
    const unsigned blocks = gridDim.x * gridDim.y * gridDim.z;
    const bool first = blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0;
    __threadfence();
    const unsigned old = atomicAdd(counter, first ? 0x80000000u - (blocks - 1) : 1u);
    unsigned now;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    } while (((old ^ now) & 0x80000000u) == 0);
    __threadfence();
  }
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}
//@ named_barrier
TL_DEVICE void named_barrier(int id, int count) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory"); }
//@ named_barrier_arrive
TL_DEVICE void named_barrier_arrive(int id, int count) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory");
}
//@ mbarrier_init
TL_DEVICE void mbarrier_init(void* bar, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count) : "memory");
}
//@ mbarrier_arrive
TL_DEVICE void mbarrier_arrive(void* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
//@ cp_async_mbarrier_arrive
// The barrier gets an arrival when this thread's cp.async copies so far have landed; COUNTED: one of those it waits for.
template <bool COUNTED> TL_DEVICE void cp_async_mbarrier_arrive(void* bar) {
  if constexpr (COUNTED) asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(bar)) : "memory");
  else asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(shared_address(bar)) : "memory");
}
//@ mbarrier_expect_tx
TL_DEVICE void mbarrier_expect_tx(void* bar, unsigned bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
//@ mbarrier_arrive_expect_tx
TL_DEVICE void mbarrier_arrive_expect_tx(void* bar, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
//@ mbarrier_wait
// Returns when the phase of this parity has completed.
TL_DEVICE void mbarrier_wait(void* bar, unsigned parity) {
  const unsigned at = shared_address(bar);
  unsigned done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(at), "r"(parity) : "memory");
  } while (!done);
}
//@ fence_mbarrier_init
TL_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
//@ fence_proxy_async
TL_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
//@ fence_proxy_async_global
TL_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
//@ elect_one
// True in one lane of a converged warp.
TL_DEVICE bool elect_one() {
  unsigned elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}
//@ set_max_nreg
// Registers a thread may use from here on; all warps of a warp group take part.
template <int N, bool INC> TL_DEVICE void set_max_nreg() {
  if constexpr (INC) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
  else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
//@ tensor_map
// What cuTensorMapEncodeTiled fills in.
struct alignas(64) tensor_map { unsigned char bytes[128]; };
//@ bulk_load
TL_DEVICE void bulk_load(void* dst, const void* src, unsigned bytes, void* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(dst)), "l"(src), "r"(bytes), "r"(shared_address(bar)) : "memory");
}
//@ bulk_store
TL_DEVICE void bulk_store(void* dst, const void* src, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               ::"l"(dst), "r"(shared_address(src)), "r"(bytes) : "memory");
}
//@ pdl_trigger
TL_DEVICE void pdl_trigger() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
//@ pdl_sync
TL_DEVICE void pdl_sync() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
//@ mapa
// The place of p in the shared memory of CTA `cta` of the cluster.
TL_DEVICE unsigned mapa(const void* p, unsigned cta) {
  unsigned at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(p)), "r"(cta));
  return at;
}
//@ cluster_rank
TL_DEVICE unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
//@ cluster_size
TL_DEVICE unsigned cluster_size() {
  unsigned size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
//@ cluster_arrive
TL_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
//@ cluster_arrive_relaxed
TL_DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
//@ cluster_wait
TL_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
//@ cluster_sync
TL_DEVICE void cluster_sync() { cluster_arrive(); cluster_wait(); }
//@ mbarrier_arrive_remote
// Without .release.cluster: default semantics order what a consumer's release of a slot needs, at a fifth of the cost.
TL_DEVICE void mbarrier_arrive_remote(void* bar, unsigned cta) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapa(bar, cta)) : "memory");
}
//@ cluster_load
// The element at the place of p in the shared memory of CTA `cta`.
template <typename T> TL_DEVICE T cluster_load(const T* p, unsigned cta) {
  const unsigned at = mapa(p, cta);
  if constexpr (sizeof(T) == 1) {
    unsigned r;
    asm volatile("ld.shared::cluster.u8 %0, [%1];" : "=r"(r) : "r"(at) : "memory");
    return reinterpret<T>((unsigned char)r);
  } else if constexpr (sizeof(T) == 2) {
    unsigned short r;
    asm volatile("ld.shared::cluster.u16 %0, [%1];" : "=h"(r) : "r"(at) : "memory");
    return reinterpret<T>(r);
  } else if constexpr (sizeof(T) == 4) {
    unsigned r;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(r) : "r"(at) : "memory");
    return reinterpret<T>(r);
  } else {
    unsigned long long r;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(r) : "r"(at) : "memory");
    return reinterpret<T>(r);
  }
}
//@ cluster_store
template <typename T> TL_DEVICE void cluster_store(T* p, unsigned cta, T x) {
  const unsigned at = mapa(p, cta);
  if constexpr (sizeof(T) == 1)
    asm volatile("st.shared::cluster.u8 [%0], %1;" ::"r"(at), "r"((unsigned)reinterpret<unsigned char>(x)) : "memory");
  else if constexpr (sizeof(T) == 2)
    asm volatile("st.shared::cluster.u16 [%0], %1;" ::"r"(at), "h"(reinterpret<unsigned short>(x)) : "memory");
  else if constexpr (sizeof(T) == 4)
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(at), "r"(reinterpret<unsigned>(x)) : "memory");
  else
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(at), "l"(reinterpret<unsigned long long>(x)) : "memory");
}
//@ bulk_copy_cluster
// From this CTA's shared memory to the place of dst in that of CTA `cta`, counted on the barrier at the place of bar there.
TL_DEVICE void bulk_copy_cluster(void* dst, const void* src, unsigned bytes, void* bar, unsigned cta) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(mapa(dst, cta)), "r"(shared_address(src)), "r"(bytes), "r"(mapa(bar, cta)) : "memory");
}
//@ bulk_commit
TL_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
//@ bulk_wait
template <int N> TL_DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory"); }
//@ bulk_wait_read
// The sources may be written again; the writes themselves need not be done.
template <int N> TL_DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }
//@ wgmma_fence
TL_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
//@ wgmma_commit
TL_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
//@ wgmma_wait
template <int N> TL_DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
//@ wgmma_pin
// Registers are no memory: this keeps the compiler from moving accesses to COUNT accumulator elements across it.
template <int COUNT> TL_DEVICE void wgmma_pin(float* c) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(c[i]) :: "memory");
}
template <int COUNT, typename T> TL_DEVICE void wgmma_pin(T* c) {
  unsigned* r = reinterpret_cast<unsigned*>(c);
#pragma unroll
  for (int i = 0; i < COUNT * (int)sizeof(T) / 4; ++i) asm volatile("" : "+r"(r[i]) :: "memory");
}
//@ wgmma_hold
// Waits that follow stay behind the computation of x: ptxas moves a wait up past arithmetic, but not past a branch that
// hangs on it.  (The branch is taken by whole warps, and never by numbers.)
template <int COUNT> TL_DEVICE void wgmma_hold(const float* x) {
  bool some = false;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) some |= x[i] == __int_as_float(0x7f800000);
  if (__any_sync(0xffffffffu, some)) asm volatile("bar.warp.sync 0xffffffff;" ::: "memory");
}
//@ wgmma_descriptor
// Operand in shared memory, `bytes` + `more` + OFFSET behind p, all of them multiples of 16.  Only 18 bits of the address:
// above them stands the rank in a cluster.  What is behind p is added to the finished half (no carry leaves the field:
// shared memory ends below 256 KB), so that that of p is computed once and the descriptors of one tile differ by one
// addition each: longer chains between two wgmma leave the matrix unit idle.
template <int LBO, int SBO, int SWIZZLE, int OFFSET = 0>
TL_DEVICE unsigned long long wgmma_descriptor(const void* p, unsigned bytes = 0, unsigned more = 0) {
  static_assert(OFFSET % 16 == 0, "operands start at multiples of 16 bytes");
  constexpr unsigned LOW = (unsigned)(LBO >> 4 & 0x3fff) << 16;
  constexpr unsigned HIGH = (unsigned)(SBO >> 4 & 0x3fff) | (unsigned)SWIZZLE << 30;
  const unsigned low = (shared_address(p) >> 4 & 0x3fff | LOW) + (bytes >> 4) + (more >> 4) + (OFFSET >> 4);
  return (unsigned long long)HIGH << 32 | low;
}
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
//@ shfl_sync
template <typename T> TL_DEVICE T shfl_sync(T x, int lane, int width, unsigned mask) {
  return shuffled(x, [=](auto bits) { return __shfl_sync(mask, bits, lane, width); });
}
//@ shfl_xor_sync
template <typename T> TL_DEVICE T shfl_xor_sync(T x, int lanes, int width, unsigned mask) {
  return shuffled(x, [=](auto bits) { return __shfl_xor_sync(mask, bits, lanes, width); });
}
//@ shfl_up_sync
template <typename T> TL_DEVICE T shfl_up_sync(T x, int delta, int width, unsigned mask) {
  return shuffled(x, [=](auto bits) { return __shfl_up_sync(mask, bits, delta, width); });
}
//@ shfl_down_sync
template <typename T> TL_DEVICE T shfl_down_sync(T x, int delta, int width, unsigned mask) {
  return shuffled(x, [=](auto bits) { return __shfl_down_sync(mask, bits, delta, width); });
}
//@ any_sync
TL_DEVICE int any_sync(int pred, unsigned mask = 0xffffffffu) { return __any_sync(mask, pred); }
//@ all_sync
TL_DEVICE int all_sync(int pred, unsigned mask = 0xffffffffu) { return __all_sync(mask, pred); }
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
//@ lane_idx
TL_DEVICE int lane_idx(int warp_size = 32) { return linear_thread() % warp_size; }
//@ warp_idx
TL_DEVICE int warp_idx(int warp_size = 32) { return linear_thread() / warp_size; }
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
//@ fence_before
// Memory orders: 0 relaxed, 1 consume, 2 acquire, 3 release, 4 acq_rel, 5 seq_cst.
template <int ORDER> TL_DEVICE void fence_before() { if constexpr (ORDER >= 3) __threadfence(); }
//@ fence_after
template <int ORDER> TL_DEVICE void fence_after() {
  if constexpr (ORDER == 1 || ORDER == 2 || ORDER >= 4) __threadfence();
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
//@ atomic_max
template <int ORDER, typename T> TL_DEVICE T atomic_max(T* p, T x) {
  fence_before<ORDER>();
  T old;
  if constexpr (is_integer<T>::value) old = atomicMax(p, x);
  else old = atomic_cas_loop(p, [=](T o) { return (x > o || o != o) ? x : o; });
  fence_after<ORDER>();
  return old;
}
//@ atomic_min
template <int ORDER, typename T> TL_DEVICE T atomic_min(T* p, T x) {
  fence_before<ORDER>();
  T old;
  if constexpr (is_integer<T>::value) old = atomicMin(p, x);
  else old = atomic_cas_loop(p, [=](T o) { return (x < o || o != o) ? x : o; });
  fence_after<ORDER>();
  return old;
}
//@ atomic_or
template <int ORDER, typename T> TL_DEVICE T atomic_or(T* p, T x) {
  fence_before<ORDER>();
  T old = atomic_cas_loop(p, [=](T o) { return T(o | x); });
  fence_after<ORDER>();
  return old;
}
//@ atomic_and
template <int ORDER, typename T> TL_DEVICE T atomic_and(T* p, T x) {
  fence_before<ORDER>();
  T old = atomic_cas_loop(p, [=](T o) { return T(o & x); });
  fence_after<ORDER>();
  return old;
}
//@ atomic_xor
template <int ORDER, typename T> TL_DEVICE T atomic_xor(T* p, T x) {
  fence_before<ORDER>();
  T old = atomic_cas_loop(p, [=](T o) { return T(o ^ x); });
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
//@ atomic_addx2
// Two consecutive elements, each added atomically.  Returns the old pair.
template <typename T> TL_DEVICE vec<T, 2> atomic_addx2(T* p, const vec<T, 2>& x) {
  vec<T, 2> old;
#pragma unroll
  for (int i = 0; i < 2; ++i) old.v[i] = atomicAdd(p + i, x.v[i]);
  return old;
}
//@ atomic_addx4
template <typename T> TL_DEVICE vec<T, 4> atomic_addx4(T* p, const vec<T, 4>& x) {
  vec<T, 4> old;
#pragma unroll
  for (int i = 0; i < 4; ++i) old.v[i] = atomicAdd(p + i, x.v[i]);
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
