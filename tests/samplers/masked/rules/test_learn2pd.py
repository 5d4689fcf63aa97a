"""Learn2PD: the filter's network and features, refused mismatches, cuts after an end token, and training."""

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoding import MASKED, refuses, topology_of, view_from_scores
from oracles.masked import learn2pd_records
from small_models import tiny
from typer.testing import CliRunner

import paradec
from paradec import samplers
from paradec.cli import app
from paradec.models.adapter import Model
from paradec.samplers.masked.loop import LAST, UNCUT
from paradec.samplers.masked.rules.learn2pd import Learn2PD
from paradec.samplers.masked.rules.learn2pd_filter import (
    FEATURES,
    BlockFilter,
    FilterFacts,
    load_filter,
    read_facts,
    save_filter,
)
from paradec.tools import evaluation
from paradec.tools.evaluation import TASKS, load_prompts
from paradec.tools.evaluation.tasks import is_held_out
from paradec.tools.training import learn2pd as training
from paradec.tools.training.learn2pd import Records

PROMPTS = [[38, 0, 1, 2, 3, 4, 5, 6, 37], [36, 17, 17, 18, 14, 10, 19, 10, 37], [1, 2]]
FACTS = FilterFacts("block", "llada-tiny", 64, 4, ("none", "dual"), threshold=0.96)


@pytest.fixture
def block_filter(tmp_path: Path) -> str:
    """A random filter for blocks of 4 of the small LLaDA, which accepts some positions and rejects others."""
    torch.manual_seed(1)
    network = FACTS.network()
    network.layers[2].weight.data *= 20
    save_filter(tmp_path / "block.safetensors", FACTS, network)
    return str(tmp_path / "block.safetensors")


def test_the_block_filter_equals_numpy() -> None:
    torch.manual_seed(0)
    network = BlockFilter(32)
    assert sum(p.numel() for p in network.parameters()) == 2112
    (a, b), (c, d) = ((layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in network.layers[::2])
    confidence = np.random.default_rng(0).random((5, 32), np.float32)
    sizes = np.array([32, 32, 7, 1, 20])
    padded = np.where(np.arange(32) < sizes[:, None], confidence, 1)
    expected = np.maximum(padded @ a.T + b, 0) @ c.T + d
    for width in (32, 40):  # 40: the window is wider than the block
        window_confidence = torch.rand(5, width)
        window_confidence[:, :32] = torch.tensor(confidence)
        valid = torch.arange(width) < torch.tensor(sizes)[:, None]
        logits = network({"confidence": window_confidence}, valid).detach().numpy()
        inside = valid[:, :32].numpy()
        np.testing.assert_allclose(logits[:, :32][inside], expected[inside], atol=1e-5)
        assert np.isneginf(logits[:, 32:]).all()
    short = network({"confidence": torch.tensor(confidence[2:3, :7])}, torch.ones(1, 7, dtype=torch.bool))
    np.testing.assert_allclose(short.detach().numpy(), expected[2:3, :7], atol=1e-5)


def test_the_filter_reads_every_feature(llada64: Model, tmp_path: Path) -> None:
    facts = dataclasses.replace(FACTS, kind="features", caches=("none",))
    torch.manual_seed(2)
    save_filter(tmp_path / "features.safetensors", facts, facts.network())
    filter_ = load_filter(tmp_path / "features.safetensors")
    sampler = samplers.create("learn2pd", filter=tmp_path / "features.safetensors", eot="none")
    state = sampler.start(llada64, PROMPTS, max_new_tokens=10, block_length=4, eos_early_stop=False)
    mask, num_compared = llada64.facts.mask_token_id, 0
    with torch.inference_mode():
        while not state.done:
            proposal = sampler.step(llada64, state)
            for index, row in enumerate(proposal.rows):
                start, end = int(state.block_start[row]), int(state.block_end[row])
                canvas = state.canvas[row : row + 1, : state.length[row]]
                logits = llada64.module(input_ids=canvas, use_cache=False).logits[0]
                num_masks = sum(int(canvas[0, at]) == mask for at in range(start, end))
                values_by_name: dict[str, list[float]] = {name: [] for name in FEATURES}
                for at in range(start, end):
                    allowed = [float(value) for token_id, value in enumerate(logits[at]) if token_id != mask]
                    largest = max(allowed)
                    weights = [math.exp(value - largest) for value in allowed]
                    distribution = sorted((weight / sum(weights) for weight in weights), reverse=True)
                    values_by_name["confidence"].append(distribution[0])
                    values_by_name["margin"].append(distribution[0] - distribution[1])
                    values_by_name["entropy"].append(-sum(p * math.log(p) for p in distribution if p) / math.log(64))
                    values_by_name["mask_ratio"].append(num_masks / (end - start))
                    values_by_name["position"].append((at - start) / (end - start))
                as_tensor = partial(torch.tensor, dtype=torch.float64)
                features = {name: as_tensor([values]) for name, values in values_by_name.items()}
                assert all(0 <= min(values) and max(values) <= 1 for values in values_by_name.values())
                expected = filter_.accept(features, torch.ones(1, end - start, dtype=torch.bool))[0]
                actual = proposal.quantities["acceptance"][index, : end - start]
                torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)
                num_compared += 1
            sampler.commit(state, proposal)
    assert num_compared > 12


