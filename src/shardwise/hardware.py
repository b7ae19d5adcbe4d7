"""Memory and peak speed of common accelerators: the limits of every plan.

`memory_bytes` is in whole GB (1e9): 94 % of what the driver reports, or the size in the name where
that is as near. An "80 GB" H100 reports 81559 MiB, which is 85.5 GB; the difference to 80 GB is
left to the CUDA context, libraries and fragmentation. Peaks and bandwidths are from the vendors'
data sheets: dense 16-bit matrix products with fp32 accumulation (bf16; fp16 on V100 and T4, which
lack bf16).
"""

import re
from dataclasses import dataclass, replace

from shardwise.suggest import nearest

GB = 1_000_000_000
USABLE_SHARE = 0.94
"""`memory_bytes` over what the driver reports."""
MARGIN = 0.08
"""Share of what the driver reports that plans leave to the CUDA context, NCCL and fragmentation."""
GPUS_PER_NODE = 8
"""GPUs that fast links join. Tensor parallel communicates in every layer, so it stays within."""


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
        name: its name in plans.
        memory_bytes: the memory that a program can rely on.
        bf16_flops: peak of dense 16-bit matrix products, in FLOP/s.
        memory_bandwidth: in bytes/s.
        link_bandwidth: bytes/s that it sends to another GPU of its node.
        cuda_names: the names that torch.cuda.get_device_name returns for it.
    """

    name: str
    memory_bytes: int
    bf16_flops: float
    memory_bandwidth: float
    link_bandwidth: float = 25e9
    cuda_names: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """The memory that the driver reports, about."""
        return int(self.memory_bytes / USABLE_SHARE)

    def limit_bytes(self, margin: float) -> int:
        """Return the memory that leaves a share `margin` of the total, at most `memory_bytes`."""
        return min(self.memory_bytes, int(self.memory_bytes / USABLE_SHARE * (1 - margin)))


PCIE3 = 12
PCIE4 = 25
PCIE5 = 50
"""GB/s in one direction over 16 lanes."""

DEVICES = {
    name: Device(
        name, memory_gb * GB, tflops * 1e12, bandwidth_gb * 1e9, link_gb * 1e9, tuple(cuda_names)
    )
    for name, memory_gb, tflops, bandwidth_gb, link_gb, *cuda_names in (
        ("v100-32gb", 32, 125, 900, 150, "Tesla V100-SXM2-32GB", "Tesla V100-SXM3-32GB",
         "Tesla V100-PCIE-32GB"),
        ("v100-16gb", 16, 125, 900, 150, "Tesla V100-SXM2-16GB", "Tesla V100-PCIE-16GB"),
        ("t4", 15, 65, 320, PCIE3, "Tesla T4", "NVIDIA T4"),
        ("a10", 22, 125, 600, PCIE4, "NVIDIA A10"),
        ("a10g", 22, 70, 600, PCIE4, "NVIDIA A10G"),
        ("a30", 24, 165, 933, PCIE4, "NVIDIA A30"),
        ("a100-80gb", 80, 312, 2039, 300, "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe",
         "A100-SXM4-80GB"),
        ("a100-40gb", 40, 312, 1555, 300, "NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB",
         "A100-SXM4-40GB"),
        ("l4", 22, 121, 300, PCIE4, "NVIDIA L4"),
        ("l40", 45, 181, 864, PCIE4, "NVIDIA L40"),
        ("l40s", 45, 362, 864, PCIE4, "NVIDIA L40S"),
        ("rtx-a6000", 48, 155, 768, PCIE4, "NVIDIA RTX A6000"),
        ("rtx-6000-ada", 48, 364, 960, PCIE4, "NVIDIA RTX 6000 Ada Generation"),
        ("h100-80gb", 80, 989, 3350, 450, "NVIDIA H100 80GB HBM3"),
        ("h100-pcie-80gb", 80, 756, 2000, PCIE5, "NVIDIA H100 PCIe"),
        ("h200-141gb", 141, 989, 4800, 450, "NVIDIA H200"),
        ("h20-96gb", 96, 148, 4000, 450, "NVIDIA H20"),
        ("b200-192gb", 180, 2250, 8000, 900, "NVIDIA B200"),
        ("gb200-192gb", 186, 2500, 8000, 900, "NVIDIA GB200"),
        ("rtx-3080", 10, 60, 760, PCIE4, "NVIDIA GeForce RTX 3080"),
        ("rtx-3090", 24, 71, 936, PCIE4, "NVIDIA GeForce RTX 3090", "GeForce RTX 3090"),
        ("rtx-4080", 16, 97, 717, PCIE4, "NVIDIA GeForce RTX 4080"),
        ("rtx-4090", 24, 165, 1008, PCIE4, "NVIDIA GeForce RTX 4090"),
        ("rtx-5080", 16, 113, 960, PCIE5, "NVIDIA GeForce RTX 5080"),
        ("rtx-5090", 32, 209, 1792, PCIE5, "NVIDIA GeForce RTX 5090"),
        ("mi300a", 128, 981, 5300, PCIE5, "AMD Instinct MI300A"),
        ("mi300x", 192, 1307, 5300, 448, "AMD Instinct MI300X"),
        ("mi325x", 256, 1307, 6000, 448, "AMD Instinct MI325X"),
        ("mi350x", 288, 2300, 8000, 538, "AMD Instinct MI350X"),
        ("mi355x", 288, 2500, 8000, 538, "AMD Instinct MI355X"),
    )
}  # fmt: skip
"""The known GPUs, by name. A short name means the first that it fits: the larger, or SXM."""
UNKNOWN_SPEEDS = DEVICES["l40s"]
"""The GPU whose speeds rank layouts for one that is described by its memory alone."""
VENDORS = {"nvidia", "geforce", "amd", "instinct", "tesla", "rtx"}


def find_device(name: str) -> Device:
    """Return the device in DEVICES with that name, or with these words in its name (h100, 4090).

    For a size such as 48GB, return a device of which only the memory is known. Raises ValueError
    that names the nearest devices.
    """
    key = name.lower().replace("_", "-").replace(" ", "-")
    if key in DEVICES:
        return DEVICES[key]
    if size := re.fullmatch(r"([1-9]\d*)-?gb", key):
        return replace(UNKNOWN_SPEEDS, name=key, memory_bytes=int(size[1]) * GB, cuda_names=())
    words = [word for word in key.split("-") if word not in VENDORS]
    for known, device in DEVICES.items():
        if words and set(words) <= set(known.split("-")):
            return device
    near = nearest(key, DEVICES)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(DEVICES)}."
    raise ValueError(f"GPU {name!r} is not known; {hint} A size, such as 48GB, works too")


def device_for(cuda_name: str) -> Device | None:
    """Return the device that torch.cuda.get_device_name calls `cuda_name`, or None. Similar names
    do not count: they may be another chip, as a laptop's RTX 4090 is."""
    return next((device for device in DEVICES.values() if cuda_name in device.cuda_names), None)
