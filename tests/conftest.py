"""Models that many tests share, loaded once."""

from __future__ import annotations

import collections
import gc
import os
import zlib
from typing import TYPE_CHECKING, Any

import pytest
from places import GOLDEN

if TYPE_CHECKING:
    from pathlib import Path

    from paradec.models.adapter import Model

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for child processes: pytest's other workers use the other cores


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None):
        return  # this process only distributes tests; without torch it starts sooner
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads the variable when it is imported
    torch.set_num_threads(1)  # faster for tiny models, and results do not depend on the number of cores


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases of a `thinned` test as `further`: all but one in eleven (at least one), chosen by the test's name."""
    cases = collections.defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("thinned") and not item.get_closest_marker("full"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, group in cases.items():
        interval = min(11, len(group))  # 11 is prime: if parameters are multiplied, cases with every value are kept
        for index, item in enumerate(group, zlib.crc32(name.encode())):
            if index % interval:
                item.add_marker("further")


def pytest_collection_finish() -> None:
    gc.freeze()  # every later `gc.collect()` skips the imported modules, which saves half a second


WITHOUT_FILTER = {
    ("llada-tiny", 64), ("dream-tiny", 72), ("LLaDAModelLM", 64), ("LlamaForCausalLM", 41), ("Qwen2ForCausalLM", 41),
    ("sdar", 32), ("Denoisers", 14),
}  # fmt: skip
"""(name, vocabulary size) of tested models that have no trained Learn2PD filter."""


@pytest.fixture(scope="session", autouse=True)
def random_filters(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Register untrained filters for the models in `WITHOUT_FILTER`, so that every sampler runs with its defaults."""
    import torch

    from paradec import caches
    from paradec.samplers.masked.rules.learn2pd_filter import FEATURES, FilterFacts, register_filter, save_filter

    folder = tmp_path_factory.mktemp("filters")
    for model, vocab_size in WITHOUT_FILTER:
        facts = FilterFacts("features", model, vocab_size, 32, tuple(caches.names()), threshold=0.96)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network, features = facts.network(), torch.rand(64, len(FEATURES), 8)
        # probabilities far from 0.5, above and below it equally often
        network.leave.weight.data *= 50
        with torch.no_grad():
            logits = network(dict(zip(FEATURES, features.unbind(1))), torch.ones(64, 8, dtype=torch.bool))
        network.leave.bias.data -= logits.median()
        save_filter(folder / f"{model}.safetensors", facts, network)
        register_filter(folder / f"{model}.safetensors")


@pytest.fixture(scope="session")
def packaged() -> Model:
    import paradec

    return paradec.load()


@pytest.fixture(scope="session")
def packaged64() -> Model:
    import paradec

    return paradec.load(dtype="float64")


def checkpoint(name: str, dtype: str) -> Any:
    """Create a fixture that loads a small checkpoint of tests/golden in one precision."""

    @pytest.fixture(scope="session")
    def model() -> Model:
        from traces import load_model

        return load_model(GOLDEN / name, dtype)

    return model


llada, llada64 = checkpoint("llada-tiny", "float32"), checkpoint("llada-tiny", "float64")
dream, dream64 = checkpoint("dream-tiny", "float32"), checkpoint("dream-tiny", "float64")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let huggingface_hub use an empty cache folder, offline."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path
