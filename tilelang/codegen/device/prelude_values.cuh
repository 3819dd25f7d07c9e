// Device functions that generated kernels use: vectors, conversions, arithmetic (prelude.py).
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
//@ load_if
// The same where the condition holds, zeros elsewhere.
template <typename T, int N> TL_DEVICE vec<T, N> load_if(bool inside, const void* p) {
  constexpr int BYTES = sizeof(T) * N, STEP = BYTES < 16 ? BYTES : 16;
  using R = typename raw_bytes<STEP>::type;
  vec<T, N> out;
#pragma unroll
  for (int i = 0; i < BYTES / STEP; ++i) reinterpret_cast<R*>(&out)[i] = inside ? reinterpret_cast<const R*>(p)[i] : R{};
  return out;
}
//@ load_shifted
// 16 bytes from any element of a tensor that starts at a multiple of 16 bytes and ends at one of 8, by three aligned loads that
// are shifted.  Each of them reads a byte that is asked for, so they stay inside of the tensor.
template <typename T, int N, typename I> TL_DEVICE vec<T, N> load_shifted(const T* tensor, I at) {
  const unsigned skip = (unsigned)at % (8 / sizeof(T));
  const uint2* from = reinterpret_cast<const uint2*>(tensor + (at - skip));
  const uint2 a = from[0], b = from[1], c = from[skip ? 2 : 1];
  const unsigned words[6] = {a.x, a.y, b.x, b.y, c.x, c.y};
  unsigned w[5];
  vec<T, N> out;
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = skip & 4 / sizeof(T) ? words[i + 1] : words[i];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    reinterpret_cast<unsigned*>(&out)[i] = __funnelshift_r(w[i], w[i + 1], skip * sizeof(T) % 4 * 8);
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
template <typename T, int N> TL_DEVICE void copy(void* to, const void* from) {
#ifdef __CUDA_ARCH__
  constexpr int BYTES = sizeof(T) * N;
  using R = typename raw_bytes<BYTES < 16 ? BYTES : 16>::type;
  if constexpr (BYTES > sizeof(R)) store<T, N>(to, load<T, N>(from));
  else *reinterpret_cast<R*>(to) = *reinterpret_cast<const R*>(from);  // by way of a vec NVRTC stores its words one by one
#else
  store<T, N>(to, load<T, N>(from));  // LLVM would wait for all copies in front of it
#endif
}
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
//@ small_half=half_t;half;0x6400 small_bfloat16=bfloat16_t;bfloat16;0x4300
// An integer from LOW on, of 1024 values (128 as bfloat16): 1024 + n has the bits 0x6400 + n, 128 + n the bits 0x4300 + n, and
// the difference is exact.
template <int LOW> TL_DEVICE $1 $0(int n) {
  return __hsub(__ushort_as_$2((unsigned short)(n + ($3 - LOW))), __ushort_as_$2((unsigned short)($3 - LOW)));
}
//@ packed_bytes
// Bytes i .. i + 3 of N in registers as a word, two of them where there are no more.
template <int N, typename S> TL_DEVICE unsigned packed_bytes(const S* from, int i) {
  if constexpr (N == 2) return *reinterpret_cast<const unsigned short*>(from);
  else return reinterpret_cast<const unsigned*>(from)[i / 4];
}
//@ byte_of
// A byte of a vector in registers, taken out of its word by itself (codegen/cuda/shared_addresses.py).
TL_DEVICE unsigned byte_of(const unsigned char* v, int i) {
  return __byte_perm(reinterpret_cast<const unsigned*>(v)[i / 4], 0u, 0x4440u + i % 4);
}
//@ half_of_bytes
// N integers of 8 bits in registers to halves: 1024 + n has the bits 0x6400 + n. Signed ones are counted from -128 on.
template <int N, typename S> TL_DEVICE void half_of_bytes(half_t* to, const S* from) {
  constexpr unsigned FLIP = S(-1) < S(0) ? 0x80808080u : 0u;
  const unsigned zero = FLIP ? 0x64806480u : 0x64006400u;
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const unsigned bytes = packed_bytes<N>(from, i) ^ FLIP;
    const unsigned pair = __byte_perm(bytes, 0x64646464u, i & 2 ? 0x4342u : 0x4140u);
    *reinterpret_cast<__half2*>(&to[i]) = __hsub2(*reinterpret_cast<const __half2*>(&pair), *reinterpret_cast<const __half2*>(&zero));
  }
}
//@ float_of_bytes
// The same to floats: 2^23 + n has the bits 0x4b000000 + n.
template <int N, typename S> TL_DEVICE void float_of_bytes(float* to, const S* from) {
  constexpr unsigned FLIP = S(-1) < S(0) ? 0x80808080u : 0u;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const unsigned bytes = packed_bytes<N>(from, i) ^ FLIP;
    to[i] = __uint_as_float(__byte_perm(bytes, 0x4b000000u, 0x7440u + i % 4)) - (FLIP ? 8388736.0f : 8388608.0f);
  }
}
//@ bfloat16_of_bytes
template <int N, typename S> TL_DEVICE void bfloat16_of_bytes(bfloat16_t* to, const S* from) {
  float x[N];
  float_of_bytes<N>(x, from);
#pragma unroll
  for (int i = 0; i < N; i += 2) *reinterpret_cast<__nv_bfloat162*>(&to[i]) = __floats2bfloat162_rn(x[i], x[i + 1]);
}
//@ coded_pair
// Two numbers of a byte, at bits LOW and HIGH of it, minus a whole `zero` up to 255: 1024 + n * 2^shift has the bits
// 0x6400 + n * 2^shift, and all that follows is exact.
template <int LOW, int HIGH, int MASK> TL_DEVICE __half2 coded_pair(unsigned byte, half_t zero) {
  unsigned bits = (__byte_perm(byte, 0u, 0x4040u) & (MASK << LOW | (MASK << HIGH) << 16)) | 0x64006400u;
  // 2^-shift and -1024 * 2^-shift by their bits
  __half2 part = __halves2half2(__ushort_as_half((15 - LOW) << 10), __ushort_as_half((15 - HIGH) << 10));
  __half2 rest = __halves2half2(__ushort_as_half(0x8000 | (25 - LOW) << 10), __ushort_as_half(0x8000 | (25 - HIGH) << 10));
  return __hfma2(*reinterpret_cast<__half2*>(&bits), part, __hsub2(rest, __half2half2(zero)));
}
template <int LOW, int HIGH, int MASK> TL_DEVICE __half2 coded_pair(unsigned byte) {
  return coded_pair<LOW, HIGH, MASK>(byte, __ushort_as_half(0));
}
//@ take_codes
// The entries of a table of 16 entries of 16 bits for N codes of 4 bits: a permutation looks up a byte for four codes at once in
// half of the table, another one chooses between the halves by the codes' highest bits.  HIGH: low bytes are zero.
TL_DEVICE unsigned bytes_of_codes(unsigned codes, unsigned a, unsigned b, unsigned c, unsigned d) {
  const unsigned within = codes & 0x7777u, half = (codes >> 1 & 0x4444u) | 0x3210u;
  return __byte_perm(__byte_perm(a, b, within), __byte_perm(c, d, within), half);
}
template <int N, bool HIGH, typename E> TL_DEVICE void take_codes(E* to, const unsigned* from, const E* table) {
  const unsigned* t = reinterpret_cast<const unsigned*>(table);
  unsigned low[4], high[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    low[i] = __byte_perm(t[2 * i], t[2 * i + 1], 0x6420u);
    high[i] = __byte_perm(t[2 * i], t[2 * i + 1], 0x7531u);
  }
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const unsigned codes = from[i / 8] >> i % 8 * 4;
    const unsigned l = HIGH ? 0u : bytes_of_codes(codes, low[0], low[1], low[2], low[3]);
    const unsigned h = bytes_of_codes(codes, high[0], high[1], high[2], high[3]);
    reinterpret_cast<unsigned*>(to)[i / 2] = __byte_perm(l, h, 0x5140u);
    if (N > 2) reinterpret_cast<unsigned*>(to)[i / 2 + 1] = __byte_perm(l, h, 0x7362u);
  }
}
template <int N, bool HIGH, typename E, typename S> TL_DEVICE void take_codes(E* to, const S* from, const E* table) {
  take_codes<N, HIGH>(to, reinterpret_cast<const unsigned*>(from), table);
}
//@ take_codes_of
template <bool HIGH, typename E> TL_DEVICE void take_codes_of(E* to, unsigned byte, const E* table) {
  take_codes<2, HIGH>(to, &byte, table);
}
//@ cast_half=half_t;__half2;__floats2half2_rn cast_bfloat16=bfloat16_t;__nv_bfloat162;__floats2bfloat162_rn
// float -> 16 bits in pairs: one instruction for two elements.
template <int N> TL_DEVICE vec<$1, N> $0(const vec<float, N>& x) {
  static_assert(N % 2 == 0, "pairs");
  vec<$1, N> out;
#pragma unroll
  for (int i = 0; i < N; i += 2)
    *reinterpret_cast<$2*>(&out.v[i]) = $3(x.v[i], x.v[i + 1]);
  return out;
}
//@ float_of_bfloat16
// bfloat16 -> float in pairs: one instruction for an element, where two take one out of a word and widen it.
template <int N> TL_DEVICE vec<float, N> float_of_bfloat16(const vec<bfloat16_t, N>& x) {
  static_assert(N % 2 == 0, "pairs");
  vec<float, N> out;
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const unsigned pair = reinterpret_cast<const unsigned*>(&x)[i / 2];
    out.v[i] = __uint_as_float(pair << 16);
    out.v[i + 1] = __uint_as_float(pair & 0xffff0000u);
  }
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
//@ half_of_float8
// N float8 in registers to halves in registers.  WIDE: e5m2.
template <int N, bool WIDE> TL_DEVICE void half_of_float8(half_t* to, const void* from) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    unsigned& out = reinterpret_cast<unsigned*>(to)[i];
    const unsigned short pair = reinterpret_cast<const unsigned short*>(from)[i];
    if constexpr (WIDE) asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(out) : "h"(pair));
    else asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"(pair));
  }
}
//@ bfloat16_of_float8
template <int N, bool WIDE> TL_DEVICE void bfloat16_of_float8(bfloat16_t* to, const void* from) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    unsigned& out = reinterpret_cast<unsigned*>(to)[i];
    const unsigned short pair = reinterpret_cast<const unsigned short*>(from)[i];
    if constexpr (WIDE) asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(out) : "h"(pair));
    else asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"(pair));
    asm("{\n.reg .b16 l, h;\n.reg .f32 x, y;\nmov.b32 {l, h}, %0;\ncvt.f32.f16 x, l;\ncvt.f32.f16 y, h;\n"
        "cvt.rn.bf16x2.f32 %0, y, x;\n}" : "+r"(out));
  }
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
//@ sub2=- mul2=*
template <typename V> TL_DEVICE V $0(const V& a, const V& b) { return a $1 b; }  // vec_arithmetic vec_half vec_bfloat16
//@ fma_bfloat16
TL_DEVICE bfloat16_t fma_bfloat16(bfloat16_t x, bfloat16_t y, bfloat16_t z) {
#if __CUDA_ARCH__ >= 800
  return __hfma(x, y, z);
#else  // no such instruction: in float, with the last bit set where digits were cut off, so that it is rounded once
  const float a = float(x), b = float(y), c = float(z), cut = __fmaf_rz(a, b, c);
  const bool exact = __fmaf_rd(a, b, c) == __fmaf_ru(a, b, c);
  return bfloat16_t(exact ? cut : __uint_as_float(__float_as_uint(cut) | 1u));
#endif
}
//@ fma_of
TL_DEVICE float fma_of(float x, float y, float z) { return fmaf(x, y, z); }
TL_DEVICE half_t fma_of(half_t x, half_t y, half_t z) { return __hfma(x, y, z); }
TL_DEVICE bfloat16_t fma_of(bfloat16_t x, bfloat16_t y, bfloat16_t z) { return fma_bfloat16(x, y, z); }
//@ fma2
template <typename V> TL_DEVICE V fma2(const V& a, const V& b, const V& c) {
  return map([](auto x, auto y, auto z) { return fma_of(x, y, z); }, a, b, c);
}
//@ max2=max min2=min
template <typename V> TL_DEVICE V $0(const V& a, const V& b) {
  using T = decltype(a.v[0] + a.v[0]);
  return map([](T x, T y) { return T(f$1f(float(x), float(y))); }, a, b);
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
//@ shift_left
// The amount counts as unsigned, and all bits go where it is the width or more, as PTX has it; C leaves that undefined.
template <typename T> TL_DEVICE T shift_left(T x, T n) {
  if constexpr (sizeof(T) == 8) {
    const unsigned by = (unsigned long long)n < 64 ? unsigned(n) : 64u;
    asm("shl.b64 %0, %0, %1;" : "+l"(x) : "r"(by));
    return x;
  } else {
    unsigned y;
    asm("shl.b32 %0, %1, %2;" : "=r"(y) : "r"(unsigned(x)), "r"(unsigned(n)));
    return T(y);
  }
}
//@ shift_right
// As shift_left; of a negative number ones remain.
template <typename T> TL_DEVICE T shift_right(T x, T n) {
  if constexpr (sizeof(T) == 8) {
    const unsigned by = (unsigned long long)n < 64 ? unsigned(n) : 64u;
    if constexpr (T(-1) < T(0)) asm("shr.s64 %0, %0, %1;" : "+l"(x) : "r"(by));
    else asm("shr.u64 %0, %0, %1;" : "+l"(x) : "r"(by));
    return x;
  } else {
    int y;
    if constexpr (T(-1) < T(0)) asm("shr.s32 %0, %1, %2;" : "=r"(y) : "r"(int(x)), "r"(unsigned(n)));
    else asm("shr.u32 %0, %1, %2;" : "=r"(y) : "r"(int(x)), "r"(unsigned(n)));
    return T(y);
  }
}
//@ wide_product
// NVRTC would make two multiplications of a product of which both halves are used.
TL_DEVICE unsigned long long wide_product(unsigned a, unsigned b) {
  unsigned long long out;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(out) : "r"(a), "r"(b));
  return out;
}
//@ negated
// ptxas 13.0 goes on with what neg.s16 and abs.s16 give of the least number as if it were 32768, and with that of abs.s32 as if
// it were 2^31: shifts, comparisons, conversions and quotients are wrong.  An empty asm keeps LLVM from narrowing to 16 bits,
// and from putting an absolute value together.
template <typename T> TL_DEVICE T negated(T x) {
  if constexpr (sizeof(T) <= 4) {
    unsigned y = 0u - unsigned(x);
    asm("" : "+r"(y));
    return T(y);
  } else {
    unsigned long long y = 0ull - (unsigned long long)x;
    asm("" : "+l"(y));
    return T(y);
  }
}
//@ any_divisor
// The divisor of signed numbers where C leaves a quotient undefined: 0 counts as 1, and what is divided by -1 is negated, as the
// least number then wraps.
template <typename T> TL_DEVICE T any_divisor(T b) { return b == T(0) || b == T(-1) ? T(1) : b; }
//@ any_truncdiv
template <typename T> TL_DEVICE T any_truncdiv(T a, T b) {
  const T q = a / any_divisor(b);
  return b == T(-1) ? negated(q) : q;
}
//@ any_floordiv
template <typename T> TL_DEVICE T any_floordiv(T a, T b) {
  const T q = floordiv(a, any_divisor(b));
  return b == T(-1) ? negated(q) : q;
}
//@ sign_bits
// -1 of a negative number, else 0 (see negated).
template <typename T> TL_DEVICE T sign_bits(T x) {
  x >>= 8 * sizeof(T) - 1;
  if constexpr (sizeof(T) == 8) asm("" : "+l"(x));
  else asm("" : "+r"(x));
  return x;
}
//@ abs
// The least number of a type stays what it is: no sign overflows.  A sign that LLVM cannot see through keeps it from making
// abs.s16 (see negated) and abs.s32 of this, whose result ptxas 13.0 divides as if it were never negative.
template <typename T> TL_DEVICE T abs(T x) {
  if constexpr (sizeof(T) < 4) {
    int sign = x < 0 ? -1 : 0;
    asm("" : "+r"(sign));
    int y = (int(x) ^ sign) - sign;
    asm("" : "+r"(y));
    return T(y);
  } else if constexpr (sizeof(T) == 4) {
    int sign = x < 0 ? -1 : 0;
    asm("" : "+r"(sign));
    return T((unsigned(x) ^ unsigned(sign)) - unsigned(sign));
  } else {
    long long sign = x < 0 ? -1 : 0;
    asm("" : "+l"(sign));
    return T(((unsigned long long)x ^ (unsigned long long)sign) - (unsigned long long)sign);
  }
}
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
//@ fast_exp2=ex2 fast_rcp=rcp
TL_DEVICE float $0(float x) {
  float y;
  asm("$1.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
//@ sigmoid
// 1 / (1 + exp(-x)) without a branch.  exp(-x) = 2^(i + f) 2^-32: the power of two is made of bits, and results below 2^-126
// keep theirs.  i is from -90 to 126, f takes the rest.  (NaN saturates to 0, then f is NaN.)
TL_DEVICE float sigmoid(float x) {
  constexpr float LOG2E = 1.44269502f, REST = 1.925963033e-8f;  // their sum is log2(e)
  const float part = __saturatef(fmaf(x, -LOG2E / 216.0f, 90.0f / 216.0f)), shifted = fmaf(part, 216.0f, 12582917.0f);
  const float f = fmaf(x, -REST, fmaf(x, -LOG2E, 12583007.0f - shifted));
  const float scale = __uint_as_float(__float_as_uint(shifted) << 23);
  return fast_rcp(fmaf(fast_exp2(f), scale, 0x1p-32f)) * 0x1p-32f;
}
TL_DEVICE double sigmoid(double x) {
  const double t = exp(-fabs(x));
  return (x < 0.0 ? t : 1.0) / (1.0 + t);
}
//@ exp_wide
// Forms for results that are rounded to 16 or 8 bits next (target/rounded_functions.py).
TL_DEVICE float exp_wide(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
  return y;
}
//@ sigmoid_half
TL_DEVICE float sigmoid_half(float x) { return fast_rcp(1.0f + fast_exp2(x * -1.44269504f)); }
//@ sigmoid_wide
TL_DEVICE float sigmoid_wide(float x) {
  return fast_rcp(fast_exp2(fmaf(x, -1.44269504f, -32.0f)) + 0x1p-32f) * 0x1p-32f;
}
//@ erf_in_sum
// 1 - erfc(|x|) with the sign of x, where erfc(t) = exp2(t * Q(t)) (minimax for t <= 4, above which it rounds to 0).
TL_DEVICE float erf_in_sum(float x) {
  float t;
  asm("min.NaN.f32 %0, %1, 0f40800000;" : "=f"(t) : "f"(fabsf(x)));
  float q = fmaf(t, fmaf(t, 2.6778443e-4f, -4.34066374e-3f), 3.2206294e-2f);
  q = fmaf(t, fmaf(t, fmaf(t, q, -1.50812274e-1f), -9.17768047e-1f), -1.62796927f);
  return copysignf(1.0f - fast_exp2(t * q), x);
}
//@ tanh_wide
TL_DEVICE float tanh_wide(float x) {
  const float u = x * x, large = fmaf(fast_rcp(fast_exp2(x * 2.88539008f) + 1.0f), -2.0f, 1.0f);
  return fabsf(x) < 0.125f ? x * fmaf(u, fmaf(u, 0.133333333f, -0.333333333f), 1.0f) : large;  // keeps the sign of zero
}
//@ tanh_in_sum
// 1 - 2 e / (1 + e) with the sign of x, where e = exp(-2 |x|).
TL_DEVICE float tanh_in_sum(float x) {
  const float e = fast_exp2(fabsf(x) * -2.88539008f);
  return copysignf(fmaf(e * fast_rcp(e + 1.0f), -2.0f, 1.0f), x);
}
//@ scaled_tanh
// c * tanh(k * x) with an absolute error, for exponents.
TL_DEVICE float scaled_tanh(float x, float k, float c) {
  return fmaf(fast_rcp(fast_exp2(x * (k * 2.88539008f)) + 1.0f), -2.0f * c, c);
}
//@ quotient
// At most two units in the last place, for all operands.
TL_DEVICE float quotient(float x, float y) {
  float q;
  asm("div.full.f32 %0, %1, %2;" : "=f"(q) : "f"(x), "f"(y));
  return q;
}
//@ row_quotient
// As quotient, for many elements with one divisor: only the last two multiplications are done for each.
TL_DEVICE float row_quotient(float x, float y) {
  float k = fabsf(y) > 0x1p64f ? 0x1p-64f : fabsf(y) < 0x1p-64f ? 0x1p64f : 1.0f, r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(y * k));
  return (x * k) * r;
}
//@ square_root
// Correctly rounded without a branch, by the steps of sqrtf on numbers above 2^-100: smaller ones are scaled.
TL_DEVICE float square_root(float x) {
  const bool small = x < 0x1p-100f;
  const float a = small ? x * 0x1p64f : x;
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(a));
  const float s = a * y, next = fmaf(fmaf(-s, s, a), 0.5f * y, s);
  const float root = a == 0.0f || a == __uint_as_float(0x7f800000u) ? a : next;
  return small ? root * 0x1p-32f : root;
}
//@ small_power
// x^2 or x^3: at most half a unit of error for each multiplication.
template <int N, typename T> TL_DEVICE T small_power(T x) { return N == 2 ? x * x : x * x * x; }
//@ divided_by
// x / c, correctly rounded, for a constant c > 0 whose reciprocal is high + low (target/division.py).  Below 2^-78, where low * x
// underflows, in double: a correctly rounded double is in the middle between two floats only if the quotient is.
TL_DEVICE float divided_by(float x, float c, float high, float low) {
  float q = fmaf(x, high, x * low);
  if (fabsf(x) < 0x1p-78f && x != 0.0f) {
    const double wide = x, by = c, reciprocal = 1.0 / by, near = wide * reciprocal;
    q = float(fma(fma(-by, near, wide), reciprocal, near));
  }
  return q;
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
