"""paradec's algorithms for SGLang on the released base class, in both loops, compared with SGLang's algorithms."""

import importlib
import os
import random
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from engines import ENGINE_SAMPLERS, check_sampler, dllm_config, forward_batch
from places import ROOT
from small_models import tiny
from torch import Tensor

from paradec.integrations.engines.sglang import algorithms
from paradec.models.adapter import Model

VERSION = "0.5.23"
FOLDER = Path(os.environ.get("PARADEC_ENGINE_WHEELS", ROOT / ".engines"))
PARTS = ("sglang/srt/dllm/", "sglang/srt/plugins/", "sglang/srt/environ.py")
"""The executed parts of the wheel."""
STAND_INS: dict[str, dict[str, Any]] = {
    "sglang.srt.server_args": {"ServerArgs": type("ServerArgs", (), {})},
    "sglang.srt.model_executor.forward_batch_info": {"ForwardBatch": SimpleNamespace},
    "sglang.srt.model_executor.model_runner": {"ModelRunner": type("ModelRunner", (), {})},
    "sglang.srt.layers.logits_processor": {"LogitsProcessorOutput": SimpleNamespace},
    # only needed to create the configuration from server arguments, which no test does
    "sglang.srt.configs.model_config": {"ModelConfig": type("ModelConfig", (), {})},
    "sglang.srt.arg_groups.overrides": {"resolving_view": lambda arguments: arguments},
    "sglang.srt.utils": {"is_npu": lambda: False},
}
"""Stubs: modules that the algorithms import, with the imported names."""


def wheel() -> Path | None:
    return next(iter(sorted(FOLDER.glob(f"sglang-{VERSION}-*.whl"))), None)


@contextmanager
def sglang(folder: Path) -> Iterator[SimpleNamespace]:
    """Unpack SGLang into `folder`. Yield its modules `base`, `algorithm` (the registry), `config` and `plugins`."""
    archive = wheel()
    assert archive is not None
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(folder, [name for name in packed.namelist() if name.startswith(PARTS)])
    before = {name for name in sys.modules if name.split(".")[0] == "sglang"}
    assert not before, "sglang is installed here: these tests are for places where it is not"
    try:
        for name, path in {"sglang": "sglang", "sglang.srt": "sglang/srt"}.items():
            sys.modules[name] = ModuleType(name)  # skips the imports of their __init__
            sys.modules[name].__path__ = [str(folder / path)]
        for name, contents in STAND_INS.items():
            parent = name.rpartition(".")[0]
            if parent not in sys.modules:
                sys.modules[parent] = ModuleType(parent)
                sys.modules[parent].__path__ = []
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(contents)
        yield SimpleNamespace(
            base=importlib.import_module("sglang.srt.dllm.algorithm.base"),
            algorithm=importlib.import_module("sglang.srt.dllm.algorithm"),
            config=importlib.import_module("sglang.srt.dllm.config"),
            plugins=importlib.import_module("sglang.srt.plugins"),
        )
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            del sys.modules[name]


class Runner:
    def __init__(self, logits: Any):
        self.logits, self.calls = logits, 0

    def forward(self, forward_batch: Any, pp_proxy_tensors: Any = None) -> Any:
        self.calls += 1
        output = SimpleNamespace(full_logits=self.logits(forward_batch))
        return SimpleNamespace(logits_output=output, can_run_graph=False)


pytestmark = pytest.mark.skipif(wheel() is None, reason=f"needs the wheel of sglang {VERSION} (.ci/engines sglang)")
MASK, VOCAB = 63, 64


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    with sglang(tmp_path_factory.mktemp("sglang")) as modules:
        yield modules


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny(2, "block_causal")


class RandomLogits:
    def __init__(self, seed: int, scale: float):
        self.seed, self.scale, self.calls = seed, scale, 0

    def __call__(self, batch: Any) -> Tensor:
        self.calls += 1
        generator = torch.Generator().manual_seed(self.seed * 1000 + self.calls)
        logits = torch.randn(len(batch.input_ids), VOCAB, generator=generator)
        # some positions are confident and some are not; none predicts the mask, which SGLang would write
        logits *= self.scale * torch.rand(len(logits), 1, generator=generator)
        return logits.index_fill_(1, torch.tensor([MASK]), -30.0)


def blocks_of(draw: random.Random, rows: int, block: int) -> tuple[list[list[int]], Tensor]:
    """Draw rows that begin with prompt tokens, among them mask ids. Return them and the flags of prompt tokens."""
    ids, prompt = [], torch.zeros(rows, block, dtype=torch.bool)
    for row in range(rows):
        length = draw.choice((0, 0, draw.randrange(block), block))
        prompt_ids = [MASK if draw.random() < 0.1 else draw.randrange(VOCAB - 1) for _ in range(length)]
        ids.append(prompt_ids + [MASK] * (block - length))
        prompt[row, :length] = True
    return ids, prompt


