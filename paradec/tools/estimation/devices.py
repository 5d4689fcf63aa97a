"""What devices can do at most, as their makers publish it, and what a probe found this machine to do.

Peaks are dense (no structured sparsity), with accumulation in float32. "float32" is plain float32, as torch has it by
default, not TF32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from paradec.core.checks import check_choice
from paradec.core.registry import unknown

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by the dtypes that estimates are made for."""
LATENCY = 10e-6
"""Seconds that a collective takes at least. Makers publish none: this is an assumption, of the size that collectives
within one machine are commonly modelled with."""


@dataclass(frozen=True)
class Device:
    """One accelerator, or this machine's processor.

    Published devices have the first fields alone; the others are a probe's.

    Args:
        name: as messages and reports call it.
        memory: bytes.
        bandwidth: of the memory, bytes per second.
        flops: dtype -> floating point operations per second of matrix products.
        link: bytes per second that a device of a group sends to the others, in one direction; 0 where there is none.
        source: where the figures come from.
        products: dtype -> ((rows, operations per second), ...), rows ascending: how fast x @ W is by the rows of x,
            with weights that come from memory.
        attention: dtype -> ((queries, operations per second), ...), as `products`, of scaled dot product attention.
        activations: dtype -> bytes per second of what is between matrix products: norms, gates, sums.
        statistics: dtype -> bytes of logits per second that token statistics read.
        overhead: seconds per layer and forward that do not depend on any size.
        measured: whether a probe found all this; else it is a bound that nothing reaches.
    """

    name: str
    memory: float
    bandwidth: float
    flops: Mapping[str, float]
    link: float = 0.0
    source: str = ""
    products: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    attention: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    activations: Mapping[str, float] = field(default_factory=dict)
    statistics: Mapping[str, float] = field(default_factory=dict)
    overhead: float = 0.0
    measured: bool = False

    def product_rate(self, dtype: str, rows: float) -> float:
        """Operations per second of a matrix product with so many rows."""
        return _at(self.products.get(dtype), rows, self.flops[dtype])

    def attention_rate(self, dtype: str, queries: float) -> float:
        """Operations per second of attention with so many queries per row."""
        return _at(self.attention.get(dtype), queries, self.flops[dtype])

    def activation_rate(self, dtype: str) -> float:
        """Bytes per second between matrix products."""
        return self.activations.get(dtype, self.bandwidth)

    def statistics_rate(self, dtype: str) -> float:
        """Bytes of logits per second."""
        return self.statistics.get(dtype, self.bandwidth)


def _at(curve: tuple[tuple[float, float], ...] | None, rows: float, peak: float) -> float:
    """A curve at `rows`, on straight lines between the logarithms of its points; beyond its ends it is level."""
    if not curve:
        return peak
    rows = max(rows, curve[0][0])
    for (low, slow), (high, fast) in zip(curve, curve[1:]):
        if rows <= high:
            part = math.log(rows / low) / math.log(high / low)
            return slow * (fast / slow) ** part
    return curve[-1][1]


PUBLISHED = {
    "h100": Device(
        name="H100 SXM 80 GB",
        memory=80e9,
        bandwidth=3.35e12,
        flops={"float32": 67e12, "bfloat16": 989.4e12, "float16": 989.4e12},
        link=450e9,
        source="NVIDIA H100 data sheet (SXM; tensor figures halved, since printed with sparsity)",
    ),
    "h200": Device(
        name="H200 SXM 141 GB",
        memory=141e9,
        bandwidth=4.8e12,
        flops={"float32": 67e12, "bfloat16": 989.4e12, "float16": 989.4e12},
        link=450e9,
        source="NVIDIA H200 data sheet (SXM; tensor figures halved, since printed with sparsity)",
    ),
    "a100": Device(
        name="A100 SXM 80 GB",
        memory=80e9,
        bandwidth=2.039e12,
        flops={"float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12},
        link=300e9,
        source="NVIDIA A100 data sheet (SXM, 80 GB)",
    ),
    "l4": Device(
        name="L4 24 GB",
        memory=24e9,
        bandwidth=300e9,
        flops={"float32": 30.3e12, "bfloat16": 121e12, "float16": 121e12},
        link=32e9,
        source="NVIDIA L4 data sheet (tensor figures halved, since printed with sparsity; PCIe 4.0 x16)",
    ),
    "rtx4090": Device(
        name="RTX 4090 24 GB",
        memory=24e9,
        bandwidth=1.008e12,
        flops={"float32": 82.6e12, "bfloat16": 165.2e12, "float16": 165.2e12},
        link=32e9,
        source="NVIDIA Ada GPU architecture paper (PCIe 4.0 x16)",
    ),
    "mi300x": Device(
        name="MI300X 192 GB",
        memory=192e9,
        bandwidth=5.3e12,
        flops={"float32": 163.4e12, "bfloat16": 1307.4e12, "float16": 1307.4e12},
        link=448e9,
        source="AMD Instinct MI300X data sheet (seven links of 64 GB/s in one direction)",
    ),
}
"""By the names that `paradec.estimate` takes."""
PROBED = "cpu"
"""The name of this machine's processor, which is probed."""


def published(name: str) -> Device:
    """A device by its name; case, spaces, "-" and "_" do not matter.

    Raises:
        ValueError: none of `PUBLISHED`.
    """
    plain = "".join(letter for letter in name.lower() if letter not in " -_")
    if plain not in PUBLISHED:
        raise ValueError(unknown("device", name, [*PUBLISHED, PROBED]))
    return PUBLISHED[plain]


def check_dtype(dtype: str) -> None:
    """Raise ValueError unless estimates are made for the dtype."""
    check_choice("dtype", dtype, ITEM_BYTES)
