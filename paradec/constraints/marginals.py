"""The marginals of a model's slots and what the language makes of them: from logits to sums over classes, and back."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paradec.constraints import passes
from paradec.constraints.automaton import TokenAutomaton


class Marginals:
    """The product of the distributions softmax(logits) of a text's undecided slots, conditioned on the language.

    Args:
        logits: [m, V] of the m undecided slots. held: what each of the n slots holds, None where it is undecided.
        first: the state before the first slot. last: [S] bool, the states that the last one may lead to.
    """

    def __init__(self, automaton: TokenAutomaton, logits: Tensor, held: list[int | None], first: int, last: np.ndarray):
        self.automaton, self.logits, self.held, self.first, self.last = automaton, logits, held, first, last
        self._open = [slot for slot, token in enumerate(held) if token is None]
        self._values, tops, sums = _class_sums(automaton, logits)
        self.broken = bool(np.isnan(sums).any() or (tops == np.inf).any())
        """Whether logits are NaN or +inf; nothing else may be asked then."""
        fixed = [None if token is None else passes.certain(automaton, token) for token in held]
        self._sums, self._tops = (_filled(fixed, found, automaton.classes) for found in (sums, tops))
        if not self.broken:
            self.total, self._log_g, self._backward = passes.conditioned(automaton, self._sums, first, last)
            """ln Z, up to the constants of the slots' logits."""

    def conditioned(self) -> Tensor:
        """Logits [m, V] of the conditioned marginals r; in the dtype of the logits."""
        nothing = np.full((len(self._open), 1), -np.inf)
        table = torch.as_tensor(np.concatenate((self._log_g[self._open], nothing), 1)).to(self.logits)
        return table[:, self._class_of()] + self.logits

    def best(self) -> Tensor:
        """The tokens [m] of the likeliest text; of several the lowest ids, from the left."""
        fixed = [0 if token is None else token for token in self.held]
        lowest = np.tile(np.array(fixed)[:, None], (1, self.automaton.classes))
        lowest[self._open] = self._lowest()
        found = passes.best(self.automaton, self._tops, lowest, self.first, self.last)
        return torch.as_tensor(lowest[self._open, np.array(found)[self._open]], device=self.logits.device)

    def drawn(self, uniform: np.ndarray) -> Tensor:
        """The tokens [m] of a text that is drawn jointly, with the numbers uniform [m] (see `passes.drawn`)."""
        wide, logs = np.zeros(len(self.held)), np.zeros((len(self.held), len(self.automaton.tokens)))
        wide[self._open] = uniform
        logs[self._open] = self._host_values()
        found = passes.drawn(self.automaton, logs, self._backward, self.held, self.first, wide)
        return torch.tensor(found, device=self.logits.device)[self._open]

    def log_masses(self) -> np.ndarray:
        """[n, C] float64: the logarithm of each class's probability in each slot."""
        found = self._sums.copy()
        found[self._open] -= self._norms()[:, None]
        return found

    def log_z(self) -> float:
        """ln Z: the logarithm of the language's probability."""
        return self.total - float(self._norms().sum())

    def _norms(self) -> np.ndarray:
        found: np.ndarray = self.logits.double().logsumexp(-1).cpu().numpy()
        return found

    def _class_of(self) -> Tensor:
        return torch.as_tensor(self.automaton.class_of, device=self.logits.device).long()  # -1 is the last entry

    def _host_values(self) -> np.ndarray:
        if self._values is None:
            tokens = torch.as_tensor(self.automaton.tokens, device=self.logits.device)
            self._values = self.logits.index_select(-1, tokens).float().cpu().numpy()
        return self._values

    def _lowest(self) -> np.ndarray:
        """[m, C] int64: the likeliest token of each class, the lowest of several."""
        values, automaton = self._host_values(), self.automaton
        found = np.empty((len(values), automaton.classes), np.int64)
        for index, (begin, size) in enumerate(zip(automaton.begins, automaton.sizes, strict=True)):
            found[:, index] = automaton.tokens[begin + values[:, begin : begin + size].argmax(1)]
        return found


def _filled(fixed: list[np.ndarray | None], found: np.ndarray, classes: int) -> np.ndarray:
    """[n, C]: rows of `found` [m, C] where nothing is fixed."""
    rows = iter(found)
    return np.array([next(rows) if row is None else row for row in fixed]).reshape(len(fixed), classes)


def _class_sums(automaton: TokenAutomaton, logits: Tensor) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
    """Of logits [m, V]: those of `automaton.tokens` [m, A] where they are on the host; the largest of each class, and
    the logarithms of the sums of their exponentials [m, C], float64."""
    tokens = torch.as_tensor(automaton.tokens, device=logits.device)
    values = logits.detach().index_select(-1, tokens)
    if not values.is_cpu:
        owner = torch.as_tensor(automaton.class_of, device=logits.device)[tokens].long().expand(len(values), -1)
        wide = values.float()
        top = wide.new_full((len(values), automaton.classes), -torch.inf).scatter_reduce_(1, owner, wide, "amax")
        base = top.where(top > -torch.inf, 0)
        sums = torch.zeros_like(base, dtype=torch.float64)
        sums.scatter_add_(1, owner, (wide - base.gather(1, owner)).exp().double())
        return None, top.double().cpu().numpy(), (sums.log() + base).cpu().numpy()
    if values.dtype not in (torch.float32, torch.float64):
        values = values.float()
    array = values.numpy()
    tops = np.maximum.reduceat(array, automaton.begins, axis=1)
    base = np.where(tops > -np.inf, tops, 0)
    shifted = array - np.repeat(base, automaton.sizes, axis=1)
    sums = np.add.reduceat(torch.from_numpy(shifted).exp_().numpy(), automaton.begins, axis=1, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return array, tops.astype(np.float64), np.log(sums) + base.astype(np.float64)
