"""Read recorded cases of the reference implementations; record which fields are read and how each replay ends.

Tests read the packaged cases in tests/golden. If `tests/replays.py` sets `SELECTION`, the same tests read only the
cases of the selected folder.
"""

import contextlib
import functools
import inspect
import json
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from places import GOLDEN, TESTS
from safetensors.torch import load_file
from torch import Tensor

NEAR_TIE = 1e-7
"""Scores that differ by less are a tie: rounding decides."""


@dataclass(frozen=True)
class Selection:
    """The folder of the cases to replay, and the families in it."""

    folder: Path
    families: tuple[str, ...]


SELECTION: Selection | None = None
"""None selects the packaged cases of every family."""


def golden(family: str) -> Path:
    """Return the folder with the recorded cases of a family; it does not exist if the family is not selected."""
    if SELECTION is None:
        return GOLDEN / family
    return SELECTION.folder if family in SELECTION.families else GOLDEN / "not selected"


def is_packaged(family: str) -> bool:
    """Return whether the packaged cases of a family are replayed. Only packaged cases must cover every behaviour."""
    return golden(family) == GOLDEN / family


def find_checkpoint(name: str, family: str) -> Path:
    """Find the folder of a checkpoint that a case names: in the cases' folder, else next to it, else packaged."""
    folder = golden(family)
    for base in (folder, folder.parent, GOLDEN):
        for pattern in ("", "*/", "*/*/"):
            for config in sorted(base.glob(f"{pattern}{Path(name).name}/config.json")):
                return config.parent
    raise FileNotFoundError(f"no folder {name} with a config.json in {folder}, next to it or in tests/golden")


def find_weights(name: str, family: str) -> Path:
    """Find a weights file that a case names: in the cases' folder, else next to it, else packaged."""
    folder = golden(family)
    for base in (folder, *(path for path in sorted(folder.parent.glob("*")) if path.is_dir()), GOLDEN / family):
        if (base / name).exists():
            return base / name
    raise FileNotFoundError(f"no file {name} in {folder}, next to it or in tests/golden/{family}")


READ: dict[Path, dict[tuple[str, ...], set[str]]] = {}
"""File -> path of an object in the file -> names of the object's fields that were read."""


class Fields(dict[str, Any]):
    """A JSON object that records which of its fields are read."""

    def __init__(self, fields: dict[str, Any], read: set[str]):
        super().__init__(fields)
        self.read = read

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def __iter__(self) -> Iterator[str]:  # without this method `|` and `**` would copy fields without recording
        return super().__iter__()

    def items(self) -> Any:
        self.read.update(self)
        return super().items()

    def values(self) -> Any:
        self.read.update(self)
        return super().values()

    def __eq__(self, other: object) -> bool:
        return plain(self, read=True) == other

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return dict, (plain(self),)


def plain(value: Any, read: bool = False) -> Any:
    """Copy a value into plain dicts and lists. read: whether the copied fields count as read."""
    if isinstance(value, Fields):
        if read:
            value.read.update(value)
        return {name: plain(field, read) for name, field in dict.items(value)}
    return [plain(entry, read) for entry in value] if isinstance(value, list) else value


def _record(value: Any, read: dict[tuple[str, ...], set[str]], path: tuple[str, ...]) -> Any:
    """Replace the objects in a JSON value by `Fields`. path: names and indices that lead to the value in its file."""
    if isinstance(value, dict):
        fields = {name: _record(field, read, (*path, name)) for name, field in value.items()}
        return Fields(fields, read.setdefault(path, set()))
    if isinstance(value, list) and any(isinstance(entry, (dict, list)) for entry in value):
        return [_record(entry, read, (*path, str(index))) for index, entry in enumerate(value)]
    return value


def read_json(path: Path) -> Any:
    """Return the contents of a JSON or JSON Lines file; later reads of its fields are recorded."""
    return _record(_parse(path), READ.setdefault(path, {}), ())


