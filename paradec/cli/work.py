"""What commands that decode text prepare: prompt, sampler and request, all checked before the model is loaded."""

from __future__ import annotations

import dataclasses
import os
import shlex
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import paradec
from paradec.cli import options, show
from paradec.core.checks import check_int, check_model, check_text

if TYPE_CHECKING:
    from paradec.api.output import Output
    from paradec.core.prompts import Prompts
    from paradec.request import Request


def one_prompt(words: list[str] | None, command: str) -> str:
    """The prompt of a command line.

    Raises:
        ValueError: none, or several arguments, which a prompt without quotes is; the message has the quotes.
    """
    if not words:
        raise ValueError(f"Missing argument 'PROMPT': paradec {command} \"...\", or - for standard input")
    if len(words) > 1:
        whole = " ".join(words)
        quoted = shlex.quote(whole) if any(sign in whole for sign in '"$`\\!') else f'"{whole}"'
        raise ValueError(f"the prompt is {len(words)} arguments; put it in quotes: paradec {command} {quoted}")
    return words[0]


@dataclass
class Work:
    """A model that is loaded, and what is asked of it."""

    function: str
    """"generate" or "infill"."""
    model: Any
    method: Any
    """The sampler."""
    request: dict[str, Any]
    """Further arguments of the function, a seed among them."""
    chat: bool | None
    answers: int
    """Per prompt."""

    @property
    def cache_name(self) -> str:
        """What a report calls the cache."""
        cache = self.request["cache"]
        own = {"draft_verify": "causal", "renoising": "canvas"}.get(self.method.family, "none")
        return own if cache is None else cache.name

    def encode(self, prompt: Any) -> Prompts:
        """The rows of a prompt or of several, each as often as it is to be answered, numbered for their draws."""
        from paradec.core.prompts import encode

        asked = encode(self.model, prompt, chat=self.chat, placeholder=self.request.get("mask"))
        return asked.repeated(self.answers).numbered()

    def rows_that_fit(self, asked: Prompts) -> int:
        """How many of these rows are decoded together."""
        from paradec.cli.batches import rows_that_fit

        new = self.request["max_new_tokens"]
        new = self.model.default_max_new_tokens if new is None else new
        branches = 1 if self.request["guidance_scale"] == 1 else 2
        return rows_that_fit(self.model, max(map(len, asked.rows)) + new, branches)

    def try_start(self, asked: Prompts) -> None:
        """Raise what `run` would raise before it decodes: ValueError or TypeError for what does not go together."""
        from paradec.request import Request

        with self.method.start(self.model, asked, Request(sampler=self.method, **self.request)).freed_store():
            pass

    def run(self, prompts: Any, callback: Callable[[Any, Any], None], **more: Any) -> Output:
        """Decode a batch, with a callback after every commit. more: further arguments, of this batch."""
        call = getattr(paradec, self.function)
        return call(self.model, prompts, sampler=self.method, callback=callback, **{**self.request, **more})


RENAMED = {"stop": "stop_strings", "raw": "chat", "attention_set": "attention"}
RENAMED |= dict.fromkeys(("choice", "regex", "json_schema"), "constraint")
"""Options, and the arguments that they set."""


def prepare(
    function: str,
    prompt: Any,
    *,
    model: str | None,
    preset: Path | None,
    given: set[str],
    sampler: str,
    set_: list[str] | None,
    dtype: str | None,
    device: str | None,
    attention: str | None = None,
    attention_set: list[str] | None = None,
    num_return_sequences: int = 1,
    guidance_scale: float = 1.0,
    seed: int | None = None,
    drafter: str | None = None,
    agree: Callable[[dict[str, Any]], int | None] | None = None,
    **request: Any,
) -> Work:
    """Check what can be checked without the model, which may take minutes to load, then load it.

    Args:
        function: "generate" or "infill". prompt: as it takes it; None where there are none yet. given: options that
            are on the command line. agree: called before the model is loaded with what was set, as data: "model",
            "dtype", "drafter" and "request" (what differs from the defaults); returns the seed. request: further
            arguments of the function. The others are options of the command as they were given.

    Raises:
        ValueError, TypeError, OSError: what cannot be used; and what `agree` raises.
    """
    # said at once: the libraries take seconds to import
    with show.waiting(f"loading {'the packaged model' if model is None else model}"):
        from paradec.request import DEFAULTS

        values = options.settings(set_)
        check_texts(prompt, request)
        request |= {"sampler": sampler, "num_return_sequences": num_return_sequences, "seed": seed}
        request["guidance_scale"] = guidance_scale
        request["attention"] = options.attention_of(attention, attention_set)
        request = options.with_preset(request, preset, {RENAMED.get(name, name) for name in given})
        chosen = request.pop("sampler")
        late = {"tree": values.pop("tree")} if drafter is not None and "tree" in values else {}
        if isinstance(chosen, str):
            method = paradec.samplers.create(chosen, **values)
        elif values:
            raise ValueError(f"--set {set_[0] if set_ else ''}: --preset has a sampler with settings; give --sampler")
        else:
            method = chosen
        check_drafter(method, drafter)
        if isinstance(request["cache"], str):
            request["cache"] = paradec.caches.create(request["cache"])
        if request["cache"] is not None and request["cache"].name == "none":
            request["cache"] = None
        answers = request.pop("num_return_sequences")
        asked = check_options(function, request, answers)
        # a model may have a sampler of its own for who names none
        left_open = "sampler" not in given and chosen == DEFAULTS["sampler"] and not values
        if agree is not None:
            named = {} if left_open else {"sampler": method.to_dict() | late}
            said: dict[str, Any] = {"model": "packaged" if model is None else Path(model).as_posix(), "dtype": dtype}
            said |= {"drafter": drafter, "request": asked.to_dict() | named}
            request["seed"] = agree({name: value for name, value in said.items() if value is not None})
        show.quiet_loading()
        together = options.num_processes() > 1
        if together and device is not None:
            raise ValueError(f"--device {device} is for one process; with torchrun each has a GPU, or all the CPU")
        loaded = paradec.load(model, dtype=dtype, device=device, tp_plan="auto" if together else None)
        from paradec.api.generate import MADE, own_defaults, sampler_on
        from paradec.request import seed_matters

        check_model(function, loaded, MADE)
        own = own_defaults(loaded).get("sampler")
        if own is not None and left_open:
            method = paradec.samplers.create(own)
        method = sampler_on(loaded, method)
        if drafter is not None:
            small = load_draft_model(drafter, loaded, dtype=dtype, device=str(loaded.device))
            method = dataclasses.replace(method, drafter=small, **late)
    drawn = seed_matters(method, request["temperature"], request["suffix"])
    if request["seed"] is None and drawn:  # one for all batches
        import torch

        request["seed"] = int(torch.randint(2**63 - 1, (1,)))
    if together and os.environ["RANK"] != "0":
        decode_for_rank_0(loaded, method)
    return Work(function, loaded, method, request, request.pop("chat", None), answers)


