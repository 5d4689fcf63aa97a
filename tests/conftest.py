"""Models that many tests share, loaded once."""

from __future__ import annotations

import pytest
import torch
from replay import GOLDEN

import paradec
from paradec.models.adapter import Model

torch.set_num_threads(1)  # tiny models are faster on one thread, and results do not depend on the machine's cores


@pytest.fixture(scope="session")
def llada() -> Model:
    return paradec.load(GOLDEN / "llada-tiny")


@pytest.fixture(scope="session")
def dream() -> Model:
    return paradec.load(GOLDEN / "dream-tiny")


@pytest.fixture(scope="session")
def llada64() -> Model:
    return paradec.load(GOLDEN / "llada-tiny", dtype="float64")


@pytest.fixture(scope="session")
def dream64() -> Model:
    return paradec.load(GOLDEN / "dream-tiny", dtype="float64")
