"""Questions as rows of ids, and the model's log-probabilities at the places of their answers."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.utils.chat_template_utils import render_jinja_template

from paradec.api.decisions.questions import Question
from paradec.core import rng
from paradec.core.checks import check_text, shown
from paradec.core.facts import HOLE
from paradec.core.family_queries import CanvasQuery
from paradec.core.prompts import check_rows, ids_of, render, unknown_words
from paradec.core.query import StoreCall, whole_rows
from paradec.samplers.renoising.diffusion_gemma import DiffusionGemma
from paradec.samplers.renoising.state import FIRST_STREAM, noise
from paradec.samplers.starting import padded

Ids = tuple[int, ...]
Template = Callable[[str, Question], str]
"""From the state as text and a question to the text of the user's turn."""
MIN_SHARED_TOKENS = 16
"""Tokens that rows must have in common for a call of its own to evaluate them."""


class Step(NamedTuple):
    """One factor of a label's probability: that one of `ids` is at a position of a row, which begins with a prompt."""

    row: Ids
    prompt_length: int
    position: int
    ids: Ids


def lay_out(
    model: Any, state: Any, questions: Sequence[Question], template: Template | None
) -> tuple[int, list[list[list[Step]]]]:
    """Lay out questions in one row, as turns of one chat: its length, and for each label of each question the steps
    whose probabilities multiply to the label's. An answer is as many holes as its longest label has tokens; on causal
    models it is left out. Raises ValueError for what the tokenizer cannot write or the model cannot take."""
    facts, is_causal = model.facts, model.facts.topology == "causal"
    labels = [_label_ids(model, question.labels) for question in questions]
    chat: list[dict[str, str]] = []
    row: list[int] = []
    before: list[int] = []
    starts: list[int] = []
    for question, label_ids in zip(questions, labels, strict=True):
        text = text_of("", question, template).lstrip("\n") if chat else text_of(state, question, template)
        chat.append({"role": "user", "content": text})
        opened, tail = _chat_ids(model, chat)
        if opened[: len(before)] != before:
            raise ValueError(f"{facts.name}'s chat template writes a turn otherwise before others: leave together out")
        row += opened[len(before) :]
        starts.append(len(row))
        row += [] if is_causal else [facts.hole_id] * max(map(len, label_ids))
        chat.append({"role": "assistant", "content": question.labels[0]})
        before = [*opened, *label_ids[0]]
    prompt, ends = starts[0], facts.eos_token_ids
    if not is_causal and not tail and ends:  # the template's end token of an answer, else the model's first
        closed, _ = _chat_ids(model, chat, open_turn=False)
        written = closed[len(os.path.commonprefix([opened, closed])) :]
        tail = [next((token for token in written if token in ends), ends[0])]
    row += [] if is_causal else tail
    if facts.topology == "block_causal":  # trained on whole blocks
        missing = (prompt * facts.prompt_aligned - len(row)) % facts.block_unit
        row += [facts.fill_token_id] * min(missing, (facts.max_length or math.inf) - len(row))
    new = max(map(len, labels[0])) if is_causal else len(row) - prompt
    width = facts.block_length if facts.topology == "canvas" else new
    if new > width:
        raise ValueError(f"answers take {new} positions after the prompt, and a canvas has {width}")
    check_rows(model, [row])
    facts.check_length(prompt + width, width)
    return len(row), [_steps(facts, (*row,), prompt, *place) for place in zip(starts, labels, strict=True)]


def _steps(facts: Any, row: Ids, prompt: int, start: int, labels: Sequence[Ids]) -> list[list[Step]]:
    """The steps of each label: its tokens, each given those before it, then an end token where another label is longer
    (on causal models: where one begins another one). Raises ValueError where there is no end token."""
    if facts.topology == "causal":
        ended = [any(b[: len(a)] == a for a, b in itertools.pairwise(sorted(labels)))] * len(labels)
    else:
        ended = [len(label) < max(map(len, labels)) for label in labels]
    if any(ended) and not facts.eos_token_ids:
        raise ValueError(f"{facts.name} has no end token, which tells labels of different numbers of tokens apart")
    steps: list[list[Step]] = [[] for _ in labels]
    for label, is_ended, factors in zip(labels, ended, steps, strict=True):
        for count, ids in enumerate([(token,) for token in label] + [(*facts.eos_token_ids,)] * is_ended):
            factors.append(Step(row[:start] + label[:count] + row[start + count :], prompt, start + count, ids))
    return steps


