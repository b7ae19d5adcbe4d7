"""Memory and peak speed of common accelerators: the limits of every plan.

`memory_bytes` is in whole GB (1e9): 94 % of what the driver reports, or the size in the name where
that is as near. An "80 GB" H100 reports 81559 MiB, which is 85.5 GB; the difference to 80 GB is
left to the CUDA context, libraries and fragmentation. Peaks are from the vendors' data sheets:
dense 16-bit matrix products with fp32 accumulation (bf16; fp16 on V100 and T4, which lack bf16).
"""

from dataclasses import dataclass

from shardwise.suggest import nearest

GB = 1_000_000_000


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
        name: its name in plans.
        memory_bytes: the memory that a program can rely on.
        bf16_flops: peak of dense 16-bit matrix products, in FLOP/s.
        memory_bandwidth: in bytes/s.
        cuda_names: the names that torch.cuda.get_device_name returns for it.
    """

    name: str
    memory_bytes: int
    bf16_flops: float
    memory_bandwidth: float
    cuda_names: tuple[str, ...] = ()


DEVICES = {
    name: Device(name, memory_gb * GB, tflops * 1e12, bandwidth_gb * 1e9, cuda_names)
    for name, memory_gb, tflops, bandwidth_gb, cuda_names in (
        ("v100-16gb", 16, 125, 900, ("Tesla V100-SXM2-16GB", "Tesla V100-PCIE-16GB")),
        (
            "v100-32gb",
            32,
            125,
            900,
            ("Tesla V100-SXM2-32GB", "Tesla V100-SXM3-32GB", "Tesla V100-PCIE-32GB"),
        ),
        ("t4", 15, 65, 320, ("Tesla T4", "NVIDIA T4")),
        ("a10", 22, 125, 600, ("NVIDIA A10",)),
        ("a10g", 22, 70, 600, ("NVIDIA A10G",)),
        (
            "a100-40gb",
            40,
            312,
            1555,
            ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "A100-SXM4-40GB"),
        ),
        (
            "a100-80gb",
            80,
            312,
            2039,
            ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "A100-SXM4-80GB"),
        ),
        ("l4", 22, 121, 300, ("NVIDIA L4",)),
        ("l40s", 45, 362, 864, ("NVIDIA L40S",)),
        ("h100-80gb", 80, 989, 3350, ("NVIDIA H100 80GB HBM3",)),
        ("h100-pcie-80gb", 80, 756, 2000, ("NVIDIA H100 PCIe",)),
        ("h200-141gb", 141, 989, 4800, ("NVIDIA H200",)),
        ("b200-192gb", 180, 2250, 8000, ("NVIDIA B200",)),
        ("rtx-3090", 24, 71, 936, ("NVIDIA GeForce RTX 3090", "GeForce RTX 3090")),
        ("rtx-4090", 24, 165, 1008, ("NVIDIA GeForce RTX 4090",)),
        ("rtx-5090", 32, 209, 1792, ("NVIDIA GeForce RTX 5090",)),
        ("mi300x", 192, 1307, 5300, ("AMD Instinct MI300X",)),
    )
}


def find_device(name: str) -> Device:
    """Return the device with that name in DEVICES. Raises ValueError that names the nearest
    ones."""
    key = name.lower().replace("_", "-").replace(" ", "-")
    if key in DEVICES:
        return DEVICES[key]
    near = [known for known in DEVICES if key and known.startswith(key)] or nearest(key, DEVICES)
    hint = f"did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(f"GPU {name!r} is not known; {hint or 'known are ' + ', '.join(DEVICES)}")


def device_for(cuda_name: str) -> Device | None:
    """Return the device that torch.cuda.get_device_name calls `cuda_name`, or None. Similar names
    do not count: they may be another chip, as a laptop's RTX 4090 is."""
    return next((device for device in DEVICES.values() if cuda_name in device.cuda_names), None)
