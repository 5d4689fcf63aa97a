"""What this machine's processor does, measured in about ten seconds: a `Device` that an estimate takes.

What a forward is made of is timed piece by piece, in turns, and the median of each counts: matrix products by their
rows, with weights that come from memory; attention; norms, rotations and gates as transformers writes them; token
statistics; and what a layer takes when it has next to nothing to compute. On processors the rate of products depends
much on the rows and on the dtype: without instructions for bfloat16 that is the slower one.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from paradec.core.checks import check_number
from paradec.kernels.token_stats import token_stats
from paradec.models.layout import columns_first
from paradec.tools.estimation.costs import activation_bytes
from paradec.tools.estimation.devices import ITEM_BYTES, PROBED, Device, check_dtype
from paradec.tools.estimation.shapes import Shape

SECONDS = 10.0
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
"""Of the matrix products."""
QUERIES = (1, 32, 256)
"""Of attention, over 512 keys."""
WIDTH, HEADS, HEAD_DIM, KEYS = 1024, 8, 64, 512
BYTES = 96e6
"""Of weights that a product with few rows goes through: more than caches hold."""
OPERATIONS = 5e8
"""That a product with many rows takes at most."""
TOKENS, VOCAB = 64, 32768
LEAST_TURNS = 3


class Prober:
    """The pieces, and the seconds that each took in every turn.

    Args:
        dtype: of the pieces.
        clock: seconds. The wall's by default; on one thread of a busy machine `time.process_time` tells more.
    """

    def __init__(self, dtype: str, clock: Callable[[], float] = time.perf_counter):
        check_dtype(dtype)
        self.dtype, self.clock = dtype, clock
        self.kind: torch.dtype = getattr(torch, dtype)
        self.seconds: dict[Any, list[float]] = defaultdict(list)
        self.pieces: dict[Any, tuple[Callable[[], Any], float]] = {}
        """Name -> what runs, and how much work that is (operations or bytes, or 1)."""
        with torch.random.fork_rng(devices=[]):  # the caller's numbers stay the caller's
            torch.manual_seed(0)
            self._products()
            self._attention()
            self._activations()
            self._statistics()
            self._layers()

    def turn(self) -> None:
        """Time every piece once."""
        with torch.inference_mode():
            for name, (run, _) in self.pieces.items():
                begin = self.clock()
                run()
                self.seconds[name].append(self.clock() - begin)

    def device(self) -> Device:
        """What was found so far.

        Raises:
            RuntimeError: no turn was taken.
        """
        if not self.seconds:
            raise RuntimeError("a probe has found nothing before its first turn()")
        rates = {name: work / statistics.median(self.seconds[name]) for name, (_, work) in self.pieces.items()}
        products = tuple((float(rows), rates["product", rows]) for rows in ROWS)
        attention = tuple((float(queries), rates["attention", queries]) for queries in QUERIES)
        item, threads = ITEM_BYTES[self.dtype], torch.get_num_threads()
        return Device(
            name=f"this machine's processor ({threads} thread{'' if threads == 1 else 's'})",
            memory=memory(),
            # with one row every weight is read for one product: as fast as memory gives them, or slower
            bandwidth=max(rate / (2 * rows) * item for (rows, rate) in products),
            flops={self.dtype: max(rate for _, rate in products)},
            source="measured",
            products={self.dtype: products},
            attention={self.dtype: attention},
            activations={self.dtype: rates["activations"]},
            statistics={self.dtype: rates["statistics"]},
            overhead=1 / rates["layer"],
            measured=True,
        )

    def _products(self) -> None:
        count = max(1, round(BYTES / ITEM_BYTES[self.dtype] / WIDTH**2))
        weights = [torch.randn(WIDTH, WIDTH, dtype=self.kind) for _ in range(count)]
        if self.kind == torch.float32:  # as `paradec.load(weight_layout="columns")` lays them
            weights = [columns_first(weight) for weight in weights]
        for rows in ROWS:
            each = 2.0 * rows * WIDTH**2
            chosen = weights[: max(1, min(count, int(OPERATIONS / each)))]
            x = torch.randn(rows, WIDTH, dtype=self.kind)
            self.pieces["product", rows] = (functools.partial(_multiply, x, chosen), each * len(chosen))

    def _attention(self) -> None:
        for queries in QUERIES:
            q = torch.randn(1, HEADS, queries, HEAD_DIM, dtype=self.kind)
            k, v = (torch.randn(1, HEADS, KEYS, HEAD_DIM, dtype=self.kind) for _ in range(2))
            work = 4.0 * HEADS * HEAD_DIM * queries * KEYS
            self.pieces["attention", queries] = (functools.partial(F.scaled_dot_product_attention, q, k, v), work)

    def _activations(self) -> None:
        """What one layer computes between its matrix products, on the modules that compute it."""
        from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

        width, wide = HEADS * HEAD_DIM, 3 * HEADS * HEAD_DIM
        norm = LlamaRMSNorm(width).to(self.kind)
        x, y = (torch.randn(1, TOKENS, width, dtype=self.kind) for _ in range(2))
        q, k = (torch.randn(1, HEADS, TOKENS, HEAD_DIM, dtype=self.kind) for _ in range(2))
        cos, sin = (torch.randn(1, TOKENS, HEAD_DIM, dtype=self.kind) for _ in range(2))
        gate, up = (torch.randn(1, TOKENS, wide, dtype=self.kind) for _ in range(2))

        def run() -> None:
            norm(x + y)
            apply_rotary_pos_emb(q, k, cos, sin)
            F.silu(gate) * up
            norm(x + y)

        one = Shape("", 1, width, HEADS, HEADS, HEAD_DIM, wide, 1)
        self.pieces["activations"] = (run, TOKENS * activation_bytes(one, ITEM_BYTES[self.dtype]))

    def _statistics(self) -> None:
        logits = torch.randn(TOKENS // 2, VOCAB, dtype=self.kind)
        self.pieces["statistics"] = (functools.partial(token_stats, logits, fields=("token", "prob")), logits.nbytes)

    def _layers(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        layers = 8
        config = LlamaConfig(
            vocab_size=16,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=layers,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
        module, ids = LlamaForCausalLM(config).to(self.kind).eval(), torch.zeros(1, 1, dtype=torch.int64)
        self.pieces["layer"] = (lambda: module(input_ids=ids, use_cache=False), float(layers))


def _multiply(x: torch.Tensor, weights: list[torch.Tensor]) -> None:
    for weight in weights:
        F.linear(x, weight)


def memory() -> float:
    """Bytes of this machine's memory; infinite where the system does not say."""
    if {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= {*getattr(os, "sysconf_names", {})}:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return float("inf")


def probe(dtype: str = "float32", seconds: float = SECONDS, clock: Callable[[], float] = time.perf_counter) -> Device:
    """Measure this machine's processor, with torch's threads as they are set.

    Args:
        dtype: "float32", "bfloat16" or "float16": what the estimate is for.
        seconds: how long turns are taken, on the wall; three are taken anyhow.

    Raises:
        ValueError: an argument out of its range.
    """
    check_number("seconds", seconds, low=0, high=600)
    prober = Prober(dtype, clock)
    end = time.perf_counter() + seconds
    prober.turn()
    prober.seconds.clear()  # the first one sets things up
    for turn in range(10_000):
        if turn >= LEAST_TURNS and time.perf_counter() > end:
            break
        prober.turn()
    return prober.device()


@functools.lru_cache(maxsize=8)
def _probed(dtype: str, threads: int) -> Device:
    return probe(dtype)


def probed(dtype: str) -> Device:
    """What `probe` found for a dtype and torch's threads, measured once per process."""
    return _probed(dtype, torch.get_num_threads())


__all__ = ["PROBED", "Prober", "probe", "probed"]
