"""The hint that bfloat16 would be faster."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import paradec
from paradec.models import cpu_dtypes


@pytest.fixture
def stored(tmp_path: Path) -> str:
    """The packaged model, stored in bfloat16."""
    model = paradec.load(dtype="bfloat16")
    model.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def said(source: str, **options: object) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        paradec.load(source, **options)  # type: ignore[arg-type]
    return [str(each.message) for each in caught if "bfloat16" in str(each.message)]


def capable(monkeypatch: pytest.MonkeyPatch, *names: str, slow: torch.dtype = torch.float32) -> None:
    """A CPU with these instructions, on which products of the dtype `slow` take 50 milliseconds more."""

    def linear(hidden: torch.Tensor, *rest: Any, product: Any = torch.nn.functional.linear) -> torch.Tensor:
        time.sleep(0.05 * (hidden.dtype == slow and hidden.shape[-1] == cpu_dtypes.WIDTH))
        found: torch.Tensor = product(hidden, *rest)
        return found

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    monkeypatch.setattr(cpu_dtypes, "_said", False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(names, True), raising=False)
    for name in cpu_dtypes.FAST:
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda name=name: name in names, raising=False)


@pytest.mark.parametrize("instructions", cpu_dtypes.FAST)
def test_it_comes_once(stored: str, monkeypatch: pytest.MonkeyPatch, instructions: str) -> None:
    capable(monkeypatch, instructions)
    assert not said(stored) and not said(stored, dtype="bfloat16") and not said(stored, dtype="float64")
    assert len(found := said(stored, dtype="float32")) == 1
    assert "is stored in bfloat16 and runs in float32" in found[0] and "dtype='bfloat16'" in found[0]
    assert not said(stored, dtype="float32")


@pytest.mark.parametrize("instructions", cpu_dtypes.FAST)
def test_instructions_that_gain_nothing(stored: str, monkeypatch: pytest.MonkeyPatch, instructions: str) -> None:
    capable(monkeypatch, instructions, slow=torch.bfloat16)
    assert not said(stored, dtype="float32")


def test_other_processors_and_checkpoints(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capable(monkeypatch, "avx2")
    assert not said(stored, dtype="float32")
    capable(monkeypatch, *cpu_dtypes.FAST)
    paradec.load(dtype="float32").save_pretrained(tmp_path / "wide")
    assert not said(str(tmp_path / "wide"), dtype="float32")
