// Kernels for test_isa_programs.py, without headers.  One file, so that a chip needs one call of the compiler.
#define VEC(T, n) T __attribute__((ext_vector_type(n)))
#define LDS __attribute__((address_space(3)))
#define GLB __attribute__((address_space(1)))
#define SHARED __attribute__((shared)) static
#define DEV static __attribute__((device)) inline
#define KERNEL(threads) extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(threads, threads))) void
#define B(name) __builtin_amdgcn_##name
typedef _Float16 h; typedef VEC(h, 2) h2; typedef VEC(h, 4) h4; typedef VEC(h, 8) h8; typedef VEC(float, 2) f2; typedef VEC(float, 4) f4;
typedef VEC(float, 16) f16; typedef VEC(int, 4) i4; typedef VEC(short, 4) s4; typedef VEC(double, 4) d4; typedef VEC(int, 16) i16;
typedef unsigned u; typedef unsigned long ul;
DEV int tid() { return B(workitem_id_x)(); }
DEV int gid(int n) { return B(workgroup_id_x)() * n + tid(); }
DEV void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local"); B(s_barrier)(); __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local"); }

KERNEL(128) saxpy(const float *x, float *y, float a, int n) { int i = gid(128); if (i < n) y[i] = __builtin_fmaf(a, x[i], y[i]); }

KERNEL(64) integers(const int *x, const int *y, int *out, u *uout, long *lout) {
  int i = tid(), a = x[i], b = y[i]; u ua = a, ub = b;
  out[i] = a / b; out[64 + i] = a % b; out[128 + i] = a >> (b & 31); out[192 + i] = a < b ? a : b; out[256 + i] = __builtin_clz(ua | 1) + __builtin_popcount(ub);
  uout[i] = ua / ub; uout[64 + i] = ua % ub; uout[128 + i] = (u)((ul)ua * ub >> 32); uout[192 + i] = __builtin_bitreverse32(ua) ^ __builtin_bswap32(ub);
  uout[256 + i] = ua << (ub & 31) | ua >> (-ub & 31);
  lout[i] = (long)a * b; lout[64 + i] = (long)a * 0x123456789L + ((long)b << 20) - (a >> 3); lout[128 + i] = ((long)a << 32 | ub) / (b | 1);
}
KERNEL(64) floats(const float *x, const float *y, float *out, int *iout) {
  int i = tid(); float a = x[i], b = y[i];
  out[i] = a / b; out[64 + i] = __builtin_sqrtf(__builtin_fabsf(a)); out[128 + i] = __builtin_fmaxf(a, b) - __builtin_fminf(a, b * 0.5f);
  out[192 + i] = __builtin_floorf(a) + __builtin_rintf(b) * __builtin_truncf(a); out[256 + i] = -a * b + __builtin_fabsf(b); out[320 + i] = __builtin_ldexpf(a, i - 32);
  out[384 + i] = __builtin_copysignf(a, b) + (__builtin_isnan(a) ? 1.f : 2.f);
  iout[i] = (int)a; iout[64 + i] = (int)(u)__builtin_fabsf(b); iout[128 + i] = a < b; iout[192 + i] = !(a >= b) + 2 * (a != b);
}
KERNEL(64) doubles(const double *x, const double *y, double *out, int *iout) {
  int i = tid(); double a = x[i], b = y[i];
  out[i] = a / b; out[64 + i] = __builtin_fma(a, b, 1.0 / 3); out[128 + i] = __builtin_fmax(a, b) + __builtin_floor(a); out[192 + i] = (double)iout[i] * (float)a;
  iout[i] = (int)b; iout[64 + i] = a < b;
}
KERNEL(64) halves(const h2 *x, const h2 *y, h2 *out, float *fout, __bf16 *bout) {
  int i = tid(); h2 a = x[i], b = y[i];
  out[i] = a * b + a; out[64 + i] = __builtin_elementwise_fma(a, b, -a); out[128 + i] = __builtin_elementwise_max(a, -b); out[192 + i] = a / b; out[256 + i] = a.yx - b.xx;
  fout[i] = a.x * (float)b.y + a.y; fout[64 + i] = (float)(a.x < b.x ? a.y : b.y); bout[i] = (__bf16)((float)a.x * 1.001f); bout[64 + i] = (__bf16)(float)bout[i];
}
KERNEL(64) packed(const f2 *x, const f2 *y, f2 *out) {
  int i = tid(); f2 a = x[i], b = y[i]; out[i] = __builtin_elementwise_fma(a, b, a.yx); out[64 + i] = a * b.yy + a; out[128 + i] = a - b; }
