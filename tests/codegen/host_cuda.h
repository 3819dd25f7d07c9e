// Runs printed CUDA kernels on the host, to check their text where there is no GPU.  Threads of a block are fibers that
// switch only at barriers and warp operations; asynchronous copies land at the wait, as late as they may.  The sections
// after the marker replace those of prelude.cuh that hold PTX.
#include <immintrin.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_assume(c) ((void)0)
using std::isfinite; using std::isinf; using std::isnan; using std::max; using std::min;

struct dim3_ { int x, y, z; };
static dim3_ threadIdx, blockIdx, blockDim, gridDim;
extern "C" { alignas(1024) unsigned char smem[232448]; }
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };

// ---- fibers ----
struct Copy { void* to; const void* from; int bytes; bool pred; };
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  int index;
  bool done = false;
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open;
  std::vector<std::vector<std::function<void()>>> products, stores;  // groups of wgmma and of bulk stores
  std::vector<std::function<void()>> open_products, open_stores;
};
struct Gate { int arrived = 0, generation = 0; };
struct Warp { Gate gate; alignas(16) unsigned char slot[32][256]; };
static std::vector<std::unique_ptr<Fiber>> fibers;
static std::vector<Warp> warps;
static ucontext_t scheduler;
static Fiber* now;
static Gate block_gate;
static int live;
static bool stuck;
static long waits_without_progress;

static void fail(const char* what) { fprintf(stderr, "host_cuda: %s (thread %d)\n", what, now ? now->index : -1); abort(); }
static void wait_at(Gate& gate, int expected) {
  const int generation = gate.generation;
  if (++gate.arrived >= expected) { gate.arrived = 0; ++gate.generation; waits_without_progress = 0; }
  while (gate.generation == generation) {
    if (++waits_without_progress > 64L * 1024 * 1024) fail("deadlock");
    swapcontext(&now->context, &scheduler);
  }
}
static int lane() { return now->index % 32; }
static Warp& warp() { return warps[now->index / 32]; }
static void wait_warp() { wait_at(warp().gate, std::min(32, (int)fibers.size() - now->index / 32 * 32)); }
static void __syncthreads() { wait_at(block_gate, live); }
static void __syncwarp(unsigned = 0xffffffffu) { wait_warp(); }
static void __threadfence() {}
static void __trap() { fail("trap"); }

// ---- element types ----
struct __half {
  uint16_t bits;
  __half() = default;
  explicit __half(float x) : bits(_cvtss_sh(x, 0)) {}
  explicit __half(double x) : __half((float)x) {}
  explicit __half(int x) : __half((float)x) {}
  operator float() const { return _cvtsh_ss(bits); }
};
struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) {
    uint32_t u; memcpy(&u, &x, 4);
    bits = x != x ? 0x7fc0 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
  }
  explicit __nv_bfloat16(double x) : __nv_bfloat16((float)x) {}
  explicit __nv_bfloat16(int x) : __nv_bfloat16((float)x) {}
  operator float() const { uint32_t u = (uint32_t)bits << 16; float x; memcpy(&x, &u, 4); return x; }
};
#define HALF_OPERATORS(T)                                                        \
  static inline T operator+(T a, T b) { return T((float)a + (float)b); }         \
  static inline T operator-(T a, T b) { return T((float)a - (float)b); }         \
  static inline T operator*(T a, T b) { return T((float)a * (float)b); }         \
  static inline T operator-(T a) { return T(-(float)a); }                        \
  static inline T __hsub(T a, T b) { return a - b; }                             \
  static inline T __hmax(T a, T b) { return T(fmaxf(a, b)); }                    \
  static inline T __hmin(T a, T b) { return T(fminf(a, b)); }
