"""A question becomes a row of ids, in which holes are where its answer is read."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from paradec.api.decisions.questions import Asked
from paradec.core.checks import check_text, shown
from paradec.core.prompts import ids_of, render, unknown_words

Template = Callable[[str, Asked], str]
"""From the state as text and a question to what the user's turn says."""
NEEDED = "5.23"
"""The first release of transformers that has the decision pipeline."""


@dataclass(frozen=True)
class Place:
    """Where one question is answered."""

    row: tuple[int, ...]
    """Ids; on masked models and canvases with holes from `at` on, as many as the longest label has tokens."""
    at: int
    """The position of the answer's first token; on causal models the row ends before it."""
    prompt: int
    """How many tokens are before the row's first answer."""
    texts: tuple[tuple[int, ...], ...]
    """The labels' ids, in the order of the options."""
    holes: int
    """How many there are for this question; 0 on causal models."""
    closed: bool
    """Whether an end token follows every label, or what is shorter than the holes; so that no label begins another."""


def places(model: Any, state: Any, asked: Sequence[Asked], template: Template | None, together: bool) -> list[Place]:
    """The rows of questions about a state: one for each, or one for all.

    Raises:
        ValueError: labels that the tokenizer cannot tell apart, texts that it cannot write, a row that is longer than
            the model takes. ImportError: the installed transformers has no prompt for questions.
    """
    texts = [label_ids(model, one.labels) for one in asked]
    if together:
        return _in_one_row(model, state, asked, template, texts)
    return [
        _alone(model, [{"role": "user", "content": text_of(state, one, template)}], own, one.labels[0])
        for one, own in zip(asked, texts, strict=True)
    ]


# ---- texts ----------------------------------------------------------------------------------------------------------


def text_of(state: Any, asked: Asked, template: Template | None) -> str:
    """What the user's turn says: transformers' own prompt; of a `Span` the state and the instructions alone."""
    if template is not None:
        text = template(json_text(state), asked)
        if not isinstance(text, str):
            raise TypeError(f"template returned {shown(text)}: it must return the text of the user's turn")
    elif asked.type == "span":
        text = "\n\n".join(part for part in (json_text(state), json_text(asked.instructions)) if part)
    else:
        try:
            text = _prompt().render(state=state, question=asked)
        except RecursionError:
            raise ValueError(f"instructions={shown(asked.instructions)} or options are nested too deeply") from None
    check_text("state and question", text)
    if not text.strip():
        raise ValueError(f"nothing is asked: state={shown(state)} and instructions={shown(asked.instructions)}")
    return text


def json_text(value: Any) -> str:
    """A text as it is, other data as JSON, None as nothing."""
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


# ---- ids ------------------------------------------------------------------------------------------------------------


