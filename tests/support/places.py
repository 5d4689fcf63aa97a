"""Where the tests' files are."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SUPPORT = TESTS / "support"
"""The modules that several tests share."""
ROOT = TESTS.parent
GOLDEN = TESTS / "golden"
"""Small trained checkpoints in the published formats, and traces of the reference implementations."""