HALF_OPERATORS(__half) HALF_OPERATORS(__nv_bfloat16)
static inline __half __ushort_as_half(uint16_t x) { __half y; y.bits = x; return y; }
static inline __nv_bfloat16 __ushort_as_bfloat16(uint16_t x) { __nv_bfloat16 y; y.bits = x; return y; }
struct __half2 { __half x, y; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
static inline __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }
static inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__nv_bfloat16(a), __nv_bfloat16(b)}; }
#define PAIR_OPERATORS(T)                                                        \
  static inline T __hadd2(T a, T b) { return {a.x + b.x, a.y + b.y}; }           \
  static inline T __hsub2(T a, T b) { return {a.x - b.x, a.y - b.y}; }           \
  static inline T __hmul2(T a, T b) { return {a.x * b.x, a.y * b.y}; }
PAIR_OPERATORS(__half2) PAIR_OPERATORS(__nv_bfloat162)
static inline __half2 __half2half2(__half x) { return {x, x}; }
static inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
static inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
static inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {  // sums of products of halves are exact as doubles, nearly all
  return {__half(float((double)a.x * b.x + c.x)), __half(float((double)a.y * b.y + c.y))};
}
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
  unsigned long long all = (unsigned long long)y << 32 | x, out = 0;
  for (int k = 0; k < 4; ++k) out |= (all >> 8 * (s >> 4 * k & 7) & 255) << 8 * k;
  return (unsigned)out;
}
static inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
static inline float __uint_as_float(unsigned x) { return __int_as_float((int)x); }
static inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
template <typename T> static T atomicAdd(T* p, T x) { T old = *p; *p = T(old + x); return old; }
template <typename T> static T atomicMax(T* p, T x) { T old = *p; *p = std::max(old, x); return old; }
template <typename T> static T atomicMin(T* p, T x) { T old = *p; *p = std::min(old, x); return old; }
template <typename T> static T atomicCAS(T* p, T seen, T x) { T old = *p; if (old == seen) *p = x; return old; }

// ---- lanes ----
template <typename T> static T from_lane(T x, int source) {
  memcpy(warp().slot[lane()], &x, sizeof(T));
  wait_warp();
  T y;
  memcpy(&y, warp().slot[source], sizeof(T));
  wait_warp();
  return y;
}
template <typename T> static T __shfl_sync(unsigned, T x, int l, int w) { return from_lane(x, lane() / w * w + (l & (w - 1))); }
template <typename T> static T __shfl_xor_sync(unsigned, T x, int m, int w) {
  int s = lane() ^ m;
  return from_lane(x, s < (lane() / w + 1) * w ? s : lane());
}
template <typename T> static T __shfl_up_sync(unsigned, T x, int d, int w) {
  int s = lane() - d;
  return from_lane(x, s >= lane() / w * w ? s : lane());
}
template <typename T> static T __shfl_down_sync(unsigned, T x, int d, int w) {
  int s = lane() + d;
  return from_lane(x, s < (lane() / w + 1) * w ? s : lane());
}

// ---- matrix operations, from the figures of the PTX ISA ----
static void ldmatrix(void* dst, const void* src, int num, bool trans) {
  if ((uintptr_t)src % 16) fail("ldmatrix row is not 16-byte aligned");
  memcpy(warp().slot[lane()], &src, sizeof(src));
  wait_warp();
  uint16_t* out = (uint16_t*)dst;
  const int g = lane() / 4, q = lane() % 4;
  for (int j = 0; j < num; ++j)
    for (int h = 0; h < 2; ++h) {
      const int row = trans ? 2 * q + h : g, col = trans ? g : 2 * q + h;
      const uint16_t* line;
      memcpy(&line, warp().slot[8 * j + row], sizeof(line));
      out[2 * j + h] = line[col];
    }
  wait_warp();
}
template <int K, int NA, int NB, int NC, typename S, typename TA, typename TB, typename TC>
static void matrix_multiply(TC* c, const TA* a, const TB* b) {
  unsigned char(&slot)[32][256] = warp().slot;
  memcpy(slot[lane()], a, NA * sizeof(TA));
  memcpy(slot[lane()] + 64, b, NB * sizeof(TB));
  wait_warp();
  constexpr int e = 4 / sizeof(TA);
  const int g = lane() / 4, q = lane() % 4;
  for (int i = 0; i < NC; ++i) {
    const int row = g + 8 * (i / 2), col = 2 * q + i % 2;
    S sum = S(c[i]);
    for (int k = 0; k < K; ++k) {
      const int la = row % 8 * 4 + k / e % 4, ia = (row / 8 + 2 * (k / (4 * e))) * e + k % e;
      const int lb = col * 4 + k / e % 4, ib = k / (4 * e) * e + k % e;
      TA x; TB y;
      memcpy(&x, slot[la] + ia * sizeof(TA), sizeof(TA));
      memcpy(&y, slot[lb] + 64 + ib * sizeof(TB), sizeof(TB));
      sum += S(x) * S(y);
    }
    c[i] = TC(sum);
  }
  wait_warp();
}
static void complete(int pending) {
  while ((int)now->groups.size() > pending) {
    for (const Copy& c : now->groups.front()) c.pred ? (void)memcpy(c.to, c.from, c.bytes) : (void)memset(c.to, 0, c.bytes);
    now->groups.erase(now->groups.begin());
  }
}

