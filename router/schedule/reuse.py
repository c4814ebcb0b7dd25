"""What of a prompt a server can reuse, and what that is worth.

An engine loads what lies below the GPU instead of computing it. That is cheaper than to compute it,
and dearer than to find it on the GPU.
"""

from typing import NamedTuple

# Loading a token over computing it, as a share. An H100 computes a token of an 8B model in 20 to 24
# us. Its 128 KiB of keys and values come from the CPU's memory in 2.6 us (PCIe 5, 50 GB/s): an
# eighth. A disk of 5 GB/s takes 26 us, no less than to compute it, but others are computed
# meanwhile: three quarters. A larger model over several GPUs loads cheaper than that.
CPU_SHARE = 1 / 8
DISK_SHARE = 3 / 4


class Reuse(NamedTuple):
    """Leading blocks: on the GPU or on their way there, then in the CPU's memory, then on disk."""

    gpu: int = 0
    cpu: int = 0
    disk: int = 0

    @property
    def blocks(self) -> int:
        """That need not be computed."""
        return self.gpu + self.cpu + self.disk

    @property
    def worth(self) -> int:
        """Blocks on the GPU that would save as much."""
        gpu, cpu, disk = self
        if not (cpu or disk):
            return gpu  # as in most fleets
        return gpu + int((1 - CPU_SHARE) * cpu + (1 - DISK_SHARE) * disk)