def label_ids(model: Any, labels: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The ids of labels, as the beginning of an answer.

    Raises:
        ValueError: a label that the tokenizer cannot write, or two that it writes alike.
    """
    tokenizer = model.tokenizer
    found = [tuple(tokenizer(label, add_special_tokens=False)["input_ids"]) for label in labels]
    for label, ids in zip(labels, found, strict=True):
        if not ids or tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
            raise ValueError(f"the tokenizer of {model.facts.name} cannot write the label {shown(label)}; give labels")
        if {model.facts.mask_token_id, *model.facts.eos_token_ids} & {*ids}:
            raise ValueError(f"the label {shown(label)} holds the mask or an end token; give another one")
    if len({*found}) < len(found):
        twice = next(label for label, ids in zip(labels, found, strict=True) if found.count(ids) > 1)
        raise ValueError(f"the tokenizer of {model.facts.name} writes the label {shown(twice)} as another one")
    return tuple(found)


def _alone(model: Any, chat: list[dict[str, str]], texts: tuple[tuple[int, ...], ...], label: str) -> Place:
    """The place of one question that is asked in a chat of one turn."""
    facts, tail = model.facts, list[int]()
    templated = bool(getattr(model.tokenizer, "chat_template", None))
    if templated:
        ids = chat_ids(model, chat)
    else:
        ids, tail = _plain_ids(model, chat[0]["content"] + "\n")
    if facts.topology == "causal":
        return Place(tuple(ids), len(ids), len(ids), texts, 0, _closed(facts, _begins_another(texts)))
    closed = chat_ids(model, [*chat, {"role": "assistant", "content": label}], open_turn=False) if templated else ids
    holes = max(map(len, texts))
    row = [*ids, *[facts.hole_id] * holes, *(tail or _end(model, ids, closed))]
    ended = _closed(facts, min(map(len, texts)) < holes)
    return Place(tuple(_whole_blocks(facts, row, len(ids))), len(ids), len(ids), texts, holes, ended)


def _in_one_row(
    model: Any, state: Any, asked: Sequence[Asked], template: Template | None, texts: Sequence[Any]
) -> list[Place]:
    """The places of questions that are asked in one chat: the state in the first turn, each answer after its question.

    Raises:
        ValueError: no chat template, or one that writes a turn otherwise where other turns follow.
    """
    if not getattr(model.tokenizer, "chat_template", None):
        raise ValueError(f"together=True asks in turns of a chat, and {model.facts.name} has no chat template")
    chat: list[dict[str, str]] = []
    row: list[int] = []
    before: list[int] = []
    found: list[tuple[int, Any, int]] = []
    for number, (one, own) in enumerate(zip(asked, texts, strict=True)):
        text = text_of("" if number else state, one, template)
        chat.append({"role": "user", "content": text.lstrip("\n") if number else text})
        opened = chat_ids(model, chat)
        if opened[: len(before)] != before:
            raise ValueError(
                f"together=True: the chat template of {model.facts.name} writes a turn otherwise where others follow; "
                "ask one by one"
            )
        row += opened[len(before) :]
        holes = max(map(len, own))
        found.append((len(row), own, holes))
        row += [model.facts.hole_id] * holes
        chat.append({"role": "assistant", "content": one.labels[0]})
        before = [*opened, *own[0]]
    row += _end(model, opened, chat_ids(model, chat, open_turn=False))
    whole = tuple(row)
    return [
        Place(whole, at, found[0][0], own, holes, _closed(model.facts, min(map(len, own)) < holes))
        for at, own, holes in found
    ]


def _begins_another(texts: Sequence[tuple[int, ...]]) -> bool:
    """Whether one of several different texts is the beginning of another one."""
    return any(b[: len(a)] == a for a, b in itertools.pairwise(sorted(texts)))


def _closed(facts: Any, needed: bool) -> bool:
    """`needed`, where there is an end token. Raises ValueError where there is none."""
    if needed and not facts.eos_token_ids:
        raise ValueError(f"{facts.name} has no end token, which tells labels of different numbers of tokens apart")
    return needed


def _end(model: Any, opened: list[int], closed: list[int]) -> list[int]:
    """The end token that the chat template writes after an answer, else the model's first; none where it has none.

    Args:
        opened: a chat up to the answer. closed: the same with an answer.
    """
    ends = model.facts.eos_token_ids
    same = next(
        (at for at, pair in enumerate(zip(opened, closed)) if pair[0] != pair[1]), min(map(len, (opened, closed)))
    )
    return [next((token for token in closed[same:] if token in ends), ends[0])] if ends else []


def _whole_blocks(facts: Any, row: list[int], prompt: int) -> list[int]:
    """Fill up a row to whole blocks, of block-causal models, which were trained on such."""
    if facts.topology != "block_causal":
        return row
    start, stop = np.array([prompt]), np.array([len(row)])
    end = int(facts.block_bounds(start, stop, start)[1][0])
    return row + [facts.fill_token_id] * (min(end, facts.max_length or end) - len(row))


def _plain_ids(model: Any, text: str) -> tuple[list[int], list[int]]:
    """The ids of a text without a chat template, and those that the tokenizer puts after it."""
    tokenizer, facts = model.tokenizer, model.facts
    if found := _controls(tokenizer, text):
        raise ValueError(f"the text holds {found[0]!r}, a special token, and there is no chat template to write it")
    special = facts.topology.startswith("causal") or model.kind == "encoder"
    ids = ids_of(tokenizer, text, special=special)
    if not special:
        return ids, []
    plain = ids_of(tokenizer, text)
    begin = next((at for at in range(len(ids)) if ids[at : at + len(plain)] == plain), 0)
    return ids[: begin + len(plain)], ids[begin + len(plain) :]


_COPIES: weakref.WeakKeyDictionary[Any, tuple[Any, threading.Lock]] = weakref.WeakKeyDictionary()
_COPYING = threading.Lock()


def chat_ids(model: Any, chat: list[dict[str, str]], open_turn: bool = True) -> list[int]:
    """The ids of a chat, in which special tokens that its contents hold are text.

    Raises:
        ValueError: a text that the tokenizer cannot write.
    """
    tokenizer = model.tokenizer
    contents = " ".join(turn["content"] for turn in chat)
    if not _controls(tokenizer, contents):
        return ids_of(tokenizer, render(tokenizer, chat, open_turn, enable_thinking=False))
    if "sanitize_control_tokens" not in inspect.signature(tokenizer.apply_chat_template).parameters:
        held = _controls(tokenizer, contents)[0]
        raise ValueError(f"the text holds {held!r}, a special token, which transformers {NEEDED} can write as text")
    with _COPYING:
        own, lock = _COPIES.get(tokenizer) or _COPIES.setdefault(
            tokenizer, (copy.deepcopy(tokenizer), threading.Lock())
        )
    # on a copy: while it writes such a text, the tokenizer takes no special token for one, in any thread
    with lock:
        ids: list[int] = own.apply_chat_template(
            chat, add_generation_prompt=open_turn, enable_thinking=False, sanitize_control_tokens=True, return_dict=True
        )["input_ids"]
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        raise unknown_words(tokenizer, contents)
    return ids


def _controls(tokenizer: Any, text: str) -> list[str]:
    """The special tokens that a text holds."""
    return [token for token in tokenizer.added_tokens_encoder if token and token in text and not token.isspace()]
