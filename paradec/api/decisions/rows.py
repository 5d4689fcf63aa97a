"""Questions as rows of ids, and the model's log-probabilities at the places of their answers."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paradec.api.decisions.questions import Asked
from paradec.core import rng
from paradec.core.checks import check_text, shown
from paradec.core.facts import HOLE
from paradec.core.family_queries import CanvasQuery
from paradec.core.prompts import check_rows, ids_of, render, unknown_words
from paradec.core.protocol import NotFinite
from paradec.core.query import StoreCall, whole_rows
from paradec.samplers.renoising.diffusion_gemma import DiffusionGemma
from paradec.samplers.renoising.state import FIRST_STREAM, noise
from paradec.samplers.starting import padded

Ids = tuple[int, ...]
Template = Callable[[str, Asked], str]
"""From the state as text and a question to the text of the user's turn."""
NEEDED = "5.23"
"""The first release of transformers that has the decision pipeline."""
MIN_SHARED_TOKENS = 16
"""Tokens that rows must have in common for a call of its own to evaluate them."""


class Step(NamedTuple):
    """One factor of a label's probability: that one of `ids` is at a position of a row."""

    row: Ids
    prompt: int
    """How many tokens of the row are its prompt."""
    position: int
    ids: Ids


def lay_out(
    model: Any, state: Any, questions: Sequence[Asked], template: Template | None, together: bool
) -> tuple[int, list[list[list[Step]]]]:
    """Lay out questions about a state in one row, in the turns of one chat: the row's length, and for each label of
    each question the steps whose probabilities multiply to the label's. Rows have a hole for each token of an answer's
    longest label; those of causal models end before the answer.

    Raises:
        ValueError: labels that the tokenizer cannot tell apart, texts that it cannot write, a chat template that writes
            a turn otherwise where others follow, a row that is longer than the model takes.
        ImportError: the installed transformers has no prompt for questions.
    """
    facts, is_causal = model.facts, model.facts.topology == "causal"
    has_template = bool(getattr(model.tokenizer, "chat_template", None))
    labels = [_label_ids(model, question.labels) for question in questions]
    if together and not has_template:
        raise ValueError(f"together=True asks in turns of a chat, and {facts.name} has no chat template")
    chat: list[dict[str, str]] = []
    row: list[int] = []
    before: list[int] = []
    starts: list[int] = []
    for question, label_ids in zip(questions, labels, strict=True):
        text = text_of("" if chat else state, question, template)
        chat.append({"role": "user", "content": text.lstrip("\n") if chat else text})
        opened, tail = (_chat_ids(model, chat), []) if has_template else _plain_ids(model, text + "\n")
        if opened[: len(before)] != before:
            raise ValueError(
                f"together=True: the chat template of {facts.name} writes a turn otherwise where others follow; "
                "ask one by one"
            )
        row += opened[len(before) :]
        starts.append(len(row))
        row += [] if is_causal else [facts.hole_id] * max(map(len, label_ids))
        chat.append({"role": "assistant", "content": question.labels[0]})
        before = [*opened, *label_ids[0]]
    prompt = starts[0]
    if not is_causal:
        closed = _chat_ids(model, chat, open_turn=False) if has_template else opened
        row += tail or _end_token(facts, opened, closed)
    if facts.topology == "block_causal":  # trained on whole blocks
        begin, stop = np.array([prompt]), np.array([len(row)])
        end = int(facts.block_bounds(begin, stop, begin)[1][0])
        row += [facts.fill_token_id] * (min(end, facts.max_length or end) - len(row))
    steps = [_steps(facts, tuple(row), prompt, start, ids) for start, ids in zip(starts, labels, strict=True)]
    new = max(map(len, labels[0])) if is_causal else len(row) - prompt
    if facts.topology == "canvas":
        if new > facts.block_length:
            raise ValueError(
                f"the answers take {new} positions after the prompt, and a canvas has {facts.block_length}"
            )
        new = facts.block_length
    check_rows(model, [row])
    facts.check_length(prompt + new, new)
    return len(row), steps


