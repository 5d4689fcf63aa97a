"""The marginals of a model's slots and what the language makes of them: from logits to sums over classes, and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paradec.constraints import passes
from paradec.constraints.automaton import Runs, TokenAutomaton

NEAR = 60.0
"""Logits whose exponentials float32 holds together."""


class Marginals:
    """The product of the distributions softmax(logits) of a text's undecided slots, conditioned on the language.

    Args:
        logits: [m, V] of the m undecided slots. held: what each of the n slots holds, None where it is undecided.
        first: the state before the first slot. last: [S] bool, the states that the last one may lead to.
    """

    def __init__(self, automaton: TokenAutomaton, logits: Tensor, held: list[int | None], first: int, last: np.ndarray):
        self.automaton, self.logits, self.held, self.first, self.last = automaton, logits.detach(), held, first, last
        self._open = [slot for slot, token in enumerate(held) if token is None]
        self._runs = _run_sums(automaton.runs, self.logits)
        self.broken = bool(np.isnan(self._runs[1]).any() or (self._runs[0] == np.inf).any())
        """Whether logits are NaN or +inf; nothing else may be asked then."""
        if not self.broken:
            self.sums = self._of_classes(self._runs[1], passes.summed)
            """[n, C] float64: the logarithm of each class's probability in each slot, up to the constant `norms`
            says."""
            self.total, self._log_g, self._backward = passes.conditioned(automaton, self.sums, first, last)
            """ln Z, up to the constants of the slots."""

    def _of_classes(self, runs: np.ndarray, among: passes.Sums) -> np.ndarray:
        """[n, C] of values [m, P] of runs; of what is decided, that it is certain."""
        by_class = self.automaton.runs.by_class
        with np.errstate(divide="ignore"):
            rows = iter(among(runs[:, by_class.order], by_class, self.automaton.classes))
        each = [next(rows) if token is None else passes.certain(self.automaton, token) for token in self.held]
        return np.array(each).reshape(len(self.held), self.automaton.classes)

    def conditioned(self) -> Tensor:
        """Logits [m, V] of the conditioned marginals r; in the dtype of the logits."""
        nothing = np.full((len(self._open), 1), -np.inf)
        table = torch.as_tensor(np.concatenate((self._log_g[self._open], nothing), 1)).to(self.logits)
        class_of = torch.as_tensor(self.automaton.class_of, device=table.device).remainder(self.automaton.classes + 1)
        return table.index_select(1, class_of).add_(self.logits)

    def probabilities(self, tokens: Tensor) -> Tensor:
        """[m] float64: r of one token [m] of each slot; exactly 1 where no other token fits."""
        ids = tokens.cpu().numpy()
        own = self.logits.gather(1, tokens.unsqueeze(1))[:, 0].double().cpu().numpy()
        shares = self.sums[self._open] + self._log_g[self._open]
        top = shares.max(1)
        whole = np.log(np.exp(shares - top[:, None]).sum(1)) + top
        found = own + self._log_g[self._open, self.automaton.class_of[ids]] - whole
        return torch.as_tensor(np.minimum(np.exp(found), 1), device=tokens.device)

    def best(self) -> Tensor:
        """The tokens [m] of the likeliest text; of several the lowest ids, from the left."""
        tops = self._of_classes(self._runs[0], passes.highest)
        found = passes.best(self.automaton, tops, self._lowest, self.first, self.last)
        return torch.tensor([found[slot] for slot in self._open], device=self.logits.device)

    def drawn(self, uniform: np.ndarray) -> Tensor:
        """The tokens [m] of a text that is drawn jointly, with the numbers uniform [m] (see `passes.drawn`)."""
        rows = {slot: row for row, slot in enumerate(self._open)}
        found = passes.drawn(
            self.automaton,
            lambda slot: self._runs[1, rows[slot]],
            lambda slot, ids: self._values(rows[slot], ids),
            self._backward,
            self.held,
            self.first,
            [0.0 if slot not in rows else float(uniform[rows[slot]]) for slot in range(len(self.held))],
        )
        return torch.tensor([found[slot] for slot in self._open], device=self.logits.device)

    def norms(self, slots: Sequence[int]) -> np.ndarray:
        """[k] float64: the logarithms of what makes the distributions of undecided slots sum to 1."""
        rows = [self._open.index(slot) for slot in slots]
        found: np.ndarray = self.logits[rows].double().logsumexp(-1).cpu().numpy()
        return found

    def log_z(self) -> float:
        """ln Z: the logarithm of the language's probability."""
        return self.total - float(self.norms(self._open).sum())

    def _values(self, row: int, ids: np.ndarray) -> np.ndarray:
        """The logits of a slot's tokens [k], in float64."""
        found: np.ndarray = self.logits[row][torch.as_tensor(ids, device=self.logits.device)].double().cpu().numpy()
        return found

    def _lowest(self, slot: int, index: int) -> int:
        """The likeliest token of a class in a slot, the lowest of several."""
        if (held := self.held[slot]) is not None:
            return held
        row, runs = self._open.index(slot), self.automaton.runs
        own = runs.by_class.order[runs.by_class.owner == index]
        run = int(own[self._runs[0, row, own].argmax()])
        ids = runs.tokens[runs.begins[run] : runs.begins[run + 1]]
        return int(ids[self._values(row, ids).argmax()])


def _run_sums(runs: Runs, logits: Tensor) -> np.ndarray:
    """Of logits [m, V]: the largest of each run, and the logarithms of the sums of their exponentials, [2, m, P]
    float64 on the host."""
    tokens = torch.as_tensor(runs.tokens, device=logits.device)
    if not logits.is_cpu:
        return _scattered_sums(runs, logits.index_select(-1, tokens))
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    values = torch.empty(len(tokens), dtype=logits.dtype)  # one row's, which fits a cache
    array, found = values.numpy(), np.empty((2, len(logits), len(runs.classes)))
    with np.errstate(divide="ignore", invalid="ignore"):  # of runs without a finite logit
        for row, own in enumerate(logits):
            torch.index_select(own, 0, tokens, out=values)
            tops = found[0, row] = np.maximum.reduceat(array, runs.begins[:-1])
            base = np.where(tops > -np.inf, tops, tops.max())
            if base.max() - base.min() < NEAR:  # one number for all runs loses none of them
                base[:] = base.max()
                values -= float(base[0])
            else:
                array -= np.repeat(np.maximum(base, passes.LEAST), np.diff(runs.begins))
            values.exp_()
            found[1, row] = np.log(np.add.reduceat(array, runs.begins[:-1])) + base
    return found


def _scattered_sums(runs: Runs, values: Tensor) -> np.ndarray:
    """The same of values [m, A], those of `runs.tokens`, on their device: sums over runs alone come to the host."""
    owner = torch.as_tensor(np.repeat(np.arange(len(runs.classes)), np.diff(runs.begins)), device=values.device)
    owner, wide = owner.expand(len(values), -1), values.to(torch.promote_types(values.dtype, torch.float32))
    top = wide.new_full((len(values), len(runs.classes)), -torch.inf).scatter_reduce_(1, owner, wide, "amax")
    floor = top.where(top > -torch.inf, 0)
    total = torch.zeros_like(floor, dtype=torch.float64)
    total.scatter_add_(1, owner, (wide - floor.gather(1, owner)).exp().double())
    return np.stack((top.double().cpu().numpy(), (total.log() + floor).cpu().numpy()))
