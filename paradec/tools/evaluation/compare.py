"""Comparison of masked samplers on prompts with checkable answers: accuracy and forwards.

Each sampler runs with its defaults and with each entry of its class attribute `sweep`. Model, cache, length, seed and
early stopping are equal for all. The baseline, `threshold` with threshold 0.9, is always measured. Right answers and
forwards are reproducible on one machine; times are not.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paradec import caches, samplers
from paradec.api.generate import generate
from paradec.api.output import Output
from paradec.attention.sparsed import SparseD
from paradec.caches.suffix import Suffix
from paradec.constraints.values import Constraint, parse_one_constraint
from paradec.core.checks import check_int, short_repr
from paradec.core.prompts import encode
from paradec.core.protocol import Commit, State, interruptible
from paradec.core.registry import to_data
from paradec.core.text_files import parse_json, read_text, write_json
from paradec.core.version import DRAWS, __version__
from paradec.models.base import Model
from paradec.models.loading import load
from paradec.request import Request, seed_matters
from paradec.samplers.features.sparse_attention import find_attention
from paradec.samplers.masked.start import choose_policy
from paradec.tools.evaluation.configuration import BASELINE, Configuration, configurations
from paradec.tools.evaluation.metrics import aup, wilson
from paradec.tools.evaluation.questions import Question, packaged_questions

SCHEMA = "paradec-compare/2"
STORED_FIELDS = ("row_calls", "forwarded_tokens", "tokens", "seconds", "padding_forwards", "source")
"""Fields of `Result` that files store unchanged."""
Progress = Callable[["Comparison", "Configuration", float], None]
"""Function, called after every batch with the comparison so far, the current configuration, and the share done."""


@dataclass
class Result:
    """Answers and costs of one configuration."""

    configuration: Configuration
    tasks: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By task: (right answers, prompts)."""
    row_calls: int = 0
    """Number of forwards, summed over prompts."""
    forwarded_tokens: int = 0
    """Number of evaluated positions, without padding."""
    tokens: int = 0
    """Number of answer tokens up to the end token, which is included."""
    seconds: float = 0.0
    """Wall time of decoding."""
    padding_forwards: int = 0
    """Number of the `row_calls` that decided only padding after the answer."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    """One entry per prompt, in the order of `Comparison.prompts`: "text" (ids if there is no tokenizer), "right", "nfe"
    and "tokens"."""
    source: str | None = None
    """Digest of a custom sampler's file; None for paradec's samplers."""

    def right(self, tasks: Iterable[str] | None = None) -> tuple[int, int]:
        """Return (right answers, prompts) of the `tasks`; by default of all tasks."""
        counts = [self.tasks[name] for name in (self.tasks if tasks is None else tasks) if name in self.tasks]
        return sum(right for right, _ in counts), sum(num_prompts for _, num_prompts in counts)

    def accuracy(self, tasks: Iterable[str] | None = None) -> float:
        """Return the share of right answers, in [0, 1], of the `tasks`; by default of all tasks."""
        right, num_prompts = self.right(tasks)
        return right / num_prompts

    @property
    def nfe(self) -> float:
        """Mean number of forwards per prompt."""
        return self.row_calls / self.right()[1]

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.row_calls

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass
class Comparison:
    """Result of `compare`; `to_json` saves it, `paradec.tools.evaluation.plot.frontier` draws it."""

    setup: dict[str, Any]
    """Model, questions and settings, which must be equal in comparable runs."""
    machine: dict[str, Any]
    """Device, dtype, batch and versions of the run."""
    many: dict[str, bool | None]
    """By task: whether its prompts have several right answers; None if unknown."""
    results: list[Result] = field(default_factory=list)
    """Results of the finished configurations; the first is the baseline's."""
    complete: bool = False
    """Whether every configuration was measured."""
    prompts: list[dict[str, Any]] = field(default_factory=list)
    """"task" and "prompt" of each question."""
    num_answered: int = 0
    """Number of answers so far, over all configurations."""
    num_total: int = 0
    """Number of answers of the complete comparison."""

    @property
    def baseline(self) -> Result:
        return self.results[0]

    def group(self, many: bool) -> list[str]:
        """List the tasks whose prompts have several right answers (many=True) or one (many=False)."""
        return [task for task, several in self.many.items() if several is many]

    def aup(self) -> dict[str, float]:
        """Compute the area under the accuracy-parallelism curve (`paradec.tools.evaluation.metrics.aup`), by sampler.

        Areas are comparable only for equal numbers of settings: samplers without the most frequent number are left out.
        If this number is 1, the result is empty."""
        best_accuracy = max((100 * result.accuracy() for result in self.results), default=0.0)
        points: dict[str, list[tuple[float, float]]] = {}
        for result in self.results:
            point = (result.tokens_per_forward, 100 * result.accuracy())
            points.setdefault(result.configuration.sampler, []).append(point)
        counts = Counter(map(len, points.values()))
        num_settings = max(counts, key=lambda count: (counts[count], count), default=0)
        return {
            sampler: aup(curve, best_accuracy) for sampler, curve in points.items() if len(curve) == num_settings > 1
        }

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON data: the fields, and statistics of the results."""
        rows = []
        for result in self.results:
            row: dict[str, Any] = {"sampler": result.configuration.sampler}
            row["changes"] = {name: to_data(value) for name, value in result.configuration.changes.items()}
            row["tasks"] = {name: list(counts) for name, counts in result.tasks.items()}
            row |= {name: getattr(result, name) for name in (*STORED_FIELDS, "nfe", "tokens_per_forward", "answers")}
            row |= {"accuracy": result.accuracy(), "interval": list(wilson(*result.right()))}
            row |= {"tokens_per_second": round(result.tokens_per_second, 1), "lost": self.lost(result)}
            rows.append(row | {"won": self.won(result), "versus_baseline": self.versus_baseline(result)})
        fields = {name: getattr(self, name) for name in ("complete", "setup", "machine", "many", "prompts")}
        return {"schema": SCHEMA, **fields, "results": rows, "aup": self.aup()}

    def lost(self, result: Result) -> list[int]:
        """List the indices of `prompts` that the baseline answered right and this configuration did not."""
        return _right_only_in_first(self.baseline, result)

    def won(self, result: Result) -> list[int]:
        """List the indices of `prompts` that this configuration answered right and the baseline did not."""
        return _right_only_in_first(result, self.baseline)

    def versus_baseline(self, result: Result) -> dict[str, float]:
        """Compare with the baseline: difference of accuracies (shares), ratios of parallelism and of speed."""
        base = self.baseline
        speed = result.tokens_per_second / base.tokens_per_second if base.tokens_per_second else 0.0
        return {
            "accuracy": result.accuracy() - base.accuracy(),
            "tokens_per_forward": result.tokens_per_forward / base.tokens_per_forward,
            "tokens_per_second": round(speed, 2),
        }

    def to_json(self, file: str | os.PathLike[str]) -> None:
        """Write `to_dict` to a file, atomically."""
        write_json(file, self.to_dict())

    @classmethod
    def from_json(cls, file: str | os.PathLike[str]) -> Comparison:
        """Read a file of `to_json`. Raises ValueError: the file is no comparison; OSError: an unreadable file."""
        try:
            data = parse_json(read_text(file))
            if data["schema"] != SCHEMA:
                raise ValueError(f"schema {data['schema']!r}")
            results = [
                Result(
                    Configuration(row["sampler"], row["changes"]),
                    {name: (right, num_prompts) for name, (right, num_prompts) in row["tasks"].items()},
                    answers=list(row["answers"]),
                    **{name: row[name] for name in STORED_FIELDS},
                )
                for row in data["results"]
            ]
            for result in results:
                if (sum(bool(answer["right"]) for answer in result.answers), len(result.answers)) != result.right():
                    raise ValueError("answers and counts differ")
            return cls(data["setup"], data["machine"], data["many"], results, data["complete"], data["prompts"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{str(file)!r} is not a comparison of schema {SCHEMA!r} ({error!r})") from None

    def columns(self) -> list[str]:
        """Column headings of `table`."""
        heads = ["sampler", "setting", "right %", "95 %"]
        heads += ["one answer %", "many answers %"] if self._has_both_groups() else []
        heads += ["forwards", "tokens/forward", "tokens/forward x baseline", "tokens/s", "tokens/s x baseline"]
        return [*heads, "AUP"] if self.results and self.aup() else heads

    def table(self) -> list[list[str]]:
        """Build a row of cells per configuration, in the order of `columns`. Only a sampler's first row has its AUP."""
        area, lines = self.aup() if self.results else {}, []
        has_area = bool(area)
        for result in self.results:
            low, high = wilson(*result.right())
            versus, sampler = self.versus_baseline(result), result.configuration.sampler
            shares = [result.accuracy(self.group(many)) for many in (False, True)] if self._has_both_groups() else []
            cells = [sampler, result.configuration.setting, f"{100 * result.accuracy():.1f}"]
            cells += [f"{100 * low:.1f}-{100 * high:.1f}", *(f"{100 * share:.1f}" for share in shares)]
            cells += [f"{result.nfe:.1f}", f"{result.tokens_per_forward:.2f}", f"{versus['tokens_per_forward']:.2f}"]
            cells += [f"{result.tokens_per_second:.2f}", f"{versus['tokens_per_second']:.2f}"]
            if has_area:
                cells.append(f"{area.pop(sampler):.0f}" if sampler in area else "")
            lines.append(cells)
        return lines

    def _has_both_groups(self) -> bool:
        return bool(self.group(False)) and bool(self.group(True))


