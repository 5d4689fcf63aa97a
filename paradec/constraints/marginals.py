"""The marginals of a model's slots and what the language makes of them: from logits to sums over classes, and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paradec.constraints import passes
from paradec.constraints.automaton import TokenAutomaton

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
        tops, sums = _class_sums(automaton, self.logits)
        self.broken = bool(np.isnan(sums).any() or (tops == np.inf).any())
        """Whether logits are NaN or +inf; nothing else may be asked then."""
        fixed = [None if token is None else passes.certain(automaton, token) for token in held]
        self.sums, self._tops = (_filled(fixed, found, automaton.classes) for found in (sums, tops))
        """[n, C] float64: the logarithm of each class's probability in each slot, up to the constant `norms` says."""
        if not self.broken:
            self.total, self._log_g, self._backward = passes.conditioned(automaton, self.sums, first, last)
            """ln Z, up to the constants of the slots."""

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
        found = passes.best(self.automaton, self._tops, self._lowest, self.first, self.last)
        return torch.tensor([found[slot] for slot in self._open], device=self.logits.device)

    def drawn(self, uniform: np.ndarray) -> Tensor:
        """The tokens [m] of a text that is drawn jointly, with the numbers uniform [m] (see `passes.drawn`)."""
        rows = {slot: row for row, slot in enumerate(self._open)}
        found = passes.drawn(
            self.automaton,
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
        """A copy of the logits of a slot's tokens [k], in float32 at least."""
        found = self.logits[row].index_select(0, torch.as_tensor(ids, device=self.logits.device))
        return found.to(torch.promote_types(found.dtype, torch.float32)).cpu().numpy()

    def _lowest(self, slot: int, index: int) -> int:
        """The likeliest token of a class in a slot, the lowest of several."""
        held, members = self.held[slot], self.automaton.members[index]
        if held is not None:
            return held
        return int(members[self._values(self._open.index(slot), members).argmax()])


def _filled(fixed: list[np.ndarray | None], found: np.ndarray, classes: int) -> np.ndarray:
    """[n, C]: rows of `found` [m, C] where nothing is fixed."""
    rows = iter(found)
    return np.array([next(rows) if row is None else row for row in fixed]).reshape(len(fixed), classes)


def _class_sums(automaton: TokenAutomaton, logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Of logits [m, V]: the largest of each class, and the logarithms of the sums of their exponentials [m, C]; float64
    on the host."""
    tokens = torch.as_tensor(automaton.tokens, device=logits.device)
    if not logits.is_cpu:
        return _scattered_sums(automaton, logits.index_select(-1, tokens), tokens)
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    values = torch.empty(len(tokens), dtype=logits.dtype)  # one row's, which fits a cache
    array, found = values.numpy(), np.empty((2, len(logits), automaton.classes))
    with np.errstate(divide="ignore", invalid="ignore"):  # of classes without a finite logit
        for row, own in enumerate(logits):
            torch.index_select(own, 0, tokens, out=values)
            tops = found[0, row] = np.maximum.reduceat(array, automaton.begins)
            base = np.where(tops > -np.inf, tops, 0)
            if base.max() - base.min() < NEAR:  # one number for all classes loses none of them
                base[:] = base.max()
                values -= float(base[0])
            else:
                array -= np.repeat(base, automaton.sizes)
            values.exp_()
            found[1, row] = np.log(np.add.reduceat(array, automaton.begins, dtype=np.float64)) + base
    return found[0], found[1]


def _scattered_sums(automaton: TokenAutomaton, values: Tensor, tokens: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The same of values [m, A], those of `tokens` [A], on their device: sums over classes alone come to the host."""
    owner = torch.as_tensor(automaton.class_of, device=values.device)[tokens].long().expand(len(values), -1)
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    top = wide.new_full((len(values), automaton.classes), -torch.inf).scatter_reduce_(1, owner, wide, "amax")
    floor = top.where(top > -torch.inf, 0)
    total = torch.zeros_like(floor, dtype=torch.float64)
    total.scatter_add_(1, owner, (wide - floor.gather(1, owner)).exp().double())
    return top.double().cpu().numpy(), (total.log() + floor).cpu().numpy()