def test_filters_for_other_models_caches_or_block_lengths_are_refused(
    llada64: Model, dream64: Model, block_filter: str
) -> None:
    def run(model: Model, filter: str = block_filter, **request: Any) -> paradec.Output:
        mismatch = request.pop("allow_mismatch", False)
        sampler = samplers.create("learn2pd", filter=filter, allow_mismatch=mismatch)
        return paradec.generate(model, PROMPTS, sampler=sampler, max_new_tokens=8, **{"block_length": 4} | request)

    run(llada64), run(llada64, cache="dual")
    for model, request, match in (
        (llada64, {"block_length": 3}, "trained for block_length 4, here 3"),
        (llada64, {"cache": "prefix"}, "trained for cache 'none' or 'dual', here 'prefix'"),
        (dream64, {}, r"trained for model 'llada-tiny' \(64 tokens\), here 'dream-tiny' \(72 tokens\)"),
    ):
        with pytest.raises(ValueError, match=match + r"\. Train one with .*allow_mismatch=True"):
            run(model, **request)
        run(model, allow_mismatch=True, **request)
    refuses(lambda: run(dream64, block_length=2, cache="prefix"), "model .*; block_length 4, here 2; cache")
    for request in ({"block_length": 5}, {"block_length": None, "blocks": paradec.AdaptiveBlocks(delimiters=(5,))}):
        with pytest.raises(ValueError, match="reads blocks of up to 4 positions"):
            run(llada64, allow_mismatch=True, **request)
    # a canvas with one block of 4 masks fits block_length 4
    sampler = samplers.create("learn2pd", filter=block_filter)
    ids = [1, 2, *[llada64.facts.mask_token_id] * 4]
    assert paradec.generate(llada64, ids, sampler=sampler).tokens == [4]


def test_compare_omits_learn2pd_with_a_warning_if_no_filter_fits() -> None:
    questions = evaluation.packaged_questions(["copy"], limit=1)
    with pytest.warns(UserWarning, match="learn2pd is left out: filter=.* trained for block_length 32, here 2"):
        comparison = evaluation.compare(paradec.load(), questions=questions, max_new_tokens=2, block_length=2)
    fitting = {"learn2pd", *(name for name in MASKED if topology_of(name) == "bidirectional")}
    compared = {result.configuration.sampler for result in comparison.results}
    assert comparison.complete and fitting - compared == {"learn2pd"}


def model_with_many_ends(layers: int = 1, **kinds: Any) -> Model:
    """A random model for which one token in five is an end token."""
    model = tiny(layers, **kinds)
    model.facts = dataclasses.replace(model.facts, eos_token_ids=(39, *range(0, 35, 5)), pad_token_id=38)
    return model


