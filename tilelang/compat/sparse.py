"""2:4 sparse tensors of torch: random ones, and their compressed form for T.gemm_sp.

Metadata: 4 bits for each group of 4 columns (float32: of 2), lowest group first. They are the two kept columns, 2 bits each,
the first one low; for float32 0b0100 keeps column 0 and 0b1110 column 1.
"""

from __future__ import annotations

from typing import Any

from .sparse_layout import GROUP_CONFIG, get_e_factor


def _group(dtype: Any) -> tuple[int, int]:
    """(kept columns, columns) of a group."""
    name = str(dtype).removeprefix("torch.")
    if name not in GROUP_CONFIG:
        raise ValueError(f"no 2:4 form for {name}: expected one of {', '.join(GROUP_CONFIG)}")
    return GROUP_CONFIG[name]


def compress(A: Any, transposed: bool = False, arch: Any = None, meta_dtype: Any = None, **options: Any) -> tuple[Any, Any]:
    """(kept values, metadata) of a 2:4 sparse matrix.  A: (M, K), or (K, M) if transposed, and so are both results.

    meta_dtype: torch.int16 by default, int32 for 8-bit elements.  arch and further options select hardware layouts of other
    libraries; T.gemm_sp reads one layout on every device. Raises ValueError where a group keeps too many values.
    """
    import torch  # torch belongs to the user: nothing else of this package needs it

    keep, group = _group(A.dtype)
    meta = meta_dtype or (torch.int32 if A.element_size() == 1 else torch.int16)
    dense = A.T if transposed else A
    rows, columns = dense.shape
    per = torch.iinfo(meta).bits // 4
    if columns % (group * per):
        raise ValueError(f"K = {columns} is no multiple of the {group * per} columns that one {meta} describes "
                         f"(e_factor {get_e_factor(str(A.dtype).removeprefix('torch.'), str(meta).removeprefix('torch.'))})")
    groups = dense.reshape(rows, columns // group, group)
    used = groups.float() != 0 if A.element_size() == 1 else groups != 0
    if bool((used.sum(-1) > keep).any()):
        raise ValueError(f"the matrix is not 2:4 sparse: a group of {group} columns has more than {keep} values")
    places = torch.sort(torch.argsort((~used).to(torch.int8), dim=-1, stable=True)[..., :keep], dim=-1).values
    raw = groups.view(torch.uint8) if A.element_size() == 1 else groups
    kept = torch.gather(raw, -1, places).reshape(rows, columns * keep // group).view(A.dtype)
    codes = torch.where(places[..., 0] == 0, 4, 14) if group == 2 else places[..., 0] | places[..., 1] << 2
    shifts = 4 * torch.arange(per, device=A.device)
    words = (codes.reshape(rows, -1, per) << shifts).sum(-1)
    words = words.to(torch.uint8) if meta == torch.uint8 else (words + (1 << 4 * per - 1)) % (1 << 4 * per) - (1 << 4 * per - 1)
    e = words.to(meta)
    return (kept.T.contiguous(), e.T.contiguous()) if transposed else (kept.contiguous(), e.contiguous())


def decompress(values: Any, metadata: Any, transposed: bool = False) -> Any:
    """The dense matrix of a compressed one."""
    import torch  # as above

    keep, group = _group(values.dtype)
    kept, e = (values.T, metadata.T) if transposed else (values, metadata)
    rows, per = kept.shape[0], torch.iinfo(e.dtype).bits // 4
    codes = (e.long().unsqueeze(-1) >> 4 * torch.arange(per, device=e.device) & 15).reshape(rows, -1, 1)
    places = (codes != 4).long() if group == 2 else torch.cat([codes & 3, codes >> 2], -1)
    whole = torch.zeros(rows, places.shape[1], group, dtype=values.dtype, device=values.device)
    raw = whole.view(torch.uint8) if values.element_size() == 1 else whole
    raw.scatter_(-1, places, kept.contiguous().view(raw.dtype).reshape(rows, -1, keep))
    dense = whole.reshape(rows, -1)
    return dense.T.contiguous() if transposed else dense


def _sparse(dense: Any, transposed: bool) -> Any:
    """The matrix with all but the kept number of values in each group set to zero, at random places."""
    import torch  # as above

    keep, group = _group(dense.dtype)
    rows, columns = dense.shape
    order = torch.rand(rows, columns // group, group, device=dense.device).argsort(-1)
    out = torch.where((order < keep).reshape(rows, columns), dense, torch.zeros((), dtype=dense.dtype, device=dense.device))
    return out.T.contiguous() if transposed else out


def randn_semi_sparse(M: int, K: int, dtype: Any = None, device: Any = "cuda", transposed: bool = False) -> Any:
    """A 2:4 sparse (M, K) matrix of normal values; (K, M) if transposed.  dtype: torch.float16 by default."""
    import torch  # as above

    return _sparse(torch.randn(M, K, device=device).to(dtype or torch.float16), transposed)


def randint_semi_sparse(M: int, K: int, low: int, high: int, dtype: Any = None, device: Any = "cuda",
                        transposed: bool = False) -> Any:
    """A 2:4 sparse (M, K) matrix of integers from low to high - 1; (K, M) if transposed.  dtype: torch.int8 by default."""
    import torch  # as above

    return _sparse(torch.randint(low, high, (M, K), device=device).to(dtype or torch.int8), transposed)


def arange_semi_sparse(M: int, K: int, dtype: Any = None, device: Any = "cuda", transposed: bool = False) -> Any:
    """A 2:4 sparse (M, K) matrix of the numbers 0, 1, …; (K, M) if transposed.  dtype: torch.float16 by default."""
    import torch  # as above

    return _sparse(torch.arange(M * K, device=device).reshape(M, K).to(dtype or torch.float16), transposed)


__all__ = ["arange_semi_sparse", "compress", "decompress", "randint_semi_sparse", "randn_semi_sparse"]