@functools.lru_cache(maxsize=2000)
def _parse(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


@functools.cache
def read_arrays(path: Path) -> Any:
    """Return the arrays of a safetensors file (as tensors) or an npz file (as NumPy arrays), by name."""
    return Fields(_load(path), READ.setdefault(path, {}).setdefault((), set()))


def _load(path: Path) -> dict[str, Any]:
    return dict(np.load(path)) if path.suffix == ".npz" else load_file(path)


def read_json_unrecorded(path: Path) -> Any:
    """Return the contents of a JSON file without recording reads; for code that only chooses the cases to replay."""
    return _parse(path)


def unread_fields(folder: Path) -> Counter[tuple[str, str]]:
    """Count the unread fields of opened files, by (subfolder of `folder`, field such as "steps.commits")."""
    counts: Counter[tuple[str, str]] = Counter()
    for file, read in READ.items():
        if not file.is_relative_to(folder):
            continue
        subfolder = str(file.parent.relative_to(folder))
        if file.suffix in (".npz", ".safetensors"):
            unread = [name for name in _load(file) if name not in read[()]]
            fields = ("".join("#" if c.isdigit() else c for c in name.split("/")[-1]) for name in unread)
            counts.update((subfolder, field) for field in fields)
        else:
            _count_unread(_parse(file), read, (), "", counts, subfolder)
    return counts


def _count_unread(
    value: Any, read: Any, path: tuple[str, ...], field: str, counts: Counter[tuple[str, str]], subfolder: str
) -> None:
    if isinstance(value, list):
        for index, entry in enumerate(value):
            if isinstance(entry, (dict, list)):
                _count_unread(entry, read, (*path, str(index)), field, counts, subfolder)
    elif isinstance(value, dict):
        is_table = len(value) > 1 and all(isinstance(entry, dict) for entry in value.values())
        for name, entry in value.items():
            inner = field if is_table else f"{field}.{name}".removeprefix(".")
            if name in read.get(path, ()):
                _count_unread(entry, read, (*path, name), inner, counts, subfolder)
            else:
                counts[subfolder, inner] += 1


RANKS = ("replayed", "refused", "near tie", "wrong")
"""Outcomes of a case, from best to worst. If several tests replay a case, the worst outcome counts."""


@dataclass
class Outcome:
    rank: str
    reason: str = ""


OUTCOMES: dict[str, Outcome] = {}
"""Name of a case -> its outcome."""


class NearTie(Exception):
    """A case departs from the recording at scores that differ by less than `NEAR_TIE`."""


class Refused(Exception):
    """A case cannot be replayed; the message is the reason."""


def record_outcome(name: str, rank: str, reason: str = "") -> None:
    before = OUTCOMES.get(name)
    if before is None or RANKS.index(rank) > RANKS.index(before.rank):
        OUTCOMES[name] = Outcome(rank, reason)


def refuse(name: str, reason: str) -> None:
    """Record a case that is not replayed."""
    record_outcome(name, "refused", reason)


@contextlib.contextmanager
def replay(name: str) -> Iterator[None]:
    """Record the outcome of one case. If `SELECTION` is set, a wrong case raises no error."""
    try:
        yield
    except NearTie as tie:
        record_outcome(name, "near tie", str(tie))
    except Refused as reason:
        refuse(name, str(reason))
    except (Exception, pytest.fail.Exception) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if TESTS in Path(frame.filename).parents]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
        record_outcome(name, "wrong", f"{type(error).__name__} at {where}: {' '.join(str(error).split())[:300]}")
        if SELECTION is None:
            raise
    else:
        record_outcome(name, "replayed")