@pytest.mark.parametrize("guidance", [1.0, 1.5])
@pytest.mark.parametrize("cache", ["none", "dual"])
def test_rows_are_cut_after_a_committed_end_token(cache: str, guidance: float) -> None:
    model, rows = model_with_many_ends(2), [[1, 2, 3], [4, 5], [6, 7, 8, 9], [11, 12], [21], [22, 23, 24]]
    sampler = samplers.create("learn2pd", filter_threshold=1.0)  # one token per step: masks can remain before an end
    state = sampler.start(model, rows, max_new_tokens=24, block_length=8, cache=cache, guidance_scale=guidance)
    ends, cut_rows = set(model.facts.eos_token_ids), 0
    with torch.inference_mode():
        while not state.done:
            before = state.length.copy()
            commit = sampler.commit(state, sampler.step(model, state))
            cuts = {}
            for row, position, token, _ in commit.to_list():
                if token in ends:
                    cuts.setdefault(row, position + 1)
            for row in range(len(rows)):
                expected = min(before[row], cuts.get(row, UNCUT))
                assert state.length[row] == expected
                tail = state.canvas[row, expected:]
                assert (tail == 38).all()
                if expected < before[row] and state.running[row]:
                    cut_rows += 1
                    num_masks = (state.canvas[row, :expected] == model.facts.mask_token_id).sum()
                    assert num_masks > 0 and state.block_end[row] == expected and state.remaining[row] == num_masks
                    if state.store is not None:
                        stored_tokens = state.store.token_at_write[row :: len(rows)]
                        assert (stored_tokens[:, expected:] == -1).all() and (stored_tokens[:, :expected] >= 0).all()
            for query in sampler.query(state) if not state.done else ():
                lengths = state.length if query.kind == "full" else state.block_end - state.block_start
                assert query.forwarded.tolist() == lengths[query.rows].tolist()
    assert cut_rows >= 2


@pytest.mark.thinned
@pytest.mark.parametrize("eot", ["committed", "greedy"])
@pytest.mark.parametrize("kinds", [{}, {"prediction": "shifted"}])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_caches_give_the_same_tokens_after_a_cut(eot: str, kinds: dict, cache: str) -> None:
    model, rows = model_with_many_ends(1, **kinds), [[1, 2, 3], [4, 5], [6, 7, 8, 9], [11]]
    sampler = samplers.create("learn2pd", eot=eot, filter_threshold=1.0)
    request = {"sampler": sampler, "max_new_tokens": 24, "block_length": 8}
    plain = paradec.generate(model, rows, **request)
    cached = paradec.generate(model, rows, cache=cache, **request)
    assert plain.new_tokens.tolist() == cached.new_tokens.tolist() and plain.row_nfe == cached.row_nfe
    assert cached.forwarded_tokens < plain.forwarded_tokens
    uncut = samplers.create("learn2pd", eot="none", filter_threshold=1.0)
    uncut = paradec.generate(model, rows, **request | {"sampler": uncut})
    assert plain.forwarded_tokens < uncut.forwarded_tokens
    for index, row in enumerate(rows):
        alone = paradec.generate(model, row, cache=cache, **request)
        assert alone.new_tokens[0].tolist() == cached.new_tokens[index].tolist()
        assert alone.nfe == cached.row_nfe[index] and alone.tokens == cached.tokens[index : index + 1]


