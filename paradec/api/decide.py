"""Typed questions about a text or JSON object (the state), answered from the model's probabilities of a few labels."""

from __future__ import annotations

import itertools
import json
import math
import os
import string
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import __version__
from transformers.utils.chat_template_utils import render_jinja_template

from paradec.caches.kept_prefix import evaluate
from paradec.core.checks import check_bool, check_choice, check_int, check_model, check_number, check_text, short_repr
from paradec.core.facts import HOLE
from paradec.core.family_queries import CanvasQuery, build_rows_query
from paradec.core.packaged import unknown_words_error
from paradec.core.prompts import check_rows, render_chat, tokenize
from paradec.core.query import StoreCall
from paradec.core.weights import weights_lock
from paradec.samplers.renoising.diffusion_gemma import DiffusionGemma
from paradec.samplers.renoising.state import FIRST_STREAM, draw_noise_tokens
from paradec.samplers.start import pad_rows, row_keys

TYPES = ("noul", "choice", "score", "span")
"""Types of `YesNo`, `Pick`, `Score` and `Span`, named as in transformers."""
Options = Sequence[str] | Mapping[str, Any]
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """A question with the fields of transformers' decision pipeline. Base of `YesNo`, `Pick`, `Score` and `Span`, which
    raise ValueError or TypeError for a wrong argument.

    type: one of `TYPES`. instructions: a text or JSON data; None if the state or the options contain the question.
    labels: the answers that the model may generate, one for each option.
    descriptions: meanings of the options; for None, the prompt lists only the option's name.
    values: the options, as in `Decision.probabilities`."""

    type: str
    instructions: Any
    labels: list[str]
    descriptions: list[Any]
    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        check_json("instructions", self.instructions)

    @property
    def options(self) -> list[str]:
        """The values as texts."""
        return [str(value).lower() if isinstance(value, bool) else str(value) for value in self.values]

    def rotate(self, by: int) -> Question:
        """Copy with the options rotated to the left under the same labels."""
        descriptions, values = self.descriptions[by:] + self.descriptions[:by], self.values[by:] + self.values[:by]
        return Question(self.type, self.instructions, self.labels, descriptions, values)


class YesNo(Question):
    """A yes-no question. true, false: meanings of the answers. labels: the texts that the model generates for them."""

    def __init__(
        self, instructions: Any = None, true: Any = None, false: Any = None, labels: Sequence[str] = ("Yes", "No")
    ):
        if instructions is None and true is None and false is None:
            raise ValueError("a YesNo needs instructions, or the meaning of true or false")
        check_json("true", true)
        check_json("false", false)
        super().__init__("noul", instructions, _check_texts("labels", labels, 2), [true, false], (True, False))


class Pick(Question):
    """A choice of one of several options, which the prompt lists. options: different texts, or a mapping of texts to
    meanings. labels: the model's answers, one for each option; None is A, B, C, ... for at most 26 options."""

    def __init__(self, instructions: Any = None, options: Options = (), labels: Sequence[str] | None = None):
        values = _check_texts("options", options)
        descriptions = [*options.values()] if isinstance(options, Mapping) else [None] * len(values)
        check_json("options", descriptions)
        labels = _check_texts("labels", labels, len(values))
        super().__init__("choice", instructions, labels, descriptions, tuple(values))


class Score(Question):
    """A level of a scale; the prompt lists the levels. levels: meanings, lowest first. labels: as for `Pick`."""

    def __init__(self, instructions: Any = None, levels: Sequence[Any] = (), labels: Sequence[str] | None = None):
        descriptions = [] if isinstance(levels, str | bytes) or not isinstance(levels, Sequence) else [*levels]
        count = len(descriptions)
        if count == 0 or any(level is None for level in descriptions):
            raise ValueError(
                f"levels={short_repr(levels)} must be the levels' meanings, lowest first, none of them None"
            )
        check_json("levels", descriptions)
        labels = _check_texts("labels", labels, count)
        super().__init__("score", instructions, labels, descriptions, tuple(range(count)))


