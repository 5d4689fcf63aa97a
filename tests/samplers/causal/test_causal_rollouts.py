"""`generate(rollout=True)` and `paradec.replay` for causal models: step and log-probability of every token."""

import copy
import functools
from typing import Any

import pytest
import torch
from decoding import assert_replayed, assert_same, read_last_writes
from oracles.rollouts import causal_logp
from places import GOLDEN
from small_models import END, MASK, tiny
from structured import CASES, case_names, causal_model_of

import paradec
from paradec.core.rollouts import Rollout
from paradec.models.adapter import Model
from paradec.models.self_drafting import SelfDrafting
from paradec.samplers import create
from paradec.samplers.causal.trees import DynamicTree

ROWS = [[3, 5, 7, 9, 11], [2], [20, 21, 22, 1, 6, 8, 4]]
ROLLOUT: dict[str, Any] = {"max_new_tokens": 8, "rollout": True}
SAMPLED_ROLLOUT = ROLLOUT | {"temperature": 0.7, "seed": 3, "sampler": "sjd"}


@functools.cache
def causal(layers: int = 2, dtype: torch.dtype = torch.float64) -> Model:
    module = tiny(layers).unwrap().to(dtype)
    facts = {"topology": "causal", "prediction": "shifted", "eos_token_id": END, "mask_token_id": MASK}
    model = paradec.wrap(module, **facts)
    model.self_drafting = SelfDrafting(4)
    return model


def create_sampler(name: str, drafter: Model) -> Any:
    factories = {
        "one by one": lambda: create("sjd", window=1),
        "pool": lambda: create("jacobi", pool=3),
        "blocks": lambda: create("jacobi", group=5),
        "coupled": lambda: create("scd", refresh="maximal"),
        "chain": lambda: create("speculative", drafter=drafter),
        "tree": lambda: create("speculative", drafter=drafter, tree=(2, 2)),
        "grown": lambda: create("speculative", drafter=drafter, tree=DynamicTree(8, 3, 3), rule="naive"),
        "lookup": lambda: create("speculative", drafter="prompt_lookup"),
        "recycling": lambda: create("speculative", drafter="token_recycling", rule="naive"),
    }
    return factories.get(name, lambda: create(name))()


METHODS = [
    "sjd", "scd", "jacobi", "one by one", "pool", "blocks", "coupled", "chain", "tree", "grown", "lookup",
    "self_speculative",
]  # fmt: skip
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0, "trace": True},
    {"temperature": 0.7, "top_p": 0.9, "guidance_scale": 1.5, "suppress_tokens": [3, 5]},
    {"temperature": 0.1, "top_k": 5},
    {"temperature": 0.0, "trace": True},
]


@pytest.mark.thinned
@pytest.mark.parametrize("name", METHODS)
def test_recorded_log_probabilities_are_replayed_and_equal_the_module_s(name: str) -> None:
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model = causal(2, dtype)
        sampler = create_sampler(name, causal(1, dtype))
        for request in SETTINGS if tolerance < 1e-9 else SETTINGS[:1]:
            temperature = request["temperature"]
            output = paradec.generate(model, ROWS, sampler=sampler, seed=3, **ROLLOUT, **request)
            rollout, tolerances = output.rollout, {"equal_nan": True, "rtol": 0, "atol": tolerance}
            with torch.no_grad():
                replayed = paradec.replay(model, rollout).double()
                torch.testing.assert_close(replayed, rollout.logp, **tolerances)
                assert rollout.exact and torch.equal(replayed.isnan(), ~rollout.decided)
                if temperature:
                    assert rollout.logp_drawn is not None
                    tempered = paradec.replay(model, rollout, temperature=temperature, batch_size=2).double()
                    torch.testing.assert_close(tempered, rollout.logp_drawn, **(tolerances | {"atol": 10 * tolerance}))
            if tolerance < 1e-9:  # atol 1e-5, because transformers computes norms in float32
                torch.testing.assert_close(causal_logp(model, rollout), rollout.logp, **(tolerances | {"atol": 1e-5}))
            for row, begin in enumerate(map(len, ROWS)):
                count = int(rollout.decided[row].sum())
                assert count == output.tokens[row]
                new_tokens = output.sequences[row, -8 : -8 + count if count < 8 else None]
                assert rollout.tokens[row, : begin + count].tolist() == ROWS[row] + new_tokens.tolist()
                steps = rollout.step_map[row].tolist()
                assert steps[:begin] == [-1] * begin and steps[begin + count : begin + 8] == [-2] * (8 - count)
                if request.get("trace"):
                    writes = {p: (int(rollout.tokens[row, p]), steps[p]) for p in range(begin, begin + count)}
                    assert read_last_writes(output, mask=-1)[row] == writes


