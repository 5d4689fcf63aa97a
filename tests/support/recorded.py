"""Recorded cases of the reference implementations: the files, the fields that are read, the outcome of each replay.

Tests read the packaged cases in tests/golden. `tests/replays.py` sets `SELECTION`, and then the same tests read the
cases of another folder, and only these. All files of cases are read here.
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
"""Scores whose difference is below this are a tie: rounding decides."""


@dataclass(frozen=True)
class Selection:
    """The folder whose cases are replayed, and the families that it holds."""

    folder: Path
    families: tuple[str, ...]


SELECTION: Selection | None = None
"""None: the packaged cases of every family."""


def golden(family: str) -> Path:
    """The folder with the recorded cases of a family; a path that does not exist if the family is not selected."""
    if SELECTION is None:
        return GOLDEN / family
    return SELECTION.folder if family in SELECTION.families else GOLDEN / "not selected"


def is_packaged(family: str) -> bool:
    """Whether the packaged cases of a family are replayed; they must show something, another set need not."""
    return golden(family) == GOLDEN / family


def find_checkpoint(name: str, family: str) -> Path:
    """The folder of a checkpoint that a case names: in the cases' folder, else beside it, else packaged."""
    folder = golden(family)
    for base in (folder, folder.parent, GOLDEN):
        for pattern in ("", "*/", "*/*/"):
            for config in sorted(base.glob(f"{pattern}{Path(name).name}/config.json")):
                return config.parent
    raise FileNotFoundError(f"no folder {name} with a config.json in {folder}, beside it or in tests/golden")


def find_weights(name: str, family: str) -> Path:
    """A file of weights that a case names, in the cases' folder, else beside it, else packaged."""
    folder = golden(family)
    for base in (folder, *(path for path in sorted(folder.parent.glob("*")) if path.is_dir()), GOLDEN / family):
        if (base / name).exists():
            return base / name
    raise FileNotFoundError(f"no file {name} in {folder}, beside it or in tests/golden/{family}")


READ: dict[Path, dict[tuple[str, ...], set[str]]] = {}
"""For every file that was opened: the fields read, by the place of the object that has them."""


class Fields(dict[str, Any]):
    """An object of a file, which records the fields that are read."""

    def __init__(self, fields: dict[str, Any], read: set[str]):
        super().__init__(fields)
        self.read = read

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def __iter__(self) -> Iterator[str]:  # without it `|` and `**` would copy the fields unseen
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
    """A copy without records. read: whether the copied fields count as read."""
    if isinstance(value, Fields):
        if read:
            value.read.update(value)
        return {name: plain(field, read) for name, field in dict.items(value)}
    return [plain(entry, read) for entry in value] if isinstance(value, list) else value