class Span(Question):
    """A choice of one of several texts of any length, which the prompt does not list (as with `paradec.Choice`)."""

    def __init__(self, instructions: Any = None, texts: Sequence[str] = ()):
        values = _check_texts("texts", texts)
        super().__init__("span", instructions, values, [None] * len(values), tuple(values))


def check_json(name: str, value: Any) -> None:
    """Raise ValueError or TypeError unless a value is JSON data with valid Unicode texts."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name}={short_repr(value)} must be a text or data of JSON: {short_repr(str(error))}") from None
    check_text(name, text)


def _check_texts(name: str, value: Any, count: int | None = None) -> list[str]:
    """Convert a value to a list of texts; None becomes `count` letters. Raises ValueError for no text, an empty or
    repeated text, and a number of texts other than `count` (if given)."""
    if value is None and count is not None:
        value = [*string.ascii_uppercase[:count]]
    texts = [] if isinstance(value, str | bytes) or not isinstance(value, Sequence | Mapping) else [*value]
    if not texts or not all(isinstance(text, str) and text for text in texts) or len({*texts}) < len(texts):
        example = f'write {name}=["red", "blue"]'
        raise ValueError(
            f"{name}={short_repr(value)} must be different texts, none of them empty, and at least one: {example}"
        )
    if count is not None and len(texts) != count:
        raise ValueError(f"{name}={short_repr(value)} must be texts for {count} options (None: letters, up to 26)")
    check_json(name, texts)
    return texts


@dataclass(frozen=True)
class Decision:
    """Answer to one question."""

    type: str
    """"noul", "choice", "score" or "span"."""
    value: Any
    """True or False, the likeliest option or text, or the mean level of a `Score`."""
    probabilities: Mapping[Any, float]
    """Probabilities of the options, levels or texts."""
    confidence: float
    """0 (a guess) to 1, as in transformers. Of m options, the likeliest of which has probability p: (p - 1/m) / (1 -
    1/m). For a `Score`: max(0, 1 - d / u), where d is the mean distance to the likeliest level, and u is the mean
    distance of a uniform distribution to the middle."""
    entropy: float
    """Entropy of the probabilities, in nats."""
    mass: float
    """Probability of all labels together. If it is low, the model did not understand the question."""
    log_scores: tuple[float, ...]
    """Log-probabilities of the labels, before the temperature. With `prior`, minus those about an empty state."""


class Decisions(dict[str, Decision]):
    """Result of `decide`: a `Decision` for each question, by name.

    forwards: number of model calls. input_tokens: tokens in the rows of all questions."""

    def __init__(self, answers: Mapping[str, Decision], forwards: int, input_tokens: int):
        super().__init__(answers)
        self.forwards, self.input_tokens = forwards, input_tokens

    def __str__(self) -> str:
        lines = [f"{k}: {d.value} (confidence {d.confidence:.3f}, mass {d.mass:.3f})" for k, d in self.items()]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON data; probabilities become pairs, since their keys may not be texts."""
        answers = {name: asdict(answer) for name, answer in self.items()}
        for answer in answers.values():
            answer["probabilities"] = [[*pair] for pair in answer["probabilities"].items()]
        return {"answers": answers, "forwards": self.forwards, "input_tokens": self.input_tokens}


