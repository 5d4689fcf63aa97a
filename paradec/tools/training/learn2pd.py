"""Training of Learn2PD's filters: records of "extremely greedy" decoding are collected, and a network is fit to them.

The method is from "Learning to Parallel" (Learn2PD), arXiv 2509.25188, generate_training_data.py and train.ipynb.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import paradec
from paradec import caches as cache_registry
from paradec.api.generate import generate
from paradec.core.checks import check_choice, check_int, check_number, short_repr
from paradec.core.prompts import Prompts, encode
from paradec.core.protocol import Commit, State, interruptible
from paradec.core.text_files import read_lines, replace_file
from paradec.models.base import Model
from paradec.samplers.masked.loop import MaskedSampler, Needs, View
from paradec.samplers.masked.rules.learn2pd_filter import FEATURES, KINDS, FilterFacts, block_features
from paradec.samplers.masked.state import MaskedState
from paradec.tools.evaluation.questions import read_fields
from paradec.tools.evaluation.tasks import TASKS

PAPER_EPOCHS = 40_000
FORMAT = "paradec-learn2pd-records/1"
FILTER_INPUTS = ("confidence", "margin", "minus_entropy")
MAX_PER_TASK = 10_000
"""Maximum number of prompts of each packaged task: the smallest task has about ten thousand different prompts."""
Progress = Callable[[str, float], None]
"""Function that is called with the name of the current stage, and the share of its work that is done, in [0, 1]."""


def packaged_prompts(per_task: int, seed: int = 0) -> list[str]:
    """Draw different prompts, `per_task` of each packaged task, in random order. None of them is among the prompts that
    are packaged for evaluation."""
    check_int("per_task", per_task, low=1, high=MAX_PER_TASK)
    prompts: dict[str, None] = {}
    for task in TASKS.values():
        rng = Random(f"learn2pd-{task.name}-{seed}")
        target = len(prompts) + per_task
        while len(prompts) < target:
            prompts[task.make(rng).prompt] = None
    return Random(seed).sample(list(prompts), len(prompts))


def read_prompts(file: str | os.PathLike[str]) -> list[str]:
    """Read prompts from a file with one prompt per line. In a .jsonl file, a line is a JSON object with a "prompt".
    Raises ValueError: a line without a prompt (the message has its number), no lines; OSError: an unreadable file."""
    is_json = Path(file).suffix == ".jsonl"
    prompts = read_lines(file, lambda line: read_fields(line)["prompt"] if is_json else line)
    if not prompts:
        raise ValueError(f"{str(file)!r} has no prompts")
    return prompts


# ---- records --------------------------------------------------------------------------------------------------------


@dataclass
class Records:
    """Training data of a filter: `N` records. A record is a step of a block of at most `n` positions."""

    setup: dict[str, Any]
    """Model and settings of `collect`. Only records with equal setups can be joined."""
    done: int
    """Number of recorded prompts."""
    features: Tensor
    """[N, F, n] float32: the F features of `paradec.samplers.masked.rules.learn2pd_filter.FEATURES`, in order."""
    final: Tensor
    """[N, n] bool: whether the candidate equals the token of decoding with one token per step."""
    undecided: Tensor
    """[N, n] bool: whether the position is masked."""
    valid: Tensor
    """[N, n] bool: whether the position is in the block, which may be shorter than n."""
    prompt: Tensor
    """[N] int64: index of each record's prompt."""

    @classmethod
    def empty(cls, setup: dict[str, Any]) -> Records:
        size = setup["block_length"]
        flags = torch.zeros(0, size, dtype=torch.bool)
        features = torch.zeros(0, len(FEATURES), size)
        return cls(setup, 0, features, flags, flags, flags, torch.zeros(0, dtype=torch.int64))

    def concatenate(self, parts: Sequence[Records], done: int) -> Records:
        """Join these records and `parts`. done: number of recorded prompts in the result."""
        names = ("features", "final", "undecided", "valid", "prompt")
        tensors = [torch.cat([getattr(part, name) for part in (self, *parts)]) for name in names]
        return Records(self.setup, done, *tensors)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write a safetensors file, atomically."""
        tensors = {f.name: getattr(self, f.name).contiguous() for f in dataclasses.fields(self)[2:]}
        about = {"format": FORMAT, "setup": self.setup, "done": self.done}
        with replace_file(file) as draft:
            save_file(tensors, draft, metadata={"learn2pd": json.dumps(about)})

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Records:
        """Read a file of `save`. Raises ValueError: the file has no records; OSError: an unreadable file."""
        try:
            with safe_open(file, framework="pt") as opened:
                about = json.loads((opened.metadata() or {})["learn2pd"])
                if about["format"] != FORMAT:
                    raise ValueError(f"format {about['format']!r}")
                return cls(about["setup"], about["done"], **{name: opened.get_tensor(name) for name in opened.keys()})
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{os.fspath(file)!r} holds no records of format {FORMAT!r} ({error})") from None


@dataclass(frozen=True)
class _Replay(MaskedSampler):
    """Sampler that commits the masked positions at which the proposal's quantity "agrees" is True."""

    name = "learn2pd replay"
    needs = Needs(reads=FILTER_INPUTS, decided_logits=True, may_wait=True)

    def select(self, view: View) -> Tensor:
        return view.quantities["agrees"]


