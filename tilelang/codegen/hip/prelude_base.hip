// What the shared sections of the prelude take from a device's headers, made of clang's builtins: no header of ROCm is read.
// Instructions: CDNA3 ISA, "Vector ALU", "DPP", "LDS"; builtins: LLVM AMDGPU usage, clang language extensions.
//@ threadIdx=dim3_;workitem_id blockIdx=place_;workgroup_id blockDim=sizes_;workgroup_size
struct $1 { unsigned x, y, z; };
#define $0 (tl::$1{__builtin_amdgcn_$2_x(), __builtin_amdgcn_$2_y(), __builtin_amdgcn_$2_z()})
//@ gridDim
// The first implicit arguments of a kernel (code object 5): blocks along x, y, z.
struct blocks_ { unsigned x, y, z; };
TL_DEVICE blocks_ blocks() {
  const auto p = (const __attribute__((address_space(4))) unsigned*)__builtin_amdgcn_implicitarg_ptr();
  return {p[0], p[1], p[2]};
}
#define gridDim (tl::blocks())
//@ memcpy
#define memcpy __builtin_memcpy
//@ uint2
typedef unsigned uint2 __attribute__((ext_vector_type(2)));
//@ uint4
typedef unsigned uint4 __attribute__((ext_vector_type(4)));
//@ __float_as_uint=unsigned;float __float_as_int=int;float __uint_as_float=float;unsigned __int_as_float=float;int
TL_DEVICE $1 $0($2 x) { return __builtin_bit_cast($1, x); }
//@ __ushort_as_half
TL_DEVICE half_t __ushort_as_half(unsigned short x) { return __builtin_bit_cast(half_t, x); }
//@ __ushort_as_bfloat16
TL_DEVICE bfloat16_t __ushort_as_bfloat16(unsigned short x) { return __builtin_bit_cast(bfloat16_t, x); }
//@ min
template <typename T, typename U> TL_DEVICE auto min(T a, U b) { return a < b ? a : b; }
//@ max
template <typename T, typename U> TL_DEVICE auto max(T a, U b) { return a > b ? a : b; }
//@ fmaxf fminf copysignf
TL_DEVICE float $0(float x, float y) { return __builtin_$0(x, y); }
//@ fmax fmin copysign
TL_DEVICE double $0(double x, double y) { return __builtin_$0(x, y); }
//@ __hmax=max __hmin=min
TL_DEVICE half_t $0(half_t x, half_t y) { return half_t(__builtin_f$1f(float(x), float(y))); }
TL_DEVICE bfloat16_t $0(bfloat16_t x, bfloat16_t y) { return bfloat16_t(__builtin_f$1f(float(x), float(y))); }
//@ fmaf=float fma=double
TL_DEVICE $1 $0($1 x, $1 y, $1 z) { return __builtin_$0(x, y, z); }
//@ fabsf floorf ceilf truncf roundf sqrtf expf exp2f exp10f logf log2f log10f
TL_DEVICE float $0(float x) { return __builtin_$0(x); }
//@ fabs floor ceil trunc round sqrt
TL_DEVICE double $0(double x) { return __builtin_$0(x); }
//@ nearbyintf=float;f nearbyint=double;
TL_DEVICE $1 $0($1 x) { return __builtin_rint$2(x); }
//@ isnan
template <typename T> TL_DEVICE bool isnan(T x) { return x != x; }
//@ isinf isfinite
template <typename T> TL_DEVICE bool $0(T x) { return __builtin_$0(x); }
//@ ldexpf=float ldexp=double
TL_DEVICE $1 $0($1 x, int n) { return __builtin_$0(x, n); }
//@ rsqrtf
// v_rsq_f32 takes subnormals as zero; scaled numbers are far from them.
TL_DEVICE float rsqrtf(float x) {
  const bool small = x < 0x1p-100f && x > 0.0f;
  return __builtin_amdgcn_rsqf(small ? x * 0x1p64f : x) * (small ? 0x1p32f : 1.0f);
}
//@ rsqrt
TL_DEVICE double rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
//@ __expf=1.44269504f __exp10f=3.32192809f
TL_DEVICE float $0(float x) { return __builtin_amdgcn_exp2f(x * $1); }
//@ __logf=0.693147181f __log10f=0.301029996f
TL_DEVICE float $0(float x) { return __builtin_amdgcn_logf(x) * $1; }
//@ __log2f
TL_DEVICE float __log2f(float x) { return __builtin_amdgcn_logf(x); }
//@ __powf
TL_DEVICE float __powf(float x, float y) { return __builtin_amdgcn_exp2f(y * __builtin_amdgcn_logf(x)); }
//@ __sinf=sinf __cosf=cosf
// v_sin_f32 and v_cos_f32 count in turns.
TL_DEVICE float $0(float x) { return __builtin_amdgcn_$1(__builtin_amdgcn_fractf(x * 0.159154943f)); }
//@ __tanf
TL_DEVICE float __tanf(float x) { return __sinf(x) * __builtin_amdgcn_rcpf(__cosf(x)); }
//@ __fdividef
TL_DEVICE float __fdividef(float x, float y) { return x * __builtin_amdgcn_rcpf(y); }
//@ __saturatef
TL_DEVICE float __saturatef(float x) { return x > 0.0f ? __builtin_fminf(x, 1.0f) : 0.0f; }
//@ exp
// 2^n e^r with |r| <= ln(2) / 2; the remainder of the series is below 2^-57.
TL_DEVICE double exp(double x) {
  const double n = __builtin_rint(x * 1.4426950408889634);
  const double r = __builtin_fma(-n, 1.9082149292705877e-10, __builtin_fma(-n, 6.93147180369123816490e-01, x));
  const double inverse[14] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0,
                              1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0};
  double p = inverse[0];