def _right_only_in_first(first: Result, second: Result) -> list[int]:
    """List the indices of the prompts that `first` answered right and `second` did not."""
    pairs = enumerate(zip(first.answers, second.answers, strict=True))
    return [index for index, (a, b) in pairs if a["right"] and not b["right"]]


# The comparison --------------------------------------------------------------------------------------------------


def compare(
    model: Model | None = None,
    *,
    questions: Sequence[Question] | None = None,
    names: str | Iterable[str | Configuration] | None = None,
    defaults: bool = False,
    cache: str = "none",
    attention: str | SparseD | None = None,
    suffix: Suffix | int | str | None = None,
    batch: int = 1,
    seed: int = 0,
    max_new_tokens: int | None = None,
    block_length: int | None = None,
    constraint: Constraint | None = None,
    resume: Comparison | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Decode every question with every configuration; count right answers and forwards.

    model: from `paradec.load` or `paradec.wrap`; None is the packaged model.
    questions: from `packaged_questions` or `read_questions`; None is all packaged questions.
    names: as in `configurations`; None is every masked sampler and combination that supports the request. The baseline
        is always added.
    defaults: whether to run each sampler with its defaults only.
    cache: a name of `paradec.caches.names()`, with settings in parentheses if needed.
    attention, suffix, max_new_tokens, block_length: as in `paradec.generate`.
    batch: prompts decoded together. Answers do not depend on it; in float32, rounding may change near-ties.
    seed: seed of samplers with random choices.
    constraint: constraint of the questions that have none.
    resume: an earlier comparison with an equal setup, whose results are reused, except those of custom samplers whose
        file has changed.
    progress: see `Progress`.
    Raises ValueError, before any decoding: an argument out of its range, or a `resume` with another setup. Raises
    Interrupted (a KeyboardInterrupt) at Ctrl-C; its `output` is the incomplete `Comparison`."""
    todo = configurations(names, defaults)
    caches.create(cache)
    suffix = Suffix.from_value(suffix)
    check_int("batch", batch, low=1)
    check_int("seed", seed, low=0, high=2**63 - 1)
    check_int("max_new_tokens", max_new_tokens, low=1, none=True)
    check_int("block_length", block_length, low=1, none=True)
    questions = packaged_questions() if questions is None else list(questions)
    if not questions:
        raise ValueError("questions is empty; give at least one")
    if unjudged := [question.prompt for question in questions if not question.judged]:
        raise ValueError(f"questions: {short_repr(unjudged[0])} has no judge of its answers; set `right` or `truth`")
    model = load() if model is None else model
    if model.tokenizer is None and any(question.right is not None for question in questions):
        reason = "has no tokenizer; give input_ids and answer_ids, or load(..., tokenizer=...)"
        raise ValueError(f"{model.facts.name} {reason}")
    find_attention(Request(attention=attention), Configuration(BASELINE).make(), model)
    new = model.default_max_new_tokens if max_new_tokens is None else max_new_tokens
    request: dict[str, Any] = {"cache": cache, "attention": attention, "suffix": suffix, "seed": seed}
    request |= {"max_new_tokens": new, "block_length": block_length}
    request["constraint"] = parse_one_constraint("constraint", constraint)
    if names is None:
        arguments = request | {"seed": None, "constraint": questions[0].constraint or request["constraint"]}
        todo = [entry for entry in todo if _is_supported(entry, model, questions[0].prompt, arguments)]
    setup = _setup(model, questions, request)
    machine: dict[str, Any] = {"device": str(model.device), "dtype": str(model.dtype).removeprefix("torch.")}
    machine |= {"threads": torch.get_num_threads(), "batch": batch}
    machine |= {"paradec": __version__, "torch": torch.__version__}
    comparison = Comparison(setup, machine, {q.task: q.many for q in questions})
    comparison.prompts = [{"task": question.task, "prompt": question.prompt} for question in questions]
    finished = {} if resume is None else _reusable_results(resume, setup)
    comparison.num_total = len(todo) * len(questions)
    work = [_expected_forwards(configuration, new) for configuration in todo]
    # results of `resume` stay, even if `names` does not contain their configuration
    order = list(dict.fromkeys([*(configuration.name for configuration in todo), *finished]))
    comparison.results = [finished[name] for name in order if name in finished]
    done_work = 0.0

    message = "the comparison was interrupted; the results so far are in .output"
    with interruptible(lambda: comparison, message):
        for configuration, expected in zip(todo, work, strict=True):
            num_before = comparison.num_answered
            if configuration.name not in finished:
                result = Result(configuration, source=_sampler_digest(configuration))
                for num_measured in _measure(result, model, questions, batch, request):
                    comparison.num_answered = num_before + num_measured
                    if progress is not None:
                        share = (done_work + expected * num_measured / len(questions)) / sum(work)
                        progress(comparison, configuration, share)
                finished[configuration.name] = result
            done_work += expected
            comparison.num_answered = num_before + len(questions)
            comparison.results = [finished[name] for name in order if name in finished]
    comparison.complete = True
    return comparison


def _setup(model: Model, questions: Sequence[Question], request: dict[str, Any]) -> dict[str, Any]:
    """Build `Comparison.setup`."""
    policy = choose_policy(Configuration(BASELINE).make(), model, None, request["block_length"])
    setup: dict[str, Any] = {"model": model.facts.name}
    setup |= {name: request[name] for name in ("cache", "seed", "max_new_tokens")}
    setup |= {"blocks": repr(policy), "baseline": BASELINE, "draws": DRAWS}
    setup["tasks"] = dict(Counter(question.task for question in questions))
    setup["questions"] = hashlib.sha256("\n".join(question.key for question in questions).encode()).hexdigest()[:16]
    digest = _file_digest(type(caches.create(request["cache"])))
    setup |= {} if digest is None else {"cache_source": digest}
    # optional settings have an entry only if they are set
    if request["constraint"] is not None:
        setup["constraint"] = request["constraint"].to_dict()
    return setup | {name: to_data(request[name]) for name in ("attention", "suffix") if request[name] is not None}


def _measure(
    result: Result, model: Model, questions: Sequence[Question], batch: int, request: dict[str, Any]
) -> Iterator[int]:
    """Decode all questions with the configuration of `result`, and fill `result`. Yields the number of answers after
    every batch. request: arguments of `generate` that all configurations share."""
    configuration, new = result.configuration, request["max_new_tokens"]
    method = configuration.make()
    policy = choose_policy(method, model, None, request["block_length"])
    right: dict[str, list[bool]] = {}
    runs = itertools.groupby(questions, lambda question: (question.constraint, type(question.prompt)))
    groups = [list(group) for _, group in runs]
    for rows in (group[first : first + batch] for group in groups for first in range(0, len(group), batch)):
        prompts = [question.prompt for question in rows]
        block_counts = [policy.count(len(row), len(row) + new) or 1 for row in encode(model, prompts).rows]
        constraint = {"constraint": rows[0].constraint or request["constraint"]}
        arguments = request | constraint | configuration.request(new, max(block_counts))
        if not seed_matters(method, arguments.get("temperature", 0), request["suffix"]):
            arguments["seed"] = None
        if not result.answers:  # warm up: one-time work must not be timed
            generate(model, prompts, sampler=method, **arguments)
        padding = PaddingCounter()
        output = generate(model, prompts, sampler=method, callback=padding, **arguments)
        for row, question in enumerate(rows):
            filled = output.sequences[row, output.filled[row]].tolist()[: output.tokens[row]]
            ids = [*itertools.takewhile(lambda token: token not in model.facts.eos_token_ids, filled)]
            text = ids if output.text is None else output.text[row]
            is_right = tuple(ids) == question.truth if question.right is None else question.right(str(text))
            right.setdefault(question.task, []).append(is_right)
            answer = {"text": text, "right": is_right, "nfe": output.row_nfe[row], "tokens": output.tokens[row]}
            result.answers.append(answer)
        result.row_calls += sum(output.row_nfe)
        result.forwarded_tokens += output.forwarded_tokens
        result.tokens += sum(output.tokens)
        result.seconds += output.seconds
        result.padding_forwards += padding.forwards(output)
        yield len(result.answers)
    result.tasks = {task: (sum(flags), len(flags)) for task, flags in right.items()}


def _is_supported(configuration: Configuration, model: Model, prompt: Any, arguments: dict[str, Any]) -> bool:
    """Check whether a configuration supports the model and the request; warn if a sampler's defaults do not."""
    if configuration.sampler == BASELINE:
        return True  # if the baseline fails, the request is wrong: `compare` raises later
    try:
        configuration.make().start(model, prompt, **arguments)
    except ValueError as error:
        if not configuration.changes:
            warnings.warn(f"{configuration.sampler} is left out: {error}", stacklevel=3)
        return False
    return True


def _expected_forwards(configuration: Configuration, new: int) -> float:
    """Estimate the number of forwards per prompt, for the progress bar."""
    steps = configuration.request(new).get("steps")
    if steps is not None:
        return steps / 2
    return new / 2 if configuration.make().uses_steps else new / 16


def _reusable_results(resume: Comparison, setup: dict[str, Any]) -> dict[str, Result]:
    """Return the results to reuse, by configuration. Raises ValueError unless `resume` has the setup `setup`."""
    for name in resume.setup | setup:
        earlier, current = resume.setup.get(name), setup.get(name)
        if earlier != current:
            raise ValueError(
                f"the comparison to resume has {name}={short_repr(earlier)}, this one has {name}={short_repr(current)}"
            )
    results = [result for result in resume.results if result.source in (None, _sampler_digest(result.configuration))]
    return {result.configuration.name: result for result in results}


def _sampler_digest(configuration: Configuration) -> str | None:
    """Compute the digest of a custom sampler's file; None for paradec's samplers and for combinations."""
    if configuration.sampler not in samplers.registry:
        return None
    return _file_digest(samplers.get(configuration.sampler))


def _file_digest(cls: type) -> str | None:
    """Compute the digest of a class's file; None for paradec's classes."""
    if cls.__module__.startswith("paradec."):
        return None
    try:
        return hashlib.sha256(Path(inspect.getfile(cls)).read_bytes()).hexdigest()[:16]
    except (OSError, TypeError):  # a class from a notebook has no file
        return None


NO_POSITION = 2**62  # position for a row in which a step decided nothing
MIN_PADDING_SHARE = 0.1  # smallest share of padding forwards that `padding_lines` reports


class PaddingCounter:
    """A `callback` for one `generate` that records the first position that each step decided in each row."""

    def __init__(self) -> None:
        self._first: list[tuple[np.ndarray, torch.Tensor]] = []

    def __call__(self, state: State, commit: Commit) -> None:
        if commit.selected is not None and commit.positions is not None:
            first = torch.where(commit.selected, commit.positions, NO_POSITION).amin(1)
            self._first.append((commit.rows, first.cpu()))

    def forwards(self, output: Output) -> int:
        """Count the forwards, over all rows, that decided tokens only after the end of the row's answer."""
        lengths = output.attention_mask.sum(1).cpu() - output.new_tokens.shape[1] + torch.tensor(output.tokens)
        return sum(int(((first >= lengths[rows]) & (first < NO_POSITION)).sum()) for rows, first in self._first)


def padding_lines(results: Iterable[Any]) -> list[str]:
    """Build a heading, and a line for each `Result` with at least 10 % padding forwards; [] if there is none."""
    lines = [
        f"  {result.configuration.name}: {result.padding_forwards / result.right()[1]:.1f} of {result.nfe:.1f}"
        for result in results
        if result.padding_forwards >= MIN_PADDING_SHARE * result.row_calls
    ]
    heading = "forwards per prompt that decided only padding after the answer (a shorter --block-length saves most):"
    return [heading, *lines] if lines else []
