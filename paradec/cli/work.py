"""Prompt, sampler and request of the commands that decode text, checked before the model is loaded."""

from __future__ import annotations

import dataclasses
import os
import shlex
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paradec
from paradec.cli import options, show
from paradec.core.checks import LARGEST_INT, check_int, check_model, check_text
from paradec.request import DEFAULTS, FIELDS, Request, seed_matters

if TYPE_CHECKING:
    from paradec.api.output import Output
    from paradec.core.prompts import Prompts

MAX_ROWS = 256
"""Maximum number of rows decoded together: results are printed batch by batch, and larger batches gain little."""
CPU_BYTES = 2**30
"""Limit of a batch's memory on the CPU, where other programs may need the free memory."""
LOGIT_BYTES = 24
"""Approximate bytes per logit: float32, and float64 values computed from it."""
ACTIVATIONS = 24
"""Approximate number of hidden vectors per position that exist at the same time."""


def check_one_prompt(words: list[str] | None, command: str) -> str:
    """Return the prompt of a command line. Raises ValueError unless it is one argument."""
    if not words:
        raise ValueError(f"Missing argument 'PROMPT': paradec {command} \"...\", or - for standard input")
    if len(words) > 1:
        quoted = shlex.quote(" ".join(words))
        raise ValueError(f"the prompt is {len(words)} arguments; put it in quotes: paradec {command} {quoted}")
    return words[0]


@dataclass
class Work:
    """A loaded model, with the sampler and the arguments to decode with."""

    function: str
    """"generate" or "infill"."""
    model: Any
    method: Any
    """The sampler."""
    request: dict[str, Any]
    """Further arguments of the function, such as the seed."""
    chat: bool | None
    num_answers: int
    """Number of answers per prompt."""
    uses_default_cache: bool = False
    """Whether the cache is the default for model and sampler (`choose_cache`)."""

    def choose_cache(self) -> None:
        """If `uses_default_cache`, choose the cache for model and sampler; else drop it if the family takes none."""
        from paradec.api.defaults import choose_cache

        if self.uses_default_cache:
            self.request["cache"] = choose_cache(self.model, self.method)
        elif self.method.family != "masked":
            self.request["cache"] = None  # other families have their own store

    @property
    def cache_name(self) -> str:
        """Name of the cache in reports."""
        cache = self.request["cache"]
        builtin = {"draft_verify": "causal", "renoising": "canvas"}.get(self.method.family, "none")
        return builtin if cache is None else cache.name

    def encode(self, prompt: Any) -> Prompts:
        """Encode one or several prompts: one row per answer, with `copy_indices`."""
        from paradec.core.prompts import encode

        prompts = encode(self.model, prompt, chat=self.chat, placeholder=self.request.get("mask"))
        return prompts.repeat(self.num_answers).number_duplicates()

    def rows_that_fit(self, prompts: Prompts) -> int:
        """Estimate how many of these rows can be decoded together."""
        new = self.request["max_new_tokens"]
        new = self.model.default_max_new_tokens if new is None else new
        branches = 1 if self.request["guidance_scale"] == 1 else 2
        return rows_that_fit(self.model, max(map(len, prompts.rows)) + new, branches)

    def run(self, prompts: Any, callback: Callable[[Any, Any], None], **arguments: Any) -> Output:
        """Decode a batch, with a callback after every commit. arguments: further arguments for this batch."""
        function = getattr(paradec, self.function)
        return function(self.model, prompts, sampler=self.method, callback=callback, **{**self.request, **arguments})


ARGUMENTS = {"stop": "stop_strings", "raw": "chat", "attention_set": "attention"}
ARGUMENTS |= dict.fromkeys(("choice", "regex", "json_schema", "after", "thinking_budget"), "constraint")
"""Names of arguments by the name of their option, where the two differ."""