def _steps(facts: Any, row: Ids, prompt: int, start: int, labels: Sequence[Ids]) -> list[list[Step]]:
    """The steps of each label: its tokens, each given those before it, then an end token where another label is longer
    (on causal models: where one begins another one). Raises ValueError where there is no end token."""
    if facts.topology == "causal":
        ended = [any(b[: len(a)] == a for a, b in itertools.pairwise(sorted(labels)))] * len(labels)
    else:
        ended = [len(label) < max(map(len, labels)) for label in labels]
    if any(ended) and not facts.eos_token_ids:
        raise ValueError(f"{facts.name} has no end token, which tells labels of different numbers of tokens apart")
    steps: list[list[Step]] = []
    for label, is_ended in zip(labels, ended, strict=True):
        choices = [(token,) for token in label] + [tuple(facts.eos_token_ids)] * is_ended
        rows = (row[:start] + label[:count] + row[start + count :] for count in range(len(choices)))
        steps.append([Step(own, prompt, start + count, ids) for count, (own, ids) in enumerate(zip(rows, choices))])
    return steps


def text_of(state: Any, question: Asked, template: Template | None) -> str:
    """The text of the user's turn: transformers' own prompt; of a `Span` the state and the instructions alone."""
    if template is not None:
        text = template(_json_text(state), question)
        if not isinstance(text, str):
            raise TypeError(f"template returned {shown(text)}: it must return the text of the user's turn")
    elif question.type == "span":
        text = "\n\n".join(part for part in (_json_text(state), _json_text(question.instructions)) if part)
    else:
        try:
            text = _prompt().render(state=state, question=question)
        except RecursionError:
            raise ValueError(f"instructions={shown(question.instructions)} or options are nested too deeply") from None
    check_text("state and question", text)
    if not text.strip():
        raise ValueError(f"nothing is asked: state={shown(state)} and instructions={shown(question.instructions)}")
    return text


def _json_text(value: Any) -> str:
    """A text unchanged, other data as JSON, None as nothing."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@lru_cache
def _prompt() -> Any:
    """transformers' prompt for questions, a template of Jinja."""
    try:
        from transformers.decision import DECISION_PROMPT
        from transformers.utils.chat_template_utils import _compile_jinja_template
    except ImportError as error:
        import transformers

        raise ImportError(
            f"decide asks with the prompt of transformers {NEEDED}, and {transformers.__version__} has none: install a "
            "newer one, or give template="
        ) from error
    return _compile_jinja_template(DECISION_PROMPT)


def _label_ids(model: Any, labels: Sequence[str]) -> list[Ids]:
    """The ids of labels. Raises ValueError for one that the tokenizer cannot write, and two that it writes alike."""
    tokenizer, facts = model.tokenizer, model.facts
    rows: list[Ids] = []
    for label in labels:
        ids = tuple(tokenizer(label, add_special_tokens=False)["input_ids"])
        if not ids or tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
            raise ValueError(f"the tokenizer of {facts.name} cannot write the label {shown(label)}; give labels")
        if {facts.mask_token_id, *facts.eos_token_ids} & {*ids}:
            raise ValueError(f"the label {shown(label)} holds the mask or an end token; give another one")
        rows.append(ids)
    for label, ids in zip(labels, rows, strict=True):
        if rows.count(ids) > 1:
            raise ValueError(f"the tokenizer of {facts.name} writes the label {shown(label)} as another one")
    return rows


def _end_token(facts: Any, opened: list[int], closed: list[int]) -> list[int]:
    """The end token that the chat template writes after an answer, else the model's first; none where it has none.

    Args:
        opened: a chat up to the answer. closed: the same with an answer.
    """
    ends = facts.eos_token_ids
    common = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], zip(opened, closed))])
    return [next((token for token in closed[common:] if token in ends), ends[0])] if ends else []


