"""Answers and log-likelihoods for an evaluation harness. `harness.py` adapts them to lm-evaluation-harness."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import paradec
from paradec.api.defaults import model_defaults
from paradec.api.output import Output
from paradec.batching.many import generate_many
from paradec.batching.slots import why_unsupported
from paradec.constraints.automaton import TokenAutomaton
from paradec.constraints.values import Constraint, build_sequence_automaton
from paradec.core.checks import check_bool, check_choice, check_int, check_model
from paradec.core.prompts import tokenize
from paradec.request import Preset, Request
from paradec.tools.evaluation.likelihood import SUPPORTED_KINDS, Likelihood, check_greedy_decoding, log_likelihoods
from paradec.tools.evaluation.recipe import CHOICES, cut_at_stops, generation_fields, request_from_arguments

TASKS = Path(__file__).parent / "lm_eval_tasks"
"""Folder with tasks of packaged prompts ("paradec", "paradec_copy", ...), for the harness' `--include_path`."""


@dataclass
class TotalCosts:
    """Total costs of all answers."""

    answers: int = 0
    row_calls: int = 0
    """Number of forwards, summed over answers."""
    tokens: int = 0
    """Number of answer tokens up to the end token or the stop string, which are included."""
    forwarded_tokens: int = 0
    seconds: float = 0.0

    def add(self, output: Output) -> None:
        """Add the costs of an answer."""
        self.answers += 1
        self.row_calls += sum(output.row_nfe)
        self.tokens += sum(output.tokens)
        self.forwarded_tokens += output.forwarded_tokens

    def report(self) -> dict[str, Any]:
        """Return the totals, means per answer and rates."""
        sums: dict[str, Any] = asdict(self)
        if self.answers:
            sums |= {"nfe": self.row_calls / self.answers, "tokens_per_forward": self.tokens / max(1, self.row_calls)}
            sums["tokens_per_second"] = self.tokens / self.seconds if self.seconds else 0.0
        return sums


