"""Layouts: maps from the index of a tile element to its address, or to its thread and register.

    Layout     logical index -> element of shared (or global) storage
    Fragment   logical index -> (thread, register), possibly in several threads

Both have a structure, from which short index code is printed, and an exact NumPy table, from which every property is computed:
equality, injectivity, bank conflicts, the owners of a row.  `print(layout)` draws the layout.
"""

from .fragment import Fragment, PartialFragment
from .layout import Layout, Swizzle
from .mode import ADDRESS, REGISTER, THREAD, Mode
from .swizzled_boxes import Box, Descriptor, SwizzledBoxes, swizzled_box_layout, box_width, boxes_of
from .unsupported import make_tcgen05mma_swizzled_layout
from .views import RowMajor, view_layout
from .swizzle import (
    SwizzleMode, bank_conflicts, linear_layout, make_cutlass_metadata_layout, make_full_bank_swizzled_layout,
    make_half_bank_swizzled_layout, make_linear_layout, make_quarter_bank_swizzled_layout, make_swizzled_layout,
    make_volta_swizzled_layout, make_wgmma_swizzled_layout, padded_layout, phase_conflicts, swizzled_layout,
)
from .text import read_fragment, read_layout
from .tiled import (
    make_fully_replicated_layout_fragment, make_gemm_fragment_8x8, make_gemm_fragment_8x8_transposed, replicated_fragment,
    row_fragment, tile_fragment, viewed_fragment,
)

__all__ = [n for n in dir() if not n.startswith("_")]