// ---- Hopper: barriers in shared memory, tensor copies, products of warp groups; all land as late as they may ----
struct Barrier { int count = 0, pending = 0, phase = 0; long bytes = 0; std::vector<std::function<int()>> loads; };
static std::map<const void*, Barrier> barriers;
static Gate named[16];
static Barrier& barrier_at(const void* p) {
  auto it = barriers.find(p);
  if (it == barriers.end()) fail("an mbarrier that was not initialised");
  return it->second;
}
static void settle(Barrier& b) {
  if (b.pending < 0) fail("more arrivals than an mbarrier counts");
  if (b.pending == 0 && b.bytes == 0) { b.pending = b.count; ++b.phase; waits_without_progress = 0; }
}
static void barrier_wait(const void* p, unsigned parity) {
  Barrier& b = barrier_at(p);
  while ((b.phase & 1) == (int)parity) {
    if (!b.loads.empty()) {
      b.bytes -= b.loads.front()();
      b.loads.erase(b.loads.begin());
      settle(b);
      continue;
    }
    if (++waits_without_progress > 1024L * 1024) fail("deadlock at an mbarrier");
    swapcontext(&now->context, &scheduler);
  }
}
struct alignas(64) TensorMap {  // made by host_cuda.py
  unsigned char* base;
  int64_t dims[5], strides[5];
  int32_t box[5], rank, element, swizzle;
};
static_assert(sizeof(TensorMap) == 128, "128 bytes");
// Every element of a box: shared place and global place, null outside the tensor.  Swizzles act on the place in smem.
template <typename F> static void each_element(const TensorMap& m, const int* c, const unsigned char* tile, F f) {
  const int64_t start = tile - smem, pitch = m.swizzle ? m.swizzle : (int64_t)m.box[0] * m.element;
  if (start % 128) fail("a TMA tile is not 128-byte aligned");
  int64_t total = 1;
  for (int d = 0; d < m.rank; ++d) total *= m.box[d];
  for (int64_t e = 0; e < total; ++e) {
    int64_t rest = e, row = 0, scale = 1;
    unsigned char* global = m.base;
    int64_t first = 0;
    for (int d = 0; d < m.rank; ++d) {
      const int64_t i = rest % m.box[d], at = c[d] + i;
      rest /= m.box[d];
      if (d == 0) first = i; else { row += i * scale; scale *= m.box[d]; }
      if (at < 0 || at >= m.dims[d]) global = nullptr;
      if (global) global += at * m.strides[d];
    }
    int64_t place = start + row * pitch + first * m.element;
    if (m.swizzle) place ^= (place >> 7 & (m.swizzle / 16 - 1)) << 4;
    f(smem + place, global);
  }
}
static void tma_load(void* dst, const void* map, void* bar, const int* c) {
  const TensorMap m = *(const TensorMap*)map;
  const std::vector<int> at(c, c + m.rank);
  barrier_at(bar).loads.push_back([=] {
    int bytes = 0;
    each_element(m, at.data(), (unsigned char*)dst, [&](unsigned char* to, unsigned char* from) {
      if (from) memcpy(to, from, m.element); else memset(to, 0, m.element);
      bytes += m.element;
    });
    return bytes;
  });
}
static void tma_store(const void* src, const void* map, const int* c) {
  const TensorMap m = *(const TensorMap*)map;
  const std::vector<int> at(c, c + m.rank);
  now->open_stores.push_back([=] {
    each_element(m, at.data(), (const unsigned char*)src, [&](unsigned char* from, unsigned char* to) {
      if (to) memcpy(to, from, m.element);
    });
  });
}
static void finish(std::vector<std::vector<std::function<void()>>>& groups, int pending) {
  while ((int)groups.size() > pending) {
    for (auto& f : groups.front()) f();
    groups.erase(groups.begin());
  }
}
static int64_t operand_place(unsigned long long d, bool mn, int m, int k, int size) {
  const int64_t start = (d & 0x3fff) << 4, lbo = (d >> 16 & 0x3fff) << 4, sbo = (d >> 32 & 0x3fff) << 4;
  const int width = (int[]){16, 128, 64, 32}[d >> 62];
  const int64_t along = (mn ? m : k) * size, across = mn ? k : m;
  if (width == 16) return start + along / 16 * (mn ? sbo : lbo) + across / 8 * (mn ? lbo : sbo) + across % 8 * 16 + along % 16;
  const int64_t place = start + (mn ? along / width * lbo + along % width : along) + across / 8 * sbo + across % 8 * width;
  return place ^ (place >> 7 & (width / 16 - 1)) << 4;
}
template <typename T> static T shared_at(int64_t place) { T x; memcpy(&x, smem + place, sizeof(T)); return x; }
// This thread's part of C (64 x N) = A (64 x K) @ B [+ C]; `a` gives an element of A that this thread's rows need.
template <int N, typename S, typename TA, typename TB, typename TC, typename F>
static void group_multiply(TC* c, F a, unsigned long long b, bool b_mn, bool keep) {
  constexpr int K = 32 / sizeof(TA);
  const int t = now->index % 128, g = t % 32 / 4, q = t % 4;
  for (int i = 0; i < N / 2; ++i) {
    const int row = 16 * (t / 32) + g + 8 * (i / 2 % 2), col = 8 * (i / 4) + 2 * q + i % 2;
    S sum = keep ? S(c[i]) : S(0);
    for (int k = 0; k < K; ++k) sum += S(a(row, k)) * S(shared_at<TB>(operand_place(b, b_mn, col, k, sizeof(TB))));
    c[i] = TC(sum);
  }
}

