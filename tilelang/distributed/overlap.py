"""GEMMs whose operands or results are spread over the ranks: copy engines move some rows under the GEMM of others.

A GEMM fills all SMs, so what travels under a GEMM, with the flags that say that it has come, goes by copy engines on a stream
of its own.  GEMMs that do not depend on one another are launched on streams of their own: blocks of the next one start where
blocks of the one before have ended.  The ranks meet before the first GEMM, and wait for flags later.
"""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import Any

import tilelang
import tilelang.language as T
from tilelang.library.gemm.kernels import Form, main_loop
from tilelang.library.gemm.matmul import matmul, matmul_problem
from tilelang.library.gemm.plan import plan_matmul
from tilelang.library.place import Place

from .gemms import RankGemm, gathered_gemm, scattered_gemm
from .host import create_tensor, current, on_rank, same_program, symmetric_view
from .streams import set_signal, wait_eq


ROWS = 4  # of flags: rows that came, or a chunk of them and the next one, then chunks of results


def meeting(ranks: int) -> Any:
    """All ranks wait for each other.  pad[0, ranks] counts the meetings."""

    @T.prim_func
    def meet(pad: T.SymmTensor((1, 2 * ranks), "int64")):
        with T.Kernel(1, threads=32):
            T.barrier_all(pad[0, 0:2 * ranks])

    return meet


def beginning(ranks: int, counts: int) -> Any:
    """All ranks set their counts to zero and wait for each other."""

    @T.prim_func
    def begin(pad: T.SymmTensor((1, 2 * ranks), "int64"), numbers: T.SymmTensor((counts,), "int64")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(counts):
                numbers[i] = 0
            T.barrier_all(pad[0, 0:2 * ranks])

    return begin


def taking(ranks: int) -> Any:
    """Wait until the flags of all other ranks in a row are 1, and set them to 0."""

    @T.prim_func
    def take(flags: T.SymmTensor((ROWS, ranks), "int64"), row: T.int32):
        with T.Kernel(1, threads=32 * ceil(ranks / 32)):
            if T.get_thread_binding() < ranks - 1:
                T.wait_ge(flags[row, T.get_thread_binding()], 1)
                T.st(flags[row, T.get_thread_binding()], 0, scope="sys")

    return take


def gemm_added(f: Form, others: int) -> Any:
    """C = A @ B + what the other ranks have sent, summed in float32 and rounded once."""

    @T.prim_func
    def gemm_and_sum(A: f.a(f.m), B: f.b, inbox: T.Tensor((others, f.m, f.n), f.types[2]), C: f.c(f.m)):
        with T.Kernel(*f.tiles(f.m), threads=f.tile.threads) as (bx, by):
            Cf = main_loop(f, A, B, (bx, by, 0), 0, f.steps)
            for i, j in T.Parallel(f.tile.bm, f.tile.bn):
                Cf[i, j] += sum([T.cast(inbox[r, f.row(by) + i, f.column(bx) + j], "float32") for r in range(others)])
            T.copy(Cf, C[f.row(by), f.column(bx)])

    return gemm_and_sum


@cache
def _stream() -> Any:
    import torch

    return torch.cuda.Stream()


@cache
def _streams(count: int) -> list[Any]:
    import torch

    return [torch.cuda.Stream() for _ in range(count)]


def _fork(count: int) -> tuple[Any, list[Any]]:
    """(The stream of copies, which waits for a meeting of the ranks, streams of GEMMs, which do not.)

    The meeting starts first, because it would find no room while a GEMM runs, and then the GEMMs one after another: each stream
    waits for an operation of the one before.
    """
    import torch

    main, side, streams, start = torch.cuda.current_stream(), _stream(), _streams(count), _space((1,), torch.int64, False)
    before = main.record_event()
    _meeting()()
    side.wait_stream(main)
    for stream in streams:
        stream.wait_event(before)
        set_signal(start, 1, stream)
        before = stream.record_event()
    return side, streams


def _join(*streams: Any) -> None:
    import torch

    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)


@cache
def _one() -> Any:
    import torch

    return torch.ones(1, dtype=torch.int64, device=current().heap.device)


@cache
def _pad() -> Any:
    import torch

    return create_tensor((1, 2 * current().ranks), torch.int64, "the counts of the meetings around GEMMs")


@cache
def _meeting() -> Any:
    """The kernel at which the ranks meet."""
    kernel, pad = tilelang.compile(meeting(current().ranks), target="cuda"), _pad()
    same_program(kernel, "one row")
    return lambda: kernel(pad)


