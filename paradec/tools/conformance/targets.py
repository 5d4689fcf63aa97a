"""How a decoder is asked: ours through `paradec.generate`, a Python function, or a command that reads JSON lines.

A target is a function from a request (a dict of plain data) to an answer (a dict of plain data):

    {"id": "llada/low_confidence_bl8_steps32/0", "checkpoint": "/folder", "prompts": [[36, 17, ...]], ...}
    {"ids": [[36, 17, ..., 61]], "steps": [[[0, 9, 10], [0, 10, 18]], [[0, 11, 10]]]}

`ids` are prompts and answers; each step is [row, position, token] of everything that one forward changed. `steps` may
be left out: then answers alone are compared. What a target does not have it says by NotImplementedError.
"""

from __future__ import annotations

import json
import queue
import shlex
import subprocess
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paradec.core.checks import shown
from paradec.tools.conformance.archive import Data
from paradec.tools.conformance.cases import Case

Target = Callable[[dict[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Answer:
    """What a target gave, checked."""

    ids: list[list[int]]
    steps: list[list[tuple[int, int, int]]] | None


class BadAnswer(ValueError):
    """What a target gave is no answer to the request."""


def request(case: Case, data: Data) -> dict[str, Any]:
    """What a target is given."""
    asked, settings = asdict(case.asked), dict(case.asked.settings)
    asked["checkpoint"] = str(data.folder / asked["checkpoint"])
    if "drafter" in settings:  # a checkpoint, too
        settings["drafter"] = str(data.folder / settings["drafter"])
    return {"id": case.name, "group": case.group} | asked | {"settings": settings}


def checked(answer: Any, asked: Mapping[str, Any]) -> Answer:
    """An answer of the right form.

    Raises:
        BadAnswer: anything else; the message names the field.
    """
    if not isinstance(answer, Mapping) or "ids" not in answer:
        raise BadAnswer(f"the answer {shown(answer)} must be a mapping with 'ids', and 'steps' if there are any")
    ids = _whole(answer["ids"], "ids")
    if not isinstance(ids, list) or len(ids) != len(asked["prompts"]):
        raise BadAnswer(f"ids={shown(ids)} must be {len(asked['prompts'])} lists of ids, one for each prompt")
    for row, (tokens, prompt) in enumerate(zip(ids, asked["prompts"], strict=True)):
        if not isinstance(tokens, list) or not all(_is_int(token) for token in tokens):
            raise BadAnswer(f"ids[{row}]={shown(tokens)} must be a list of whole numbers")
        if tokens[: len(prompt)] != prompt:
            raise BadAnswer(f"ids[{row}]={shown(tokens)} must begin with its prompt {shown(prompt)}")
        if len(tokens) < len(prompt) + asked["max_new_tokens"]:
            raise BadAnswer(
                f"ids[{row}] has {len(tokens)} ids; prompt and answer are {len(prompt) + asked['max_new_tokens']}"
            )
    given = _whole(answer.get("steps"), "steps")
    if given is None:
        return Answer(ids, None)
    if not isinstance(given, list):
        raise BadAnswer(f"steps={shown(given)} must be a list with what each forward changed")
    steps = []
    for number, step in enumerate(given):
        if not isinstance(step, list):
            raise BadAnswer(f"steps[{number}]={shown(step)} must be a list of [row, position, token]")
        steps.append([_entry(entry, number, ids) for entry in step])
    return Answer(ids, steps)


def _entry(entry: Any, number: int, ids: list[list[int]]) -> tuple[int, int, int]:
    if isinstance(entry, list) and len(entry) == 3 and all(map(_is_int, entry)) and 0 <= entry[0] < len(ids):
        if entry[1] >= 0:
            return entry[0], entry[1], entry[2]
    raise BadAnswer(f"steps[{number}] holds {shown(entry)}; an entry is [row, position, token], rows from 0")


def _whole(value: Any, name: str) -> Any:
    """Lists of lists for tuples, arrays and tensors."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_whole(entry, name) for entry in value]
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# ---- a command -----------------------------------------------------------------------------------------------------


class Command:
    """A process that is asked a JSON object a line, and answers with one a line; started once, for all cases.

    An answer is as that of a function, or {"not_implemented": "why"}, or {"error": "what"}. What the process writes to
    standard error is shown as it is.

    Args:
        line: as on a command line, without a shell. timeout: seconds that one answer may take.
    """

    def __init__(self, line: str, timeout: float):
        words = shlex.split(line)
        if not words:
            raise ValueError(f"--command {line!r} is empty")
        self.line, self.timeout = line, timeout
        try:
            self.process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
        except OSError as error:
            raise ValueError(f"--command {line!r} could not be started: {error}") from error
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def __call__(self, asked: dict[str, Any]) -> Mapping[str, Any]:
        """Ask; one request is answered before the next one is written.

        Raises:
            NotImplementedError: it says so. RuntimeError: it says that it failed. BadAnswer: no JSON object.
            ValueError: it has ended, or taken longer than it may; nothing more can be asked.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
            line = self._lines.get(timeout=self.timeout)
        except (BrokenPipeError, queue.Empty) as error:
            why = "took longer than --timeout" if isinstance(error, queue.Empty) else "has ended"
            raise Ended(f"--command {self.line!r} {why} at {asked['id']}") from error
        if not line:
            raise Ended(f"--command {self.line!r} has ended at {asked['id']}")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise BadAnswer(f"the line {shown(line)} is no JSON") from error
        if not isinstance(answer, dict):
            raise BadAnswer(f"the line {shown(line)} is no JSON object")
        if "not_implemented" in answer:
            raise NotImplementedError(str(answer["not_implemented"]))
        if "error" in answer:
            raise RuntimeError(str(answer["error"]))
        return answer

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Ended(ValueError):
    """A command that answers no more."""


# ---- ours ----------------------------------------------------------------------------------------------------------


class Ours:
    """paradec itself, through `paradec.load` and `paradec.generate`."""

    def __init__(self, dtype: str = "float64"):
        self.dtype = dtype
        self._models: dict[Any, Any] = {}

    def model(self, asked: Mapping[str, Any], checkpoint: str | None = None) -> Any:
        """The checkpoint of a request, loaded once; `checkpoint`: another one, which needs no telling."""
        import paradec

        path = asked["checkpoint"] if checkpoint is None else checkpoint
        told = {}
        kind = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))["model_type"]
        if checkpoint is None and kind in ("llada2_moe", "llada_moe") or Path(path).name == "llada-moe-tiny":
            told = {"mask_token_id": asked["mask_id"]}  # which their config.json does not say
            told |= {"block_length": asked["block_length"]} if kind == "llada2_moe" else {}
        key = (path, *told.items())
        if key not in self._models:
            dtype = None if kind == "diffusion_gemma" else self.dtype  # a recorded stream of draws is of its own dtype
            self._models[key] = paradec.load(path, **told | ({} if dtype is None else {"dtype": dtype}))
        return self._models[key]

    def arguments(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The sampler and the request's fields, as `paradec.generate` takes them."""
        import paradec

        settings = dict(asked["settings"])
        if "drafter" in settings:
            settings["drafter"] = self.model(asked, settings["drafter"])
        if "base" in settings:
            settings["base"] = paradec.core.protocol.Sampler.from_dict(settings["base"])
        found = {"sampler": paradec.samplers.create(asked["method"], **settings)}
        for name in ("max_new_tokens", "block_length", "steps", "temperature", "top_p", "top_k", "guidance_scale"):
            if asked[name] is not None:
                found[name] = asked[name]
        if asked["cache"] is not None:
            cache = dict(asked["cache"])
            found["cache"] = paradec.caches.create(cache.pop("name"), **cache)
        # "reference" is as the published code: the mask has its share of the probability, torch's generator is drawn
        # from, and rows are of one length
        own = asked["draws"] == "own" or asked["group"] == "rows" or asked["method"] == "freedave"
        rng = "counter" if own else "reference"
        return found | {"rng": rng, "seed": asked["seed"], "eos_early_stop": False}

    def __call__(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        import paradec

        model, wanted = self.model(asked), self.arguments(asked)
        steps = asked["group"] not in ("laws", "canvases")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "cache=")  # what caches are worth on so small a model
            warnings.filterwarnings("ignore", ".* no effect at temperature 0")  # cases state every field
            out = paradec.generate(model, [list(prompt) for prompt in asked["prompts"]], trace=steps, **wanted)
        pad = out.sequences.shape[1] - asked["max_new_tokens"]
        ids = [row[pad - len(prompt) :].tolist() for row, prompt in zip(out.sequences, asked["prompts"], strict=True)]
        if out.trace is None:
            return {"ids": ids}
        return {"ids": ids, "steps": [[list(entry[:3]) for entry in step.commits] for step in out.trace.steps]}