def text_of(state: Any, question: Question, template: Template | None) -> str:
    """The text of the user's turn: transformers' own prompt; of a `Span` the state and the instructions alone."""
    if template is not None:
        text = template(_json_text(state), question)
        if not isinstance(text, str):
            raise TypeError(f"template returned {shown(text)}: it must return the text of the user's turn")
    elif question.type == "span":
        text = "\n\n".join(part for part in (_json_text(state), _json_text(question.instructions)) if part)
    else:
        try:
            fields = vars(question) | {"options": question.options}
            text = render_jinja_template([[]], chat_template=_prompt(), state=state, question=fields)[0][0]
        except RecursionError:
            raise ValueError(f"instructions={shown(question.instructions)} or options are nested too deeply") from None
    check_text("state and question", text)
    if not text.strip():
        raise ValueError(f"nothing is asked: state={shown(state)} and instructions={shown(question.instructions)}")
    return text


def _json_text(value: Any) -> str:
    """A text unchanged, other data as JSON, None as nothing."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _prompt() -> str:
    """transformers' prompt for questions, a template of Jinja. Raises ImportError where it has none."""
    try:
        from transformers.decision import DECISION_PROMPT
    except ImportError as error:
        needs = "the prompt for questions and special tokens written as text need transformers 5.23"
        raise ImportError(f"{needs}, this is {transformers.__version__}; a plain text needs template= alone") from error
    return str(DECISION_PROMPT)


def _label_ids(model: Any, labels: Sequence[str]) -> list[Ids]:
    """The ids of labels. Raises ValueError for one that the tokenizer cannot write, and two that it writes alike."""
    tokenizer, facts = model.tokenizer, model.facts
    rows: list[Ids] = []
    for label in labels:
        ids = (*tokenizer(label, add_special_tokens=False)["input_ids"],)
        if not ids or tokenizer.unk_token_id in ids:
            raise ValueError(f"the tokenizer of {facts.name} cannot write the label {shown(label)}; give labels")
        if {facts.mask_token_id, *facts.eos_token_ids} & {*ids}:
            raise ValueError(f"the label {shown(label)} holds the mask or an end token; give another one")
        if ids in rows:
            raise ValueError(f"the tokenizer of {facts.name} writes the label {shown(label)} as another one")
        rows.append(ids)
    return rows


def _chat_ids(model: Any, chat: list[dict[str, str]], open_turn: bool = True) -> tuple[list[int], list[int]]:
    """The ids of a chat, whose contents hold no special tokens but text; without a chat template those of its text, and
    what the tokenizer puts after it."""
    tokenizer, contents = model.tokenizer, " ".join(turn["content"] for turn in chat)
    controls = [token for token in tokenizer.added_tokens_encoder if token.strip() and token in contents]
    if getattr(tokenizer, "chat_template", None):
        if not controls:
            return ids_of(tokenizer, render(tokenizer, chat, open_turn, enable_thinking=False)), []
        _prompt()  # an older transformers cannot write special tokens as text
        options = {"add_generation_prompt": open_turn, "enable_thinking": False, "sanitize_control_tokens": True}
        ids = tokenizer.apply_chat_template(chat, return_dict=True, **options)["input_ids"]
        if tokenizer.unk_token_id in ids:
            raise unknown_words(tokenizer, contents)
        return ids, []
    if controls:
        raise ValueError(f"the text holds {controls[0]!r}, a special token, and there is no chat template to write it")
    special = model.facts.topology.startswith("causal") or model.kind == "encoder"
    ids = ids_of(tokenizer, chat[0]["content"] + "\n", special)
    tail = [*itertools.takewhile(lambda token: token in tokenizer.all_special_ids, reversed(ids))][::-1]
    return ids[: len(ids) - len(tail)], tail


# ---- reading --------------------------------------------------------------------------------------------------------