def record_run(
    algorithm: Any, ids: list[list[int]], prompt: Tensor | None, logits: RandomLogits, fdfo: bool
) -> list[Any]:
    """Return the ids that every forward reads, and the tokens and flags that every run of the algorithm returns."""
    rows, states = len(ids), None
    batch = forward_batch(ids, prompt_mask=prompt)
    events: list[Any] = []
    for _ in range(algorithm.max_steps(len(ids[0])) if fdfo else 1):
        runner = Runner(lambda batch: record_ids(events, batch, logits))
        _, tokens, accepted, states, _ = algorithm.run(runner, batch, states)
        events.append([part.tolist() if isinstance(part, Tensor) else part for part in tokens])
        events.append((accepted, batch.input_ids.tolist(), runner.calls))
        if accepted is not None and all(accepted):
            break
        if accepted is not None:  # finished rows leave the batch, like in the engine
            keep = [row for row in range(rows) if not accepted[row]]
            remaining = batch.input_ids.view(rows, len(ids[0]))[keep]
            prompt = None if prompt is None else prompt[keep]
            batch, rows = forward_batch(remaining.tolist(), prompt_mask=prompt), len(keep)
            states = [states[row] for row in keep]
    return events


def record_ids(events: list[Any], batch: Any, logits: RandomLogits) -> Tensor:
    events.append(batch.input_ids.tolist())
    return logits(batch)


PAIRS = {
    "threshold": ("LowConfidence", {"threshold": 0.6}, "ParadecThreshold", {"threshold": 0.6}),
    "defaults": ("LowConfidence", {}, "ParadecThreshold", {"preset": "llada2.0"}),
    "editing": ("JointThreshold", {}, "ParadecEditing", {"preset": "sglang"}),
    "sure edits": (
        "JointThreshold",
        {"threshold": 0.7, "edit_threshold": 0.6, "max_post_edit_steps": 3},
        "ParadecEditing",
        {"threshold": 0.7, "editing_threshold": 0.6, "max_post_steps": 3},
    ),
}


@pytest.mark.parametrize("fdfo", [False, True], ids=["sync", "fdfo"])
@pytest.mark.parametrize("pair", PAIRS)
def test_1000_blocks_equal_the_algorithm_of_sglang(pair: str, fdfo: bool, released: SimpleNamespace) -> None:
    sglang_name, sglang_config, paradec_name, paradec_config = PAIRS[pair]
    shipped = released.algorithm.algo_name_to_cls[sglang_name](dllm_config(4, MASK, fdfo, **sglang_config))
    algorithm = algorithms(released.base.DllmAlgorithm)[paradec_name](dllm_config(4, MASK, fdfo, **paradec_config))
    draw, steps = random.Random(pair), []
    for batch in range(125):
        ids, prompt = blocks_of(draw, 8, 4)
        expected = record_run(shipped, ids, prompt, RandomLogits(batch, 12.0), fdfo)
        assert record_run(algorithm, ids, prompt, RandomLogits(batch, 12.0), fdfo) == expected
        steps.append(len(expected))
    assert len(set(steps)) > 1


@pytest.mark.parametrize("fdfo", [False, True], ids=["sync", "fdfo"])
def test_blocks_without_flags_of_the_prompt(fdfo: bool, released: SimpleNamespace) -> None:
    shipped = released.algorithm.algo_name_to_cls["LowConfidence"](dllm_config(8, MASK, fdfo))
    algorithm = algorithms(released.base.DllmAlgorithm)["ParadecThreshold"](dllm_config(8, MASK, fdfo, threshold=0.95))
    draw = random.Random(0)
    for batch in range(20):
        lengths = [draw.choice((0, draw.randrange(8), 8)) for _ in range(5)]
        ids = [[draw.randrange(VOCAB - 1) for _ in range(n)] + [MASK] * (8 - n) for n in lengths]
        expected = record_run(shipped, ids, None, RandomLogits(batch, 12.0), fdfo)
        assert record_run(algorithm, ids, None, RandomLogits(batch, 12.0), fdfo) == expected


@pytest.mark.parametrize("fdfo", [False, True], ids=["sync", "fdfo"])
@pytest.mark.parametrize("name", ENGINE_SAMPLERS)
def test_steps_equal_generate(name: str, fdfo: bool, released: SimpleNamespace, model: Model) -> None:
    algorithm = algorithms(released.base.DllmAlgorithm)[name](dllm_config(fdfo=fdfo, **ENGINE_SAMPLERS[name].config))
    check_sampler(name, algorithm, Runner, model, fdfo)


def test_sglang_finds_the_algorithms(released: SimpleNamespace, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    metadata = tmp_path / "parallel_decoding-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: parallel-decoding-here\nVersion: 0\n")
    lines = [f"{name} = {target}" for name, target in entry_points["sglang.srt.plugins"].items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[sglang.srt.plugins]", *lines, ""]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(released.plugins, "_plugins_loaded", False)
    shipped = {"LowConfidence", "JointThreshold", "JointThresholdInDel"}
    registry = released.algorithm.algo_name_to_cls
    for name in [name for name in registry if name not in shipped]:
        del registry[name]
    released.plugins.load_plugins()
    assert shipped < {*registry} and "ParadecThreshold" in registry
    config = released.config.DllmConfig("ParadecThreshold", {"threshold": 0.8}, 32, 156895, 4, True)
    algorithm = released.algorithm.get_algorithm(config)
    assert isinstance(algorithm, released.base.DllmAlgorithm)
    assert algorithm.sampler.threshold == 0.8 and algorithm.fdfo and algorithm.block_size == 32
    request = SimpleNamespace(sampling_params=SimpleNamespace(regex="a+"), return_logprob=False)
    assert "regex" in config.validate_request(request)