#if !defined(__gfx90a__)
KERNEL(64) float8(const float *x, u *out, float *back) {
  int i = tid(); float a = x[2 * i], b = x[2 * i + 1];
  int p = B(cvt_pk_fp8_f32)(a, b, 0, 0); p = B(cvt_pk_fp8_f32)(b, a, p, 1); out[i] = p; out[64 + i] = B(cvt_pk_bf8_f32)(a, b, 0, 0);
  f2 lo = B(cvt_pk_f32_fp8)(p, 0), hi = B(cvt_pk_f32_fp8)(p, 1); back[i] = lo.x; back[64 + i] = lo.y; back[128 + i] = hi.x; back[192 + i] = B(cvt_f32_fp8)(p, 3);
}
#endif
DEV float wave_sum(float v) {
#define DPP(ctrl, rows) v += __builtin_bit_cast(float, B(update_dpp)(0, __builtin_bit_cast(int, v), ctrl, rows, 15, 0))
  DPP(0x111, 15); DPP(0x112, 15); DPP(0x114, 15); DPP(0x118, 15); DPP(0x142, 10); DPP(0x143, 12);
  return __builtin_bit_cast(float, B(readlane)(__builtin_bit_cast(int, v), 63)); }
KERNEL(256) block_sum(const float *x, float *out) {
  SHARED float part[4]; int t = tid(), w = B(readfirstlane)(t >> 6); float s = wave_sum(x[gid(256)]);
  if ((t & 63) == 0) part[w] = s; barrier(); if (t == 0) out[B(workgroup_id_x)()] = part[0] + part[1] + part[2] + part[3]; }
KERNEL(64) lanes(const int *x, int *out) {
  int t = tid(), v = x[t]; out[t] = B(ds_bpermute)((t ^ 17) << 2, v); out[64 + t] = B(ds_swizzle)(v, 0x401f); out[128 + t] = B(update_dpp)(-1, v, 0x1B, 15, 15, 0);
  out[192 + t] = B(update_dpp)(-7, v, 0x101, 15, 15, 0); out[256 + t] = B(mov_dpp)(v, 0x140, 15, 15, 1); out[320 + t] = B(update_dpp)(v, v + 1, 0x123, 5, 3, 0);
  out[384 + t] = B(mbcnt_hi)(~0u, B(mbcnt_lo)(~0u, 0)); out[448 + t] = __builtin_popcountl(B(ballot_w64)(v > 0)); out[512 + t] = B(ds_permute)(((t * 5) & 63) << 2, v);
  out[576 + t] = B(readlane)(v, 13) + B(readfirstlane)(v); out[640 + t] = B(perm)(v, t, 0x05000603);
  if (v > 0) out[704 + t] = B(readfirstlane)(t); else out[704 + t] = -B(readfirstlane)(t); }
KERNEL(256) transpose(const int *x, int *out, int n) {
  SHARED int tile[32][33]; int c = tid() & 31, r = tid() >> 5, bx = B(workgroup_id_x)() * 32, by = B(workgroup_id_y)() * 32;
  for (int k = 0; k < 32; k += 8) tile[r + k][c] = x[(by + r + k) * n + bx + c];
  barrier(); for (int k = 0; k < 32; k += 8) out[(bx + r + k) * n + by + c] = tile[c][r + k]; }