def test_a_replay_is_one_call_without_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shapes = causal(1), list[tuple[int, ...]]()
    rollout = paradec.generate(model, ROWS, **SAMPLED_ROLLOUT).rollout
    hook = model.module.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    replayed = paradec.replay(model, rollout)
    hook.remove()
    assert shapes == [(3, max(row.nonzero().max().item() for row in rollout.decided))]
    replayed.nansum().backward()
    assert model.module.lm_head.weight.grad.abs().sum() > 0
    model.module.zero_grad()


def test_rollouts_of_several_requests_can_be_concatenated() -> None:
    model = causal(1)
    first = paradec.generate(model, ROWS * 2, **SAMPLED_ROLLOUT).rollout
    many = paradec.generate_many(model, ROWS * 2, batch_size=2, **SAMPLED_ROLLOUT)
    outputs = sorted(many, key=lambda output: output.index)
    assert_same(Rollout.concatenate([output.rollout for output in outputs]), first)
    second = paradec.generate(model, ROWS, **SAMPLED_ROLLOUT, suppress_tokens=[1, 2]).rollout
    concatenated = Rollout.concatenate([first, second])
    assert concatenated.suppressed.tolist() == [[MASK, -1, -1]] * 6 + [[1, 2, MASK]] * 3
    assert_replayed(model, concatenated)


def test_rollouts_state_the_version_of_the_weights_and_have_no_tokens_of_failed_rows() -> None:
    model = causal(1)
    model = paradec.wrap(copy.deepcopy(model.unwrap()), topology="causal", prediction="shifted", eos_token_id=END)
    before = paradec.generate(model, ROWS, **SAMPLED_ROLLOUT).rollout
    model.update_weights({name: tensor * 0.9 for name, tensor in model.module.state_dict().items()})
    after = paradec.generate(model, ROWS, **SAMPLED_ROLLOUT).rollout
    assert (before.version, after.version) == (0, 1)
    assert (paradec.replay(model, before).detach() - before.logp).abs().nan_to_num().max() > 1e-3

    def change_weights(state: Any, commit: Any) -> None:
        with torch.no_grad():
            model.module.lm_head.weight *= 0.9

    rollout = paradec.generate(model, ROWS, callback=change_weights, **SAMPLED_ROLLOUT).rollout
    assert rollout.approximation == "weights that changed while decoding"
    with torch.no_grad():
        model.module.model.embed_tokens.weight[20] = torch.nan  # token 20 is only in the last prompt
    many = paradec.generate_many(model, ROWS, suppress_tokens=[20], **SAMPLED_ROLLOUT)
    outputs = sorted(many, key=lambda output: output.index)
    assert [output.error is None for output in outputs] == [True, True, False]
    assert outputs[0].rollout.decided.sum() == outputs[0].tokens[0] and outputs[2].rollout.decided.sum() == 0


def test_rollouts_under_a_constraint_have_unconstrained_log_probabilities() -> None:
    case = CASES[case_names("causal")[0]]
    size, model = len(case["vocab"]), causal_model_of(case)
    request = {"constraint": paradec.Regex(case["constraint"]["regex"]), "max_new_tokens": case["slots"]}
    request |= {"sampler": "sjd", "temperature": 1.0, "seed": 0, "rollout": True}
    rollout = paradec.generate(model, torch.tensor([[size + 1]]), **request).rollout
    assert rollout.decided.any()
    assert_replayed(model, rollout, 1e-5)


def test_rollouts_in_nemotrons_causal_mode_are_replayed_only_in_it() -> None:
    model = paradec.load(GOLDEN / "autumn" / "nld" / "nld-tiny", dtype="float64", topology="causal")
    request = {"sampler": "self_speculative", "temperature": 1.0, "seed": 0} | ROLLOUT
    rollout = paradec.generate(model, [[3, 1, 2], [5]], **request).rollout
    assert_replayed(model, rollout)
    with pytest.raises(ValueError, match="rollout is of .*, not of"):
        paradec.replay(paradec.load(GOLDEN / "autumn" / "nld" / "nld-tiny", topology="block_causal"), rollout)
