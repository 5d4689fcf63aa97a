"""The algorithms for SGLang over its released base, in both of its loops, and beside its own algorithms."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blocks import RULES, batch_of, check_rule, config
from places import ROOT
from released import VERSION, Runner, sglang, wheel
from tiny_models import tiny
from torch import Tensor

from paradec.integrations.engines.sglang import algorithms
from paradec.models.adapter import Model

pytestmark = pytest.mark.skipif(wheel() is None, reason=f"needs the wheel of sglang {VERSION} (.ci/engines sglang)")
MASK, VOCAB = 63, 64


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    with sglang(tmp_path_factory.mktemp("sglang")) as found:
        yield found


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny(2, "block_causal")


class Drawn:
    """Logits that depend on the round alone, and so are the same for two algorithms."""

    def __init__(self, seed: int, sure: float):
        self.seed, self.sure, self.calls = seed, sure, 0

    def __call__(self, batch: Any) -> Tensor:
        self.calls += 1
        generator = torch.Generator().manual_seed(self.seed * 1000 + self.calls)
        logits = torch.randn(len(batch.input_ids), VOCAB, generator=generator)
        # some confident of a token and some not; never of the mask, which SGLang would write as a token
        logits *= self.sure * torch.rand(len(logits), 1, generator=generator)
        return logits.index_fill_(1, torch.tensor([MASK]), -30.0)


def blocks_of(draw: random.Random, rows: int, block: int) -> tuple[list[list[int]], Tensor]:
    """Rows that begin with a piece of a prompt, in which the mask may be spelled out; and the flags of the prompt."""
    ids, prompt = [], torch.zeros(rows, block, dtype=torch.bool)
    for row in range(rows):
        length = draw.choice((0, 0, draw.randrange(block), block))
        spelled = [MASK if draw.random() < 0.1 else draw.randrange(VOCAB - 1) for _ in range(length)]
        ids.append(spelled + [MASK] * (block - length))
        prompt[row, :length] = True
    return ids, prompt


def history(made: Any, ids: list[list[int]], prompt: Tensor | None, logits: Drawn, fdfo: bool) -> list[Any]:
    """What `run` returns, and what stands in the blocks, round by round."""
    rows, states = len(ids), None
    batch = batch_of(ids, prompt_mask=prompt)
    seen: list[Any] = []
    for _ in range(made.max_steps(len(ids[0])) if fdfo else 1):
        runner = Runner(lambda batch: note(seen, batch, logits))
        _, tokens, accepted, states, _ = made.run(runner, batch, states)
        seen.append([part.tolist() if isinstance(part, Tensor) else part for part in tokens])
        seen.append((accepted, batch.input_ids.tolist(), runner.calls))
        if accepted is not None and all(accepted):
            break
        if accepted is not None:  # what is done leaves the batch, as from the engine's rounds
            keep = [row for row in range(rows) if not accepted[row]]
            block = len(ids[0])
            left = batch.input_ids.view(rows, block)[keep]
            prompt = None if prompt is None else prompt[keep]
            batch, rows = batch_of(left.tolist(), prompt_mask=prompt), len(keep)
            states = [states[row] for row in keep]
    return seen


def note(seen: list[Any], batch: Any, logits: Drawn) -> Tensor:
    seen.append(batch.input_ids.tolist())
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
def test_1000_blocks_beside_the_shipped_algorithm(pair: str, fdfo: bool, released: SimpleNamespace) -> None:
    theirs, their_config, ours, our_config = PAIRS[pair]
    shipped = released.algorithm.algo_name_to_cls[theirs](config(4, MASK, fdfo, **their_config))
    made = algorithms(released.base.DllmAlgorithm)[ours](config(4, MASK, fdfo, **our_config))
    draw, steps = random.Random(pair), []
    for batch in range(125):
        ids, prompt = blocks_of(draw, 8, 4)
        expected = history(shipped, ids, prompt, Drawn(batch, 12.0), fdfo)
        assert history(made, ids, prompt, Drawn(batch, 12.0), fdfo) == expected
        steps.append(len(expected))
    assert len(set(steps)) > 1


@pytest.mark.parametrize("fdfo", [False, True], ids=["sync", "fdfo"])
def test_blocks_without_flags_of_the_prompt(fdfo: bool, released: SimpleNamespace) -> None:
    """Where no prompt spells the mask out, SGLang sends none: what is no mask is given."""
    shipped = released.algorithm.algo_name_to_cls["LowConfidence"](config(8, MASK, fdfo))
    made = algorithms(released.base.DllmAlgorithm)["ParadecThreshold"](config(8, MASK, fdfo, threshold=0.95))
    draw = random.Random(0)
    for batch in range(20):
        lengths = [draw.choice((0, draw.randrange(8), 8)) for _ in range(5)]
        ids = [[draw.randrange(VOCAB - 1) for _ in range(n)] + [MASK] * (8 - n) for n in lengths]
        expected = history(shipped, ids, None, Drawn(batch, 12.0), fdfo)
        assert history(made, ids, None, Drawn(batch, 12.0), fdfo) == expected


@pytest.mark.parametrize("fdfo", [False, True], ids=["sync", "fdfo"])
@pytest.mark.parametrize("name", RULES)
def test_steps_of_generate(name: str, fdfo: bool, released: SimpleNamespace, model: Model) -> None:
    made = algorithms(released.base.DllmAlgorithm)[name](config(fdfo=fdfo, **RULES[name].config))
    check_rule(name, made, Runner, model, fdfo)


def test_sglang_finds_the_algorithms(released: SimpleNamespace, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    metadata = tmp_path / "parallel_decoding-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: parallel-decoding-here\nVersion: 0\n")
    lines = [f"{name} = {target}" for name, target in stated["sglang.srt.plugins"].items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[sglang.srt.plugins]", *lines, ""]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(released.plugins, "_plugins_loaded", False)
    shipped = {"LowConfidence", "JointThreshold", "JointThresholdInDel"}
    known = released.algorithm.algo_name_to_cls
    for name in [name for name in known if name not in shipped]:
        del known[name]
    released.plugins.load_plugins()
    assert shipped < {*known} and "ParadecThreshold" in known
    real = released.config.DllmConfig("ParadecThreshold", {"threshold": 0.8}, 32, 156895, 4, True)
    made = released.algorithm.get_algorithm(real)
    assert isinstance(made, released.base.DllmAlgorithm)
    assert made.sampler.threshold == 0.8 and made.fdfo and made.block_size == 32
    request = SimpleNamespace(sampling_params=SimpleNamespace(regex="a+"), return_logprob=False)
    assert "regex" in real.validate_request(request)
