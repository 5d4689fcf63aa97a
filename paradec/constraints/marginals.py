"""Marginal distributions of a model's slots, conditioned on a language."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paradec.constraints import passes
from paradec.constraints.automaton import Runs, TokenAutomaton

MAX_SPREAD = 60.0
"""Maximum difference between logits for which float32 can sum the exponentials with one common shift."""


class Marginals:
    """The product of the slots' distributions softmax(logits), conditioned on the language.

    Args:
        logits: [m, V] of the m undecided slots.
        tokens: the token of each of the n slots; None: undecided.
        first: the state before the first slot.
        last: [S] bool: the states allowed after the last slot.
    """

    def __init__(
        self, automaton: TokenAutomaton, logits: Tensor, tokens: list[int | None], first: int, last: np.ndarray
    ):
        self.automaton, self.logits, self.tokens = automaton, logits.detach(), tokens
        self.first, self.last = first, last
        self._open = [slot for slot, token in enumerate(tokens) if token is None]
        self._runs = _run_sums(automaton.runs, self.logits)
        self.has_invalid_logits = bool(np.isnan(self._runs[1]).any() or (self._runs[0] == np.inf).any())
        """Whether a logit of a token in `Runs.tokens` is NaN or +inf; if so, no method may be called."""
        if not self.has_invalid_logits:
            self.sums = self._reduce_to_classes(self._runs[1], passes.logsumexp)
            """[n, C] float64: log-probability of each class in each slot, plus the slot's constant (`norms`)."""
            self.total, self._log_g, self._backward = passes.condition(automaton, self.sums, first, last)
            """`total`: ln Z plus the sum of the slots' constants."""

    def _reduce_to_classes(self, runs: np.ndarray, reduce: passes.Sums) -> np.ndarray:
        """Reduce values [m, P] of the `P` runs to [n, C] float64; a decided slot has all mass on its token's class."""
        by_class = self.automaton.runs.by_class
        with np.errstate(divide="ignore"):
            rows = iter(reduce(runs[:, by_class.order], by_class, self.automaton.classes))
        by_slot = [next(rows) if token is None else passes.certain(self.automaton, token) for token in self.tokens]
        return np.array(by_slot).reshape(len(self.tokens), self.automaton.classes)

    def conditioned_logits(self) -> Tensor:
        """Logits [m, V] of the conditioned marginals r (`passes`), in the dtype of the logits."""
        impossible = np.full((len(self._open), 1), -np.inf)
        table = torch.as_tensor(np.concatenate((self._log_g[self._open], impossible), 1)).to(self.logits)
        class_of = torch.as_tensor(self.automaton.class_of, device=table.device).remainder(self.automaton.classes + 1)
        return table.index_select(1, class_of).add_(self.logits)

    def probabilities(self, tokens: Tensor) -> Tensor:
        """[m] float64: conditioned probability r of `tokens` [m], one per undecided slot; at most 1."""
        ids = tokens.cpu().numpy()
        token_logits = self.logits.gather(1, tokens.unsqueeze(1))[:, 0].double().cpu().numpy()
        shares = self.sums[self._open] + self._log_g[self._open]
        top = shares.max(1)
        log_norm = np.log(np.exp(shares - top[:, None]).sum(1)) + top
        log_prob = token_logits + self._log_g[self._open, self.automaton.class_of[ids]] - log_norm
        return torch.as_tensor(np.minimum(np.exp(log_prob), 1), device=tokens.device)

    def best(self) -> Tensor:
        """Tokens [m] of the likeliest text; ties are resolved from the left, by the lowest id."""
        tops = self._reduce_to_classes(self._runs[0], passes.maximum)
        text = passes.best(self.automaton, tops, self._likeliest_token, self.first, self.last)
        return torch.tensor([text[slot] for slot in self._open], device=self.logits.device)

    def sample(self, uniform: np.ndarray) -> Tensor:
        """Draw the tokens [m] of a text jointly, from `uniform` [m] in [0, 1) (`passes.sample`)."""
        rows = {slot: row for row, slot in enumerate(self._open)}
        text = passes.sample(
            self.automaton,
            lambda slot: self._runs[1, rows[slot]],
            lambda slot, ids: self._read_logits(rows[slot], ids),
            self._backward,
            self.tokens,
            self.first,
            [0.0 if slot not in rows else float(uniform[rows[slot]]) for slot in range(len(self.tokens))],
        )
        return torch.tensor([text[slot] for slot in self._open], device=self.logits.device)

    def norms(self, slots: Sequence[int]) -> np.ndarray:
        """[k] float64: log-normalisers of undecided slots."""
        rows = [self._open.index(slot) for slot in slots]
        log_norms: np.ndarray = self.logits[rows].double().logsumexp(-1).cpu().numpy()
        return log_norms

    def log_z(self) -> float:
        """ln Z: log-probability of the language."""
        return self.total - float(self.norms(self._open).sum())

    def _read_logits(self, row: int, ids: np.ndarray) -> np.ndarray:
        """Logits [k] float64 of a slot's tokens `ids`."""
        logits: np.ndarray = self.logits[row][torch.as_tensor(ids, device=self.logits.device)].double().cpu().numpy()
        return logits

    def _likeliest_token(self, slot: int, index: int) -> int:
        """Find the likeliest token of the class `index` in a slot; of equal ones, the lowest id."""
        if (token := self.tokens[slot]) is not None:
            return token
        row, runs = self._open.index(slot), self.automaton.runs
        class_runs = runs.by_class.order[runs.by_class.owner == index]
        run = int(class_runs[self._runs[0, row, class_runs].argmax()])
        ids = runs.tokens[runs.begins[run] : runs.begins[run + 1]]
        return int(ids[self._read_logits(row, ids).argmax()])