def read(
    model: Any, steps: Iterable[Step], batch_size: int, seeds: int, before_call: Callable[[int], None] | None
) -> tuple[dict[Step, float], int]:
    """Evaluate each row once: log-probabilities of steps, of canvases the means over noises, and the number of calls.
    Raises FloatingPointError for NaN or +inf among the logits."""
    by_row: dict[Ids, dict[int, list[Step]]] = {}
    for step in dict.fromkeys(steps):
        by_row.setdefault(step.row, {}).setdefault(step.position, []).append(step)
    rows, is_canvas = sorted(by_row, key=len), model.facts.topology == "canvas"
    size = max(1, batch_size // seeds) if is_canvas else batch_size
    groups = [rows] if is_canvas or model.pads else [[*group] for _, group in itertools.groupby(rows, len)]
    log_probs: dict[Step, float] = {}

    def announce() -> None:
        if before_call is not None:
            before_call(sum(map(len, rows)) * (seeds if is_canvas else 1))

    with torch.inference_mode():
        announce()
        store, shared = _shared_prefix(model, rows, min(map(min, by_row.values())))
        forwards = 0 if store is None else 1
        for batch in (group[first : first + size] for group in groups for first in range(0, len(group), size)):
            announce()
            places = [by_row[row] for row in batch]
            prompts = [next(iter(row_places.values()))[0].prompt_length for row_places in places]
            if is_canvas:
                logits = _first_step(model, batch, prompts, seeds)
                forwards += 2  # prompts, and canvases
            else:
                query = whole_rows(model, batch, [[*row_places] for row_places in places], prompts, shared)
                logits = (model(query) if store is None else model(query, store)).unsqueeze(0)
                forwards += 1
            for number, (prompt, row_places) in enumerate(zip(prompts, places, strict=True)):
                for column, (place, here) in enumerate(row_places.items()):
                    scores = logits[:, number, place - prompt if is_canvas else column]
                    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))  # [S, V]
                    total = scores.logsumexp(-1, keepdim=True)
                    if not total.isfinite().all():
                        raise FloatingPointError(f"{model.facts.name} returned NaN or +inf")
                    ids = [token for step in here for token in step.ids]
                    means = (scores[:, ids] - total).logsumexp(0) - math.log(len(scores))
                    by_id = dict(zip(ids, means.tolist(), strict=True))
                    for step in here:
                        log_probs[step] = float(np.logaddexp.reduce([by_id[token] for token in step.ids]))
    return log_probs, forwards


def _shared_prefix(model: Any, rows: Sequence[Ids], first: int) -> tuple[Any, int]:
    """A store of what all rows begin with, before the `first` position to be read, and its length; None and 0 where a
    call for it would not pay, or keys depend on what follows."""
    facts = model.facts
    if len(rows) == 1 or not model.supports_store or facts.topology not in ("causal", "block_causal"):
        return None, 0
    length = min(len(os.path.commonprefix(rows)), first - 1)  # a shifted prediction is read one to the left
    length -= length % facts.block_unit
    if length < MIN_SHARED_TOKENS or facts.prompt_aligned:  # else the whole prompt is one block
        return None, 0
    store, row, index = model.make_store(1, length), rows[0][:length], np.zeros(1, np.int64)
    query = whole_rows(model, [row], [[length - 1]], [length])
    slots = torch.arange(length, device=model.device).unsqueeze(0)
    query.store = StoreCall(torch.as_tensor(index, device=model.device), slots, index, length)
    model(query, store)
    return store, length


def _first_step(model: Any, rows: Sequence[Ids], starts: list[int], seeds: int) -> Tensor:
    """Logits [seeds, R, C, V] of canvases that begin at `starts`, after their prompts. Given tokens stay where they
    are; where a row has `HOLE` or has ended is noise of seeds 0, 1, ..., which depends on the prompt alone."""
    width, device, count = model.facts.block_length, model.device, seeds * len(rows)
    prompts = [row[:start] for row, start in zip(rows, starts, strict=True)] * seeds
    unique = [*dict.fromkeys(prompts)]
    sampler = DiffusionGemma()
    state = sampler.start(model, unique, max_new_tokens=width, seed=0)
    model(sampler.query(state)[0], state.store)  # encodes the prompts

    index = np.array([unique.index(prompt) for prompt in prompts])
    positions = state.positions(index)
    keys = rng.row_keys([seed for seed in range(seeds) for _ in rows], prompts, before=[0] * count)
    step = torch.zeros(count, dtype=torch.int64, device=device)
    fresh = noise(torch.as_tensor(keys, device=device), step, positions, model.facts.vocab_size, FIRST_STREAM)
    answers = padded([[*row[start:]] for row, start in zip(rows, starts, strict=True)], width, HOLE)
    given = torch.as_tensor(answers, device=device).repeat(seeds, 1)
    query = CanvasQuery(
        rows=np.arange(count),
        tokens=torch.where(given == HOLE, fresh, given),
        positions=positions,
        store=StoreCall(state.index(index), visible_length=max(starts), begin=min(starts)),
        forwarded=np.full(count, width),
        kind="canvas",
    )
    logits: Tensor = model(query, state.store)
    return logits.unflatten(0, (seeds, len(rows)))