KERNEL(128) softmax(const float *x, float *out, int n) {
  SHARED float part[4]; int t = tid(), row = B(workgroup_id_x)(), w = B(readfirstlane)(t >> 6); float m = -1e30f, s = 0;
  for (int i = t; i < n; i += 128) m = __builtin_fmaxf(m, x[row * n + i]);
  for (int k = 32; k; k >>= 1) m = __builtin_fmaxf(m, __builtin_bit_cast(float, B(ds_bpermute)(((t & 63) ^ k) << 2, __builtin_bit_cast(int, m))));
  if ((t & 63) == 0) part[w] = m; barrier(); m = __builtin_fmaxf(part[0], part[1]);
  for (int i = t; i < n; i += 128) { float e = B(exp2f)((x[row * n + i] - m) * 1.44269504f); out[row * n + i] = e; s += e; }
  s = wave_sum(s); if ((t & 63) == 0) part[2 + w] = s; barrier(); s = 1.f / (part[2] + part[3]);
  for (int i = t; i < n; i += 128) out[row * n + i] *= s; }
KERNEL(64) bounded(const int *x, int *y, int n) {
  __amdgpu_buffer_rsrc_t r = B(make_buffer_rsrc)((void *)x, 0, n * 4, 0x27000), q = B(make_buffer_rsrc)(y, 0, n * 4, 0x27000);
  int t = tid(); i4 v = B(raw_buffer_load_b128)(r, t * 16, 0, 0); B(raw_buffer_store_b128)(v + 1, q, t * 16, 0, 0); }