def collect(
    model: Model,
    prompts: Sequence[Any],
    *,
    block_length: int | None = None,
    max_new_tokens: int | None = None,
    caches: Sequence[str] = ("none",),
    batch: int = 16,
    resume: Records | None = None,
    checkpoint: Callable[[Records], None] | None = None,
    progress: Progress | None = None,
) -> Records:
    """Record the steps of an "extremely greedy" decoding of every prompt.

    Each prompt is decoded twice. The first decoding commits one token per step, the most confident. Each step of the
    second decoding records the block's features, and which candidates equal the tokens of the first decoding; these are
    committed. If the candidates do not change, or after one step per mask, the first decoding's tokens fill the block.

    model: from `paradec.load` or `paradec.wrap`. prompts: texts, chats or rows of ids.
    block_length, max_new_tokens: by default the model's.
    caches: names of caches. The second decoding is made with each of them, and the filter is for these caches.
    batch: prompts decoded together. resume: records with an equal setup; their prompts are not decoded again.
    checkpoint: called with all records so far, after every 4th batch. progress: called in the first decoding's steps.
    Raises ValueError, before any decoding: an argument out of its range, or a `resume` with another setup. Raises
    Interrupted (a KeyboardInterrupt) at Ctrl-C; its `output` has the records of the finished batches."""
    check_int("batch", batch, low=1)
    check_int("block_length", block_length, low=1, none=True)
    check_int("max_new_tokens", max_new_tokens, low=1, none=True)
    length = block_length or model.facts.block_length or model.default_block_length
    if length is None:
        raise ValueError(f"block_length=None: {model.facts.name} has no block length; give one")
    if not caches or isinstance(caches, str):
        raise ValueError(f"caches={short_repr(caches)} must be a sequence of names, at least one")
    for name in caches:
        cache_registry.create(name)
    rows = encode(model, list(prompts)).rows
    setup = {
        "model": model.facts.name,
        "vocab_size": model.facts.vocab_size,
        "block_length": length,
        "max_new_tokens": max_new_tokens or model.default_max_new_tokens,
        "caches": list(caches),
        "prompts": hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16],
    }
    records = Records.empty(setup) if resume is None else resume
    for name, value in setup.items():
        if records.setup.get(name) != value:
            earlier = short_repr(records.setup.get(name))
            raise ValueError(f"the records to resume have {name}={earlier}, this run has {name}={short_repr(value)}")
    request: dict[str, Any] = {name: setup[name] for name in ("block_length", "max_new_tokens")}
    request["eos_early_stop"] = False
    parts: list[Records] = []
    num_done = records.done
    message = "collecting was interrupted; the records so far are in .output"
    with interruptible(lambda: records.concatenate(parts, num_done), message):
        for first in range(num_done, len(rows), batch):
            chosen = Prompts(rows[first : first + batch], False, [0] * len(rows[first : first + batch]))

            def report(state: State, commit: Commit, first: int = first, count: int = len(chosen.rows)) -> None:
                if progress is not None:
                    decided, total = state.progress
                    progress("collecting", (first + count * decided / total) / len(rows))

            batch_records: list[Records] = []
            targets = generate(model, chosen, sampler="low_confidence", callback=report, **request).new_tokens
            for cache in caches:
                state = _Replay().start(model, chosen, cache=cache, **request)
                batch_records += _replay(model, state, targets, first, setup)
            parts += batch_records  # only complete batches
            num_done = first + len(chosen.rows)
            if checkpoint is not None and (num_done // batch) % 4 == 0:
                checkpoint(records.concatenate(parts, num_done))
    return records.concatenate(parts, num_done)


def _replay(model: Model, state: MaskedState, targets: Tensor, first: int, setup: dict[str, Any]) -> Iterator[Records]:
    """Make the second decoding of a batch; yield `Records` per step. targets: tokens of the first decoding."""
    sampler, size = _Replay(), setup["block_length"]
    canvas = torch.full_like(state.canvas, -1)
    for row, start in enumerate(state.requested_end - state.max_new_tokens):
        canvas[row, start : state.requested_end[row]] = targets[row]
    last_values = torch.full_like(canvas, -1)
    with torch.inference_mode(), state.release_stores_on_exit():
        while not state.done:
            proposal, window = sampler.step(model, state), state.window
            target = window.read(canvas)
            features, valid = block_features(state, proposal)
            final = (proposal.values == target) & valid
            is_stable = ((proposal.values == window.read(last_values)) | ~valid).all(1)
            # limit a block to one step per mask
            is_last = state.block_step[window.rows] + 1 >= state.masks_at_open[window.rows]
            is_stable |= torch.as_tensor(is_last, device=is_stable.device)
            block = torch.stack([features[name] for name in FEATURES], 1)
            yield Records(
                setup,
                0,
                _resize(torch.where(valid.unsqueeze(1), block, 0).float(), size),
                _resize(final, size),
                _resize(window.undecided(proposal.current, state.mask_id), size),
                _resize(valid, size),
                torch.as_tensor(window.rows + first),
            )
            window.write(last_values, proposal.values.clone())
            proposal.values = torch.where(is_stable.unsqueeze(1), target, proposal.values)
            proposal.quantities["agrees"] = proposal.values == target
            sampler.commit(state, proposal)


def _resize(tensor: Tensor, size: int) -> Tensor:
    """Move a tensor to the CPU, and cut or zero-pad its last dimension to `size`."""
    tensor = tensor[..., :size].cpu()
    return nn.functional.pad(tensor, (0, size - tensor.shape[-1]))


# ---- training -------------------------------------------------------------------------------------------------------


def train(
    records: Records,
    *,
    kind: str = "block",
    epochs: int = PAPER_EPOCHS,
    lr: float = 3e-3,
    threshold: float = 0.96,
    false_accept_weight: float = 1.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[FilterFacts, nn.Module]:
    """Fit a filter by AdamW. The loss is the binary cross-entropy over all positions of the training set (full batch).

    Prompts are split into three sets: 80 % for training, 10 % to choose the epoch by its loss, 10 % for measurements.
    (The paper splits records instead, so steps of one prompt may be in different sets.)

    kind: "block", the paper's, or "features"; see `paradec.samplers.masked.rules.learn2pd_filter`.
    epochs: number of passes over the training set; by default the paper's. lr: AdamW's learning rate.
    threshold: probability above which the filter accepts a candidate, in the measurements and in use.
    false_accept_weight: loss weight of positions whose candidate is not final; 1 in the paper.
    seed: seed of the split and the initial weights. progress: called every 50 epochs.
    Returns the filter's `FilterFacts` with measurements, and the network of the best epoch. Raises ValueError: an
    argument out of its range, or records of fewer than 10 prompts."""
    check_settings(kind, epochs, lr, threshold, false_accept_weight, seed)
    prompts = records.prompt.unique()
    if len(prompts) < 10:
        raise ValueError(f"records of {len(prompts)} prompts cannot be split; collect from at least 10")
    order = prompts[torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed))]
    cuts = len(order) * 8 // 10, len(order) * 9 // 10
    training, validation, test = (
        torch.isin(records.prompt, part) for part in (order[: cuts[0]], order[cuts[0] : cuts[1]], order[cuts[1] :])
    )
    about = {name: records.setup[name] for name in ("model", "vocab_size", "block_length")}
    about |= {"caches": tuple(records.setup["caches"]), "paradec": paradec.__version__}
    facts = FilterFacts(kind=kind, threshold=threshold, **about)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = facts.network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr)
    best_loss, best_state = float("inf"), network.state_dict()
    for epoch in range(1, epochs + 1):
        optimizer.zero_grad()
        _loss(network, records, training, false_accept_weight).backward()
        optimizer.step()
        if epoch % 50 == 0 or epoch == epochs:
            with torch.no_grad():
                loss = float(_loss(network, records, validation, false_accept_weight))
            if loss < best_loss:
                best_loss, best_state = loss, {name: value.clone() for name, value in network.state_dict().items()}
            if progress is not None:
                progress("training", epoch / epochs)
    network.load_state_dict(best_state)
    held_out = _measure(network, records, test, threshold)
    return dataclasses.replace(facts, held_out=held_out | {"epochs": epochs, "prompts": len(prompts)}), network