def decide(
    model: Any,
    state: Any,
    questions: Mapping[str, Question],
    *,
    temperature: float | Mapping[str, float] | None = None,
    prior: str | None = None,
    rotate: bool = False,
    template: Callable[[str, Question], str] | None = None,
    seeds: int = 4,
    batch_size: int = 16,
    before_call: Callable[[int], None] | None = None,
) -> Decisions:
    """Answer questions about a state from the probabilities of their labels, without generating.

    >>> questions = {"spam": paradec.YesNo("Is it spam?")}                 # doctest: +SKIP
    >>> paradec.decide(model, "WIN a FREE phone!", questions)["spam"].value  # doctest: +SKIP
    True

    Each question is a separate row with the prompt of transformers' decision pipeline; with causal models the answers
    equal the pipeline's. Labels are read from the next token (causal models), at masks before an end token, or from the
    first step of a canvas. A label of several tokens has the product of their probabilities, and a label with fewer
    tokens than others ends with an end token.

    Args:
        model: a causal, bidirectional, block-causal or canvas model with a tokenizer.
        state: one text or JSON object.
        questions: `YesNo`, `Pick`, `Score` or `Span` by name.
        temperature: divisor of the log scores, or one for each type of question, as from `fit_temperature`.
        prior: "empty" subtracts the log scores for an empty state (Zhao et al., arXiv 2102.09690).
        rotate: ask each `Pick` with every rotation of its options, and average the log scores.
        template: function that returns the user's turn from the state as text and a `Question`, instead of
            transformers' prompt.
        seeds: on canvases, number of noise samples to average probabilities over.
        batch_size: rows per call.
        before_call: called before each model call with the number of tokens of all calls together, a constant.

    Raises:
        ValueError, TypeError: an argument out of its range, before any work.
        ImportError: transformers is older than 5.23, and its prompt is used or a text contains special tokens.
        FloatingPointError: the model returned NaN or infinite logits, or no label has a probability.
    """
    _check(model, state, questions, rotate, template)
    check_choice("prior", prior, (None, "empty"))
    check_int("seeds", seeds, low=1, high=1024)
    check_int("batch_size", batch_size, low=1)
    if not isinstance(temperature, Mapping):
        temperature = dict.fromkeys(TYPES, 1.0 if temperature is None else temperature)
    for kind, number in temperature.items():
        check_choice("type of question in temperature", kind, TYPES)
        check_number("temperature", number, low=1e-6, high=1e6)
    num_rotations = {name: len(q.values) if rotate and q.type == "choice" else 1 for name, q in questions.items()}
    # each question's phrasings: sign (1: about the state, -1: about the empty state), question, steps of its labels
    phrasings: dict[str, list[tuple[int, Question, list[list[Step]]]]] = {name: [] for name in questions}
    input_tokens, answers = 0, dict[str, Decision]()
    for (subject, sign), name in itertools.product([(state, 1), ("", -1)] if prior else [(state, 1)], questions):
        for phrasing in map(questions[name].rotate, range(num_rotations[name])):
            steps = build_steps(model, subject, phrasing, template)
            input_tokens += len(steps[0][0][0].row)
            phrasings[name].append((sign, phrasing, steps))
    all_labels = [labels for question_phrasings in phrasings.values() for *_, labels in question_phrasings]
    all_steps = [step for labels in all_labels for label in labels for step in label]
    with weights_lock(model):
        log_probs, forwards = read_log_probs(model, all_steps, batch_size, seeds, before_call or (lambda tokens: None))
    for name, question in questions.items():
        scores, masses = np.zeros(len(question.values)), list[float]()
        for sign, phrasing, labels in phrasings[name]:
            logs = np.array([sum(log_probs[step] for step in label) for label in labels], np.float64)
            if sign > 0:
                masses.append(min(1.0, float(np.exp(logs).sum())))
            elif not np.isfinite(logs).all():
                raise FloatingPointError(f"a label of question {name!r} has no probability about an empty state")
            scores += sign / num_rotations[name] * logs[[phrasing.values.index(value) for value in question.values]]
        if not np.isfinite(scores).any():
            raise FloatingPointError(f"no label of question {name!r} has a probability")
        p = _softmax(scores / float(temperature.get(question.type, 1)))
        count, best, levels, confidence = len(p), int(p.argmax()), np.arange(len(p)), 1.0
        if count > 1 and question.type == "score":
            confidence = 1 - float(p @ np.abs(levels - best)) / (float(np.abs(levels - (count - 1) / 2).sum()) / count)
        elif count > 1:
            confidence = (float(p[best]) - 1 / count) / (1 - 1 / count)
        answers[name] = Decision(
            type=question.type,
            value=float(p @ levels) if question.type == "score" else question.values[best],
            probabilities=dict(zip(question.values, p.tolist(), strict=True)),
            confidence=max(0.0, confidence),
            entropy=max(0.0, -float(p[p > 0] @ np.log(p[p > 0]))),
            mass=float(np.mean(masses)),
            log_scores=tuple(scores.tolist()),
        )
    return Decisions(answers, forwards, input_tokens)