def _plain_ids(model: Any, text: str) -> tuple[list[int], list[int]]:
    """The ids of a text without a chat template, and those that the tokenizer puts after it."""
    tokenizer = model.tokenizer
    if controls := _control_tokens(tokenizer, text):
        raise ValueError(f"the text holds {controls[0]!r}, a special token, and there is no chat template to write it")
    plain = ids_of(tokenizer, text)
    if not (model.facts.topology.startswith("causal") or model.kind == "encoder"):
        return plain, []
    ids = ids_of(tokenizer, text, special=True)
    begin = next((start for start in range(len(ids)) if ids[start : start + len(plain)] == plain), 0)
    return ids[: begin + len(plain)], ids[begin + len(plain) :]


def _chat_ids(model: Any, chat: list[dict[str, str]], open_turn: bool = True) -> list[int]:
    """The ids of a chat, in which special tokens of its contents are text. Raises ValueError for a text that the
    tokenizer cannot write."""
    tokenizer, contents = model.tokenizer, " ".join(turn["content"] for turn in chat)
    if not (controls := _control_tokens(tokenizer, contents)):
        return ids_of(tokenizer, render(tokenizer, chat, open_turn, enable_thinking=False))
    if "sanitize_control_tokens" not in inspect.signature(tokenizer.apply_chat_template).parameters:
        raise ValueError(
            f"the text holds {controls[0]!r}, a special token, which transformers {NEEDED} can write as text"
        )
    # on a copy: while it writes such a text, the tokenizer takes no special token for one, in any thread
    copied, lock = _copy_of(tokenizer)
    with lock:
        ids: list[int] = copied.apply_chat_template(
            chat, add_generation_prompt=open_turn, enable_thinking=False, sanitize_control_tokens=True, return_dict=True
        )["input_ids"]
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        raise unknown_words(tokenizer, contents)
    return ids


@lru_cache(maxsize=4)
def _copy_of(tokenizer: Any) -> tuple[Any, threading.Lock]:
    return copy.deepcopy(tokenizer), threading.Lock()


def _control_tokens(tokenizer: Any, text: str) -> list[str]:
    """The special tokens that a text holds."""
    return [token for token in tokenizer.added_tokens_encoder if token and token in text and not token.isspace()]


# ---- reading --------------------------------------------------------------------------------------------------------


