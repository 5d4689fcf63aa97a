"""The kit's data and cases, read once, and what a target makes of some of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from places import GOLDEN

from paradec.tools.conformance.archive import Data, manifest
from paradec.tools.conformance.cases import Case, cases
from paradec.tools.conformance.run import TOLERANCE, Outcome, Run, run


@functools.cache
def data() -> Data:
    return Data(GOLDEN, manifest(GOLDEN)["files"], "test")


@functools.cache
def named() -> dict[str, Case]:
    return {case.name: case for case in cases(data())}


def asked(target: Any, names: Iterable[str], tolerance: float = TOLERANCE, draws: int = 1000) -> Run:
    """A run of some cases by name."""
    into = Run("test", "test", data().digest, tolerance, draws, {})
    return run(target, data(), [named()[name] for name in names], into)


def one(target: Any, name: str, **more: Any) -> Outcome:
    (outcome,) = asked(target, [name], **more).outcomes
    return outcome
