"""Peak rates of GPUs by compute capability, for the limits a report expects of a kernel.

Sources: NVIDIA A100 80GB, H200 SXM and L40S data sheets (dense figures), NVIDIA H100 and Ada whitepapers.
"""

from __future__ import annotations

from tilelang.ir.record import record


@record
class Rates:
    """device: whose figures these are.  bandwidth: of device memory, bytes/s.  matrix: FLOP/s of matrix instructions by
    operand bits (integers of 8 bits: operations).  fp32: FLOP/s of ordinary instructions."""

    device: str
    bandwidth: float
    matrix: dict[int, float]
    fp32: float

    def of(self, bits: int, matrix: bool) -> float | None:
        """FLOP/s for products of operands of so many bits, with or without matrix instructions."""
        return self.matrix.get(bits) if matrix else self.fp32


RATES: dict[int, Rates] = {
    80: Rates("A100 80GB SXM", 2.039e12, {8: 624e12, 16: 312e12, 32: 156e12, 64: 19.5e12}, 19.5e12),
    89: Rates("L40S", 0.864e12, {8: 733e12, 16: 362e12, 32: 183e12}, 91.6e12),
    90: Rates("H200 SXM", 4.8e12, {8: 1979e12, 16: 989e12, 32: 495e12, 64: 67e12}, 67e12),
}

__all__ = ["RATES", "Rates"]
