"""Where the tests' files are."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SUPPORT = TESTS / "support"
"""The modules that several tests share."""
ROOT = TESTS.parent
GOLDEN = TESTS / "golden"
"""Small trained checkpoints in the published formats, and traces of the reference implementations."""


def variable(family: str) -> str:
    """The environment variable of a family's folder: PARADEC_NEXT_IMAGE for "next-image"."""
    return f"PARADEC_{family.upper().replace('-', '_')}"


def golden(family: str) -> Path:
    """The folder of a family's recorded cases: `tests/golden/<family>`, or the one that its variable names, so that
    another set of the same form is replayed (docs/fidelity.md)."""
    return Path(os.environ.get(variable(family)) or GOLDEN / family).absolute()


def golden_file(family: str, name: str) -> Path:
    """A file that cases share, weights for one, in the folder of a family; tests/golden's where that has none."""
    path = golden(family) / name
    return path if path.exists() else GOLDEN / family / name


def assert_shown(family: str, found: object) -> None:
    """That a family's cases show something. Those of tests/golden do; another set need not have such a case."""
    assert found or golden(family) != GOLDEN / family