def prepare(
    function: str,
    prompt: Any,
    given: set[str],
    *,
    model: str | None,
    preset: Path | None,
    sampler: str,
    set_: list[str] | None,
    dtype: str | None,
    device: str | None,
    quantization: str | None = None,
    tokenizer: str | None = None,
    attention: str | None = None,
    attention_set: list[str] | None = None,
    drafter: str | None = None,
    on_settings: Callable[[dict[str, Any]], int | None] | None = None,
    use_defaults: bool = False,
    **request: Any,
) -> Work:
    """Make all checks that need no model, then load the model, which may take minutes.

    prompt: None if it is not known yet. given: names of the options on the command line. use_defaults: whether a cache
    or block length that is not given comes from `paradec.api.defaults`. on_settings: called before the model is loaded
    with "model", "dtype", "quantization", "tokenizer", "drafter" and "request" as JSON data; returns the seed.
    """
    # shown before the imports, which take seconds
    with show.waiting(f"loading {'the packaged model' if model is None else model}"):
        from paradec.core.mask_text import check_placeholder

        settings = options.read_settings(set_)
        check_texts(prompt, request)
        request = {"num_return_sequences": 1, "guidance_scale": 1.0, "seed": None, **request}
        request["sampler"] = options.import_classes("--sampler", sampler, "sampler")
        request["cache"] = options.import_classes("--cache", request["cache"], "cache")
        request["attention"] = options.make_attention(attention, attention_set)
        if preset is not None:
            explicit = {ARGUMENTS.get(name, name) for name in given} | {"trace"}  # `--trace` is a file name
            request |= Request.load(preset, explicit).changes()
        sampler_value = request.pop("sampler")
        draft_settings = {"tree": settings.pop("tree")} if drafter is not None and "tree" in settings else {}
        if isinstance(sampler_value, str):
            method = paradec.samplers.create(sampler_value, **settings)
        elif settings:
            raise ValueError(f"--set {set_[0] if set_ else ''}: --preset has a sampler with settings; give --sampler")
        else:
            method = sampler_value
        check_drafter(method, drafter)
        if isinstance(request["cache"], str):
            request["cache"] = paradec.caches.create(request["cache"])
        if request["cache"] is not None and request["cache"].name == "none":
            request["cache"] = None
        fields = Request(**{name: value for name, value in request.items() if name in FIELDS})
        needs_answer = function == "generate"
        check_int(
            "max_new_tokens", request["max_new_tokens"], low=int(needs_answer), high=LARGEST_INT, none=needs_answer
        )
        check_placeholder(request.get("mask"))
        num_answers = request.pop("num_return_sequences")
        # without an explicit sampler, the model's default sampler is used
        uses_default_sampler = "sampler" not in given and sampler_value == DEFAULTS["sampler"] and not settings
        uses_default_cache = use_defaults and request["cache"] is None and "cache" not in given
        if on_settings is not None:
            sampler_data = {} if uses_default_sampler else {"sampler": method.to_dict() | draft_settings}
            changes = fields.to_dict() | sampler_data
            data: dict[str, Any] = {"model": "packaged" if model is None else Path(model).as_posix(), "dtype": dtype}
            data |= {"quantization": quantization, "tokenizer": tokenizer, "drafter": drafter, "request": changes}
            request["seed"] = on_settings({name: value for name, value in data.items() if value is not None})
        show.quiet_loading()
        is_parallel = options.num_processes() > 1
        if is_parallel and device is not None:
            raise ValueError(f"--device {device} is for one process; with torchrun each has a GPU, or all the CPU")
        plan = "auto" if is_parallel else None
        placement: dict[str, Any] = {"device": device, "quantization": quantization, "tp_plan": plan}
        loaded = paradec.load(model, dtype=dtype, tokenizer=tokenizer, **placement)
        from paradec.api.defaults import find_defaults, model_defaults
        from paradec.api.generate import KINDS, make_sampler

        check_model(function, loaded, KINDS)
        default = model_defaults(loaded).get("sampler")
        method = make_sampler(loaded, default if default is not None and uses_default_sampler else method)
        if use_defaults and loaded.default_block_length is None and loaded.facts.block_length is None:
            loaded.default_block_length = find_defaults(loaded).block_length
        if drafter is not None:
            draft_model = load_draft_model(drafter, loaded, dtype=dtype, device=str(loaded.device))
            method = dataclasses.replace(method, drafter=draft_model, **draft_settings)
    uses_seed = seed_matters(method, request["temperature"], request["suffix"])
    if request["seed"] is None and uses_seed:  # one seed for all batches
        import torch

        request["seed"] = int(torch.randint(2**63 - 1, (1,)))
    if is_parallel and os.environ["RANK"] != "0":
        warnings.simplefilter("ignore")  # the first process prints them
        while True:  # decode the first process's requests until `release_ranks` ends this process
            with suppress(ValueError, TypeError, FloatingPointError):  # the first process reports them and may continue
                paradec.generate(loaded, [0], sampler=method)
    work = Work(function, loaded, method, request, request.pop("chat", None), num_answers, uses_default_cache)
    if uses_default_cache:
        work.choose_cache()
    return work


def release_ranks() -> None:
    """End the other processes of torchrun, which decode with this process."""
    from torch import distributed

    from paradec.models.tensor_parallel import FAILURE_WAIT, exchange

    with suppress(RuntimeError):  # the other processes have already failed
        if os.environ["RANK"] == "0" and distributed.is_initialized():
            exchange(None, FAILURE_WAIT)


DRAFTERS = {
    "cspd": "a smaller MAR with the same VAE",
    "code": "a larger VAR with the same VQ, which makes the first scales",
}
"""Description of the drafter that a sampler of pictures needs, by sampler."""


def drafter_setting(sampler: Any) -> str | None:
    """Return the name of the sampler's setting that is another model; None if it has no such setting."""
    return next((name for name in ("drafter", "draft", "teacher") if name in sampler.settings()), None)