class HarnessModel:
    """A paradec model for a harness. The arguments override those of a task.

    pretrained: source for `paradec.load`, or a model; None is the packaged model.
    batch_size: rows decoded together (`generate_many`). It changes scores by rounding errors only.
    max_batch_size: unused; the harness passes it. device, dtype, revision: as in `paradec.load`.
    preset: a request, or a file of `Request.save`. seed: seed of all random numbers.
    until: whether the task's stop strings end an answer (the opposite of `escape_until` in other libraries).
    max_length: maximum number of tokens of prompt and answer together; by default the model's.
    likelihood: "monte_carlo" or "chain" for masked models (`paradec.tools.evaluation.likelihood`); causal models are
        always exact. mc_num, mc_batch, order: `samples`, `stratum` and `order` of `log_likelihoods`.
    check_greedy: whether to check, for masked models, that greedy decoding yields the continuation (one forward per
        token). LAMBADA's accuracy needs this; tasks with choices do not.
    choices: "score": log-likelihoods of all continuations of a context. "decode": the model decodes one of them under a
        constraint; this one has log-likelihood 0, the others have -inf.
    arguments: fields of `paradec.Request` and settings of its sampler. The task sets `max_new_tokens` if it is missing.
    Raises ValueError, TypeError: an unknown argument, or one out of its range."""

    def __init__(
        self,
        pretrained: Any = None,
        *,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
        revision: str | None = None,
        preset: Preset | None = None,
        seed: int = 0,
        until: bool = True,
        max_length: int | None = None,
        likelihood: str | None = None,
        mc_num: int = 128,
        mc_batch: int = 16,
        order: str = "left_to_right",
        check_greedy: bool = True,
        choices: str = "score",
        **arguments: Any,
    ):
        super().__init__()
        batch_size = int(batch_size) if isinstance(batch_size, str) and batch_size.isdigit() else batch_size
        check_int("batch_size", 1 if batch_size is None else batch_size, low=1)
        check_bool("until", until)
        check_bool("check_greedy", check_greedy)
        check_choice("choices", choices, CHOICES)
        check_int("max_length", max_length, low=2, none=True)
        fields, request = request_from_arguments(arguments, preset, seed)
        model = pretrained
        if pretrained is None or isinstance(pretrained, (str, Path)):
            model = paradec.load(pretrained, device=device, dtype=dtype, revision=revision)
        elif (device, dtype, revision) != (None, None, None):
            raise ValueError(f"device={device!r}, dtype={dtype!r}, revision={revision!r} need a model's name")
        check_model("lm-eval's model", model, SUPPORTED_KINDS)
        if "sampler" not in fields:
            request = Request(**{**request.changes(), **model_defaults(model)})
        if reason := why_unsupported(model, request):
            raise ValueError(reason)
        self.model, self.request, self.explicit_fields = model, request, fields
        self.batch_size: int = 1 if batch_size is None else int(batch_size)
        self.tokenizer = model.tokenizer
        if self.tokenizer is None:
            raise ValueError(f"{model.facts.name} has no tokenizer; lm-eval needs one")
        self.until, self.check_greedy, self.choices = until, check_greedy, choices
        self.requested_length, self._device = max_length, model.device
        self.estimate: dict[str, Any] = {"method": likelihood, "samples": mc_num, "stratum": mc_batch, "order": order}
        log_likelihoods(model, [], **self.estimate)  # raises for wrong arguments before any decoding
        self.spent = TotalCosts()
        self.likelihoods: list[Likelihood] = []
        """Log-likelihoods of all continuations so far, in order."""
        self._rendered: set[str] = set()

    # ---- text ---------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """Id of the end token."""
        return int(self.model.facts.eos_token_ids[0]) if self.model.facts.eos_token_ids else self.prefix_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token that stands in for an empty context. Raises ValueError: there is neither a BOS nor an EOS token."""
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id, *self.model.facts.eos_token_ids):
            if token is not None:
                return int(token)
        raise ValueError(f"{self.model.facts.name} has no BOS or EOS token to start a text with; give a context")

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of prompt and answer."""
        return self.requested_length or self.model.facts.max_length or 2**20

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for the harness' caches."""
        return str(getattr(self.tokenizer, "name_or_path", "") or self.model.facts.name).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokenise a text as `paradec.generate` does without a chat template. add_special_tokens: None adds them for
        causal models, except to texts of `apply_chat_template`. Raises ValueError: words that cannot be encoded."""
        has_bos = self.model.facts.topology == "causal" and string not in self._rendered
        return tokenize(self.tokenizer, string, has_bos if add_special_tokens is None else add_special_tokens)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokenise a context and a continuation. Spaces at the context's end move to the continuation."""
        has_bos = self.model.facts.topology == "causal" and context not in self._rendered
        context_ids = self.tok_encode(context.rstrip(), add_special_tokens=has_bos)
        ids = self.tok_encode(context + continuation, add_special_tokens=has_bos)
        return context_ids, ids[len(context_ids) :]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a chat as text. Raises ValueError: there is no chat template, or it rejects the messages."""
        from jinja2 import TemplateError

        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(f"the tokenizer of {self.model.facts.name} has no chat template: pass --no-chat")
        ending = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        try:
            text = self.tokenizer.apply_chat_template(chat_history, tokenize=False, **ending)
        except TemplateError as error:
            raise ValueError(f"the tokenizer's chat template does not accept these messages: {error}") from error
        self._rendered.add(text)
        return text

    def _keep_last(self, ids: list[int], max_tokens: int) -> list[int]:
        """Return the last `max_tokens` ids of a context; warn if there are more."""
        if max_tokens < 1:
            raise ValueError(f"max_length={self.max_length} leaves no room for a prompt and the answer")
        if len(ids) > max_tokens:
            warnings.warn(f"a context of {len(ids)} tokens is cut to its last {max_tokens}", stacklevel=2)
        return ids[-max_tokens:]

    def keep(self, kind: str, arguments: Any, answer: Any) -> None:
        """Hook for subclasses, called with each answer; they may cache it."""

    # ---- answers ------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Decode the answers. Each ends before the first stop string of its task."""
        texts: list[str] = []
        entries = [self._build_entry(*request.args) for request in requests]
        start = time.perf_counter()
        outputs = generate_many(
            self.model, [entry for entry, _ in entries], batch_size=self.batch_size, errors="raise", preset=self.request
        )
        bar = self._bar(len(requests), disable_tqdm, "answers")
        with outputs, bar:
            for request, (_, until), output in zip(requests, entries, outputs, strict=True):
                texts.append(cut_at_stops(str(output.text), until))
                self.keep("generate_until", request.args, texts[-1])
                self.spent.add(output)
                bar.update()
        self.spent.seconds += time.perf_counter() - start
        return texts

    def _build_entry(self, context: str, task_kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Build an entry for `generate_many`, and the stop strings at which its text is cut."""
        fields, until = generation_fields(task_kwargs)
        fields = {name: value for name, value in fields.items() if name not in self.explicit_fields}
        if not self.until:
            until = []
        new = self.request.max_new_tokens if "max_new_tokens" in self.explicit_fields else fields.get("max_new_tokens")
        fields["max_new_tokens"] = new = self.model.default_max_new_tokens if new is None else new
        constraint = fields.get("constraint", self.request.constraint)
        # stop strings would end an answer before its constraint is met
        if until and "stop_strings" not in self.explicit_fields and constraint is None:
            fields["stop_strings"] = tuple(until)
        ids = self.tok_encode(context) if context else [self.prefix_token_id]
        if (mask := self.model.facts.mask_token_id) is not None and mask in ids:
            raise ValueError(f"a prompt holds the mask id {mask}, at token {ids.index(mask)}: the model would fill it")
        return {"prompt": self._keep_last(ids, self.max_length - new), **fields}, until

    # ---- log-likelihoods ----------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = []
        for _, context, continuation in requests:
            max_context = self.max_length - len(continuation)
            pairs.append((self._keep_last(context, max_context) if context else [], continuation))
        scores = self._decode_choices([key for key, *_ in requests], pairs) if self.choices == "decode" else {}
        remaining = [index for index in range(len(pairs)) if index not in scores]
        keys = [requests[index][0] for index in remaining]
        scored = self._score(keys, [pairs[index] for index in remaining], disable_tqdm)
        scores |= dict(zip(remaining, scored, strict=True))
        return [scores[index] for index in range(len(pairs))]

    def _decode_choices(
        self, keys: list[Any], pairs: list[tuple[list[int], list[int]]]
    ) -> dict[int, tuple[float, bool]]:
        """Decode one of the continuations of each context that several successive pairs share. Returns, by index of
        these pairs, (0.0, True) for the decoded continuation, and (-inf, False) for the others."""
        groups = [[*indices] for _, indices in itertools.groupby(range(len(pairs)), lambda number: pairs[number][0])]
        groups = [group for group in groups if len(group) > 1]
        contexts = [
            (pairs[group[0]][0] or [self.prefix_token_id], [pairs[index][1] for index in group]) for group in groups
        ]
        scores, start = dict[int, tuple[float, bool]](), time.perf_counter()
        for group, (chosen, output) in zip(
            groups, decode_choices(self.model, self.request, contexts, self.batch_size), strict=True
        ):
            self.spent.add(output)
            for choice, index in enumerate(group):
                scores[index] = (0.0, True) if choice == chosen else (-math.inf, False)
                if keys[index] is not None:
                    self.keep("loglikelihood", keys[index], scores[index])
        self.spent.seconds += time.perf_counter() - start
        return scores

    def _score(
        self, keys: list[Any], pairs: list[tuple[list[int], list[int]]], disable_tqdm: bool
    ) -> list[tuple[float, bool]]:
        is_causal, is_greedy = self.model.facts.topology == "causal", [False] * len(pairs)
        scale = self.request.guidance_scale
        if self.check_greedy and not is_causal:
            is_greedy = check_greedy_decoding(self.model, pairs, guidance_scale=scale, batch_size=self.batch_size)
        scores: list[tuple[float, bool]] = []
        settings = {**self.estimate, "guidance_scale": scale, "seed": self.request.seed, "batch_size": self.batch_size}
        with self._bar(len(pairs), disable_tqdm, "log-likelihoods") as bar:
            for index, likelihood in enumerate(log_likelihoods(self.model, pairs, **settings)):
                scores.append((likelihood.value, bool(likelihood.greedy) if is_causal else is_greedy[index]))
                self.likelihoods.append(likelihood)
                if keys[index] is not None:
                    self.keep("loglikelihood", keys[index], scores[-1])
                bar.update()
        return scores

    # ---- reports for the harness ----------------------------------------------------------------------------------

    def get_model_info(self) -> dict[str, Any]:
        """Return the request, costs, and standard errors of log-likelihoods, for the harness' result file."""
        info: dict[str, Any] = {
            "paradec": paradec.__version__,
            "request": self.request.to_dict(),
            "model_dtype": str(self.model.dtype),
            "model_name": self.model.facts.name,
        }
        if self.spent.answers:
            info["spent"] = self.spent.report()
        if self.likelihoods:
            errors = torch.tensor([entry.error for entry in self.likelihoods], dtype=torch.float64)
            info["log_likelihoods"] = {
                **{name: value for name, value in self.estimate.items() if value is not None},
                "judged": len(errors),
                "forwards": sum(entry.forwards for entry in self.likelihoods),
                # None replaces NaN (the error of a single stratum), which JSON lacks
                "median_standard_error": _none_for_nan(errors.nanmedian().item()),
                "largest_standard_error": _none_for_nan(errors.where(~errors.isnan(), -1.0).max().item()),
                "without_a_standard_error": int(errors.isnan().sum()),
            }
        return info

    def _bar(self, total: int, hidden: bool, description: str) -> Any:
        from tqdm.auto import tqdm

        return tqdm(total=total, desc=description, disable=hidden)


def _none_for_nan(value: float) -> float | None:
    return None if value != value or value < 0 else value  # -1: every error is NaN


@dataclass(frozen=True)
class Sequences(Constraint):
    """Constraint to one of several sequences of ids; the texts of the ids do not matter."""

    ids: tuple[tuple[int, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        return {"ids": [[*ids] for ids in self.ids]}

    def to_token_automaton(self, tokenizer: Any, vocab_size: int) -> TokenAutomaton:
        return build_sequence_automaton(self.ids, vocab_size)


def decode_choices(
    model: Any, request: Request, contexts: Sequence[tuple[list[int], list[list[int]]]], batch_size: int
) -> Iterator[tuple[int, Output]]:
    """Decode each context; the answer must be one of the context's continuations. Yields its index, and the output.

    A context takes a few forwards. Log-likelihoods of masked models take about a hundred forwards per continuation.

    request: decoding settings; `max_new_tokens` is replaced by the longest continuation's length + 1 (an end token).
    batch_size: rows decoded together.
    Raises ValueError: no end token, or a request that does not support constraints."""
    if not model.facts.eos_token_ids:
        raise ValueError(f"choices='decode' needs an end token, which {model.facts.name} lacks")
    entries = [
        {
            "prompt": context,
            "constraint": Sequences(tuple(map(tuple, continuations))),
            "max_new_tokens": max(map(len, continuations)) + 1,
        }
        for context, continuations in contexts
    ]
    ends = {*model.facts.eos_token_ids}
    with generate_many(model, entries, batch_size=batch_size, errors="raise", preset=request) as outputs:
        for (_, continuations), output in zip(contexts, outputs, strict=True):
            new = output.new_tokens.flatten().tolist()
            is_decoded = [new[: len(ids)] == ids and new[len(ids)] in ends for ids in continuations]
            yield is_decoded.index(True), output
