// 8-bit floats that CUDA's headers have no type for: conversions by bits, arithmetic in float (prelude.py).
//@ odd_float
// A number as a float whose last bit is set where digits were cut off: rounding it further is then one rounding of the number.
TL_DEVICE float odd_float(float x) { return x; }
TL_DEVICE float odd_float(double x) {
  float y;
  double back;
  asm("cvt.rz.f32.f64 %0, %1;" : "=f"(y) : "d"(x));  // by name: subnormals stay under -ftz=true
  asm("cvt.f64.f32 %0, %1;" : "=d"(back) : "f"(y));
  return back == x || x != x ? y : __uint_as_float(__float_as_uint(y) | 1u);
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
//@ fnuz_code
// Nearest even; what is greater than all values, infinity too, becomes the greatest.  0x80 is the NaN, not a second zero.
template <int MANTISSA, int BIAS> TL_DEVICE unsigned char fnuz_code(float x) {
  constexpr unsigned DROP = 23 - MANTISSA, UNIT = (151u - BIAS - MANTISSA) << 23;
  const unsigned bits = __float_as_uint(x), size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return 0x80;
  unsigned code;
  if (size < (128u - BIAS) << 23)  // subnormal: a sum with this unit in the last place rounds to whole units
    code = __float_as_uint(__fadd_rn(__uint_as_float(size), __uint_as_float(UNIT))) - UNIT;
  else
    code = ((size + (1u << DROP - 1) - 1 + (size >> DROP & 1)) >> DROP) - ((127u - BIAS) << MANTISSA);
  code = code < 127u ? code : 127u;
  return code ? code | (bits >> 24 & 0x80) : 0;
}
//@ fnuz_value
template <int MANTISSA, int BIAS> TL_DEVICE float fnuz_value(unsigned char code) {
  constexpr unsigned DROP = 23 - MANTISSA, UNIT = (128u - BIAS - MANTISSA) << 23;
  if (code == 0x80) return __uint_as_float(0xffc00000u);
  const unsigned size = code & 0x7f;
  const float x = size >> MANTISSA ? __uint_as_float((size << DROP) + ((127u - BIAS) << 23)) : size * __uint_as_float(UNIT);
  return code & 0x80 ? -x : x;
}
//@ fp8_e4_fnuz=3;8 fp8_e5_fnuz=2;16
struct $0 {
  unsigned char code;
  $0() = default;
  template <typename T> explicit TL_DEVICE $0(T x) : code(fnuz_code<$1, $2>(odd_float(x))) {}
  explicit TL_DEVICE operator float() const { return fnuz_value<$1, $2>(code); }
};
//@ e8m0_code
// The least power of two that |x| does not exceed, from 2**-127 to 2**127: what cvt.rp.satfinite.ue8m0x2 gives.
TL_DEVICE unsigned char e8m0_code(float x) {
  const unsigned size = __float_as_uint(x) & 0x7fffffffu, up = size + 0x7fffffu >> 23;
  return size > 0x7f800000u ? 255 : size <= 0x400000u ? 0 : up < 254u ? up : 254;
}
//@ fp8_e8m0
struct fp8_e8m0 {
  unsigned char code;
  fp8_e8m0() = default;
  template <typename T> explicit TL_DEVICE fp8_e8m0(T x) : code(e8m0_code(odd_float(x))) {}
  explicit TL_DEVICE operator float() const {
    return __uint_as_float(code == 255 ? 0x7fc00000u : code ? unsigned(code) << 23 : 0x400000u);
  }
};