def read(
    model: Any, steps: Iterable[Step], batch_size: int, seeds: int, before_call: Callable[[], None] | None
) -> tuple[dict[Step, float], int]:
    """Evaluate rows, each once: log-probabilities of steps, and the number of calls. On canvases they are means over
    noises of as many seeds.

    Raises:
        FloatingPointError: NaN or +inf among the logits.
    """
    by_row: dict[Ids, list[Step]] = {}
    for step in steps:
        by_row.setdefault(step.row, []).append(step)
    rows, facts = sorted(by_row, key=len), model.facts
    positions = {row: sorted({step.position for step in by_row[row]}) for row in rows}
    is_canvas = facts.topology == "canvas"
    size = max(1, batch_size // seeds) if is_canvas else batch_size
    groups = [rows] if is_canvas or model.pads else [[*group] for _, group in itertools.groupby(rows, len)]
    shared = 0 if is_canvas else _shared_length(model, rows, min(places[0] for places in positions.values()))
    log_probs: dict[Step, float] = {}
    with torch.inference_mode():
        store, forwards = (_fill_store(model, rows[0][:shared]), 1) if shared else (None, 0)
        for batch in (group[first : first + size] for group in groups for first in range(0, len(group), size)):
            if before_call is not None:
                before_call()
            prompts = [by_row[row][0].prompt for row in batch]
            if is_canvas:
                logits = _first_step(model, batch, prompts, seeds)
                forwards += 2  # prompts, and canvases
            else:
                query = whole_rows(model, batch, [positions[row] for row in batch], prompts, shared)
                logits = (model(query) if store is None else model(query, store)).unsqueeze(1)
                forwards += 1
            for row, prompt, row_logits in zip(batch, prompts, logits, strict=True):
                places = positions[row]
                columns = [place - prompt for place in places] if is_canvas else [*range(len(places))]
                scores = row_logits[:, columns]
                scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
                total = scores.logsumexp(-1, keepdim=True)
                if not total.isfinite().all():
                    message = f"{facts.name} returned NaN or +inf for a row of {len(row)} tokens"
                    raise NotFinite(message, np.zeros(1, int))
                for column, place in enumerate(places):
                    here = [step for step in by_row[row] if step.position == place]
                    ids = sorted({token for step in here for token in step.ids})
                    means = (scores[:, column, ids] - total[:, column]).logsumexp(0) - math.log(len(scores))
                    by_id = dict(zip(ids, means.double().tolist(), strict=True))
                    log_probs |= {step: _log_sum_exp([by_id[token] for token in step.ids]) for step in here}
    return log_probs, forwards


def _log_sum_exp(values: list[float]) -> float:
    largest = max(values)
    if largest == -math.inf:
        return largest
    return largest + math.log(sum(math.exp(value - largest) for value in values))


def _shared_length(model: Any, rows: Sequence[Ids], first: int) -> int:
    """How many leading tokens all rows have in common, whose keys and values depend on nothing after them; 0 where a
    call for them would not pay. first: the first position to be read."""
    facts = model.facts
    if len(rows) == 1 or not model.supports_store or facts.topology not in ("causal", "block_causal"):
        return 0
    if facts.prompt_aligned:  # the whole prompt is one block
        return 0
    low, high, longest = min(rows), max(rows), first - 1  # a shifted prediction is read one to the left
    common = next((index for index in range(longest) if low[index] != high[index]), longest)
    common -= common % facts.block_unit
    return common if common >= MIN_SHARED_TOKENS else 0


def _fill_store(model: Any, prefix: Ids) -> Any:
    """A store with the keys and values of the tokens that all rows begin with."""
    store, length, index = model.make_store(1, len(prefix)), len(prefix), np.zeros(1, np.int64)
    query = whole_rows(model, [prefix], [[length - 1]], [length])
    slots = torch.arange(length, device=model.device).unsqueeze(0)
    query.store = StoreCall(torch.as_tensor(index, device=model.device), slots, index, length)
    model(query, store)
    return store


def _first_step(model: Any, rows: Sequence[Ids], starts: Sequence[int], seeds: int) -> Tensor:
    """Logits [R, seeds, C, V] of canvases that begin at `starts`, after their prompts. Given tokens stay where they
    are; where a row has `HOLE` or has ended is noise of seeds 0, 1, ..., which depends on the prompt alone."""
    device, width = model.device, model.facts.block_length
    prompts = [[*row[:start]] for row, start in zip(rows, starts, strict=True)]
    unique = [[*prompt] for prompt in dict.fromkeys(map(tuple, prompts))]
    sampler = DiffusionGemma()
    state = sampler.start(model, unique, max_new_tokens=width, seed=0)
    model(sampler.query(state)[0], state.store)  # encodes the prompts

    copies = [prompt for prompt in prompts for _ in range(seeds)]
    begin = torch.tensor([len(prompt) for prompt in copies])
    positions = begin.unsqueeze(1) + torch.arange(width)
    keys = torch.as_tensor(rng.row_keys([*range(seeds)] * len(rows), copies, before=[0] * len(copies)))
    fresh = noise(keys, torch.zeros_like(begin), positions, model.facts.vocab_size, FIRST_STREAM)
    given = torch.as_tensor(padded([[*row[start:]] for row, start in zip(rows, starts, strict=True)], width, HOLE))
    given = given.repeat_interleave(seeds, 0)
    index = torch.tensor([unique.index(prompt) for prompt in copies], device=device)
    query = CanvasQuery(
        rows=np.arange(len(copies)),
        tokens=torch.where(given == HOLE, fresh, given).to(device),
        positions=positions.to(device),
        store=StoreCall(index, visible_length=max(starts), begin=min(starts)),
        forwarded=np.full(len(copies), width),
        kind="canvas",
    )
    logits: Tensor = model(query, state.store)
    return logits.unflatten(0, (len(rows), seeds))