def check_drafter(sampler: Any, drafter: str | None) -> None:
    """Raise ValueError for a missing drafter, or a drafter that the sampler does not use."""
    setting = drafter_setting(sampler)
    needs_drafter = sampler.name in DRAFTERS or getattr(sampler, "needs_drafter", False) and sampler.drafter is None
    if drafter is None and needs_drafter:
        expected = DRAFTERS.get(sampler.name, "a smaller model of the same vocabulary, or a drafter of the model")
        raise ValueError(f"--sampler {sampler.name} needs --drafter: {expected}")
    if drafter is not None and setting is None:
        raise ValueError(f"--drafter is for speculative, lantern, lantern++, cspd, code, distilled; not {sampler.name}")


DRAFTER_WEIGHTS = {"fc.weight", "encoder.fc.weight", "mtp_layers.0.input_proj.weight"}
"""Names of weights. A drafter that reads hidden states has at least one of them."""


def load_draft_model(source: str, base: Any, **options: Any) -> Any:
    """Load a drafter: a smaller causal model, a drafter that reads the base's hidden states, or the base's own heads
    ("mtp"). For a drafter without weights, returns its name. options: arguments of `paradec.load`."""
    from paradec.models.checkpoint import INDEX, WEIGHTS, fetch, read_weight_headers
    from paradec.models.load_drafter import load_drafter
    from paradec.samplers.causal.drafts.text import NamedDrafter

    if not os.path.exists(source):
        if source in NamedDrafter.kinds:
            return source
        if source == "mtp":
            return load_drafter(base, kind="mtp")
    if source.endswith(".gguf"):
        return paradec.load(source, **options)
    has_no_safetensors = fetch(source, WEIGHTS, None) is None and fetch(source, INDEX, None) is None
    # EAGLE's checkpoints are often pickled, without safetensors files
    if has_no_safetensors or DRAFTER_WEIGHTS & read_weight_headers(source, None).keys():
        return load_drafter(source, base=base)
    return paradec.load(source, **options)


def check_texts(prompt: Any, request: dict[str, Any]) -> None:
    """Raise ValueError for a prompt, mask or stop string that is not valid text, and for an empty prompt."""
    for text in [prompt] if isinstance(prompt, str) else prompt or []:
        content = text["content"] if isinstance(text, dict) else text
        check_text("prompt", content)
        if not content.strip():
            raise ValueError(f"prompt={content!r} is empty; give at least one word")
    check_text("--mask", request.get("mask") or "")
    for text in request.get("stop_strings") or ():
        check_text("--stop", text)


def rows_that_fit(model: Any, positions: int, branches: int) -> int:
    """Estimate how many rows of length `positions`, evaluated in `branches` branches, fit into the free memory."""
    config = getattr(model, "text_config", None) or getattr(model.module, "config", None)
    hidden, layers = getattr(config, "hidden_size", None) or 1024, getattr(config, "num_hidden_layers", None) or 1
    numbers_per_position = hidden * (ACTIVATIONS + 2 * layers)  # keys and values of every layer
    facts = model.facts
    num_logits = facts.block_length if facts.topology == "canvas" else positions  # only the open canvas has logits
    row_bytes = branches * (num_logits * LOGIT_BYTES * facts.vocab_size + positions * 4 * numbers_per_position)
    return max(1, min(MAX_ROWS, _available_bytes(model.device) // row_bytes))


def _available_bytes(device: Any) -> int:
    """Return the bytes for a batch: half of the device's free memory, on a CPU at most `CPU_BYTES`."""
    import torch

    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return (torch.cuda.mem_get_info(device)[0] + unused) // 2
    if device.type == "cpu" and "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return min(CPU_BYTES, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    return CPU_BYTES


def decode_in_batches(
    decode: Callable[[Prompts], Output], prompts: Prompts, size: int
) -> Iterator[tuple[Prompts, Output, bool]]:
    """Decode `size` rows at a time, or fewer if memory runs out. Yields (batch, output, whether it was interrupted); an
    interrupted batch is the last one."""
    import torch

    first, interrupted = 0, False
    while first < len(prompts.rows) and not interrupted:
        batch = prompts.slice_rows(first, first + size)
        try:
            output = decode(batch)
        except paradec.Interrupted as interrupt:
            output, interrupted = interrupt.output, True
        except torch.OutOfMemoryError:
            if len(batch.rows) == 1:
                raise
            size = len(batch.rows) // 2
            continue
        yield batch, output, interrupted
        first += len(batch.rows)


def complete_row_indices(output: Output) -> list[int]:
    """List the indices of the complete rows of an interrupted batch."""
    counts = output.filled.sum(1).tolist()
    rows = zip(output.finished, output.tokens, counts, strict=True)
    return [row for row, (finished, tokens, to_fill) in enumerate(rows) if finished or tokens == to_fill]