def _record(value: Any, places: dict[tuple[str, ...], set[str]], place: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        fields = {name: _record(field, places, (*place, name)) for name, field in value.items()}
        return Fields(fields, places.setdefault(place, set()))
    if isinstance(value, list) and any(isinstance(entry, (dict, list)) for entry in value):
        return [_record(entry, places, (*place, str(at))) for at, entry in enumerate(value)]
    return value


def read_json(path: Path) -> Any:
    """The contents of a JSON file (or of one with an object per line)."""
    return _record(_parse(path), READ.setdefault(path, {}), ())


@functools.lru_cache(maxsize=2000)
def _parse(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


@functools.cache
def read_arrays(path: Path) -> Any:
    """The arrays of a safetensors file (tensors) or an npz file (numpy arrays), by name."""
    return Fields(_load(path), READ.setdefault(path, {}).setdefault((), set()))


def _load(path: Path) -> dict[str, Any]:
    return dict(np.load(path)) if path.suffix == ".npz" else load_file(path)


def read_head(path: Path) -> Any:
    """The contents of a JSON file, of which nothing counts as read: to choose what is replayed."""
    return _parse(path)


def unread_fields(folder: Path) -> Counter[tuple[str, str]]:
    """Fields of the files opened in a folder that no replay read: how often each occurs, by (folder, field)."""
    found: Counter[tuple[str, str]] = Counter()
    for path, places in READ.items():
        if not path.is_relative_to(folder):
            continue
        group = str(path.parent.relative_to(folder))
        if path.suffix in (".npz", ".safetensors"):
            unread = [name for name in _load(path) if name not in places[()]]
            found.update((group, "".join("#" if c.isdigit() else c for c in name.split("/")[-1])) for name in unread)
        else:
            _count_unread(_parse(path), places, (), "", found, group)
    return found


def _count_unread(
    value: Any, places: Any, place: tuple[str, ...], field: str, found: Counter[tuple[str, str]], group: str
) -> None:
    if isinstance(value, list):
        for at, entry in enumerate(value):
            if isinstance(entry, (dict, list)):
                _count_unread(entry, places, (*place, str(at)), field, found, group)
    elif isinstance(value, dict):
        is_table = len(value) > 1 and all(isinstance(entry, dict) for entry in value.values())
        for name, entry in value.items():
            inner = field if is_table else f"{field}.{name}".removeprefix(".")
            if name in places.get(place, ()):
                _count_unread(entry, places, (*place, name), inner, found, group)
            else:
                found[group, inner] += 1


RANKS = ("replayed", "refused", "near tie", "wrong")
"""Outcomes of a case; where several tests replay one, the last of these counts."""


@dataclass
class Outcome:
    rank: str
    reason: str = ""


OUTCOMES: dict[str, Outcome] = {}
"""By the name of the case."""


class NearTie(Exception):
    """A case goes another way at scores that differ by less than `NEAR_TIE`."""


class Refused(Exception):
    """A case that is not replayed, with the reason."""


def record_outcome(name: str, rank: str, reason: str = "") -> None:
    before = OUTCOMES.get(name)
    if before is None or RANKS.index(rank) > RANKS.index(before.rank):
        OUTCOMES[name] = Outcome(rank, reason)


def refuse(name: str, reason: str) -> None:
    """Record a case that is not replayed."""
    record_outcome(name, "refused", reason)


@contextlib.contextmanager
def replay(name: str) -> Iterator[None]:
    """Record the outcome of one case. With another folder selected, the cases after a wrong one are replayed too."""
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
def replay_in_float64(name: str, case: Any) -> Iterator[None]:
    """As `replay`; a difference is a near tie by the stated `margin`, or refused where `fp64_same` is false."""
    with replay(name):
        try:
            yield
        except AssertionError as error:
            if case.get("margin", 1.0) < NEAR_TIE:
                raise NearTie(f"scores {case['margin']:.1e} apart: {error}") from error
            if case.get("fp64_same") is False:
                raise Refused("the reference itself decides otherwise in float64") from error
            raise


@contextlib.contextmanager
def tied_below(gap: Callable[[], float]) -> Iterator[None]:
    """Make a difference a near tie if scores that decide are this close. gap: called where something differs."""
    try:
        yield
    except AssertionError as error:
        distance = gap()
        if distance < NEAR_TIE:
            raise NearTie(f"scores {distance:.1e} apart: {error}") from error
        raise


def distance_to_bounds(weights: Any, uniform: Any) -> float:
    """The least distance of numbers [...] to a bound of the cumulative weights [..., V] that they draw from."""
    total = np.cumsum(np.asarray(weights, np.float64), -1)
    return float(np.abs(total / total[..., -1:] - np.asarray(uniform, np.float64)[..., None]).min(initial=np.inf))


Test = TypeVar("Test", bound=Callable[..., None])


def replays(argument: str, group: str = "") -> Callable[[Test], Test]:
    """Make each call of a test the replay of one case, which this argument of the test names within its group."""

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def wrapped(*positional: Any, **named: Any) -> None:
            with replay(group + name_of(inspect.signature(test).bind(*positional, **named).arguments[argument])):
                test(*positional, **named)

        return wrapped  # type: ignore[return-value]

    return decorate


def name_of(case: Any) -> str:
    """The name of a case: of its file, or the one that it states."""
    if isinstance(case, Path):
        return f"{case.parent.name}/{case.stem}"
    if isinstance(case, dict):
        return str(dict.get(case, "name") or dict.get(case, "id"))
    return str(case)


def image_cases(system: str, holds: str) -> list[str]:
    """Names of a system's cases of the kind that has this field, or this array."""
    found = {path.stem: read_head(path) for path in (golden("next-image") / system).glob("*.json")}
    return sorted(name for name, said in found.items() if "id" in said and holds in {*said, *said.get("tensors", ())})


def image_file(system: str, name: str) -> Path:
    """A file of a system, "model-a.safetensors"; of the folder itself where `system` is empty."""
    return find_weights(str(Path(system, name)), "next-image")


def image_case(system: str, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A case, or a model's configuration ("vae.config"), and the arrays beside it."""
    path = image_file(system, f"{name}.json")
    arrays = path.with_name(f"{path.stem.removesuffix('.config')}.safetensors")
    if name.endswith(".config"):
        return dict(read_head(path)), load_file(arrays) if arrays.exists() else {}
    record, found = read_json(path), read_arrays(arrays) if arrays.exists() else {}
    assert record.get("tensors", {}) == {key: list(tensor.shape) for key, tensor in dict.items(found)}
    return record, found


def checksum(tensor: Tensor) -> list[float]:
    """[n, mean, root of the mean square, sum x_i cos(i) / sqrt(n)], in float64."""
    x = tensor.detach().double().flatten()
    wave = torch.arange(len(x), dtype=torch.float64).cos()
    return [float(len(x)), float(x.mean()), float(x.square().mean().sqrt()), float((x * wave).sum() / len(x) ** 0.5)]


def assert_checksum(tensor: Tensor, expected: list[float], tolerance: float = 2e-5) -> None:
    """Within `tolerance` of max(1, |value|)."""
    found = checksum(tensor)
    assert found[0] == expected[0]
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert abs(ours - theirs) <= tolerance * max(1.0, abs(theirs)), (found, expected)
