"""Whether the ranks of a layout fit the memory of a device."""

from __future__ import annotations

from msgspec import Struct

from primus.prediction.rank_record import RankRecord

GIB = 2**30
FRAGMENTATION = 0.04
"""Share of the peak that the allocator has reserved and cannot use: an assumption, not a measurement."""
RESERVED_BYTES = 2 * GIB
"""Context of the device, libraries and buffers of RCCL or NCCL, beside PyTorch's allocator: an assumption."""


class RankFit(Struct, frozen=True, kw_only=True):
    """A rank beside a device."""

    rank: int
    peak_bytes: int
    fragmentation_bytes: int
    reserved_bytes: int
    device_bytes: int

    @property
    def needed_bytes(self) -> int:
        return self.peak_bytes + self.fragmentation_bytes + self.reserved_bytes

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.device_bytes


def judge_memory(record: RankRecord, device_bytes: int) -> RankFit:
    """The memory of a rank with allowances, beside that of its device."""
    peak = record.peak.parts.total
    return RankFit(
        rank=record.rank,
        peak_bytes=peak,
        fragmentation_bytes=int(peak * FRAGMENTATION),
        reserved_bytes=RESERVED_BYTES,
        device_bytes=device_bytes,
    )