def check_decision_model(model: Any) -> None:
    """Raise TypeError or ValueError unless `decide` supports the model."""
    check_model("decide", model, ("text", "canvas"))
    name, topology, tokenizer = model.facts.name, model.facts.topology, getattr(model, "tokenizer", None)
    if getattr(model, "reads_order", False):
        raise ValueError(f"{name} generates residues, and cannot answer questions: decide takes text models")
    if tokenizer is None:
        ways = "put its files into the model's folder, load with tokenizer=..., or set model.tokenizer = ..."
        raise ValueError(f"{name} has no tokenizer to write questions with: {ways}")
    if topology == "causal_context":
        raise ValueError(f"{name} predicts an answer's first token causally: load(..., topology='causal')")
    if topology != "causal" and model.facts.hole_id is None:
        raise ValueError(f"{name} has no mask token: {topology!r} models answer at a mask")


def _check(model: Any, state: Any, questions: Any, rotate: bool, template: Any) -> None:
    """Raise TypeError or ValueError unless the model can answer the questions."""
    check_decision_model(model)
    if not isinstance(questions, Mapping) or not questions:
        raise ValueError(f"questions={short_repr(questions)} must map names to questions, at least one")
    for key, question in questions.items():
        if not isinstance(key, str) or not isinstance(question, Question):
            raise TypeError(
                f"questions={short_repr({key: question})} must map names to paradec.YesNo, Pick, Score or Span"
            )
    if not isinstance(state, str | dict):
        raise TypeError(f"state={short_repr(state)} must be one text or JSON object; ask about several one by one")
    check_json("state", state)
    check_bool("rotate", rotate)
    if template is not None and not callable(template):
        raise TypeError(f"template={short_repr(template)} must be a function of the state and a question, or None")


def _softmax(scores: np.ndarray) -> np.ndarray:
    """Compute probabilities [m] proportional to exp(scores [m]); at least one score must be finite."""
    weights: np.ndarray = np.exp(scores - scores.max())
    return weights / weights.sum()