def check_settings(kind: str, epochs: int, lr: float, threshold: float, false_accept_weight: float, seed: int) -> None:
    """Raise ValueError if one of these arguments of `train` is out of its range."""
    check_choice("kind", kind, tuple(KINDS))
    check_int("epochs", epochs, low=1)
    check_number("lr", lr, low=0, high=1, open_low=True)
    check_number("threshold", threshold, low=0, high=1)
    check_number("false_accept_weight", false_accept_weight, low=1, high=1e3)
    check_int("seed", seed, low=0, high=2**63 - 1)


def _logits(network: nn.Module, records: Records, chosen: Tensor) -> Tensor:
    features = dict(zip(FEATURES, records.features[chosen].unbind(1), strict=True))
    return network(features, records.valid[chosen])


def _loss(network: nn.Module, records: Records, chosen: Tensor, weight: float) -> Tensor:
    final, valid = records.final[chosen].float(), records.valid[chosen].float()
    weights = valid * (1 + (weight - 1) * (1 - final))
    losses = binary_cross_entropy_with_logits(_logits(network, records, chosen), final, reduction="none")
    return (losses * weights).sum() / valid.sum()


def _measure(network: nn.Module, records: Records, chosen: Tensor, threshold: float) -> dict[str, Any]:
    """Measure precision (share of accepted candidates that are final) and recall (share of final ones accepted)."""
    with torch.no_grad():
        accepted = _logits(network, records, chosen).sigmoid() > threshold
    undecided = records.undecided[chosen] & records.valid[chosen]
    accepted, final = accepted & undecided, records.final[chosen] & undecided
    right = int((accepted & final).sum())
    counts = np.maximum([int(accepted.sum()), int(final.sum())], 1)
    return {
        "precision": right / float(counts[0]),
        "recall": right / float(counts[1]),
        "accepted": int(accepted.sum()),
        "undecided": int(undecided.sum()),
        "records": int(chosen.sum()),
    }
