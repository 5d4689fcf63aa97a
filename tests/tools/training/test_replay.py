"""`paradec.replay` of rollouts: recorded cases, a plain loop, one forward against several, gradients, errors."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from checkpoints import golden_moe
from decoding import covering, refuses
from oracles.rollouts import masked_logp, writes_logp
from places import GOLDEN
from recorded import find_checkpoint, golden, read_arrays, read_json, replay
from small_models import END, MASK, tiny
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import paradec
from paradec import samplers
from paradec.core.facts import ModelFacts
from paradec.core.rollouts import Rollout
from paradec.models.adapter import Model, Opaque

RECORDED = golden("drafters") / "rollouts"
CASES = [case for path in sorted(RECORDED.glob("cases.json")) for case in read_json(path)]
ROWS = [[3, 5, 7, 9, 11], [2], [20, 21, 22, 1, 6, 8, 4]]
EXACT = {"float32": 1e-5, "float64": 1e-10}


@functools.cache
def tensors() -> dict[str, Tensor]:
    return read_arrays(RECORDED / "cases.safetensors")


@functools.cache
def checkpoint(name: str, dtype: str) -> Model:
    return paradec.load(find_checkpoint(name, "drafters"), dtype=dtype)


def recorded_rollout(number: int) -> Rollout:
    case, (final, step, logp) = CASES[number], (tensors()[f"{number}/{name}"] for name in ("final", "step", "logp"))
    return Rollout(
        tokens=final[None], step_map=step[None], logp=logp[None], logp_drawn=None, length=torch.tensor([len(final)]),
        prompt_length=torch.tensor([len(case["prompt"])]), suppressed=torch.tensor([[case["mask"]]]),
        settings=case["settings"], version=0,
    )  # fmt: skip


def assert_logp(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), equal_nan=True, rtol=0, atol=tolerance)


@pytest.mark.thinned
@pytest.mark.parametrize("number", range(len(CASES)))
def test_replays_equal_the_recorded_cases(number: int) -> None:
    with replay(f"rollouts, case {number}"):
        case, rollout = CASES[number], recorded_rollout(number)
        model = checkpoint(case["model"], "float64")
        replayed_logp = paradec.replay(model, rollout)
        assert int(rollout.step_map.max()) + 1 == case["steps"]
        assert_logp(replayed_logp.detach(), rollout.logp, 1e-10)
        if case["block"]:
            assert model.facts.block_length == case["block"]
            with torch.no_grad():
                assert_logp(paradec.replay(model, rollout, one_forward=False), rollout.logp, 1e-10)
        names = [key.partition("/grad/")[2] for key in tensors() if key.startswith(f"{number}/grad/")]
        assert names
        parameters = dict(model.module.named_parameters())
        gradients = torch.autograd.grad(replayed_logp.nansum(), [parameters[name] for name in names])
        for name, gradient in zip(names, gradients, strict=True):
            expected = tensors()[f"{number}/grad/{name}"]
            assert (gradient - expected).norm() <= 1e-4 * expected.norm()
        with torch.no_grad():
            assert_logp(paradec.replay(checkpoint(case["model"], "float32"), rollout), rollout.logp, 1e-4)
        if not case["settings"].get("temperature"):
            arguments = {"max_new_tokens": case["max_new_tokens"], **case["settings"]}
            repeated = paradec.generate(model, [case["prompt"]], rollout=True, **arguments).rollout
            assert torch.equal(repeated.tokens, rollout.tokens) and torch.equal(repeated.step_map, rollout.step_map)
            assert_logp(repeated.logp, rollout.logp, 1e-10)
            assert int(repeated.step_map.max()) + 1 == case["steps"]


MODELS = ["llada", "dream", "mixture", "sdar", "shifted blocks"]


@functools.cache
def model_of(name: str, dtype: str) -> Model:
    if name in ("llada", "dream"):
        return paradec.load(GOLDEN / f"{name}-tiny", dtype=dtype)
    if name == "shifted blocks":
        model = tiny(2, "block_causal", "shifted")
        model.module.to(getattr(torch, dtype))
        return model
    if name == "sdar":
        return paradec.load(GOLDEN / "drafters" / "rollouts" / "sdar-tiny", dtype=dtype)
    return golden_moe("sdar-moe-tiny", dtype)


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"sampler": "threshold(threshold=0.1)"},
    "drawn": {"sampler": "threshold(threshold=0.1)", "temperature": 1.0, "seed": 5},
    "one by one": {"sampler": "low_confidence", "temperature": 1.0, "seed": 2, "top_p": 0.9},
    "guided": {"sampler": "credit", "temperature": 0.7, "seed": 3, "guidance_scale": 1.5, "suppress_tokens": [5]},
    "cached": {"sampler": "threshold(threshold=0.15)", "temperature": 1.0, "seed": 9, "cache": "block"},
}


@pytest.mark.parametrize(("name", "setting"), covering(MODELS, SETTINGS))
def test_replay_equals_the_record_and_a_plain_loop(name: str, setting: str) -> None:
    for dtype, tolerance in EXACT.items():
        model, arguments = model_of(name, dtype), dict(SETTINGS[setting])
        if model.facts.topology == "bidirectional":
            arguments |= {"block_length": 5}
            arguments.pop("cache", None)
        rollout = paradec.generate(model, ROWS, max_new_tokens=11, rollout=True, **arguments).rollout
        assert rollout.decided.sum() >= 18 and rollout.exact
        with torch.no_grad():
            replayed_logp = paradec.replay(model, rollout, batch_size=5)
            assert_logp(replayed_logp, rollout.logp, tolerance)
            if model.facts.block_length:
                assert_logp(paradec.replay(model, rollout, one_forward=False), replayed_logp, tolerance)
            if "temperature" in arguments:
                drawn = paradec.replay(model, rollout, temperature=arguments["temperature"])
                assert_logp(drawn, rollout.logp_drawn, tolerance)
        if dtype == "float64" and name != "mixture":
            # transformers computes norms in float32
            assert_logp(masked_logp(model, rollout), replayed_logp, 1e-5)


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["llada", "dream", "sdar", "shifted blocks"])
def test_replays_with_joined_steps(name: str) -> None:
    model = model_of(name, "float64")
    rollout = paradec.generate(model, ROWS, max_new_tokens=9, rollout=True, sampler="low_confidence").rollout
    for shrink in (2, 3, 100):
        with torch.no_grad():
            replayed_logp = paradec.replay(model, rollout, shrink)
            if model.facts.block_length:
                assert_logp(paradec.replay(model, rollout, shrink, one_forward=False), replayed_logp, 1e-10)
        assert_logp(replayed_logp, masked_logp(model, rollout, shrink), 1e-5)
        assert (replayed_logp - rollout.logp).nan_to_num().abs().max() > 0.01


REWRITING = ["wino(threshold=0.2, threshold_back=0.6)", "saber", "editing(threshold=0.1, editing_threshold=0.2)"]


@pytest.mark.parametrize(("name", "topology"), covering(REWRITING, ["bidirectional", "block_causal"]))
def test_rewriting_samplers_are_replayed_write_by_write(name: str, topology: str) -> None:
    model, has_rewritten = tiny(2, topology), set()
    for temperature in (0.0, 1.0):
        arguments: dict[str, Any] = {"sampler": name, "temperature": temperature} | ({"seed": 5} if temperature else {})
        if topology == "bidirectional":
            arguments["block_length"] = 6
        rollout = paradec.generate(model, ROWS, max_new_tokens=12, rollout=True, **arguments).rollout
        num_decided = len(rollout.logp[rollout.decided])
        has_rewritten.add(bool(rollout.writes_logp.isnan().any()) or len(rollout.writes) > num_decided)
        with torch.no_grad():
            replayed_logp = paradec.replay(model, rollout, writes=True)
            assert_logp(replayed_logp, rollout.writes_logp, 1e-10)
            assert_logp(replayed_logp, writes_logp(model, rollout, False), 1e-5)
            assert_logp(paradec.replay(model, rollout), rollout.logp, 1e-10)
            if topology == "block_causal":
                assert_logp(paradec.replay(model, rollout, writes=True, one_forward=False), replayed_logp, 1e-10)
            else:
                assert_logp(paradec.replay(model, rollout, 100, writes=True), writes_logp(model, rollout, True), 1e-5)
            if temperature:
                assert_logp(paradec.replay(model, rollout, writes=True, batch_size=1), rollout.writes_logp_drawn, 1e-10)
    assert True in has_rewritten or (name, topology) == ("saber", "block_causal")


@pytest.mark.parametrize("kind", ["bidirectional", "block_causal", "causal", "rewriting"])
def test_gradients_match_finite_differences(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def normed(self: Any, hidden: Tensor) -> Tensor:  # transformers' norm computes in float32
        return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", normed)
    arguments: dict[str, Any] = {"temperature": 1.0, "seed": 1, "guidance_scale": 1.3}
    if kind == "causal":
        model = paradec.wrap(tiny(2).unwrap(), topology="causal", prediction="shifted", eos_token_id=END)
        arguments["sampler"] = "sjd"
    elif kind == "rewriting":
        model, arguments["sampler"] = tiny(2), "saber"
    else:
        model = tiny(2, kind)
    rollout = paradec.generate(model, ROWS, max_new_tokens=6, rollout=True, **arguments).rollout
    replay = functools.partial(paradec.replay, model, rollout, writes=kind == "rewriting")
    model.module.train()  # replay must switch to evaluation mode itself
    weights = torch.linspace(-1, 1, replay().numel(), dtype=torch.float64).view(replay().shape)
    parameter = model.module.model.layers[0].self_attn.k_proj.weight
    (gradient,) = torch.autograd.grad((replay() * weights).nansum(), [parameter])
    assert model.module.training
    torch.manual_seed(0)
    with torch.no_grad():
        for _ in range(3):
            direction = torch.randn_like(parameter)
            direction /= direction.norm()
            values = []
            for sign in (1, -1):
                parameter += sign * 1e-5 * direction
                values.append((replay() * weights).nansum())
                parameter -= sign * 1e-5 * direction
            assert abs((values[0] - values[1]) / 2e-5 - (gradient * direction).sum()) < 1e-6
        assert not replay().requires_grad


def test_block_causal_rollouts_take_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = tiny(1, "block_causal"), list[tuple[int, ...]]()
    rollout = paradec.generate(model, ROWS, max_new_tokens=9, rollout=True).rollout
    record = lambda module, args, kwargs: calls.append(tuple(kwargs["input_ids"].shape))  # noqa: E731
    model.module.register_forward_pre_hook(record, with_kwargs=True)
    paradec.replay(model, rollout)
    num_states, lengths = 0, []
    for row, length in zip(rollout.step_map.tolist(), rollout.length.tolist(), strict=True):
        copies = {(position // 4, step) for position, step in enumerate(row) if step >= 0}
        lengths.append(4 * len(copies) + length)
        num_states += len({step for _, step in copies})
    assert calls == [(3, max(lengths))]
    paradec.replay(model, rollout, one_forward=False)
    assert sum(shape[0] for shape in calls[1:]) == num_states


def test_overlapping_blocks_are_replayed_state_by_state() -> None:
    model = tiny(2, "block_causal")
    blocks = paradec.PipelinedBlocks(4, add=0.1, full=0.5)
    arguments = {"temperature": 1.0, "seed": 3, "blocks": blocks, "cache": "none"}
    rollout = paradec.generate(model, ROWS, max_new_tokens=12, rollout=True, sampler="threshold", **arguments).rollout
    first, second = rollout.step_map[1, 4:8], rollout.step_map[1, 8:12]
    assert second.min() < first.max()
    assert_logp(paradec.replay(model, rollout).detach(), rollout.logp, 1e-10)
    message = "one_forward=True does not work with blocks that were open at the same time"
    refuses(lambda: paradec.replay(model, rollout, one_forward=True), message)


def test_replays_of_another_policy_warn_and_differ() -> None:
    model = tiny(2)
    arguments: dict[str, Any] = {"sampler": "low_confidence", "block_length": 5, "cache": "dual"}
    rollout = paradec.generate(model, ROWS, max_new_tokens=10, rollout=True, **arguments).rollout
    with pytest.warns(UserWarning, match="decoded with cache='dual', a policy other than"):
        actual = paradec.replay(model, rollout).detach()
    assert (actual - rollout.logp).nan_to_num().abs().max() > 1e-3
    assert_logp(actual, masked_logp(model, rollout), 1e-5)


def test_partial_undecided_and_mask_id_0_rollouts() -> None:
    model = tiny(2, "block_causal")
    request = {"max_new_tokens": 9, "rollout": True}
    partial = paradec.generate(model, [[5]], callback=lambda state, _: state.commits == 4, **request).rollout
    assert (partial.step_map == -2).any()
    assert_logp(paradec.replay(model, partial).detach(), partial.logp, 1e-10)
    undecided = paradec.generate(model, [[5]], **request).rollout
    undecided.step_map[undecided.step_map >= 0] = -2
    assert paradec.replay(model, undecided).isnan().all()
    facts = {"mask_token_id": 0, "eos_token_id": END, "prediction": "same", "topology": "bidirectional"}
    zero = paradec.wrap(tiny(2).unwrap(), **facts)
    rollout = paradec.generate(zero, ROWS, max_new_tokens=6, rollout=True, temperature=0.1, seed=0).rollout
    assert rollout.logp[rollout.decided].isfinite().all()
    assert_logp(paradec.replay(zero, rollout).detach(), rollout.logp, 1e-10)
    assert_logp(paradec.replay(zero, rollout, temperature=0.1).detach(), rollout.logp_drawn, 1e-10)


class Table(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(41, 41, dtype=torch.float64))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.weight[input_ids] + self.weight[input_ids].mean(1, keepdim=True)


def test_opaque_modules_are_replayed() -> None:
    torch.manual_seed(0)
    model = Opaque(Table(), ModelFacts(vocab_size=41, mask_token_id=MASK))
    rollout = paradec.generate(model, ROWS, max_new_tokens=7, rollout=True, temperature=1.0, seed=0).rollout
    actual = paradec.replay(model, rollout)
    assert_logp(actual.detach(), rollout.logp, 1e-10)
    actual.nansum().backward()
    assert model.module.weight.grad.abs().sum() > 0


def test_unsupported_rollouts_are_refused() -> None:
    model = tiny(1)
    rollout = paradec.generate(model, ROWS, max_new_tokens=4, rollout=True).rollout
    causal = paradec.wrap(tiny(1).unwrap(), topology="causal", prediction="shifted", eos_token_id=END)
    output = paradec.generate(causal, ROWS, max_new_tokens=4, rollout=True, sampler="sjd").rollout
    other_mask = paradec.wrap(tiny(1).unwrap(), mask_token_id=7, prediction="same", topology="bidirectional")
    unnamed = dataclasses.replace(rollout, settings={})
    assert (unnamed.step_map.diff() < 0)[unnamed.decided[:, 1:]].any()
    wrong: list[tuple[Any, Any, dict[str, Any], str]] = [
        *((model, rollout, {name: 0}, f"{name}=0 must be") for name in ("shrink", "batch_size", "temperature")),
        *((model, rollout, {name: 1}, f"{name}=1 must be") for name in ("one_forward", "writes")),
        (model, rollout, {"one_forward": True}, "LlamaForCausalLM: a block-causal model that accepts attention masks"),
        (model, rollout, {"writes": True}, "writes=True: sampler 'threshold' never revises"),
        (model, None, {}, "rollout=None must be a paradec.Rollout"),
        (None, rollout, {}, "replay takes a language model"),
        (causal, rollout, {}, "rollout is of LlamaForCausalLM, not of LlamaForCausalLM: .* topology differ"),
        (causal, unnamed, {}, "rollout is of None"),
        (model, output, {}, "rollout is of LlamaForCausalLM, not of"),
        (model, dataclasses.replace(output, settings={}), {}, "rollout is of None, not of"),
        (causal, output, {"shrink": 2}, "shrink=2 does not work with LlamaForCausalLM, which is causal"),
        (causal, output, {"one_forward": False}, "one_forward=False does not work with"),
        (tiny(1, "causal_context", "shifted"), rollout, {}, "which is causal-context"),
        (other_mask, rollout, {}, "rollout is of LlamaForCausalLM, not of LlamaForCausalLM"),
    ]
    for wrong_model, wrong_rollout, arguments, message in wrong:
        call = functools.partial(paradec.replay, wrong_model, wrong_rollout, **arguments)
        refuses(call, message, (ValueError, TypeError))


@pytest.mark.filterwarnings("ignore:delimiters=")
def test_samplers_that_never_rewrite_are_replayed() -> None:
    model = tiny(1)
    request = {"max_new_tokens": 6, "rollout": True, "temperature": 1.0, "seed": 2}
    replayed = []
    for name in (name for name in samplers.names() if samplers.get(name).family == "masked"):
        try:
            output = paradec.generate(model, ROWS, sampler=name, **request)
        except (ValueError, TypeError):
            continue
        if output.rollout.writes is None:
            assert_logp(paradec.replay(model, output.rollout).detach(), output.rollout.logp, 1e-10)
            replayed.append(name)
    assert len(replayed) > 12
