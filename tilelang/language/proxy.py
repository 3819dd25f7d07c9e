"""Annotations of tensors and pointers."""

from .tensor import (Buffer_, FragmentBuffer, LocalBuffer, SharedBuffer, StridedTensor, Tensor, handle, make_tensor,
                     make_tensor_from_addr, ptr)

Buffer = Buffer_

__all__ = ["Buffer", "FragmentBuffer", "LocalBuffer", "SharedBuffer", "StridedTensor", "Tensor", "handle", "make_tensor",
           "make_tensor_from_addr", "ptr"]