def fit_temperature(decided: Sequence[Mapping[str, Decision]], right: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Fit a temperature from 0.001 to 1000 for each type of question: it maximizes the right answers' likelihood.

    decided: results of `decide` with any temperature. right: for each result, the right answers by name (True or False,
    an option, a level 0, 1, ... or a text). Raises ValueError without right answers, or if one is not an option.
    """
    if len(decided) != len(right):
        raise ValueError(f"{len(decided)} results and {len(right)} mappings of right answers: give one for each")
    cases: dict[str, list[tuple[np.ndarray, int]]] = {}
    for answers, right_answers in zip(decided, right, strict=True):
        if not isinstance(answers, Mapping) or not isinstance(right_answers, Mapping):
            raise TypeError(
                f"decided={short_repr(decided)} must be a list of results of decide, and right={short_repr(right)} a "
                "list with a mapping for each result: {'team': 'a'}"
            )
        for name, value in right_answers.items():
            check_choice("name of a right answer", name, tuple(answers))
            options = [*answers[name].probabilities]
            if not any(type(value) is type(option) and value == option for option in options):
                raise ValueError(f"right answer {short_repr(value)} to {name!r} is none of {short_repr(options)}")
            scores = np.array(answers[name].log_scores)
            cases.setdefault(answers[name].type, []).append((scores - scores.max(), options.index(value)))
    if not cases:
        raise ValueError("no right answers: give at least one")
    temperatures = {}
    for kind, scores_and_answers in cases.items():  # mean -log p is convex in 1 / temperature: bisect its derivative
        low, high = math.log(1e-3), math.log(1e3)
        for _ in range(100):
            middle, excess = (low + high) / 2, 0.0
            for scores, answer in scores_and_answers:
                weights = _softmax(scores / math.exp(middle))
                is_positive = weights > 0
                excess += float(weights[is_positive] @ scores[is_positive]) - float(scores[answer])
            low, high = (middle, high) if excess > 0 else (low, middle)  # > 0: the distribution is too sharp
        temperatures[kind] = math.exp((low + high) / 2)
        if temperatures[kind] > 999:
            message = "the right answers are no likelier than chance, and every probability becomes equal"
            warnings.warn(f"temperature of {kind!r} is at its limit, 1000: {message}", stacklevel=2)
    return temperatures


class Place(NamedTuple):
    """A row with a prompt, and the position in it whose token is read."""

    row: Ids
    prompt_length: int
    position: int


Step = tuple[Place, Ids]
"""One factor of a label's probability: the probability that the token at a place is one of some ids."""


def build_steps(model: Any, state: Any, question: Question, template: Any) -> list[list[Step]]:
    """Encode a question as a row, and return the steps of each label. Except on causal models, the row has a mask for
    each token of the longest label. Raises ValueError for a row that is too long."""
    facts, is_causal = model.facts, model.facts.topology == "causal"
    labels, ends = _tokenize_labels(model, question.labels), facts.eos_token_ids
    longest = max(map(len, labels))
    chat = [{"role": "user", "content": write_user_turn(state, question, template)}]
    row, tail = _tokenize_chat(model, chat)
    start = len(row)
    if not is_causal:
        if not tail and ends:  # the end token that the template writes after an answer, else the model's first
            answer = {"role": "assistant", "content": question.labels[0]}
            answered, _ = _tokenize_chat(model, [*chat, answer], open_turn=False)
            suffix = answered[len(os.path.commonprefix([row, answered])) :]
            tail = [next((token for token in suffix if token in ends), ends[0])]
        row = [*row, *[facts.hole_id] * longest, *tail]
    missing = (start * facts.prompt_aligned - len(row)) % facts.block_unit  # fill the last block
    row += [facts.fill_token_id] * min(missing, (facts.max_length or math.inf) - len(row))
    num_new = longest if is_causal else len(row) - start
    width = facts.block_length if facts.topology == "canvas" else num_new
    if num_new > width:
        raise ValueError(f"answers take {num_new} positions after the prompt, and a canvas has {width}")
    check_rows(model, [row])
    facts.check_length(start + width, width)
    # an end token follows labels shorter than the longest (causal models: all labels if one is a prefix of another)
    needs_end = [len(label) < longest for label in labels]
    if is_causal:
        needs_end = [any(b[: len(a)] == a for a, b in itertools.pairwise(sorted(labels)))] * len(labels)
    if any(needs_end) and not ends:
        raise ValueError(f"{facts.name} has no end token, which tells labels of different numbers of tokens apart")
    steps: list[list[Step]] = []
    for label, has_end in zip(labels, needs_end, strict=True):
        choices = [(token,) for token in label] + [(*ends,)] * has_end
        rows = [(*row[:start], *label[:count], *row[start + count :]) for count in range(len(choices))]
        steps.append([(Place(rows[count], start, start + count), ids) for count, ids in enumerate(choices)])
    return steps


def write_user_turn(state: Any, question: Question, template: Callable[[str, Question], str] | None) -> str:
    """Write the user's turn: by the template, as the state and instructions of a `Span`, or by transformers' prompt."""
    values = ("" if value is None else value for value in (state, question.instructions))
    texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
    if template is not None:
        text = template(texts[0], question)
        if not isinstance(text, str):
            raise TypeError(f"template returned {short_repr(text)}: it must return the text of the user's turn")
    elif question.type == "span":
        text = "\n\n".join(filter(None, texts))
    else:
        fields, prompt = vars(question) | {"options": question.options}, import_decision().DECISION_PROMPT
        try:
            text = render_jinja_template([[]], chat_template=prompt, state=state, question=fields)[0][0]
        except RecursionError:
            raise ValueError(
                f"instructions={short_repr(question.instructions)} or options are nested too deeply"
            ) from None
    check_text("state and question", text)
    if not text.strip():
        raise ValueError(
            f"nothing is asked: state={short_repr(state)} and instructions={short_repr(question.instructions)}"
        )
    return text


def import_decision() -> Any:
    """Import `transformers.decision`. Raises ImportError for transformers older than 5.23."""
    try:
        import transformers.decision as decision
    except ImportError as error:
        needs = "the prompt for questions and special tokens written as text need transformers 5.23"
        raise ImportError(f"{needs}; this is {__version__}. Without it pass template= and plain texts") from error
    return decision


def build_question(parsed: Any) -> Question:
    """Convert a question that transformers parsed."""
    values = {"noul": [option == "true" for option in parsed.options], "choice": parsed.options}
    options = tuple(values.get(parsed.type, range(len(parsed.options))))
    return Question(parsed.type, parsed.instructions, parsed.labels, parsed.descriptions, options)


def _tokenize_labels(model: Any, labels: Sequence[str]) -> list[Ids]:
    """Tokenize labels. Raises ValueError for a label with unknown tokens, or with the same ids as another one."""
    tokenizer, facts = model.tokenizer, model.facts
    rows: list[Ids] = []
    for label in labels:
        ids = (*tokenizer(label, add_special_tokens=False)["input_ids"],)
        if not ids or tokenizer.unk_token_id in ids or ids in rows:
            reason = f"cannot write the label {short_repr(label)}, or gives another label the same ids"
            raise ValueError(f"the tokenizer of {facts.name} {reason}; give other labels")
        if {facts.mask_token_id, *facts.eos_token_ids} & {*ids}:
            raise ValueError(f"the label {short_repr(label)} holds the mask or an end token; give another one")
        rows.append(ids)
    return rows


def _tokenize_chat(model: Any, chat: list[dict[str, str]], open_turn: bool = True) -> tuple[list[int], list[int]]:
    """Tokenize a chat; special tokens in its contents are tokenized as plain text. Returns its ids, and the special
    tokens that a tokenizer without a chat template puts after a text."""
    tokenizer, contents = model.tokenizer, " ".join(turn["content"] for turn in chat)
    controls = [token for token in tokenizer.added_tokens_encoder if token.strip() and token in contents]
    if getattr(tokenizer, "chat_template", None):
        if not controls:
            return tokenize(tokenizer, render_chat(tokenizer, chat, open_turn, enable_thinking=False)), []
        import_decision()  # an older transformers cannot tokenize special tokens as plain text
        options = {"add_generation_prompt": open_turn, "enable_thinking": False, "sanitize_control_tokens": True}
        ids = tokenizer.apply_chat_template(chat, return_dict=True, **options)["input_ids"]
        if tokenizer.unk_token_id in ids:
            raise unknown_words_error(tokenizer, contents)
        return ids, []
    if controls:
        raise ValueError(f"the text holds {controls[0]!r}, a special token, and there is no chat template to write it")
    adds_special = model.facts.topology.startswith("causal") or model.kind == "encoder"
    ids = tokenize(tokenizer, chat[0]["content"] + "\n", adds_special)
    tail = [*itertools.takewhile(lambda token: token in tokenizer.all_special_ids, reversed(ids))][::-1]
    return ids[: len(ids) - len(tail)], tail


def read_log_probs(
    model: Any, steps: Iterable[Step], batch_size: int, seeds: int, before_call: Callable[[int], None]
) -> tuple[dict[Step, float], int]:
    """Evaluate each row once. Returns the log-probability of each step (on canvases, the log of its mean probability
    over `seeds` noises), and the number of calls. Raises FloatingPointError for NaN or +inf among the logits."""
    ids_at: dict[Place, list[Ids]] = {}
    for place, ids in dict.fromkeys(steps):
        ids_at.setdefault(place, []).append(ids)
    is_canvas, log_probs = model.facts.topology == "canvas", dict[Step, float]()
    by_length: dict[int, list[Place]] = {}
    for place in sorted(ids_at, key=lambda place: len(place.row)):
        by_length.setdefault(0 if is_canvas or model.pads else len(place.row), []).append(place)
    size = max(1, batch_size // seeds) if is_canvas else batch_size
    num_tokens = sum(len(place.row) for place in ids_at) * (seeds if is_canvas else 1)
    with torch.inference_mode():
        before_call(num_tokens)
        store, prefix_length = _evaluate_prefix(model, [*ids_at])
        forwards = 0 if store is None else 1
        for batch in (group[i : i + size] for group in by_length.values() for i in range(0, len(group), size)):
            before_call(num_tokens)
            if is_canvas:
                logits = _evaluate_first_step(model, batch, seeds)
            else:
                rows, prompts, positions = zip(*batch, strict=True)
                query = build_rows_query(model, rows, [[position] for position in positions], prompts, prefix_length)
                logits = (model(query) if store is None else model(query, store)).transpose(0, 1)
            forwards += 2 if is_canvas else 1  # one for prompts, one for canvases
            scores = logits.to(torch.promote_types(logits.dtype, torch.float32))  # [S, R, V]
            total = scores.logsumexp(-1, keepdim=True)
            if not total.isfinite().all():
                raise FloatingPointError(f"{model.facts.name} returned NaN or +inf")
            means = (scores - total).logsumexp(0) - math.log(len(scores))  # [R, V]
            for place, row_means in zip(batch, means, strict=True):
                for ids in ids_at[place]:
                    log_probs[place, ids] = float(np.logaddexp.reduce(row_means[[*ids]].tolist()))
    return log_probs, forwards


def _evaluate_prefix(model: Any, places: Sequence[Place]) -> tuple[Any, int]:
    """Evaluate the rows' common prefix before the first position to read. Returns a store with it, and its length; None
    and 0 if a separate call does not pay or the model has no store, or if keys depend on later tokens."""
    facts = model.facts
    rows, first = [place.row for place in places], min(place.position for place in places)
    length = min(len(os.path.commonprefix(rows)), first - 1)  # shifted models predict a token one position earlier
    length -= length % facts.block_unit
    is_causal = facts.topology in ("causal", "block_causal") and not facts.prompt_aligned
    if len(rows) == 1 or length < 16 or not is_causal or not model.supports_store:
        return None, 0
    store = model.make_store(1, length)
    evaluate(model, store, [*rows[0][:length]], 0, False)
    return store, length


def _evaluate_first_step(model: Any, places: Sequence[Place], seeds: int) -> Tensor:
    """Compute logits [seeds, R, V] at places in canvases after the prompts. Positions with `HOLE` and after a row's end
    hold noise, which depends only on the seed (0, 1, ...) and the prompt."""
    width, device, count = model.facts.block_length, model.device, seeds * len(places)
    starts = [place.prompt_length for place in places]
    prompts = [place.row[: place.prompt_length] for place in places] * seeds
    unique = [*dict.fromkeys(prompts)]
    sampler = DiffusionGemma()
    state = sampler.start(model, unique, max_new_tokens=width, seed=0)
    model(sampler.query(state)[0], state.store)  # encodes the prompts

    index = np.array([unique.index(prompt) for prompt in prompts])
    positions = state.positions(index)
    host_keys = row_keys([seed for seed in range(seeds) for _ in places], prompts, copy_indices=[0] * count)
    keys, step = torch.as_tensor(host_keys, device=device), torch.zeros(count, dtype=torch.int64, device=device)
    noise_tokens = draw_noise_tokens(keys, step, positions, model.facts.vocab_size, FIRST_STREAM)
    answers = pad_rows([[*place.row[place.prompt_length :]] for place in places], width, HOLE)
    canvas_tokens = torch.as_tensor(answers, device=device).repeat(seeds, 1)
    query = CanvasQuery(
        rows=np.arange(count),
        tokens=torch.where(canvas_tokens == HOLE, noise_tokens, canvas_tokens),
        positions=positions,
        store=StoreCall(state.index(index), visible_length=max(starts), begin=min(starts)),
        forwarded=np.full(count, width),
        kind="canvas",
    )
    columns = torch.tensor([place.position - place.prompt_length for place in places], device=device).repeat(seeds)
    logits: Tensor = model(query, state.store)[torch.arange(count, device=device), columns]
    return logits.unflatten(0, (seeds, len(places)))