// ---- launching ----
typedef void (*Entry)(void**);
static Entry entry;
static void** entry_args;
static void fiber_main() {
  entry(entry_args);
  stuck |= !now->open.empty() || !now->open_products.empty() || !now->products.empty() || !now->open_stores.empty() ||
           !now->stores.empty();
  for (auto& group : now->groups) stuck |= !group.empty();  // copies nobody waited for
  now->done = true;
  --live;
  waits_without_progress = 0;
  if (live > 0 && block_gate.arrived >= live) { block_gate.arrived = 0; ++block_gate.generation; }
  swapcontext(&now->context, &scheduler);
}
static int launch(Entry fn, void** args, const int* grid, const int* block) {
  entry = fn; entry_args = args;
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], block[1], block[2]};
  const int n = block[0] * block[1] * block[2];
  stuck = false;
  for (int z = 0; z < grid[2]; ++z) for (int y = 0; y < grid[1]; ++y) for (int x = 0; x < grid[0]; ++x) {
    blockIdx = {x, y, z};
    memset(smem, 0xff, sizeof(smem));  // NaN in every float type: reads before writes show
    fibers.clear();
    warps.assign((n + 31) / 32, Warp());
    block_gate = Gate();
    barriers.clear();
    for (Gate& g : named) g = Gate();
    live = n;
    for (int t = 0; t < n; ++t) {
      auto f = std::make_unique<Fiber>();
      f->index = t;
      f->stack.reset(new char[128 * 1024]);
      getcontext(&f->context);
      f->context.uc_stack.ss_sp = f->stack.get();
      f->context.uc_stack.ss_size = 128 * 1024;
      f->context.uc_link = &scheduler;
      makecontext(&f->context, fiber_main, 0);
      fibers.push_back(std::move(f));
    }
    for (int done = 0; done < n;) {
      done = 0;
      for (auto& f : fibers) {
        if (f->done) { ++done; continue; }
        now = f.get();
        threadIdx = {f->index % block[0], f->index / block[0] % block[1], f->index / block[0] / block[1]};
        swapcontext(&scheduler, &f->context);
      }
    }
    for (auto& b : barriers) stuck |= !b.second.loads.empty();
  }
  return stuck;
}
// ==== sections that replace those of prelude.cuh ====
//@ to_int
template <typename T, typename S> TL_DEVICE T to_int(S x) {
  constexpr bool SIGNED = T(-1) < T(0);
  constexpr int BITS = 8 * sizeof(T);
  const double high = ldexp(1.0, BITS - SIGNED), low = SIGNED ? -high : 0.0, v = trunc((double)x);
  const unsigned long long most = ~0ull >> (64 - BITS + SIGNED);
  return v != v ? T(0) : v >= high ? T(most) : v < low ? T(SIGNED ? ~most : 0) : T(v);
}
//@ shift_left
template <typename T> TL_DEVICE T shift_left(T x, T n) {
  using U = std::make_unsigned_t<T>;
  return U(n) < 8 * sizeof(T) ? T(U(x) << U(n)) : T(0);
}
//@ shift_right
template <typename T> TL_DEVICE T shift_right(T x, T n) {
  using U = std::make_unsigned_t<T>;
  return T(x >> (U(n) < 8 * sizeof(T) ? U(n) : U(8 * sizeof(T) - 1)) >> (U(n) >= 8 * sizeof(T)));
}
//@ pack_half
template <int N> TL_DEVICE void pack_half(half_t* to, const float* from) { for (int i = 0; i < N; ++i) to[i] = half_t(from[i]); }
//@ pack_bfloat16
template <int N> TL_DEVICE void pack_bfloat16(bfloat16_t* to, const float* from) {
  for (int i = 0; i < N; ++i) to[i] = bfloat16_t(from[i]);
}
//@ warp_uniform
TL_DEVICE int warp_uniform(int x) { return x; }
//@ row_quotient
TL_DEVICE float row_quotient(float x, float y) { return x / y; }
//@ fast_exp2
TL_DEVICE float fast_exp2(float x) { return exp2f(x); }
//@ fast_rcp
TL_DEVICE float fast_rcp(float x) { return 1.0f / x; }
//@ sigmoid
template <typename T> TL_DEVICE T sigmoid(T x) { return T(1.0 / (1.0 + exp(-(double)x))); }
//@ exp_wide
TL_DEVICE float exp_wide(float x) { return expf(x); }
//@ quotient
TL_DEVICE float quotient(float x, float y) { return x / y; }
//@ square_root
TL_DEVICE float square_root(float x) { return sqrtf(x); }
//@ to_tf32
TL_DEVICE float to_tf32(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  u = (u + 0x1000) & 0xffffe000u;
  memcpy(&x, &u, 4);
  return x;
}
//@ cp_async
template <int BYTES> TL_DEVICE void cp_async(void* dst, const void* src, bool pred = true) {
  if ((uintptr_t)dst % BYTES || (pred && (uintptr_t)src % BYTES)) fail("cp.async is misaligned");
  now->open.push_back({dst, src, BYTES, pred});
}
//@ cp_async_commit
TL_DEVICE void cp_async_commit() { now->groups.push_back(std::move(now->open)); now->open.clear(); }
//@ cp_async_wait
template <int N> TL_DEVICE void cp_async_wait() { complete(N); }
//@ ldmatrix_x1
TL_DEVICE void ldmatrix_x1(void* dst, const void* src) { ldmatrix(dst, src, 1, false); }
//@ ldmatrix_x1_trans
TL_DEVICE void ldmatrix_x1_trans(void* dst, const void* src) { ldmatrix(dst, src, 1, true); }
//@ ldmatrix_x2
TL_DEVICE void ldmatrix_x2(void* dst, const void* src) { ldmatrix(dst, src, 2, false); }
//@ ldmatrix_x2_trans
TL_DEVICE void ldmatrix_x2_trans(void* dst, const void* src) { ldmatrix(dst, src, 2, true); }
//@ ldmatrix_x4
TL_DEVICE void ldmatrix_x4(void* dst, const void* src) { ldmatrix(dst, src, 4, false); }
//@ ldmatrix_x4_trans
TL_DEVICE void ldmatrix_x4_trans(void* dst, const void* src) { ldmatrix(dst, src, 4, true); }
//@ shared_address
TL_DEVICE unsigned shared_address(const void* p) { return (unsigned)((const unsigned char*)p - smem); }
//@ stmatrix_x4
TL_DEVICE void stmatrix_x4(void* dst, const void* src) {
  if ((uintptr_t)dst % 16) fail("stmatrix row is not 16-byte aligned");
  memcpy(warp().slot[lane()], &dst, sizeof(dst));
  wait_warp();
  for (int j = 0; j < 4; ++j) {
    unsigned char* line;
    memcpy(&line, warp().slot[8 * j + lane() / 4], sizeof(line));
    memcpy(line + 4 * (lane() % 4), (const unsigned char*)src + 4 * j, 4);
  }
  wait_warp();
}
//@ named_barrier
TL_DEVICE void named_barrier(int id, int count) { wait_at(named[id], count); }
//@ mbarrier_init
TL_DEVICE void mbarrier_init(void* bar, unsigned count) {
  if ((uintptr_t)bar % 8) fail("an mbarrier is not 8-byte aligned");
  barriers[bar] = Barrier{(int)count, (int)count};
}
//@ mbarrier_arrive
TL_DEVICE void mbarrier_arrive(void* bar) { Barrier& b = barrier_at(bar); --b.pending; settle(b); }
//@ mbarrier_expect_tx
TL_DEVICE void mbarrier_expect_tx(void* bar, unsigned bytes) { barrier_at(bar).bytes += bytes; }
//@ mbarrier_arrive_expect_tx
TL_DEVICE void mbarrier_arrive_expect_tx(void* bar, unsigned bytes) {
  Barrier& b = barrier_at(bar);
  b.bytes += bytes;
  --b.pending;
  settle(b);
}
//@ mbarrier_wait
TL_DEVICE void mbarrier_wait(void* bar, unsigned parity) { barrier_wait(bar, parity); }
//@ fence_mbarrier_init
TL_DEVICE void fence_mbarrier_init() {}
//@ fence_proxy_async
TL_DEVICE void fence_proxy_async() {}
//@ elect_one
TL_DEVICE bool elect_one() { return lane() == 0; }
//@ set_max_nreg
template <int N, bool INC> TL_DEVICE void set_max_nreg() {}
//@ tensor_map
using tensor_map = TensorMap;
//@ tma_prefetch
TL_DEVICE void tma_prefetch(const tensor_map*) {}
//@ bulk_commit
TL_DEVICE void bulk_commit() { now->stores.push_back(std::move(now->open_stores)); now->open_stores.clear(); }
//@ bulk_wait
template <int N> TL_DEVICE void bulk_wait() { finish(now->stores, N); }
//@ bulk_wait_read
template <int N> TL_DEVICE void bulk_wait_read() { finish(now->stores, N); }
//@ wgmma_fence
TL_DEVICE void wgmma_fence() {}
//@ wgmma_commit
TL_DEVICE void wgmma_commit() { now->products.push_back(std::move(now->open_products)); now->open_products.clear(); }
//@ wgmma_wait
template <int N> TL_DEVICE void wgmma_wait() { finish(now->products, N); wait_warp(); }
//@ wgmma_pin
template <int COUNT, typename T> TL_DEVICE void wgmma_pin(T* c) {}