#pragma unroll
  for (int i = 1; i < 14; ++i) p = __builtin_fma(p, r, inverse[i]);
  return x > 710.0 ? __builtin_inf() : x < -746.0 ? 0.0 : __builtin_ldexp(p, int(n));
}
//@ exp2
TL_DEVICE double exp2(double x) {
  const double n = __builtin_rint(x), y = exp((x - n) * 0.69314718055994531);
  return x > 1025.0 ? __builtin_inf() : x < -1080.0 ? 0.0 : __builtin_ldexp(y, int(n));
}
//@ exp10
TL_DEVICE double exp10(double x) {
  const double n = __builtin_rint(x * 3.3219280948873623);
  const double r = __builtin_fma(-n, -2.8037281277851704e-18, __builtin_fma(-n, 0.30102999566398120, x));
  const double y = exp(r * 2.3025850929940457);
  return x > 309.0 ? __builtin_inf() : x < -325.0 ? 0.0 : __builtin_ldexp(y, int(n));
}
//@ log
// x = m 2^n with m near 1: 2 artanh((m - 1) / (m + 1)) + n ln(2).
struct log_parts { double n, series; };
TL_DEVICE log_parts log_of(double x) {
  double m = __builtin_amdgcn_frexp_mant(x);
  int n = __builtin_amdgcn_frexp_exp(x);
  const bool low = m < 0.70710678118654752;
  m = low ? m * 2.0 : m;
  const double f = (m - 1.0) / (m + 1.0), s = f * f;
  double p = 1.0 / 25.0;
#pragma unroll
  for (int k = 23; k >= 3; k -= 2) p = __builtin_fma(p, s, 1.0 / k);
  return {double(n - low), 2.0 * __builtin_fma(f * s, p, f)};
}
TL_DEVICE double log_ends(double x, double y) {  // of zero, infinity, negative numbers and NaN
  return x == 0.0 ? -__builtin_inf() : x < 0.0 ? __builtin_nan("") : x > 1.7976931348623157e308 || x != x ? x : y;
}
TL_DEVICE double log(double x) {
  const log_parts p = log_of(x);
  return log_ends(x, __builtin_fma(p.n, 6.93147180369123816490e-01, __builtin_fma(p.n, 1.9082149292705877e-10, p.series)));
}
//@ log2
TL_DEVICE double log2(double x) {
  const log_parts p = log_of(x);  // log
  return log_ends(x, __builtin_fma(p.series, 1.4426950408889634, p.n));
}
//@ log10
TL_DEVICE double log10(double x) { return log(x) * 0.43429448190325183; }
//@ quarter_turns
// x as a number of quarter turns, mod 4, and the rest in radians.  Large numbers: 2 / pi in pieces of 24 bits, of which those
// are multiplied that do not give whole turns; the products are exact.
struct turned { int quarters; double rest; };
TL_DEVICE turned quarter_turns(float x) {
  const double big = 0x1p30, a = x;
  if (__builtin_fabs(a) < big) {
    const double n = __builtin_rint(a * 0.63661977236758138);
    return {int(n), __builtin_fma(-n, 6.123233995736766e-17, __builtin_fma(-n, 1.5707963267948966, a))};
  }
  if (!(__builtin_fabs(a) <= 3.5e38)) return {0, __builtin_nan("")};
  const double pieces[10] = {0xA2F983, 0x6E4E44, 0x1529FC, 0x2757D1, 0xF534DD, 0xC0DB62, 0x95993C, 0x439041, 0xFE5163, 0xABDEBB};
  const int e = __builtin_amdgcn_frexp_exp(a) - 24;  // x = m 2^e
  const double m = __builtin_ldexp(a, -e);
  double sum = 0.0;
#pragma unroll
  for (int j = 9; j >= 0; --j) {
    const int up = e - 24 * (j + 1);
    const double t = up >= 2 ? 0.0 : __builtin_ldexp(m * pieces[j], up);
    sum += t - 4.0 * __builtin_trunc(t * 0.25);
  }
  const double n = __builtin_rint(sum);
  return {int(n), (sum - n) * 1.5707963267948966};
}
TL_DEVICE double sine_of(double r) {
  const double s = r * r;
  double p = -1.0 / 1307674368000.0;
  const double inverse[6] = {1.0 / 6227020800.0, -1.0 / 39916800.0, 1.0 / 362880.0, -1.0 / 5040.0, 1.0 / 120.0, -1.0 / 6.0};
#pragma unroll
  for (int i = 0; i < 6; ++i) p = __builtin_fma(p, s, inverse[i]);
  return __builtin_fma(r * s, p, r);
}
TL_DEVICE double cosine_of(double r) {
  const double s = r * r;
  double p = 1.0 / 20922789888000.0;
  const double inverse[8] = {-1.0 / 87178291200.0, 1.0 / 479001600.0, -1.0 / 3628800.0, 1.0 / 40320.0, -1.0 / 720.0, 1.0 / 24.0,
                             -0.5, 1.0};
#pragma unroll
  for (int i = 0; i < 8; ++i) p = __builtin_fma(p, s, inverse[i]);
  return p;
}
//@ sinf
TL_DEVICE float sinf(float x) {
  const turned t = quarter_turns(x);
  const double y = t.quarters & 1 ? cosine_of(t.rest) : sine_of(t.rest);
  return x == 0.0f ? x : float(t.quarters & 2 ? -y : y);
}
//@ cosf
TL_DEVICE float cosf(float x) {
  const turned t = quarter_turns(x);
  const double y = t.quarters & 1 ? sine_of(t.rest) : cosine_of(t.rest);
  return float((t.quarters + 1) & 2 ? -y : y);
}
//@ tanf
TL_DEVICE float tanf(float x) {
  const turned t = quarter_turns(x);
  const double s = sine_of(t.rest), c = cosine_of(t.rest);
  return x == 0.0f ? x : float(t.quarters & 1 ? -c / s : s / c);
}
//@ sinhf
TL_DEVICE float sinhf(float x) {
  const double a = x, e = exp(a);
  return float(fabs(a) < 0x1p-8 ? __builtin_fma(a * a * a, 1.0 / 6.0, a) : 0.5 * (e - 1.0 / e));
}
//@ coshf
TL_DEVICE float coshf(float x) {
  const double e = exp(fabs(double(x)));
  return float(0.5 * (e + 1.0 / e));
}
//@ tanhf
TL_DEVICE float tanhf(float x) {
  const double a = x, t = exp(-2.0 * fabs(a)), y = copysign((1.0 - t) / (1.0 + t), a);
  return float(fabs(a) < 0x1p-9 ? __builtin_fma(a * a * a, -1.0 / 3.0, a) : y);
}
//@ atan
// atan(a) of a >= 0: pi/2 - atan(1/a) above 1, pi/4 + atan((a-1)/(a+1)) above sqrt(2) - 1.
TL_DEVICE double atan_positive(double a) {
  const bool above = a > 1.0;
  const double b = above ? 1.0 / a : a;
  const bool high = b > 0.41421356237309503;
  const double c = high ? (b - 1.0) / (b + 1.0) : b, s = c * c;
  double p = 1.0 / 41.0;
#pragma unroll
  for (int k = 39; k >= 3; k -= 2) p = __builtin_fma(-p, s, 1.0 / k);
  const double y = __builtin_fma(-c * s, p, c) + (high ? 0.78539816339744828 : 0.0);
  return above ? 1.5707963267948966 - y : y;
}
TL_DEVICE double atan(double x) { return copysign(atan_positive(fabs(x)), x); }
//@ atanf
TL_DEVICE float atanf(float x) { return float(atan(double(x))); }
//@ asinf
TL_DEVICE float asinf(float x) {
  const double a = x, y = atan(a / __builtin_sqrt((1.0 - a) * (1.0 + a)));
  return x == 0.0f ? x : float(y);
}
//@ acosf
TL_DEVICE float acosf(float x) {
  const double a = x;
  return float(1.5707963267948966 - atan(a / __builtin_sqrt((1.0 - a) * (1.0 + a))));
}
//@ atan2
TL_DEVICE double atan2(double y, double x) {
  const double b = fabs(y), a = fabs(x);
  const double t = a == b ? (a == 0.0 ? 0.0 : 0.78539816339744828) : atan_positive(b / a);  // atan
  const bool left = __builtin_signbit(x);
  const double z = left ? 3.1415926535897931 - t : t;
  return x != x || y != y ? x + y : copysign(z, y);
}
//@ atan2f
TL_DEVICE float atan2f(float y, float x) { return float(atan2(double(y), double(x))); }
//@ asinhf
TL_DEVICE float asinhf(float x) {
  const double a = fabs(double(x)), y = log(a + __builtin_sqrt(__builtin_fma(a, a, 1.0)));
  return copysignf(float(a < 0x1p-8 ? __builtin_fma(a * a * a, -1.0 / 6.0, a) : y), x);
}
//@ acoshf
TL_DEVICE float acoshf(float x) {
  const double a = x;
  return float(log(a + __builtin_sqrt((a - 1.0) * (a + 1.0))));
}
//@ atanhf
TL_DEVICE float atanhf(float x) {
  const double a = fabs(double(x)), y = 0.5 * log((1.0 + a) / (1.0 - a));
  return copysignf(float(a < 0x1p-8 ? __builtin_fma(a * a * a, 1.0 / 3.0, a) : y), x);
}
//@ log1pf
TL_DEVICE float log1pf(float x) {
  const double a = x;
  return float(fabs(a) < 0x1p-18 ? __builtin_fma(-0.5 * a, a, a) : log(1.0 + a));
}
//@ erff
// Below 1 by its series, above it as 1 - 2^(t Q(t)), where the second part is erfc (fitted for t <= 4, from where erf rounds to 1).
TL_DEVICE float erff(float x) {
  const float t = fminf(fabsf(x), 4.0f), u = t * t;
  const float low[8] = {-9.67359e-06f, 0.00011268254f, -0.00084843964f, 0.0052210535f, -0.026865438f, 0.11283783f, -0.37612638f,
                        1.1283792f};
  const float high[11] = {5.020769e-08f, -1.455664e-06f, 1.8694778e-05f, -0.00013792014f, 0.0006163811f, -0.0014009395f,
                          -0.0016671751f, 0.02982921f, -0.14983621f, -0.9178203f, -1.6280171f};
  float p = low[0], q = high[0];
#pragma unroll
  for (int i = 1; i < 8; ++i) p = fmaf(p, u, low[i]);
#pragma unroll
  for (int i = 1; i < 11; ++i) q = fmaf(q, t, high[i]);
  return x != x ? x : t < 1.0f ? x * p : copysignf(1.0f - fast_exp2(t * q), x);
}
//@ powf
TL_DEVICE float powf(float x, float y) {
  const double a = x, b = y;
  const bool whole = __builtin_trunc(b) == b, odd = whole && __builtin_fabs(b) < 0x1p53 && __builtin_trunc(b * 0.5) * 2.0 != b;
  if (y == 0.0f || x == 1.0f) return 1.0f;
  if (x != x || y != y) return x + y;
  if (x == -1.0f && __builtin_isinf(y)) return 1.0f;
  if (x < 0.0f && !whole && !__builtin_isinf(x) && !__builtin_isinf(y)) return __builtin_nanf("");
  const double size = exp2(fmax(fmin(b * log2(fabs(a)), 2000.0), -2000.0));
  return float(__builtin_signbit(a) && odd ? -size : size);
}
//@ fmodf
// The remainder is exact: each step subtracts a multiple of y that leaves less than y 2^k.
TL_DEVICE float fmodf(float x, float y) {
  if (!(fabsf(x) <= 3.4028235e38f) || y == 0.0f || y != y) return __builtin_nanf("");
  double a = fabs(double(x)), b = fabs(double(y));
  while (a >= b) {
    const int up = __builtin_amdgcn_frexp_exp(a) - __builtin_amdgcn_frexp_exp(b);
    const double c = __builtin_ldexp(b, up > 40 ? up - 40 : 0);
    a = __builtin_fma(-__builtin_trunc(a / c), c, a);
    a = a < 0.0 ? a + c : a;
  }
  return copysignf(float(a), x);
}
//@ hypotf
TL_DEVICE float hypotf(float x, float y) {
  const double a = x, b = y;
  return __builtin_isinf(x) || __builtin_isinf(y) ? __builtin_inff() : float(__builtin_sqrt(__builtin_fma(a, a, b * b)));
}
//@ nextafterf
TL_DEVICE float nextafterf(float x, float y) {
  if (x != x || y != y) return x + y;
  if (x == y) return y;
  if (x == 0.0f) return __uint_as_float(y > 0.0f ? 1u : 0x80000001u);
  return __uint_as_float(__float_as_uint(x) + ((y > x) == (x > 0.0f) ? 1u : ~0u));
}
//@ directed
// value + error, where |error| is at most half a unit in the last place of value, in the direction MODE: 'z', 'u', 'd', or 'n'.
template <char MODE> TL_DEVICE float directed(double value, double error) {
  const float y = float(value);
  const double over = (double(y) - value) - error;  // its sign tells on which side y is
  if (MODE == 'n' || value != value || __builtin_isinf(value)) {
    const bool tie = MODE == 'n' && error != 0.0;
    const unsigned long long bits = __builtin_bit_cast(unsigned long long, value);
    return tie && !(bits & 1) ? float(__builtin_bit_cast(double, bits + ((error > 0.0) == (value > 0.0) ? 1ull : ~0ull))) : y;
  }
  const bool down = MODE == 'd' || MODE == 'z' && value > 0.0, up = MODE == 'u' || MODE == 'z' && value < 0.0;
  const unsigned bits = __float_as_uint(y);
  if (down && over > 0.0) return y == 0.0f ? __uint_as_float(0x80000001u) : __uint_as_float(y > 0.0f ? bits - 1 : bits + 1);
  if (up && over < 0.0) return y == 0.0f ? __uint_as_float(1u) : __uint_as_float(y > 0.0f ? bits + 1 : bits - 1);
  return y;
}
template <char MODE> TL_DEVICE float directed_sum(double a, double b) {
  const double s = a + b, t = s - a, error = (a - (s - t)) + (b - t);
  return directed<MODE>(s, __builtin_isinf(s) ? 0.0 : error);
}
template <char MODE> TL_DEVICE float directed_quotient(float x, float y) {
  const double q = double(x) / y, rest = __builtin_fma(-q, double(y), double(x));
  return directed<MODE>(q, __builtin_isinf(q) ? 0.0 : rest / y);
}
template <char MODE> TL_DEVICE float directed_root(float x) {
  const double r = __builtin_sqrt(double(x)), rest = __builtin_fma(-r, r, double(x));
  return directed<MODE>(r, r > 0.0 && !__builtin_isinf(r) ? rest / (2.0 * r) : 0.0);
}
//@ __fadd_rz=z __fadd_ru=u __fadd_rd=d
TL_DEVICE float $0(float x, float y) { return directed_sum<'$1'>(x, y); }  // directed
//@ __fsub_rz=z __fsub_ru=u __fsub_rd=d
TL_DEVICE float $0(float x, float y) { return directed_sum<'$1'>(x, -y); }  // directed
//@ __fmul_rz=z __fmul_ru=u __fmul_rd=d
TL_DEVICE float $0(float x, float y) { return directed<'$1'>(double(x) * y, 0.0); }  // directed
//@ __fdiv_rz=z __fdiv_ru=u __fdiv_rd=d
TL_DEVICE float $0(float x, float y) { return directed_quotient<'$1'>(x, y); }  // directed
//@ __frcp_rz=z __frcp_ru=u __frcp_rd=d
TL_DEVICE float $0(float x) { return directed_quotient<'$1'>(1.0f, x); }  // directed
//@ __fsqrt_rz=z __fsqrt_ru=u __fsqrt_rd=d
TL_DEVICE float $0(float x) { return directed_root<'$1'>(x); }  // directed
//@ __fmaf_rz=z __fmaf_ru=u __fmaf_rd=d
TL_DEVICE float $0(float x, float y, float z) { return directed_sum<'$1'>(double(x) * y, z); }  // directed
//@ __fadd_rn=+ __fsub_rn=- __fmul_rn=* __fdiv_rn=/
TL_DEVICE float $0(float x, float y) { return x $1 y; }
//@ __frcp_rn
TL_DEVICE float __frcp_rn(float x) { return 1.0f / x; }
//@ __fsqrt_rn
TL_DEVICE float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
//@ __fmaf_rn
TL_DEVICE float __fmaf_rn(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
//@ __frsqrt_rn
TL_DEVICE float __frsqrt_rn(float x) { return float(1.0 / __builtin_sqrt(double(x))); }
//@ __dadd_rn=+ __dsub_rn=- __dmul_rn=* __ddiv_rn=/
TL_DEVICE double $0(double x, double y) { return x $1 y; }
//@ __drcp_rn
TL_DEVICE double __drcp_rn(double x) { return 1.0 / x; }
//@ __dsqrt_rn
TL_DEVICE double __dsqrt_rn(double x) { return __builtin_sqrt(x); }
//@ __fma_rn
TL_DEVICE double __fma_rn(double x, double y, double z) { return __builtin_fma(x, y, z); }
//@ __hadd_rn=+ __hsub_rn=- __hmul_rn=* __hsub=-
template <typename T> TL_DEVICE T $0(T x, T y) { return x $1 y; }
//@ __hdiv
template <typename T> TL_DEVICE T __hdiv(T x, T y) { return T(float(x) / float(y)); }
//@ hrcp
template <typename T> TL_DEVICE T hrcp(T x) { return T(1.0f / float(x)); }
//@ hsqrt
template <typename T> TL_DEVICE T hsqrt(T x) { return T(__builtin_sqrtf(float(x))); }
//@ __hfma
TL_DEVICE half_t __hfma(half_t x, half_t y, half_t z) { return __builtin_elementwise_fma(x, y, z); }
//@ __half2
typedef half_t __half2 __attribute__((ext_vector_type(2)));
//@ __half2half2
TL_DEVICE __half2 __half2half2(half_t x) { return __half2{x, x}; }
//@ __halves2half2
TL_DEVICE __half2 __halves2half2(half_t x, half_t y) { return __half2{x, y}; }
//@ __hadd2=+ __hsub2=- __hmul2=*
TL_DEVICE __half2 $0(__half2 x, __half2 y) { return x $1 y; }
//@ __hfma2
TL_DEVICE __half2 __hfma2(__half2 x, __half2 y, __half2 z) { return __builtin_elementwise_fma(x, y, z); }
//@ __byte_perm
// Bytes of y : x that the low three bits of the selector's digits name.
TL_DEVICE unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
  return __builtin_amdgcn_perm(y, x, (s & 7) | (s & 0x70) << 4 | (s & 0x700) << 8 | (s & 0x7000) << 12);
}
//@ __funnelshift_r
TL_DEVICE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) { return __builtin_amdgcn_alignbit(high, low, n); }
//@ __popc
TL_DEVICE int __popc(unsigned x) { return __builtin_popcount(x); }
//@ __popcll
TL_DEVICE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
//@ __clzll
TL_DEVICE int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(x); }
//@ __ffsll
TL_DEVICE int __ffsll(long long x) { return __builtin_ffsll(x); }
//@ __fns
// The position of the n-th set bit of a mask from `base` on, below it for n < 0.
TL_DEVICE unsigned __fns(unsigned mask, unsigned base, int n) {
  if (n == 0) return mask >> base & 1 ? base : ~0u;
  int left = n < 0 ? -n : n;
  for (int i = base; i >= 0 && i < 32; i += n < 0 ? -1 : 1)
    if (mask >> i & 1 && --left == 0) return i;
  return ~0u;
}
//@ __float2int_rz=int;i32 __float2uint_rz=unsigned;u32
// The instruction cuts, and takes what is beyond the range to its end and NaN to zero; a cast in C leaves both undefined.
TL_DEVICE $1 $0(float x) { $1 y; asm("v_cvt_$2_f32 %0, %1" : "=v"(y) : "v"(x)); return y; }
//@ __double2int_rz=int;i32 __double2uint_rz=unsigned;u32
TL_DEVICE $1 $0(double x) { $1 y; asm("v_cvt_$2_f64 %0, %1" : "=v"(y) : "v"(x)); return y; }
//@ __double2ll_rz
TL_DEVICE long long __double2ll_rz(double x) {
  return x >= 0x1p63 ? 0x7fffffffffffffffll : x < -0x1p63 ? -0x7fffffffffffffffll - 1 : x == x ? (long long)x : 0;
}
//@ __double2ull_rz
TL_DEVICE unsigned long long __double2ull_rz(double x) {
  return x >= 0x1p64 ? ~0ull : x > 0.0 ? (unsigned long long)x : 0;
}
//@ __float2ll_rz
TL_DEVICE long long __float2ll_rz(float x) { return __double2ll_rz(x); }
//@ __float2ull_rz
TL_DEVICE unsigned long long __float2ull_rz(float x) { return __double2ull_rz(x); }
//@ __ull2float_rz
TL_DEVICE float __ull2float_rz(unsigned long long x) {
  const float y = x;
  return y >= 0x1p64f || (unsigned long long)y > x ? __uint_as_float(__float_as_uint(y) - 1) : y;
}
//@ __ll2float_rz
TL_DEVICE float __ll2float_rz(long long x) {
  const float y = __ull2float_rz(x < 0 ? 0ull - (unsigned long long)x : x);
  return x < 0 ? -y : y;
}
//@ lane_of_wave
TL_DEVICE int lane_of_wave() { return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0)); }
//@ from_lane
TL_DEVICE unsigned from_lane(unsigned x, int lane) { return __builtin_amdgcn_ds_bpermute(4 * lane, x); }
TL_DEVICE unsigned long long from_lane(unsigned long long x, int lane) {
  const unsigned long long high = from_lane(unsigned(x >> 32), lane);
  return high << 32 | from_lane(unsigned(x), lane);
}
//@ __shfl_sync
// A shuffle exchanges values in groups of `width` neighbouring lanes.  Program warps of 32 lanes are halves of a wave.
template <typename T> TL_DEVICE T __shfl_sync(unsigned, T x, int lane, int width) {
  return from_lane(x, (lane_of_wave() & -width) | (lane & (width - 1)));
}
//@ shfl_operand
// The bits of a lane number: 5, as on NVIDIA's chips, or those of a wider segment.
TL_DEVICE int shfl_operand(int x, int width) { return x & ((width > 32 ? width : 32) - 1); }
//@ __shfl_up_sync
template <typename T> TL_DEVICE T __shfl_up_sync(unsigned, T x, int delta, int width) {
  const int lane = lane_of_wave();
  delta = shfl_operand(delta, width);
  return from_lane(x, (lane & (width - 1)) < delta ? lane : lane - delta);
}
//@ __shfl_down_sync
template <typename T> TL_DEVICE T __shfl_down_sync(unsigned, T x, int delta, int width) {
  const int lane = lane_of_wave();
  delta = shfl_operand(delta, width);
  return from_lane(x, (lane & (width - 1)) + delta >= width ? lane : lane + delta);
}
//@ crossed
// The value of lane ^ N.  Up to 8 by DPP in the vector unit, 16 by ds_swizzle, others by ds_bpermute.
template <int N> TL_DEVICE unsigned crossed(unsigned x) {
  if constexpr (N == 1) return __builtin_amdgcn_update_dpp(x, x, 0xb1, 15, 15, false);  // quad_perm [1, 0, 3, 2]
  else if constexpr (N == 2) return __builtin_amdgcn_update_dpp(x, x, 0x4e, 15, 15, false);  // quad_perm [2, 3, 0, 1]
  else if constexpr (N == 4)  // row_shl 4 in the even banks of four lanes, row_shr 4 in the odd ones
    return __builtin_amdgcn_update_dpp(__builtin_amdgcn_update_dpp(x, x, 0x104, 15, 5, false), x, 0x114, 15, 10, false);
  else if constexpr (N == 8) return __builtin_amdgcn_update_dpp(x, x, 0x128, 15, 15, false);  // row_ror 8
  else return __builtin_amdgcn_ds_swizzle(x, 0x401f);
}
template <int N> TL_DEVICE unsigned long long crossed(unsigned long long x) {
  const unsigned long long high = crossed<N>(unsigned(x >> 32));
  return high << 32 | crossed<N>(unsigned(x));
}
//@ __shfl_xor_sync
template <typename T> TL_DEVICE T __shfl_xor_sync(unsigned, T x, int lanes, int width) {
  if (__builtin_constant_p(lanes) && __builtin_constant_p(width)) {
    if (lanes < width) {
      if (lanes == 1) return crossed<1>(x);
      if (lanes == 2) return crossed<2>(x);
      if (lanes == 4) return crossed<4>(x);
      if (lanes == 8) return crossed<8>(x);
      if (lanes == 16) return crossed<16>(x);
    }
  }
  const int lane = lane_of_wave(), from = lane ^ shfl_operand(lanes, width);
  return from_lane(x, (from & -width) > (lane & -width) ? lane : from);
}
//@ half_wave
// A ballot of the 32 lanes of a program's warp.
TL_DEVICE unsigned half_wave(bool pred) { return __builtin_amdgcn_ballot_w64(pred) >> (lane_of_wave() & 32); }
//@ __any_sync
TL_DEVICE int __any_sync(unsigned mask, int pred) { return (half_wave(pred) & mask) != 0; }
//@ __all_sync
TL_DEVICE int __all_sync(unsigned mask, int pred) { return (half_wave(!pred) & mask) == 0; }
//@ __ballot_sync
TL_DEVICE unsigned __ballot_sync(unsigned mask, int pred) { return half_wave(pred) & mask; }
//@ __activemask
TL_DEVICE unsigned __activemask() { return half_wave(true); }
//@ __match_any_sync
template <typename T> TL_DEVICE unsigned __match_any_sync(unsigned mask, T x) {
  unsigned out = 0;
  for (int i = 0; i < 32; ++i) {
    using B = typename raw_bytes<sizeof(T)>::type;
    unsigned long long bits = 0;
    memcpy(&bits, &x, sizeof(T));
    if (from_lane(bits, (lane_of_wave() & 32) + i) == bits) out |= 1u << i;
  }
  return out & mask;
}
//@ __match_all_sync
template <typename T> TL_DEVICE unsigned __match_all_sync(unsigned mask, T x, int* pred) {
  const unsigned same = __match_any_sync(mask, x);
  return (*pred = same == mask) ? mask : 0u;
}
//@ __syncthreads
// s_barrier waits for no memory, so the wave waits for its accesses of LDS (lgkmcnt 0; 0xc07f) in front of it.  A release fence
// would not do: clang 22 drops its wait in a loop where none is outstanding in front of the loop, and lets it wait for all loads
// where one of them is into LDS.  Waves of a workgroup share the first cache of global memory, which needs no wait.
TL_DEVICE void __syncthreads() {
  asm volatile("" ::: "memory");
  __builtin_amdgcn_s_waitcnt(0xc07f);
  __builtin_amdgcn_s_barrier();
  asm volatile("" ::: "memory");
}
//@ __syncwarp
TL_DEVICE void __syncwarp(unsigned = 0xffffffffu) {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
//@ __threadfence
TL_DEVICE void __threadfence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }
//@ prefetch_l2
TL_DEVICE void prefetch_l2(const void*, int) {}  // no instruction for it
//@ __threadfence_block
TL_DEVICE void __threadfence_block() {
  __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup");
  __builtin_amdgcn_s_waitcnt(0xc07f);
}
//@ __trap
TL_DEVICE void __trap() { __builtin_trap(); }
//@ __ldg
template <typename T> TL_DEVICE T __ldg(const T* p) { return *p; }
//@ atomicAdd
// Tensors lie in coarse-grained memory of the device: what the attribute says lets the instructions be used.
#define TL_ATOMIC [[clang::atomic(no_remote_memory, no_fine_grained_memory, ignore_denormal_mode)]]
template <typename T> TL_DEVICE T atomicAdd(T* p, T x) {
  T old;
  TL_ATOMIC { old = __scoped_atomic_fetch_add(p, x, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE); }
  return old;
}
//@ atomicMax=max atomicMin=min
template <typename T> TL_DEVICE T $0(T* p, T x) {
  return __scoped_atomic_fetch_$1(p, x, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
}
//@ atomicCAS
template <typename T> TL_DEVICE T atomicCAS(T* p, T compare, T x) {
  __scoped_atomic_compare_exchange_n(p, &compare, x, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  return compare;
}