def decode_for_rank_0(model: Any, sampler: Any) -> NoReturn:
    """In the other processes of torchrun: decode what the first one decodes, and end with its command."""
    warnings.simplefilter("ignore")  # it has the same
    while True:
        with suppress(ValueError, TypeError, FloatingPointError):  # it has these, too, and may go on
            paradec.generate(model, [0], sampler=sampler)


def release_ranks() -> None:
    """Let the processes end that decode for this one."""
    from torch import distributed

    from paradec.models.tensor_parallel import FAILURE_WAIT, exchange

    with suppress(RuntimeError):  # they have failed
        if os.environ["RANK"] == "0" and distributed.is_initialized():
            exchange(None, FAILURE_WAIT)


def check_drafter(sampler: Any, drafter: str | None) -> None:
    """Raise ValueError where a sampler has no drafter and needs one, or has one and takes none."""
    if drafter is None and getattr(sampler, "needs_drafter", False) and sampler.drafter is None:
        raise ValueError(f"--sampler {sampler.name} needs --drafter: a smaller causal model of the same vocabulary")
    if drafter is not None and "drafter" not in sampler.settings():
        raise ValueError(f"--drafter is for speculative; {sampler.name} takes none")


OF_DRAFTERS = {"fc.weight", "encoder.fc.weight", "mtp_layers.0.input_proj.weight"}
"""One of these weights is in every folder of a drafter that reads hidden states."""


def load_draft_model(source: str, base: Any, **options: Any) -> Any:
    """A smaller causal model, a drafter that reads the base's hidden states (EAGLE, DFlash and others), the base's own
    heads ("mtp"), or the name of one that needs none as it is. options: as for `paradec.load`."""
    from paradec.models.checkpoint import INDEX, WEIGHTS, fetch, stored_weights
    from paradec.models.load_drafter import load_drafter
    from paradec.samplers.causal.drafting import NamedDrafter

    if source in NamedDrafter.kinds and not os.path.exists(source):
        return source
    if source == "mtp" and not os.path.exists(source):
        return load_drafter(base, kind="mtp")
    if source.endswith(".gguf"):
        return paradec.load(source, **options)
    single = fetch(source, WEIGHTS, None) is None and fetch(source, INDEX, None) is None
    # EAGLE's are often pickled
    if single or OF_DRAFTERS & stored_weights(source, None).keys():
        return load_drafter(source, base=base)
    return paradec.load(source, **options)


def check_texts(prompt: Any, request: dict[str, Any]) -> None:
    """Raise ValueError for a prompt, mask or stop string that is no text, and for a prompt without a word. None is no
    prompt yet."""
    texts = [prompt] if isinstance(prompt, str) else prompt or []
    texts = [text["content"] if isinstance(text, dict) else text for text in texts]
    for text in texts:
        check_text("prompt", text)
        if not text.strip():
            raise ValueError(f"prompt={text!r} is empty; give at least one word")
    check_text("--mask", request.get("mask") or "")
    for text in request.get("stop_strings") or ():
        check_text("--stop", text)


def check_options(function: str, request: dict[str, Any], answers: int) -> Request:
    """Check what can be checked without the model, which may take minutes to load.

    Args:
        function: "generate" or "infill". request: arguments of it. answers: per prompt.

    Returns:
        All of it but the sampler.

    Raises:
        ValueError: an argument out of its range; the message names it.
    """
    from paradec.core.blocks import LONGEST_BLOCK
    from paradec.core.prompts import check_placeholder
    from paradec.request import FIELDS, Request

    fields = {name: value for name, value in request.items() if name in FIELDS}
    asked = Request(num_return_sequences=answers, **fields)
    low = 1 if function == "generate" else 0
    check_int("max_new_tokens", request["max_new_tokens"], low=low, high=LONGEST_BLOCK, none=function == "generate")
    check_placeholder(request.get("mask"))
    return asked
