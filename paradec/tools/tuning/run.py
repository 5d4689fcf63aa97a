"""`tune`: search for settings on one half of the prompts, and measure the best settings on the other half."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paradec import caches as cache_plans
from paradec import samplers as registered
from paradec.core.checks import check_choice, check_int, check_model, check_number, short_repr
from paradec.core.protocol import interruptible
from paradec.core.version import DRAWS
from paradec.request import Request, check_names
from paradec.tools.evaluation.configuration import BASELINE
from paradec.tools.tuning import space as spaces
from paradec.tools.tuning.halving import is_promoted, rungs
from paradec.tools.tuning.prompts import fingerprint, split_halves, to_questions
from paradec.tools.tuning.result import Point, Tuning, choose, pareto, surely_below, thin_front
from paradec.tools.tuning.scoring import Checker, DecodingFailed, Measured, PromptHalf, Scorer
from paradec.tools.tuning.space import Candidate, Space
from paradec.tools.tuning.study import SCHEMA, Study, check_installed, join_rungs, read_rung

OBJECTIVES = {"forwards": ("forwards",), "seconds": ("seconds",), "both": ("forwards", "seconds")}
"""By objective: the costs to minimise, while the score is maximised. The last cost decides the choice of the preset."""
SHARED_FIELDS = (
    *("attention", "max_new_tokens", "temperature", "top_p", "top_k", "guidance_scale", "rng", "eos_early_stop"),
    *("logits_eos_inf", "holes_eos_inf", "confidence_eos_eot_inf", "suppress_tokens", "stop_strings", "stop", "chat"),
    "compile",
)
"""Fields of `paradec.Request` that may be arguments of `tune`. They are equal for all settings, and in the preset."""
TRIALS = 40
"""Default number of settings that Optuna proposes, in addition to the hand-made settings."""
STATES = {"COMPLETE": "measured", "PRUNED": "stopped early", "FAIL": "failed", "RUNNING": "under way"}
MAX_FAST = 0.5
"""Hand-made settings with at most this number of forwards per position are dropped only if they are surely worse."""

Progress = Callable[[str, float], None]
"""Function that is called after each rung and reported batch, with a label and the share of work done, in [0, 1]."""


def tune(
    model: Any,
    prompts: Any,
    *,
    answers: Sequence[Any] | None = None,
    score: str | None = None,
    checker: Checker | None = None,
    mask: str | None = None,
    samplers: str | Iterable[str] | None = None,
    caches: str | Iterable[str] | None = None,
    blocks: Sequence[int | None] | None = None,
    objective: str = "forwards",
    trials: int = TRIALS,
    minutes: float | None = None,
    study: str | os.PathLike[str] | None = None,
    tolerance: float = 1.0,
    loss: float = 10.0,
    eta: int = 3,
    batch: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
    **arguments: Any,
) -> Tuning:
    """Find the sampler, settings, cache and blocks that suit a model and its prompts. Needs the extra `tune`.

    The choosing half of the prompts is decoded with all hand-made settings (defaults and sweeps), then with settings
    that Optuna proposes. Successive halving drops worse settings early (`paradec.tools.tuning.halving`). The settings
    that no other setting dominates are the Pareto front. The preset is the best hand-made setting, or a cheaper setting
    that is surely not worse (`paradec.tools.tuning.result.choose`). The reported half measures the front, the default,
    the best hand-made setting and the reference: one token per step, by `low_confidence` without a cache.

    Args:
        model: a model with a mask token, from `paradec.load` or `paradec.wrap`.
        prompts: a file of JSON lines (`paradec.tools.tuning.read_prompts`), or a sequence of texts, chats, rows of ids
            or questions (`paradec.tools.evaluation.packaged_questions`). Mask ids in rows of ids are filled.
        answers: one per prompt of a sequence: a text, a list of texts, the ids of the filled positions, or None.
        score: "answers" (known answers), "checker", or "agreement" with the reference's tokens. The default is
            "checker" if there is a checker, else "answers" if all prompts have answers, else "agreement".
        checker: `checker(prompt, answer)`, a score from 0 to 1; answers are texts, or ids if there is no tokenizer.
        mask: a text that stands for one token to fill in prompts ("<mask>"), as in `paradec.infill`.
        samplers: names and combinations; by default every masked sampler that supports the model and the prompts.
        caches: names; by default "none" if the objective is "forwards", else all caches.
        blocks: block lengths; None is the model's. By default: the model's, half of it, twice it, and the whole answer.
        objective: "forwards", "seconds" (wall time on this machine), or "both".
        trials: number of settings that Optuna proposes, over all processes on one study.
        minutes: time after which no trial or rung starts. The report takes additional time.
        study: an SQLite file. The same call continues it after Ctrl-C or a crash, or works on it in other processes.
        tolerance: points (of 100) by which the preset may score below the best hand-made score on the choosing half.
        loss: settings more than `loss` points below the best score are dropped (fast hand-made ones only if surely so).
        eta: growth of the rungs. After each rung, about 1 in `eta` trials continues.
        batch: number of prompts decoded together.
        seed: seed of the split into halves, the proposals, and samplers with random choices.
        progress: see `Progress`.
        arguments: fields of `paradec.Request` for all settings and the preset (names in `SHARED_FIELDS`).

    Returns:
        A `Tuning`; `.preset` is a `Request`.

    Raises:
        ImportError: Optuna is not installed.
        ValueError, TypeError, before any work: an argument out of its range, or a study with another model, prompts or
            space.
        Interrupted (a KeyboardInterrupt): Ctrl-C; its `output` is the `Tuning` so far, on the choosing half.
    """
    check_installed()
    check_model("tune", model, ("text", "codes", "masked image"))
    check_search(objective, trials, minutes, tolerance, batch, seed)
    check_int("eta", eta, low=2)
    check_number("loss", loss, low=0, high=100)
    check_names(arguments, SHARED_FIELDS)
    if mask is not None:
        arguments = {"max_new_tokens": 0, "holes_eos_inf": True, **arguments}
    Request(**arguments)
    facts = model.facts
    if facts.mask_token_id is None or facts.topology == "causal":
        raise ValueError(f"tune needs a model with a mask token; {facts.name} has none, or is causal")
    if blocks is not None and (isinstance(blocks, (str, bytes, int)) or not len(blocks)):
        raise ValueError(f"blocks={short_repr(blocks)} must be a sequence of block lengths, None for the model's")
    names = [samplers] if isinstance(samplers, str) else None if samplers is None else list(samplers)
    if caches is None:
        caches = ["none", *(n for n in cache_plans.names() if n != "none" and objective != "forwards")]
    cache_names = [caches] if isinstance(caches, str) else list(dict.fromkeys(caches))
    if not cache_names:
        raise ValueError("caches is empty; give at least one")
    questions = to_questions(prompts, answers)
    scorer = Scorer.from_questions(questions, score, checker)
    first, second = split_halves(questions, seed)
    chat = arguments.get("chat")
    search = _Search(
        model=model,
        base=arguments,
        choosing=PromptHalf("choosing", model, first, chat, mask),
        reporting=PromptHalf("reporting", model, second, chat, mask),
        scorer=scorer,
        batch=batch,
        seed=seed,
        costs=OBJECTIVES[objective],
        loss=loss / 100,
        tolerance=tolerance / 100,
        eta=eta,
        progress=progress,
    )
    for half in (search.choosing, search.reporting):  # raises errors about the shared arguments
        method = Request(**arguments, sampler=spaces.REFERENCE, seed=seed)
        with registered.create(spaces.REFERENCE).start(model, half.prompts, method).release_stores_on_exit():
            pass
    lengths = spaces.default_block_lengths(model, search.positions) if blocks is None else tuple(blocks)
    prompt = search.choosing.prompts.slice_rows(0, 1)
    search.space = spaces.build_space(model, prompt, arguments, names, cache_names, lengths)
    search.setup = {
        "schema": SCHEMA,
        "draws": DRAWS,
        "model": facts.name,
        "weights": fingerprint_checkpoint(model),
        "prompts": {"choose": len(first), "report": len(second), "text": fingerprint(questions)},
        "score": scorer.kind,
        "checker": None if checker is None else getattr(checker, "__qualname__", type(checker).__name__),
        "objective": objective,
        "mask": mask,
        "loss": loss,
        "request": Request(**arguments).to_dict(),
        "space": search.space.to_data(),
        "eta": eta,
        "seed": seed,
    }
    with Study(study, search.setup, ["maximize", *("minimize" for _ in search.costs)], seed) as search.study:
        return search.run(trials, minutes)


def check_search(objective: Any, trials: Any, minutes: Any, tolerance: Any, batch: Any, seed: Any) -> None:
    """Raise ValueError if one of these arguments of `tune` is out of its range."""
    check_choice("objective", objective, OBJECTIVES)
    check_int("trials", trials, low=0)
    check_int("batch", batch, low=1)
    check_int("seed", seed, low=0, high=2**31)
    check_number("minutes", minutes, low=0, open_low=True, none=True)
    check_number("tolerance", tolerance, low=0, high=100)


def fingerprint_checkpoint(model: Any) -> str:
    """Compute the digest of the names, shapes, dtypes and first values of all weights; "unknown" without a module."""
    module = getattr(model, "module", None)
    if module is None:
        return "unknown"
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.numel() and not tensor.is_meta:
            first = tensor.detach()[:32] if tensor.dim() else tensor.detach()  # few rows, since reshape may copy
            digest.update(repr(first.reshape(-1)[:32].double().cpu().tolist()).encode())
    return digest.hexdigest()[:16]


@dataclass
class _Search:
    """The work of one process on a study."""

    model: Any
    base: dict[str, Any]
    choosing: PromptHalf
    reporting: PromptHalf
    scorer: Scorer
    batch: int
    seed: int
    costs: tuple[str, ...]
    loss: float
    tolerance: float
    eta: int
    progress: Progress | None
    setup: dict[str, Any] = field(init=False)
    space: Space = field(init=False)
    study: Study = field(init=False)

    def __post_init__(self) -> None:
        facts, rows = self.model.facts, [*self.choosing.prompts.rows, *self.reporting.prompts.rows]
        hole_counts = [row.count(facts.mask_token_id) for row in rows]
        new = self.base.get("max_new_tokens")
        if new is None:
            new = 0 if any(hole_counts) else self.model.default_max_new_tokens
        self.holes = any(hole_counts)
        self.positions = max(1, round(sum(hole_counts) / len(rows)) + new)
        """Mean number of undecided positions per row."""
        self.answer_spans = [
            (row.index(facts.mask_token_id) if holes else len(row), len(row) + new)
            for row, holes in zip(rows, hole_counts, strict=True)
        ]
        self.rungs = rungs(len(self.choosing), self.eta)
        self.groups = [entry.group for entry in self.choosing.questions]
        self.references: dict[str, dict[int, list[int]]] = {"choosing": {}, "reporting": {}}
        self.reference_measured: dict[str, Measured] = {"choosing": Measured(), "reporting": Measured()}

    def build_request(self, candidate: Candidate) -> Request:
        """Build the request of a candidate, without a seed."""
        return spaces.build_request(self.model, candidate, self.base, self.positions, self.answer_spans, self.holes)

    def run(self, trials: int, minutes: float | None) -> Tuning:
        """Run all hand-made settings and `trials` proposals within `minutes`. Then measure the best settings on the
        reported half."""
        self.num_trials = trials
        self.deadline = float("inf") if minutes is None else time.monotonic() + 60 * minutes
        self.starts = [self.space.params(start) for start in self.space.starts]
        with interruptible(self._build_result, "tuning was interrupted; the results so far are in .output"):
            if "seconds" in self.costs:  # warm up: one-time work must not be timed
                request = Request(**self.base, seed=self.seed)
                self.choosing.decode(request, 0, min(2, self.rungs[0]))
            num_refused = 0
            while self._count_remaining() and time.monotonic() < self.deadline and num_refused < 10 * (trials + 1):
                num_refused += not self._trial()
            result = self._build_result()
            if result.points:
                self._report(result)
                result.complete = not self._count_remaining()
            return result

    # ---- trials -------------------------------------------------------------------------------------------------

    def _count_remaining(self) -> int:
        """Count the hand-made settings that have not started, and the proposals that remain."""
        trials = self.study.trials()
        started = {
            frozen.user_attrs["start"]
            for frozen in trials
            if "start" in frozen.user_attrs and not self.study.is_abandoned(frozen)
        }
        proposed = sum(
            frozen.state.name not in ("WAITING", "RUNNING") and not {"refused", "start"} & set(frozen.user_attrs)
            for frozen in trials
        )
        return len(self.starts) - len(started) + max(0, self.num_trials - proposed)

    def _trial(self) -> bool:
        """Run one trial. Returns False if its setting was refused without decoding."""
        trial, other_trials = self.study.next_trial(self.starts)
        try:
            candidate = self.space.suggest(trial)
            try:
                request = self.build_request(candidate)
            except ValueError as error:
                return self._refuse(trial, str(error))
            if spaces.is_reference(request, self.positions):
                return self._refuse(trial, "it equals the reference, one token per step")
            trial.set_user_attr("candidate", candidate.to_data())
            self._run_rungs(trial, candidate, request, other_trials)
        except BaseException:
            trial.set_user_attr("owner", "")  # another process may continue it
            raise
        return True

    def _refuse(self, trial: Any, why: str) -> bool:
        trial.set_user_attr("refused", why)
        self.study.tell(trial, "PRUNED")
        return False

    def _run_rungs(self, trial: Any, candidate: Candidate, request: Request, other_trials: list[Any]) -> None:
        """Measure a trial rung by rung until it is complete, stopped, or out of time. Stored rungs are not repeated."""
        measured, data, by_hand = Measured(), candidate.to_data(), "start" in trial.user_attrs
        same_candidate = [trial, *(frozen for frozen in other_trials if frozen.user_attrs.get("candidate") == data)]
        for rung, stop in enumerate(self.rungs):
            part = next((entry for frozen in same_candidate if (entry := read_rung(frozen, rung)) is not None), None)
            if part is None:
                if time.monotonic() > self.deadline:
                    trial.set_user_attr("owner", "")  # another process may continue it
                    return
                start = self.rungs[rung - 1] if rung else 0
                if self.scorer.kind == "agreement":  # the scorer needs the reference's tokens
                    self._measure_reference(self.choosing, stop)
                try:
                    part = self._measure(self.choosing, request, start, stop)
                except DecodingFailed as error:
                    trial.set_user_attr("failed", f"{candidate.name}: {error}")
                    self.study.tell(trial, "FAIL")
                    return
            trial.set_user_attr(f"rung {rung}", dataclasses.asdict(part))
            measured.add(part)
            self._tell_progress(candidate.name)
            objectives = measured.point(self.costs)
            if stop == self.rungs[-1]:
                self.study.tell(trial, "COMPLETE", list(objectives))
                return
            other_results = [entry for frozen in other_trials if (entry := join_rungs(frozen, rung)) is not None]
            if by_hand and measured.mean("forwards") <= MAX_FAST * self.positions:
                continues = not surely_below(measured, other_results, self.groups[:stop], self.loss)
            else:
                continues = is_promoted(
                    objectives, [entry.point(self.costs) for entry in other_results], self.eta, self.loss
                )
            if not continues:
                self.study.tell(trial, "PRUNED")
                return

    def _measure(self, half: PromptHalf, request: Request, start: int, stop: int) -> Measured:
        request, references = dataclasses.replace(request, seed=self.seed), self.references[half.name]
        return half.measure(request, start, stop, self.batch, self.scorer, references)

    def _tell_progress(self, label: str, share: float | None = None) -> None:
        if self.progress is not None:
            # the last tenth of the progress is for the report
            done_share = 1 - self._count_remaining() / max(1, len(self.starts) + self.num_trials)
            self.progress(label, 0.9 * done_share if share is None else share)

    # ---- the reference ------------------------------------------------------------------------------------------

    def _measure_reference(self, half: PromptHalf, stop: int) -> None:
        """Measure the reference on the first `stop` prompts of a half. Batches stored in the study are not repeated."""
        request = Request(**{**self.base, "sampler": registered.create(spaces.REFERENCE), "seed": self.seed})
        stored = None
        measured, tokens = self.reference_measured[half.name], self.references[half.name]
        while len(measured) < min(stop, len(half)):
            start = len(measured)
            end = min(start + self.batch, len(half))
            key = f"{half.name} one per step {start}-{end}"
            stored = self.study.study.user_attrs if stored is None else stored
            if key not in stored:
                ids: dict[int, list[int]] = {}
                try:
                    part = half.measure(request, start, end, self.batch, self.scorer, ids, is_reference=True)
                except DecodingFailed as error:
                    raise ValueError(f"one token per step does not work on these prompts: {error}") from error
                self.study.study.set_user_attr(
                    key, {"ids": [ids[k] for k in range(start, end)], "measured": dataclasses.asdict(part)}
                )
                stored = self.study.study.user_attrs
            tokens.update(zip(range(start, end), stored[key]["ids"]))
            measured.add(Measured(**stored[key]["measured"]))

    # ---- results ------------------------------------------------------------------------------------------------

    def _build_result(self) -> Tuning:
        """Build the result, from the candidates that were measured on the whole choosing half."""
        counts = dict.fromkeys(("measured", "stopped early", "refused", "failed", "under way"), 0)
        points: dict[str, Point] = {}
        failures: dict[str, None] = {}
        for frozen in self.study.trials():
            data = frozen.user_attrs.get("candidate")  # None if the trial was refused, or has no candidate yet
            candidate = None if data is None else Candidate(**data)
            state = "refused" if "refused" in frozen.user_attrs else STATES.get(frozen.state.name)
            if state is not None:
                counts[state] += 1
            if "failed" in frozen.user_attrs:
                failures[frozen.user_attrs["failed"]] = None
            measured = None if candidate is None else join_rungs(frozen, len(self.rungs) - 1)
            if candidate is not None and measured is not None:
                by_hand = "start" in frozen.user_attrs
                new = Point(candidate, self.build_request(candidate), measured, by_hand=by_hand)
                points.setdefault(candidate.name, new).by_hand |= by_hand
        costs, candidates = self.costs, list(points.values())
        chosen, hand = choose(candidates, costs, self.tolerance, self.groups) or (None, None)
        front, chosen_index = thin_front(pareto(candidates, costs, self.loss), chosen, costs)
        return Tuning(
            setup=self.setup,
            costs=self.costs,
            tolerance=100 * self.tolerance,
            points=front,
            chosen=chosen_index,
            default=points.get(BASELINE),
            hand=hand,
            groups=[entry.group for entry in self.reporting.questions],
            trials=counts,
            failures=list(failures),
            left_out=self.space.left_out,
        )

    def _report(self, result: Tuning) -> None:
        """Measure the front, the default, the best hand-made setting and the reference on the reported half. Each batch
        is decoded with all settings in turn, so that their times are comparable."""
        half, to_report = self.reporting, list(result.points)
        for extra in (result.default, result.hand):
            if extra is not None and all(point is not extra for point in to_report):
                to_report.append(extra)
        stored, parts = self.study.study.user_attrs, [Measured() for _ in to_report]
        for start in range(0, len(half), self.batch):
            end = min(start + self.batch, len(half))
            self._measure_reference(half, end)
            for point, measured in zip(to_report, parts, strict=True):
                key = f"reporting {point.name} {start}-{end}"
                if key not in stored:
                    try:
                        part = self._measure(half, point.request, start, end)
                    except DecodingFailed as error:
                        raise ValueError(f"{point.name} failed on the reported half: {error}") from error
                    self.study.study.set_user_attr(key, dataclasses.asdict(part))
                else:
                    part = Measured(**stored[key])
                measured.add(part)
                self._tell_progress("the reported half", 0.9 + 0.1 * end / len(half))
        for point, measured in zip(to_report, parts, strict=True):
            point.reported = measured
        result.reference = self.reference_measured[half.name]