@cache
def _space(shape: tuple[int, ...], dtype: Any, symmetric: bool) -> Any:
    """Memory that calls of these shapes use."""
    import torch

    return create_tensor(shape, dtype) if symmetric else torch.empty(shape, dtype=dtype, device=current().heap.device)


def waves(rows: int, columns: int, sms: int) -> int:
    """Waves of tiles of 128 x 256 of a GEMM."""
    return ceil(ceil(rows / 128) * ceil(columns / 256) / sms)


def chunks_of(rows: int, columns: int, sms: int) -> int:
    """Into how many chunks of rows each rank's block is divided: the more, the earlier the first one can be added.

    Parts of a whole number of tiles, which together need no more waves than the block.
    """
    return next(n for n in (2, 1) if n == 1 or rows % (128 * n) == 0
                and n * waves(rows // n, columns, sms) <= waves(rows, columns, sms))


ONE_LAUNCH = 1.04  # time of a GEMM of gemms.py over that of the library's, on two H200s at three shapes (decision 161)


def pays_in_one_launch(m: int, n: int, ranks: int, sms: int) -> bool:
    """Whether GEMMs of each rank's m rows by themselves need so many more waves than one of all rows."""
    return ranks * waves(m, n, sms) > ONE_LAUNCH * waves(ranks * m, n, sms)


@cache
def _adding(m: int, n: int, k: int, dtype: Any) -> Any:
    """The function (a, b, inbox, out) of a GEMM that adds what other ranks sent."""
    import torch

    a, b, out = (torch.empty(shape, dtype=dtype, device=current().heap.device) for shape in ((m, k), (k, n), (m, n)))
    at = Place.of(a, None)
    given = {"a": a, "b": b, "bias": None, "scale_a": None, "scale_b": None, "out": out}
    problem = matmul_problem(given, at.target, transpose_a=False, transpose_b=False, activation=None, out_dtype=None,
                             fast_accum=False, dynamic=False)
    form = plan_matmul(problem, at.chip).form
    plain = form.tile.splits == 1 and not form.tile.swap_ab and not form.tile.overlapping and form.types[3] == "float32"
    if plain:
        return at.kernel(gemm_added, form, current().ranks - 1)

    def run(a: Any, b: Any, inbox: Any, out: Any) -> None:
        out.copy_(inbox.float().sum(0) + matmul(a, b, out_dtype="float32"))

    return run


@cache
def _begin(counts: int) -> tuple[Any, Any]:
    """(Symmetric counts, the kernel that sets them to zero on all ranks, where the ranks meet.)"""
    import torch

    numbers = create_tensor((counts,), torch.int64, "counts of tiles and arrivals")
    kernel = tilelang.compile(beginning(current().ranks, counts), target="cuda")
    return numbers, lambda: kernel(_pad(), numbers)


@cache
def _flags() -> tuple[Any, Any]:
    """(Flags of this rank, the kernel that waits for a row of them.)

    A rank sets a flag to 1 on another one, where a kernel waits for it and sets it to 0.  It is set again only after
    the ranks have met.
    """
    import torch

    flags = create_tensor((ROWS, current().ranks), torch.int64, "the flags of GEMMs over ranks")
    kernel = tilelang.compile(taking(current().ranks), target="cuda")
    same_program(kernel, "flags")
    return flags, kernel


def _tell(row: int, k: int) -> None:
    """Set a flag of this rank on the rank that is k + 1 further, on the current stream, by a copy engine."""
    me = current()
    on_rank(_flags()[0], (me.rank + k + 1) % me.ranks)[row, k:k + 1].copy_(_one())


def _hear(row: int, stream: Any) -> None:
    """Let a stream wait for the flags of all other ranks, by a kernel of one block: waits of kernels have a limit of time."""
    import torch

    flags, take = _flags()
    with torch.cuda.stream(stream):
        take(flags, row)


def _one_launch(a: Any, b: Any, out: Any, m: int, chunks: int) -> RankGemm | None:
    """The form of a GEMM over ranks in one launch, where shapes and device allow one, and it pays."""
    me, at = current(), Place.of(a, None)
    f = RankGemm(m, b.shape[1], b.shape[0], me.ranks, str(a.dtype).removeprefix("torch."), at.sms or 0, chunks)
    whole = all(x.is_contiguous() for x in (a, b, out)) and a.dtype == b.dtype == out.dtype and a.element_size() == 2
    able = me.ranks > 1 and whole and at.target.has_wgmma and f.fits
    return f if able and pays_in_one_launch(m, f.n, me.ranks, f.blocks) else None


@cache
def _kernel(make: Any, f: RankGemm, *more: Any) -> Any:
    kernel = tilelang.compile(make(f, *more), target="cuda")
    same_program(kernel, f"{f}")
    return kernel


@cache
def _room(rows: int, k: int, dtype: Any, begin: int) -> Any:
    """Symmetric rows of k elements that begin at a byte of the heap which is `begin` modulo the bytes of a row."""
    row = k * dtype.itemsize
    space = create_tensor(((rows + 1) * row,), _bytes(), "the rows that all_gather_matmul receives")
    first = (begin - (space.data_ptr() - current().heap.data_ptr())) % row
    return space[first:first + rows * row].view(dtype).view(rows, k)


def _bytes() -> Any:
    import torch

    return torch.uint8


def _gathered(f: RankGemm, a: Any, b: Any, out: Any) -> None:
    """all_gather_matmul in one launch: tiles wait until copy engines have brought their rows."""
    import torch

    me, main, side, (flags, begin) = current(), torch.cuda.current_stream(), _stream(), _begin(current().ranks)
    heap, row = me.heap.data_ptr(), f.k * a.element_size()
    own = a.data_ptr() - heap
    rows = _room(f.ranks * f.m, f.k, a.dtype, own % row)
    there = rows.data_ptr() - heap
    first, last = min(own, there), max(own + f.m * row, there + f.ranks * f.m * row)
    begin()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        for k in range(1, f.ranks):
            peer = (me.rank + k) % f.ranks
            rows[peer * f.m:(peer + 1) * f.m].copy_(on_rank(a, peer))
            set_signal(flags[peer:peer + 1], 1, side)
    memory = me.heap[first:last].view(a.dtype).view(-1, f.k)
    _kernel(gathered_gemm, f)(memory, b, out, flags, (own - first) // row, (there - first) // row)
    main.wait_stream(side)
    _meeting()()


def _scattered(f: RankGemm, a: Any, b: Any, out: Any, every: bool) -> None:
    """matmul_reduce_scatter (every: matmul_all_reduce) in one launch: copy engines fetch what other ranks' tiles stored, for
    tiles that wait for it."""
    import torch

    me, main, side, others = current(), torch.cuda.current_stream(), _stream(), f.ranks - 1
    numbers, begin = _begin(2 * f.chunks * others)
    done, flags = numbers.view(2, f.chunks, others)
    sums, inbox = (_space((others, f.m, f.n), a.dtype, symmetric) for symmetric in (True, False))
    high = f.m // f.chunks
    begin()
    side.wait_event(main.record_event())
    # The GEMM is launched first: a stream that waits may keep others from running that share its queue of the device.
    _kernel(scattered_gemm, f, every)(a, b, out, sums, inbox, done, flags)
    with torch.cuda.stream(side):
        for chunk in range(f.chunks):
            for j in range(others):
                rows = slice(chunk * high, (chunk + 1) * high)
                wait_eq(done[chunk, j:j + 1], f.per_chunk, side, "ge")
                inbox[j, rows].copy_(on_rank(sums, (me.rank - j - 1) % f.ranks)[j, rows])
                set_signal(flags[chunk, j:j + 1], 1, side)
    main.wait_stream(side)


def all_gather_matmul(a: Any, b: Any, out: Any) -> Any:
    """out = the rows a of all ranks, one rank after another, times b; on the current stream; returns out.

    a: a contiguous symmetric tensor of shape (m, k).  b: (k, n).  out: contiguous, (ranks * m, n), of a's type.  The GEMM
    of this rank's rows runs while those of the others arrive.  Raises not-symmetric, ranks-disagree, and what matmul raises.

    Example:
        out = torch.empty(dist.num_ranks() * m, n, dtype=a.dtype, device=a.device)
        dist.all_gather_matmul(a, b, out)
    """
    import torch

    symmetric_view(a, "the first operand of all_gather_matmul")
    if f := _one_launch(a, b, out, a.shape[0], 1):
        _gathered(f, a, b, out)
        return out
    me = current()
    if me.ranks == 1:
        return matmul(a, b, out=out)
    rows, results = _space((me.ranks, *a.shape), a.dtype, False), out.view(me.ranks, a.shape[0], -1)
    side, streams = _fork(me.ranks)
    with torch.cuda.stream(streams[0]):
        matmul(a, b, out=results[me.rank])
    for k, stream in enumerate(streams[1:]):
        peer = (me.rank + k + 1) % me.ranks
        with torch.cuda.stream(side):
            rows[peer].copy_(on_rank(a, peer))
            _tell(0, k)
        stream.wait_stream(side)
        with torch.cuda.stream(stream):
            matmul(rows[peer], b, out=results[peer])
    _hear(0, side)  # all have this rank's rows
    _join(side, *streams)
    return out


def _scatter(a: Any, b: Any, out: Any, then: Any, rows: int) -> None:
    """matmul_reduce_scatter; then(row of flags, chunk) is called on the stream that computes a chunk of out, behind it.

    rows: of flags for each chunk: 2 where `then` sends it.  A chunk is awaited once this rank has sent its own, so that no rank
    waits for one that waits.
    """
    import torch

    me, others, m = current(), current().ranks - 1, a.shape[0] // current().ranks
    if not others:
        matmul(a, b, out=out)
        return
    n, sms = b.shape[1], torch.cuda.get_device_properties(a.device).multi_processor_count
    chunks = chunks_of(m, n, sms)
    blocks, shape = a.view(me.ranks, chunks, m // chunks, -1), (chunks, others, m // chunks, n)
    inbox, sums = (_space(shape, a.dtype, symmetric) for symmetric in (True, False))
    (side, streams), sent = _fork(chunks * me.ranks), []
    for chunk in range(chunks):
        for k in range(others):
            peer, stream = (me.rank + k + 1) % me.ranks, streams[chunk * others + k]
            with torch.cuda.stream(stream):
                matmul(blocks[peer, chunk], b, out=sums[chunk, k])
            side.wait_stream(stream)
            with torch.cuda.stream(side):  # rank r has those of rank r - k - 1 in place k
                on_rank(inbox, peer)[chunk, k].copy_(sums[chunk, k])
                _tell(chunk, k)
        sent.append(side.record_event())
    add = _adding(m // chunks, n, b.shape[0], a.dtype)
    for chunk, result in enumerate(out.view(chunks, m // chunks, n)):
        stream = streams[chunks * others + chunk]
        stream.wait_event(sent[chunk])
        _hear(chunk, stream)
        with torch.cuda.stream(stream):
            add(blocks[me.rank, chunk], b, inbox[chunk], result)
            then(chunks + chunk, result)
    for row in range(chunks, rows * chunks):
        _hear(row, side)
    _join(side, *streams)


def matmul_reduce_scatter(a: Any, b: Any, out: Any) -> Any:
    """out = this rank's block of rows of the sum over all ranks of their a @ b; on the current stream; returns out.

    a: (ranks * m, k).  b: (k, n).  out: contiguous, (m, n), of a's type.  The rows of other ranks are computed first, and
    travel while the next ones are computed; the last GEMM adds what has come.  Sums that travel are rounded to a's type; all
    are added in float32.  Raises ranks-disagree, and what matmul raises.

    Example:
        out = torch.empty(a.shape[0] // dist.num_ranks(), n, dtype=a.dtype, device=a.device)
        dist.matmul_reduce_scatter(a, b, out)
    """
    f = _one_launch(a, b, out, out.shape[0], 2)
    if f:
        _scattered(f, a, b, out, False)
    else:
        _scatter(a, b, out, lambda row, chunk: None, 1)
    return out


def matmul_all_reduce(a: Any, b: Any, out: Any) -> Any:
    """out = the sum over all ranks of their a @ b; on the current stream; returns out.

    a: (ranks * m, k).  b: (k, n).  out: a contiguous symmetric tensor (ranks * m, n), of a's type.  As matmul_reduce_scatter;
    each chunk of this rank's rows is sent to all ranks under the GEMM of the next chunk.  Raises not-symmetric, ranks-disagree,
    and what matmul raises.

    Example:
        out = dist.create_tensor((a.shape[0], b.shape[1]), a.dtype)
        dist.matmul_all_reduce(a, b, out)
    """
    import torch

    me, side = current(), _stream()
    symmetric_view(out, "the result of matmul_all_reduce")
    if f := _one_launch(a, b, out, a.shape[0] // me.ranks, 2):
        _scattered(f, a, b, out, True)
        _meeting()()
        return out
    first = out.data_ptr()

    def send(row: int, chunk: Any) -> None:
        side.wait_stream(torch.cuda.current_stream())
        at = (chunk.data_ptr() - first) // (out.element_size() * out.shape[1])
        with torch.cuda.stream(side):
            for k in range(me.ranks - 1):
                on_rank(out, (me.rank + k + 1) % me.ranks)[at:at + chunk.shape[0]].copy_(chunk)
                _tell(row, k)

    _scatter(a, b, out.view(me.ranks, -1, out.shape[1])[me.rank], send, 2)
    return out
