"""What one forward takes on a device: operations over their rate, or bytes over the bandwidth, whichever takes longer.

The parts of a forward come one after the other, so their times add up. Nothing is said of launches, of waiting for the
host, or of kernels that reach less than their device: peaks give a bound.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from paradec.tools.estimation.courses import Evaluation
from paradec.tools.estimation.devices import ITEM_BYTES, LATENCY, Device
from paradec.tools.estimation.shapes import Shape


@dataclass(frozen=True)
class Parts:
    """Seconds of one forward, by what they go into."""

    weights: float = 0.0
    """The layers' matrices: reading them, or multiplying with them."""
    store: float = 0.0
    """Keys and values: written, and read from the store."""
    attention: float = 0.0
    """Its operations, as far as they take longer than reading keys and values does."""
    head: float = 0.0
    """The output matrix, of the wanted positions."""
    statistics: float = 0.0
    """Logits: written, and read once for what samplers ask of them."""
    activations: float = 0.0
    """Norms, rotations, gates and sums between the matrix products, each in a pass of its own."""
    communication: float = 0.0
    """Two sums over the group per layer, and its logits gathered."""
    overhead: float = 0.0
    """What a forward takes whatever its size, as far as a probe found it."""

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))

    def __add__(self, other: Parts) -> Parts:
        return Parts(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other))))

    def scaled(self, factor: float) -> Parts:
        """All of them, times a factor."""
        return Parts(*(factor * each for each in dataclasses.astuple(self)))


def forward_cost(
    shape: Shape,
    device: Device,
    dtype: str,
    rows: int,
    evaluation: Evaluation,
    group: int = 1,
    stores: bool = False,
    store_dtype: str | None = None,
) -> Parts:
    """What a forward of `rows` equal rows takes.

    Args:
        dtype: of weights, activations and logits.
        group: devices that share every matrix (tensor parallel).
        stores: whether keys and values are kept. store_dtype: in what, None is `dtype`.
    """
    item, tokens = ITEM_BYTES[dtype], rows * evaluation.positions
    rate, bandwidth = device.product_rate(dtype, tokens), device.bandwidth

    def product(weights: float, tokens: float, rate: float) -> float:
        """Every one of `weights` once for each of `tokens`."""
        return max(2 * weights * tokens / rate, weights * item / bandwidth)

    layers = product(shape.always_weights / group, tokens, rate)
    covered = shape.covered(tokens)
    if covered:
        each = tokens * shape.experts_per_token / covered
        many = covered * shape.mixtures
        layers += product(many * shape.expert_weights / group, each, device.product_rate(dtype, each))

    # heads are shared out among the group, keys' and values' as far as there are some for each
    heads, kv_heads = math.ceil(shape.heads / group), math.ceil(shape.kv_heads / group)
    read = rows * evaluation.seen * evaluation.share
    pair = 2 * shape.layers * kv_heads * shape.head_dim
    scores = 4 * shape.layers * heads * shape.head_dim * evaluation.positions * read
    scoring = scores / device.attention_rate(dtype, evaluation.positions)
    kept = ITEM_BYTES[store_dtype or dtype] if stores else item
    moved = pair * (tokens + read) * kept / bandwidth

    wanted = rows * evaluation.wanted
    logits = wanted * shape.vocab * item
    return Parts(
        weights=layers,
        store=moved if stores else 0.0,
        attention=max(0.0, scoring - moved) if stores else max(scoring, moved),
        head=product(shape.head_weights / group, wanted, device.product_rate(dtype, wanted)),
        statistics=(2 if not device.measured else 1) * logits / device.statistics_rate(dtype),
        activations=tokens * activation_bytes(shape, item, group) / device.activation_rate(dtype),
        communication=communication(shape, device, tokens, logits, item, group),
        overhead=device.overhead * shape.layers,
    )


def activation_bytes(shape: Shape, item: int, group: int = 1) -> float:
    """Bytes that one token moves between the matrix products of all layers, where each operation reads what it takes
    and writes what it makes: two norms and two sums of the hidden width, rotations, and the gates."""
    layer = 2 * 2 * shape.hidden + 2 * 3 * shape.hidden + 2 * (shape.heads + shape.kv_heads) * shape.head_dim / group
    gates = 3 * shape.intermediate * shape.dense
    gates += 3 * (shape.experts_per_token * shape.expert_width + shape.shared_width) * shape.mixtures
    return item * (shape.layers * layer + gates / group)


def communication(shape: Shape, device: Device, tokens: float, logits: float, item: int, group: int) -> float:
    """Seconds that a tensor-parallel group waits for its links.

    A ring sums in 2 (n - 1) / n of the bytes, and gathers in (n - 1) / n; each collective takes `LATENCY` at least.
    """
    if group == 1:
        return 0.0
    part = (group - 1) / group
    summed = LATENCY + 2 * part * tokens * shape.hidden * item / device.link
    return 2 * shape.layers * summed + LATENCY + part * logits / device.link


@dataclass(frozen=True)
class Memory:
    """Bytes on each device."""

    weights: float
    store: float
    logits: float
    """Of one step, and as many again for what is read off them."""
    activations: float
    """Of one layer of the largest forward."""
    available: float
    """What may be used of the device's memory."""

    @property
    def total(self) -> float:
        return self.weights + self.store + self.logits + self.activations

    @property
    def fits(self) -> bool:
        return self.total <= self.available


USABLE = 0.9
"""Share of a device's memory that a request may use; libraries, graphs and gaps take the rest."""


def memory_of(
    shape: Shape,
    device: Device,
    dtype: str,
    rows: int,
    length: int,
    largest: int,
    wanted: int,
    group: int = 1,
    stores: bool = False,
    store_dtype: str | None = None,
) -> Memory:
    """Bytes on each device for `rows` rows of `length` positions.

    Args:
        largest, wanted: positions that the largest forward evaluates of a row, and logits that any wants.
    """
    item = ITEM_BYTES[dtype]
    kv_heads = math.ceil(shape.kv_heads / group)
    # one slot more takes the padding (`paradec.caches.store`)
    slots = 2 * shape.layers * rows * kv_heads * shape.head_dim * (length + 1)
    widest = max(shape.intermediate, shape.experts_per_token * shape.expert_width + shape.shared_width) / group
    layer = 4 * shape.hidden + 2 * widest + (shape.heads + 2 * shape.kv_heads) * shape.head_dim / group
    return Memory(
        weights=shape.parameters * item / group,
        store=slots * ITEM_BYTES[store_dtype or dtype] if stores else 0.0,
        logits=2 * rows * wanted * shape.vocab * item,
        activations=rows * largest * layer * item,
        available=USABLE * device.memory,
    )
