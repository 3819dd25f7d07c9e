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
#include <memory>
#include <vector>

#define __device__
#define __global__
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
  static inline T __hmax(T a, T b) { return T(fmaxf(a, b)); }                    \
  static inline T __hmin(T a, T b) { return T(fminf(a, b)); }
HALF_OPERATORS(__half) HALF_OPERATORS(__nv_bfloat16)
struct __half2 { __half x, y; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
static inline __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }
static inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__nv_bfloat16(a), __nv_bfloat16(b)}; }
#define PAIR_OPERATORS(T)                                                        \
  static inline T __hadd2(T a, T b) { return {a.x + b.x, a.y + b.y}; }           \
  static inline T __hsub2(T a, T b) { return {a.x - b.x, a.y - b.y}; }           \
  static inline T __hmul2(T a, T b) { return {a.x * b.x, a.y * b.y}; }
PAIR_OPERATORS(__half2) PAIR_OPERATORS(__nv_bfloat162)
static inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
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

// ---- launching ----
typedef void (*Entry)(void**);
static Entry entry;
static void** entry_args;
static void fiber_main() {
  entry(entry_args);
  stuck |= !now->open.empty();
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
  }
  return stuck;
}
// ==== sections that replace those of prelude.cuh ====
//@ fast_exp2
TL_DEVICE float fast_exp2(float x) { return exp2f(x); }
//@ fast_rcp
TL_DEVICE float fast_rcp(float x) { return 1.0f / x; }
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
