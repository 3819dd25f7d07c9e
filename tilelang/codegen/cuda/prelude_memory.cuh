// Device functions that generated kernels use: shared memory, copies, barriers, clusters, matrix instructions, pairs of bfloat16 (prelude.py).
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
//@ ldmatrix_x1= ldmatrix_x1_trans=.trans
TL_DEVICE void $0(void* dst, const void* src) {
  unsigned* r = reinterpret_cast<unsigned*>(dst);
  asm volatile("ldmatrix.sync.aligned.m8n8.x1$1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(shared_address(src)) : "memory");
}
//@ ldmatrix_x2= ldmatrix_x2_trans=.trans
TL_DEVICE void $0(void* dst, const void* src) {
  unsigned* r = reinterpret_cast<unsigned*>(dst);
  asm volatile("ldmatrix.sync.aligned.m8n8.x2$1.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(src)) : "memory");
}
//@ ldmatrix_x4= ldmatrix_x4_trans=.trans
TL_DEVICE void $0(void* dst, const void* src) {
  unsigned* r = reinterpret_cast<unsigned*>(dst);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4$1.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(src)) : "memory");
}
//@ ldmatrix_x4_bytes
// Two columns of a tile of bytes: the rows of each half of k come as two pairs of matrices, whose order lanes 2, 3 (mod 4) exchange.
TL_DEVICE void ldmatrix_x4_bytes(void* dst, const void* src) {
  unsigned* r = reinterpret_cast<unsigned*>(dst);
  unsigned a, b, c, d;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(shared_address(src)) : "memory");
  unsigned lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  const bool late = lane & 2;
  const unsigned even = late ? 0x2064 : 0x6420, odd = late ? 0x3175 : 0x7531;
  r[0] = __byte_perm(a, b, even);
  r[1] = __byte_perm(a, b, odd);
  r[2] = __byte_perm(c, d, even);
  r[3] = __byte_perm(c, d, odd);
}
//@ stmatrix_x1= stmatrix_x1_trans=.trans
TL_DEVICE void $0(void* dst, const void* src) {
  const unsigned* r = reinterpret_cast<const unsigned*>(src);
  asm volatile("stmatrix.sync.aligned.m8n8.x1$1.shared.b16 [%0], {%1};" ::"r"(shared_address(dst)), "r"(r[0]) : "memory");
}
//@ stmatrix_x2= stmatrix_x2_trans=.trans
TL_DEVICE void $0(void* dst, const void* src) {
  const unsigned* r = reinterpret_cast<const unsigned*>(src);
  asm volatile("stmatrix.sync.aligned.m8n8.x2$1.shared.b16 [%0], {%1, %2};"
               ::"r"(shared_address(dst)), "r"(r[0]), "r"(r[1]) : "memory");
}
//@ stmatrix_x4= stmatrix_x4_trans=.trans
TL_DEVICE void $0(void* dst, const void* src) {
  const unsigned* r = reinterpret_cast<const unsigned*>(src);
  asm volatile("stmatrix.sync.aligned.m8n8.x4$1.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(shared_address(dst)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
//@ stmatrix_x4_bytes
// The registers of ldmatrix_x4_bytes as rows of K; lanes 16 .. 31 exchange the two columns.
TL_DEVICE void stmatrix_x4_bytes(void* dst, const void* src) {
  const unsigned* r = reinterpret_cast<const unsigned*>(src);
  unsigned lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  const bool late = lane & 16;
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(shared_address(dst)), "r"(late ? r[1] : r[0]), "r"(late ? r[0] : r[1]), "r"(late ? r[3] : r[2]),
                 "r"(late ? r[2] : r[3]) : "memory");
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
//@ fence_proxy_async=proxy.async.shared::cta fence_proxy_async_global=proxy.async.global
TL_DEVICE void $0() { asm volatile("fence.$1;" ::: "memory"); }
//@ prefetch_l2
// Bytes from an address on, both multiples of 16, come to L2 (PTX ISA, "cp.async.bulk.prefetch", "prefetch").
TL_DEVICE void prefetch_l2(const void* first, int bytes) {
#if __CUDA_ARCH__ >= 900
  if (bytes > 128) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(first), "r"(bytes) : "memory");
    return;
  }
#endif
  for (int i = 0; i < bytes; i += 128) asm volatile("prefetch.global.L2 [%0];" ::"l"((const char*)first + i));
}
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
//@ map_argument
// A tensor map as an argument of a function of the program: of the driver's type, or a pointer.
struct map_argument {
  const tensor_map& map;
  template <typename M> TL_DEVICE operator const M&() const { return reinterpret_cast<const M&>(map); }
  template <typename M> TL_DEVICE operator const M*() const { return reinterpret_cast<const M*>(&map); }
};
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
//@ pdl_trigger=launch_dependents pdl_sync=wait
TL_DEVICE void $0() { asm volatile("griddepcontrol.$1;" ::: "memory"); }
//@ mapa
// The place of p in the shared memory of CTA `cta` of the cluster.
TL_DEVICE unsigned mapa(const void* p, unsigned cta) {
  unsigned at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(p)), "r"(cta));
  return at;
}
//@ cluster_rank=rank;ctarank cluster_size=size;nctarank
TL_DEVICE unsigned $0() {
  unsigned $1;
  asm("mov.u32 %0, %%cluster_$2;" : "=r"($1));
  return $1;
}
//@ cluster_arrive=arrive.release cluster_arrive_relaxed=arrive.relaxed cluster_wait=wait.acquire
TL_DEVICE void $0() { asm volatile("barrier.cluster.$1.aligned;" ::: "memory"); }
//@ cluster_sync
TL_DEVICE void cluster_sync() { cluster_arrive(); cluster_wait(); }
//@ mbarrier_arrive_remote
// Without .release.cluster: default semantics order what a consumer's release of a slot needs, at a fifth of the cost.
TL_DEVICE void mbarrier_arrive_remote(void* bar, unsigned cta) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapa(bar, cta)) : "memory");
}
//@ mbarrier_complete_remote
// Counts bytes that this thread has stored there before; whoever waits for the mbarrier sees them.
TL_DEVICE void mbarrier_complete_remote(void* bar, unsigned cta, unsigned bytes) {
  asm volatile("fence.acq_rel.cluster;\n\tmbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%0], %1;"
               ::"r"(mapa(bar, cta)), "r"(bytes) : "memory");
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
//@ bulk_wait= bulk_wait_read=.read
// read: the sources may be written again; the writes themselves need not be done.
template <int N> TL_DEVICE void $0() { asm volatile("cp.async.bulk.wait_group$1 %0;" ::"n"(N) : "memory"); }
//@ wgmma_fence=fence wgmma_commit=commit_group
TL_DEVICE void $0() { asm volatile("wgmma.$1.sync.aligned;" ::: "memory"); }
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
//@ wgmma_keep
// COUNT registers of an operand of wgmma that a loop does not change: ptxas 13.0 gives them to other values of an iteration unless
// another instruction than wgmma may use them after those.  (A grid of 65535 layers in z takes the branch, which computes nothing.)
template <int COUNT> TL_DEVICE void wgmma_keep(const void* x) {
  unsigned layers, all = 0;
  asm("mov.u32 %0, %%nctaid.z;" : "=r"(layers));
  if (layers == 65535u) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) all ^= reinterpret_cast<const unsigned*>(x)[i];
    asm volatile("nanosleep.u32 %0;" ::"r"(all >> 31));
  }
}
//@ wgmma_used
// Metadata x of sparse wgmma stay in their registers up to here, which ptxas does not know to keep: it has to compare them with
// a clock that is read after the wait.
template <int COUNT> TL_DEVICE void wgmma_used(const unsigned* x) {
  unsigned now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
  bool some = false;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) some |= x[i] == now;
  if (some) asm volatile("nanosleep.u32 0;");
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
//@ coded_pair_bfloat16
// The same as bfloat16, of numbers below 128: 128 + n has the bits 0x4300 + n, so both numbers are shifted to the lowest bits.
template <int LOW, int HIGH, int MASK> TL_DEVICE __nv_bfloat162 coded_pair_bfloat16(unsigned byte) {
  const unsigned both = (byte >> LOW) + (byte << (16 - HIGH)), one = 0x43004300u;
  const unsigned bits = (both & (MASK | MASK << 16)) | one;
  return __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&bits), *reinterpret_cast<const __nv_bfloat162*>(&one));
}
// zero: its float has no bits below those of a bfloat16.
template <int LOW, int HIGH, int MASK> TL_DEVICE __nv_bfloat162 coded_pair_bfloat16(unsigned byte, unsigned zero) {
  const float least = __uint_as_float(0x4b000000u + zero) - 8388608.0f;
  return __hsub2(coded_pair_bfloat16<LOW, HIGH, MASK>(byte),
                 __bfloat162bfloat162(__ushort_as_bfloat16((unsigned short)(__float_as_uint(least) >> 16))));
}