@pytest.mark.parametrize("ends_last", [False, True])
@pytest.mark.parametrize("min_confidence", [0.0, 0.5])
@pytest.mark.parametrize("eot", ["committed", "greedy"])
def test_cuts_equal_a_plain_loop(eot: str, min_confidence: float, ends_last: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(300, 6, dtype=torch.float64, generator=generator)
    shares = torch.tensor([0.4, 0.7, 0.2]).view(3, 1, 1)
    is_end, candidates, selected = torch.rand(3, 300, 6, generator=generator) < shares
    selected &= candidates
    scores = torch.where(is_end & ends_last, LAST, confidence).masked_fill(~candidates, -math.inf)
    quantities = {"confidence": confidence, "is_end": is_end}
    view = dataclasses.replace(view_from_scores(scores), quantities=quantities)
    cuts = Learn2PD(eot=eot, eot_confidence=min_confidence).trim(view, selected).tolist()
    kinds = set()
    for row in range(300):
        ends = [i for i in range(6) if is_end[row, i] and confidence[row, i] >= min_confidence]
        final = [i for i in ends if selected[row, i]]
        predicted = [i for i in ends if candidates[row, i]] if eot == "greedy" else []
        at = final[0] if final else max(predicted, key=lambda i: float(confidence[row, i]), default=None)
        assert cuts[row] == (UNCUT if at is None else 7 + at + 1)  # the view begins at position 7
        kinds.add((bool(final), len(predicted) > 1, at == 0, bool(predicted) and at != predicted[0]))
    assert len(kinds) >= (9 if eot == "greedy" else 3)


def test_end_tokens_in_masked_prompt_positions_or_without_early_stop_cut_nothing() -> None:
    model = model_with_many_ends(2)
    mask = model.facts.mask_token_id
    row = [1, *[mask] * 10, 2, 3]
    sampler = samplers.create("learn2pd")
    out = paradec.generate(model, row, sampler=sampler, max_new_tokens=6, block_length=19)
    hole = out.sequences[0, 1:11].tolist()
    assert set(hole) & set(model.facts.eos_token_ids) and out.sequences[0, 11:13].tolist() == [2, 3]
    request = {"max_new_tokens": 16, "block_length": 8, "eos_early_stop": False}
    uncut_sampler = samplers.create("learn2pd", eot="none")
    plain, uncut = (paradec.generate(model, [1, 2], sampler=s, **request) for s in (sampler, uncut_sampler))
    assert torch.equal(plain.sequences, uncut.sequences)
    assert plain.tokens[0] <= 16 and not (plain.new_tokens == 38).any()


def test_records_equal_the_oracle() -> None:
    model, prompts = tiny(3), [[0, 3, 0], [1, 4, 7], [2, 5], [3, 6, 21, 9]]
    records = training.collect(model, prompts, block_length=8, max_new_tokens=16, batch=3)
    assert records.done == 4 and records.valid.all()
    num_without_candidate = 0
    for index, prompt in enumerate(prompts):
        expected = learn2pd_records(model, prompt, 16, 8)
        is_of_prompt = records.prompt == index
        assert is_of_prompt.sum() == len(expected)
        for features, final, undecided, (confidence, is_final, is_undecided) in zip(
            records.features[is_of_prompt],
            records.final[is_of_prompt],
            records.undecided[is_of_prompt],
            expected,
            strict=True,
        ):
            torch.testing.assert_close(features[0], confidence.float())
            assert final.tolist() == is_final and undecided.tolist() == is_undecided
            assert features[FEATURES.index("position")].tolist() == [i / 8 for i in range(8)]
            assert features[FEATURES.index("mask_ratio")].tolist() == [sum(is_undecided) / 8] * 8
            num_without_candidate += not any(np.logical_and(is_final, is_undecided))
    assert num_without_candidate > 0  # some records have no undecided position whose best token is final


def test_short_blocks_caches_and_resumed_records(llada64: Model, tmp_path: Path) -> None:
    request = {"block_length": 5, "max_new_tokens": 7, "caches": ("none", "dual"), "batch": 1}
    full = training.collect(llada64, PROMPTS, **request)
    assert not full.valid.all() and (full.valid.sum(1) >= 2).all() and not (full.final & ~full.valid).any()
    shares = []

    def interrupt(what: str, share: float) -> None:
        shares.append(share)
        if share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(paradec.Interrupted) as caught:
        training.collect(llada64, PROMPTS, progress=interrupt, **request)
    interrupted = caught.value.output
    assert interrupted.done == 1 and set(interrupted.prompt.tolist()) == {0} and shares == sorted(shares)
    interrupted.save(tmp_path / "records")
    resumed = training.collect(llada64, PROMPTS, resume=Records.load(tmp_path / "records"), **request)
    for name in ("features", "final", "undecided", "valid", "prompt"):
        assert torch.equal(getattr(resumed, name), getattr(full, name))
    for change, match in (
        ({"block_length": 4}, "block_length=5, this run has block_length=4"),
        ({"caches": ["none"]}, "caches"),
    ):
        with pytest.raises(ValueError, match=f"the records to resume have {match}"):
            training.collect(llada64, PROMPTS, resume=interrupted, **request | change)
    refuses(lambda: training.collect(llada64, PROMPTS, **request | {"caches": ["kv"]}), "unknown cache: 'kv'")


@pytest.mark.parametrize(
    ("kind", "rule", "length", "count", "epochs"),
    [("block", "neighbour", 8, 1200, 500), ("features", "margin", 4, 400, 60)],
)
def test_training_finds_a_planted_rule(kind: str, rule: str, length: int, count: int, epochs: int) -> None:
    """Training recovers that a token is final if its left neighbour's confidence (or its own margin) is above 0.6."""
    features = torch.rand(count, len(FEATURES), length, generator=torch.Generator().manual_seed(0))
    is_margin = rule == "margin"
    source = features[:, FEATURES.index("margin" if is_margin else "confidence")]
    final = (source if is_margin else source.roll(1, 1)) > 0.6
    flags = torch.ones_like(final)
    setup = {"model": "llada-tiny", "vocab_size": 64, "block_length": length, "caches": ["none"]}
    records = Records(setup, 40, features, final, flags, flags, torch.arange(len(features)) % 40)
    facts, network = training.train(records, kind=kind, epochs=epochs, threshold=0.5, lr=1e-2)
    assert facts.held_out["precision"] > 0.8 and facts.held_out["recall"] > 0.7  # 0.4 of the positions are final
    assert facts.held_out["records"] == count // 10 and facts.held_out["undecided"] == length * count // 10
    assert facts.network().state_dict().keys() == network.state_dict().keys()
    if kind == "block":
        strict, _ = training.train(records, epochs=epochs, threshold=0.5, lr=1e-2, false_accept_weight=10)
        assert strict.held_out["accepted"] < facts.held_out["accepted"]
    with pytest.raises(ValueError, match="records of 9 prompts cannot be split"):
        few = records.prompt < 9
        tensors = {f.name: getattr(records, f.name) for f in dataclasses.fields(records)[2:]}
        training.train(Records(records.setup, 9, **{name: tensor[few] for name, tensor in tensors.items()}))


def test_training_prompts_are_not_used_in_the_evaluation() -> None:
    prompts = training.packaged_prompts(5)
    assert len(set(prompts)) == 5 * len(TASKS) and not any(map(is_held_out, prompts))
    assert not set(prompts) & {example.prompt for example in load_prompts()}


def test_the_command_learn2pd_train(tmp_path: Path) -> None:
    out, records = tmp_path / "filter.safetensors", tmp_path / "records.safetensors"
    command = ["learn2pd", "train", "--out", str(out), "--records", str(records), "--per-task", "1"]
    command += ["--max-new-tokens", "4", "--block-length", "4", "--epochs", "60"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "precision" in result.output and Records.load(records).done == len(TASKS)
    facts = read_facts(out)
    assert (facts.model, facts.block_length, facts.caches) == ("tiny-llada", 4, ("none",))
    assert facts.paradec == paradec.__version__
    assert facts.held_out["prompts"] == len(TASKS)
    text = ["generate", "Copy: pear fig", "--sampler", "learn2pd", "--set", f"filter={out}", "--block-length", "4"]
    assert CliRunner().invoke(app, text).exit_code == 0
    result = CliRunner().invoke(app, [*command, "--block-length", "5"])
    assert result.exit_code == 2 and "--block-length=4" in result.output


def test_the_packaged_filter_saves_forwards_with_right_answers() -> None:
    path = Path(paradec.__file__).parent / "assets" / "tiny-llada" / "learn2pd.safetensors"
    assert path.stat().st_size < 100_000
    facts = read_facts(path)
    assert (facts.model, facts.block_length, facts.paradec) == ("tiny-llada", 32, paradec.__version__)
    assert {"none", "dual"} <= set(facts.caches) and facts.held_out["precision"] > 0.95
    model = paradec.load()
    examples = load_prompts(["copy", "sort", "shuffle"], limit=2)
    prompts = [example.prompt for example in examples]
    out = paradec.generate(model, prompts, sampler="learn2pd", max_new_tokens=24)
    right = [TASKS[e.task].check(e, text) for e, text in zip(examples, out.text, strict=True)]
    one_by_one = paradec.generate(model, prompts, sampler="low_confidence", max_new_tokens=24)
    assert sum(right) >= 5 and sum(out.row_nfe) < sum(one_by_one.row_nfe)