@contextlib.contextmanager
def near_tie_or_refused(gap: Callable[[], float], case: Any = None) -> Iterator[None]:
    """Turn a failed assertion into `NearTie` or `Refused`.

    It is a near tie if `gap()`, the distance of the deciding scores, is below `NEAR_TIE`. Otherwise it is refused if
    the case's field `fp64_same` is false: then the reference itself decides differently in float64."""
    try:
        yield
    except AssertionError as error:
        distance = gap()
        if distance < NEAR_TIE:
            raise NearTie(f"scores {distance:.1e} apart: {error}") from error
        if case is not None and case.get("fp64_same") is False:
            raise Refused("the reference decides differently in float64") from error
        raise


@contextlib.contextmanager
def replay_with_margin(name: str, case: Any) -> Iterator[None]:
    """Like `replay`, but a failed assertion is a near tie if the case's field `margin` is below `NEAR_TIE`."""
    with replay(name), near_tie_or_refused(lambda: case.get("margin", 1.0), case):
        yield


def distance_to_bounds(weights: Any, uniform: Any) -> float:
    """Return the least distance of uniform numbers [...] to cumulative sums of weights [..., V], scaled to end at 1."""
    total = np.cumsum(np.asarray(weights, np.float64), -1)
    return float(np.abs(total / total[..., -1:] - np.asarray(uniform, np.float64)[..., None]).min(initial=np.inf))


Test = TypeVar("Test", bound=Callable[..., None])


def replays(argument: str, group: str = "") -> Callable[[Test], Test]:
    """Decorate a test to record its outcome under `group` + the name of the case that it gets as `argument`."""

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def wrapped(*positional: Any, **named: Any) -> None:
            with replay(group + name_of(inspect.signature(test).bind(*positional, **named).arguments[argument])):
                test(*positional, **named)

        return wrapped  # type: ignore[return-value]

    return decorate


def name_of(case: Any) -> str:
    """Return the name of a case, which is a file, an object with a "name" or "id", or the name itself."""
    if isinstance(case, Path):
        return f"{case.parent.name}/{case.stem}"
    if isinstance(case, dict):
        return str(dict.get(case, "name") or dict.get(case, "id"))
    return str(case)


def image_cases(system: str, field: str) -> list[str]:
    """Return the names of a system's cases that have this field or array. system: a folder of "next-image"."""
    cases = {path.stem: read_json_unrecorded(path) for path in (golden("next-image") / system).glob("*.json")}
    return sorted(name for name, case in cases.items() if "id" in case and field in {*case, *case.get("tensors", ())})


def image_file(system: str, name: str) -> Path:
    """Find a file such as "model-a.safetensors" of a system; if `system` is empty, in the family's folder."""
    return find_weights(str(Path(system, name)), "next-image")


def image_case(system: str, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a case, or a model's configuration (with a name such as "vae.config"), and its arrays."""
    path = image_file(system, f"{name}.json")
    arrays = path.with_name(f"{path.stem.removesuffix('.config')}.safetensors")
    if name.endswith(".config"):
        return dict(read_json_unrecorded(path)), load_file(arrays) if arrays.exists() else {}
    record, tensors = read_json(path), read_arrays(arrays) if arrays.exists() else {}
    assert record.get("tensors", {}) == {key: list(tensor.shape) for key, tensor in dict.items(tensors)}
    return record, tensors


def checksum(tensor: Tensor) -> list[float]:
    """Return [n, mean, root mean square, sum of x_i cos(i) / sqrt(n)] of the flattened tensor x, in float64."""
    x = tensor.detach().double().flatten()
    wave = torch.arange(len(x), dtype=torch.float64).cos()
    return [float(len(x)), float(x.mean()), float(x.square().mean().sqrt()), float((x * wave).sum() / len(x) ** 0.5)]


def assert_checksum(tensor: Tensor, expected: list[float], tolerance: float = 2e-5) -> None:
    """Assert that a tensor's checksum is `expected`, up to `tolerance` times max(1, |value|)."""
    computed = checksum(tensor)
    assert computed[0] == expected[0]
    for ours, theirs in zip(computed[1:], expected[1:], strict=True):
        assert abs(ours - theirs) <= tolerance * max(1.0, abs(theirs)), (computed, expected)