def _run_sums(runs: Runs, logits: Tensor) -> np.ndarray:
    """Compute maximum and log-sum-exp of logits [m, V] over each run: [2, m, P] float64 on the host."""
    tokens = torch.as_tensor(runs.tokens, device=logits.device)
    if not logits.is_cpu:
        return _scattered_sums(runs, logits.index_select(-1, tokens))
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    values = torch.empty(len(tokens), dtype=logits.dtype)  # one row: it fits the CPU's cache
    array, sums = values.numpy(), np.empty((2, len(logits), len(runs.classes)))
    with np.errstate(divide="ignore", invalid="ignore"):  # runs without a finite logit
        for row, row_logits in enumerate(logits):
            torch.index_select(row_logits, 0, tokens, out=values)
            tops = sums[0, row] = np.maximum.reduceat(array, runs.begins[:-1])
            base = np.where(tops > -np.inf, tops, tops.max())
            if base.max() - base.min() < MAX_SPREAD:  # one shift for all runs
                base[:] = base.max()
                values -= float(base[0])
            else:
                array -= np.repeat(np.maximum(base, passes.LOWEST), np.diff(runs.begins))
            values.exp_()
            sums[1, row] = np.log(np.add.reduceat(array, runs.begins[:-1])) + base
    return sums


def _scattered_sums(runs: Runs, values: Tensor) -> np.ndarray:
    """Compute `_run_sums` on the device, from the logits `values` [m, A] of `runs.tokens`."""
    owner = torch.as_tensor(np.repeat(np.arange(len(runs.classes)), np.diff(runs.begins)), device=values.device)
    owner, wide = owner.expand(len(values), -1), values.to(torch.promote_types(values.dtype, torch.float32))
    top = wide.new_full((len(values), len(runs.classes)), -torch.inf).scatter_reduce_(1, owner, wide, "amax")
    floor = top.where(top > -torch.inf, 0)
    total = torch.zeros_like(floor, dtype=torch.float64)
    total.scatter_add_(1, owner, (wide - floor.gather(1, owner)).exp().double())
    return np.stack((top.double().cpu().numpy(), (total.log() + floor).cpu().numpy()))