KERNEL(128) atomics(int *counts, float *sums, int *x, double *d) {
  SHARED int bins[16]; int t = tid(); if (t < 16) bins[t] = 0; barrier(); int v = x[gid(128)] & 15;
  __scoped_atomic_fetch_add(&bins[v], 1, __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP); barrier();
  if (t < 16) __scoped_atomic_fetch_add(&counts[t], bins[t], __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  __scoped_atomic_fetch_add(&sums[v], (float)t, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE); __scoped_atomic_fetch_max(&counts[16], t, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  if (t == 5) __scoped_atomic_fetch_add(d, 0.5, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE); }
KERNEL(128) exchanged(const int *x, int *out) {
  SHARED int top; int t = tid(); if (t == 0) top = -1000; barrier(); int v = x[t], old = top;
  while (old < v && !__scoped_atomic_compare_exchange_n(&top, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP)) ;
  barrier(); out[t] = top; }
static __attribute__((constant)) const int TABLE[8] = {3, 1, 4, 1, 5, 9, 2, 6};
KERNEL(64) indexed(const int *x, int *out) {
  int own[16], t = tid(); for (int k = 0; k < 16; k++) own[k] = x[t] * k; own[x[t] & 15] += 100;
  int s = 0, v = x[t] & 31, steps = 0; for (int k = 0; k < 16; k++) s = s * 3 + own[(k * x[t]) & 15]; while (v > 1) { v = v & 1 ? 3 * v + 1 : v >> 1; steps++; }
  out[t] = s; out[64 + t] = steps; out[128 + t] = TABLE[x[t] & 7]; }
KERNEL(48) ids(int *out) { int g = (B(workgroup_id_z)() * 2 + B(workgroup_id_y)()) * 3 + B(workgroup_id_x)();
  int l = (B(workitem_id_z)() * 3 + B(workitem_id_y)()) * 8 + B(workitem_id_x)(); out[g * 48 + l] = g * 1000 + l; }

// MFMA: one wave, D = A * B^T + C with each operand read by the layout of the instruction.
KERNEL(64) matrices(const h *a, const h *b, float *c, const short *ba, const short *bb, const double *da, const double *db, double *dc, const float *fa, const float *fb) {
  int l = tid(), r = l & 15, g = l >> 4; f4 x = {0, 0, 0, 0}, y = {1, 1, 1, 1}; d4 z = {0, 0, 0, 0}; f16 w = {0}; f4 v = {0, 0, 0, 0};
  x = B(mfma_f32_16x16x16f16)(*(const h4 *)(a + r * 16 + 4 * g), *(const h4 *)(b + r * 16 + 4 * g), x, 0, 0, 0);
  y = B(mfma_f32_16x16x16bf16_1k)(*(const s4 *)(ba + r * 16 + 4 * g), *(const s4 *)(bb + r * 16 + 4 * g), y, 0, 0, 0);
  z = B(mfma_f64_16x16x4f64)(da[r * 4 + g], db[r * 4 + g], z, 0, 0, 0); v = B(mfma_f32_16x16x4f32)(fa[r * 4 + g], fb[r * 4 + g], v, 0, 0, 0);
  w = B(mfma_f32_32x32x8f16)(*(const h4 *)(a + (l & 31) * 8 + 4 * (l >> 5)), *(const h4 *)(b + (l & 31) * 8 + 4 * (l >> 5)), w, 0, 0, 0);
  for (int e = 0; e < 4; e++) { c[(4 * g + e) * 16 + r] = x[e]; c[256 + (4 * g + e) * 16 + r] = y[e]; dc[(4 * e + g) * 16 + r] = z[e]; c[512 + (4 * g + e) * 16 + r] = v[e]; }
  for (int e = 0; e < 16; e++) c[768 + (8 * (e / 4) + 4 * (l >> 5) + e % 4) * 32 + (l & 31)] = w[e]; }

// GEMM: C = A * B^T, 64 x 64 x 32 tiles, 4 waves of 32 x 32, two stages of LDS; chunk c of a row of 64 bytes is kept at c ^ (row >> 1 & 3).
DEV int at(int r, int c) { return r * 32 + ((c ^ (r >> 1 & 3)) << 3); }
KERNEL(256) gemm(const h *A, const h *Bm, float *C, int N, int K) {
  SHARED h tiles[2][2][64 * 32]; int t = tid(), l = t & 63, w = B(readfirstlane)(t >> 6), wm = (w >> 1) * 32, wn = (w & 1) * 32;
  const int m0 = B(workgroup_id_y)() * 64, n0 = B(workgroup_id_x)() * 64, lr = t >> 2, lc = t & 3, r = l & 15, g = l >> 4; f4 acc[2][2] = {};
#ifdef __gfx950__
#define LOAD(s, k) { int c = lc ^ (lr >> 1 & 3); \
    B(global_load_lds)((GLB void *)(A + (long)(m0 + lr) * K + (k) + c * 8), (LDS void *)(LDS h *)&tiles[s][0][w * 512], 16, 0, 0); \
    B(global_load_lds)((GLB void *)(Bm + (long)(n0 + lr) * K + (k) + c * 8), (LDS void *)(LDS h *)&tiles[s][1][w * 512], 16, 0, 0); }
#define STORE(s) {}
#define ARRIVE() B(s_waitcnt)(0x0070); B(s_barrier)(); __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local")
#else
  h8 ra, rb;
#define LOAD(s, k) { ra = *(const h8 *)(A + (long)(m0 + lr) * K + (k) + lc * 8); rb = *(const h8 *)(Bm + (long)(n0 + lr) * K + (k) + lc * 8); }
#define STORE(s) { *(h8 *)&tiles[s][0][at(lr, lc)] = ra; *(h8 *)&tiles[s][1][at(lr, lc)] = rb; }
#define ARRIVE() barrier()
#endif
  LOAD(0, 0) STORE(0)
  for (int k0 = 0, s = 0; k0 < K; k0 += 32, s ^= 1) {
    ARRIVE(); if (k0 + 32 < K) LOAD(s ^ 1, k0 + 32)
    h8 a[2], b[2]; for (int i = 0; i < 2; i++) { a[i] = *(const h8 *)&tiles[s][0][at(wm + 16 * i + r, g)]; b[i] = *(const h8 *)&tiles[s][1][at(wn + 16 * i + r, g)]; }
#pragma unroll
    for (int p = 0; p < 2; p++)
#pragma unroll
      for (int i = 0; i < 4; i++) acc[i >> 1][i & 1] = B(mfma_f32_16x16x16f16)(p ? a[i >> 1].hi : a[i >> 1].lo, p ? b[i & 1].hi : b[i & 1].lo, acc[i >> 1][i & 1], 0, 0, 0);
    if (k0 + 32 < K) STORE(s ^ 1)
  }
  for (int i = 0; i < 4; i++) for (int e = 0; e < 4; e++)
    C[(long)(m0 + wm + 16 * (i >> 1) + 4 * g + e) * N + n0 + wn + 16 * (i & 1) + r] = acc[i >> 1][i & 1][e]; }
