"""Token controls: biases, excluded words, minimum lengths and penalties, which change the logits of single tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_int, short_repr
from paradec.samplers.features.feature import Feature

PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Fields of a request that depend on its final tokens, and the values that turn them off."""
CONTROLS = ("logit_bias", "bad_words", "min_new_tokens", "ignore_eos", *PENALTIES)


@dataclass
class TokenControls(Feature):
    """Token controls of a request, in vLLM's order and with its formulas.

    A token is excluded where it would complete a word of `bad_words`; `logit_bias` is added; end tokens are excluded
    before `min_new_tokens`. Let a be the number of final occurrences of a token in the answer, and c that in prompt and
    answer. If c > 0, a positive logit is divided by `repetition_penalty`, any other logit is multiplied by it. Then
    `frequency_penalty` * a is subtracted, and `presence_penalty` if a > 0 (Keskar et al., arXiv 1909.05858, section
    4.1; OpenAI's formulas). In a masked model, a and c include only tokens that were final before the step, and prompt
    tokens between masks belong to the prompt.
    """

    request: Any
    bias: tuple[Tensor, Tensor]
    """Ids [N] int64, and the values [N] that are added to their logits."""
    excluded: Tensor
    """Ids [N] int64 that are never proposed."""
    words: list[list[int]]
    """Sequences of at least two ids that an answer must not contain."""
    ends: tuple[int, ...]

    why_host_only = "biases and penalties of tokens are applied on the host"

    @classmethod
    def from_request(cls, sampler: Any, model: Any, request: Any, in_order: bool) -> Self | None:
        """Make the controls of a request; None if it has none. Raises ValueError for ids out of their range, words
        without a tokenizer, and controls that do not work with the sampler or with other fields.

        in_order: whether tokens become final from left to right."""
        active = [name for name in CONTROLS if request.changes().get(name)]
        if not active:
            return None
        for field, why in (("rollout", "replays the model's own probabilities"), ("constraint", "ends an answer")):
            names = [name for name in active if field == "rollout" or name in ("min_new_tokens", "ignore_eos")]
            if getattr(request, field) and names:
                raise ValueError(f"{names[0]}={short_repr(getattr(request, names[0]))}: {field} {why}; leave one out")
        penalty = next((name for name in PENALTIES if name in active), None)
        if penalty is not None and getattr(getattr(sampler, "needs", None), "revises", False):
            value = short_repr(getattr(request, penalty))
            raise ValueError(f"{penalty}={value} counts final tokens, and sampler {sampler.name!r} takes tokens back")
        if sampler.family == "draft_verify" and not in_order:
            value = short_repr(getattr(request, active[0]))
            is_protein = getattr(model, "reads_order", False)
            hint = '; write load_protein_mpnn(..., rules=paradec.DesignRules(omit="C", bias={"A": -1}))'
            raise ValueError(
                f"{active[0]}={value} is for models that write from left to right, and {model.facts.name} decides in "
                f"any order{hint if is_protein else ''}"
            )
        size = model.facts.vocab_size
        bias = dict(request.logit_bias or ())
        for token in bias:
            check_int("logit_bias", token, low=0, high=size - 1)
        words = _read_words(request.bad_words or (), model)
        long_words = [word for word in words if len(word) > 1]
        if long_words and not in_order:
            raise ValueError(
                f"bad_words={short_repr(request.bad_words)}: sampler {sampler.name!r} decides positions in any order "
                f"and supports only words of one token; one has {len(long_words[0])}"
            )
        facts, singles = model.facts, [word[0] for word in words if len(word) == 1]
        ends = facts.eos_token_ids if request.ignore_eos or request.min_new_tokens else ()
        suppressed = facts.textless_ids if request.suppress_tokens is None else request.suppress_tokens
        if len({*singles, *ends, *suppressed, facts.mask_token_id} - {None}) >= size:
            raise ValueError(
                f"bad_words={short_repr(request.bad_words)} with suppress_tokens excludes all {size} tokens"
            )
        ids = torch.tensor(list(bias), dtype=torch.int64, device=model.device)
        values = torch.tensor(list(bias.values()), device=model.device)
        excluded = torch.tensor(singles, dtype=torch.int64, device=model.device)
        return cls(request.without_objects(), (ids, values), excluded, long_words, facts.eos_token_ids)

    def adjust(self, logits: Tensor, prompt: Sequence[int], answer: Sequence[int], offsets: Tensor) -> None:
        """Adjust logits [W, V] in place, given the final tokens `prompt` and `answer`.

        offsets: [W] int64: positions of the logits, counted from the start of the answer. In the prompt they are
        negative, and end tokens are not excluded."""
        logits[:, self.excluded] = -torch.inf
        for word in self.words:
            if list(answer[1 - len(word) :]) == word[:-1]:
                logits[:, word[-1]] = -torch.inf
        bias_ids, bias_values = self.bias
        logits[:, bias_ids] += bias_values.to(logits.dtype)
        min_tokens = torch.iinfo(torch.int64).max if self.request.ignore_eos else self.request.min_new_tokens
        for end in self.ends:
            logits[:, end].masked_fill_((offsets >= 0) & (offsets < min_tokens), -torch.inf)
        request, counts = self.request, Counter(answer)
        if any(getattr(request, name) != off for name, off in PENALTIES.items()) and (prompt or answer):
            ids = torch.tensor(sorted({*prompt, *answer}), device=logits.device)
            answer_counts = torch.tensor([counts[token] for token in ids.tolist()], device=logits.device)
            values, factor = logits[:, ids], request.repetition_penalty
            values = torch.where(values > 0, values / factor, values * factor)
            values -= request.frequency_penalty * answer_counts + request.presence_penalty * (answer_counts > 0)
            logits[:, ids] = values

    def adjust_rows(self, state: Any, logits: Tensor, rows: np.ndarray, positions: Tensor) -> Tensor:
        """Return an adjusted copy of logits [R, W, V] at positions [R, W] of a masked model or of canvases of noise.

        The second half of logits [R, 2 W, V] belongs to mask probes (`Needs.mask_probes`)."""
        positions = positions.repeat(1, logits.shape[1] // positions.shape[1])
        adjusted = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        for index, row in enumerate(rows.tolist()):
            length = int(state.length[row])
            final, is_prompt = ~state.undecided[row, :length], state.is_prompt[row, :length]
            prompt, answer = (state.canvas[row, :length][part & final].tolist() for part in (is_prompt, ~is_prompt))
            self.adjust(adjusted[index], prompt, answer, positions[index] - int(state.answer_start[row]))
        return adjusted

    def adjust_nodes(self, state: Any, logits: Tensor, rows: np.ndarray, parents: Tensor, tokens: Tensor) -> Tensor:
        """Return an adjusted copy of logits [R, N, V] after tree nodes; arguments as `CausalConstraint.mask_nodes`."""
        adjusted = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        parent_lists, token_lists = parents.tolist(), tokens.tolist()
        for index, row in enumerate(rows.tolist()):
            start, committed = int(state.answer_start[row]), int(state.committed[row])
            final = state.canvas[row, :committed].tolist()
            paths: list[list[int]] = [[]]
            for parent, token in zip(parent_lists[index if len(parent_lists) > 1 else 0][1:], token_lists[index][1:]):
                paths.append([*paths[parent], token] if token >= 0 else paths[parent])
            for node, path in enumerate(paths[: logits.shape[1]]):
                answer = final[start:] + path
                offset = torch.tensor([len(answer)], device=logits.device)
                self.adjust(adjusted[index, node : node + 1], final[:start], answer, offset)
        return adjusted

    def adjust_slots(self, state: Any, logits: Tensor, rows: np.ndarray, drafts: Tensor) -> Tensor:
        """Return an adjusted copy of logits [R, W, V] of slots, each after the drafts [R, W] before it."""
        parents = torch.arange(-1, logits.shape[1] - 1).unsqueeze(0)
        return self.adjust_nodes(
            state, logits, rows, parents, torch.nn.functional.pad(drafts, (1, 0))[:, : len(parents[0])]
        )


def _read_words(words: Sequence[Any], model: Any) -> list[list[int]]:
    """Encode `bad_words` as token ids. A text is also encoded with a space before it, as within an answer."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str):
            sequences[tuple(map(int, word))] = None
            continue
        if model.tokenizer is None:
            raise ValueError(
                f"bad_words={short_repr(word)} needs a tokenizer, and {model.facts.name} has none; give ids"
            )
        for text in (word, f" {word.lstrip()}"):
            sequences[tuple(model.tokenizer(text, add_special_tokens=False)["input_ids"])] = None
    for token in (token for sequence in sequences for token in sequence):
        check_int("bad_words", token, low=0, high=model.facts.vocab_size - 1)
    return [list(sequence) for sequence in sequences if sequence]
