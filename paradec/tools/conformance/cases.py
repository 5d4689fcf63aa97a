"""What a case is, and which cases the data has.

| group | is | compared |
|---|---|---|
| traces | a recorded decode of the published code | what each forward made final, and the answer |
| rows | several of these in one ragged batch; prompts of very different lengths | each row with itself alone |
| ties | a confidence exactly at the threshold | which tokens a forward makes final, wherever |
| laws | many draws of a lossless method | with the exact distribution of the answers |
| canvases | a decode of transformers' DiffusionGemma | the answer |
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paradec.core.checks import check_choice
from paradec.tools.conformance.archive import OWN, Data
from paradec.tools.conformance.traces import Asked, Expected, recorded

GROUPS = ("traces", "rows", "ties", "laws", "canvases")


@dataclass(frozen=True)
class Tie:
    """What equal confidences leave no choice in: which tokens each forward makes final, in whatever positions."""

    answers: Mapping[str, list[list[list[int]]]]
    """By what a decoder does ("compares confidence >= threshold"): the tokens of each forward, sorted, of each row."""
    right: str
    """What the method does."""
    twins: list[list[int]]
    """Tokens that are equally likely everywhere: either one will do."""


@dataclass(frozen=True)
class Distribution:
    """The exact distribution of an answer."""

    answers: list[list[int]]
    probabilities: list[float]


@dataclass(frozen=True)
class Case:
    """What is asked, and what agrees with it."""

    name: str
    group: str
    asked: Asked
    expected: list[Expected] = field(default_factory=list)
    """Of each row, unless it is a tie or a distribution that is expected."""
    tie: Tie | None = None
    distribution: Distribution | None = None
    alone: list[Case] = field(default_factory=list)
    """Of rows: the cases that have each of them alone."""

    @property
    def method(self) -> str:
        """What the report counts it under."""
        return self.asked.method


def cases(
    data: Data, methods: Collection[str] = (), groups: Collection[str] = (), quick: bool = False
) -> Iterator[Case]:
    """The cases of the kit, in a fixed order.

    Args:
        methods, groups: these alone; all if empty.
        quick: of each file of traces one case, and one batch.

    Raises:
        ValueError: a method or group that has no case.
    """
    for group in groups:
        check_choice("--group", group, GROUPS)
    every = list(_every(data, quick))
    known = sorted({case.method for case in every})
    for method in methods:
        check_choice("--method", method, known)
    for case in every:
        if (not methods or case.method in methods) and (not groups or case.group in groups):
            yield case


def _every(data: Data, quick: bool) -> Iterator[Case]:
    own = {name: _own(data, name) for name in ("rows", "ties", "laws", "canvases")}
    batches = own["rows"].get("batches", {})
    for name, entries in recorded(data):
        found = {number: Case(f"{name}/{number}", "traces", asked, expected) for number, asked, expected in entries}
        yield from list(found.values())[:1] if quick else found.values()
        if name in batches:
            yield _ragged([found[number] for number in batches[name]])
    yield from _ties(own["ties"])
    yield from _distributions(own["laws"])
    yield from _canvases(own["canvases"])


def _own(data: Data, name: str) -> dict[str, Any]:
    """A file of cases that were made for the kit; a folder of recorded traces alone has none."""
    file = f"{OWN}/{name}.json"
    return data.json(file) if file in data.files else {"cases": []}  # type: ignore[no-any-return]


def _ragged(members: Sequence[Case]) -> Case:
    """Cases of one row, whose prompts may have any length, as rows of one batch."""
    asked = members[0].asked.but(prompts=[case.asked.prompts[0] for case in members])
    name = f"{members[0].name.rsplit('/', 1)[0]}/rows"
    return Case(name, "rows", asked, [case.expected[0] for case in members], alone=list(members))


def _ties(file: Mapping[str, Any]) -> Iterator[Case]:
    for entry in file["cases"]:
        tie = Tie(entry["answers"], entry["right"], entry["twins"])
        yield Case(entry["name"], entry["name"].split("/")[0], Asked.of(entry["asked"]), tie=tie)


def _distributions(file: Mapping[str, Any]) -> Iterator[Case]:
    for entry in file["cases"]:
        distribution = Distribution(entry["answers"], entry["probabilities"])
        for method, settings in file["methods"].items():
            asked = Asked.of(entry["asked"] | {"method": method.split("/")[0], "settings": settings})
            yield Case(f"laws/{entry['name']}/{method.replace('/', '-')}", "laws", asked, distribution=distribution)


def _canvases(file: Mapping[str, Any]) -> Iterator[Case]:
    for entry in file["cases"]:
        expected = [Expected(ids, None, frozenset(range(len(ids))), True) for ids in entry["ids"]]
        yield Case(f"canvases/{entry['name']}", "canvases", Asked.of(entry["asked"]), expected)
