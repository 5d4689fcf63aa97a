"""The parts of the vLLM integration that need no vLLM, and its behaviour without vLLM."""

import importlib.metadata
import logging
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from decoding import refuses
from engines import block_logits
from places import ROOT
from small_models import MASK, tiny
from torch import nn

import paradec
from paradec.integrations.engines import vllm
from paradec.integrations.engines.vllm.configs import FastDLLMConfig, SDARConfig
from paradec.integrations.engines.vllm.sampler import BlockSampler, LeftShift
from paradec.integrations.engines.vllm.settings import VARIABLE, server_defaults, settings_of
from paradec.integrations.engines.vllm.slots import ServedModel, Slot, cut_at_blocks
from paradec.models.adapter import Model
from paradec.models.checkpoint import CheckpointError

BLOCK, SLOTS, END = 4, 3, 0


def params(**changes: Any) -> Any:
    neutral = {
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logprobs": None,
        "prompt_logprobs": None, "logprob_token_ids": None, "top_p": 1.0, "top_k": 0, "ignore_eos": False,
        "stop_token_ids": [], "eos_token_id": END, "max_tokens": 16, "extra_args": None,
    }  # fmt: skip
    return SimpleNamespace(**neutral | changes)


def test_the_entry_point_imports_little_and_never_raises() -> None:
    code = "import sys, paradec.integrations.engines.vllm as _; "
    code += "print(sorted({'torch', 'transformers', 'vllm'} & sys.modules.keys()))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert process.stdout.strip() == "[]", process.stderr


@pytest.mark.skipif(bool([*importlib.metadata.packages_distributions().get("vllm", [])]), reason="vLLM is installed")
def test_a_missing_vllm_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm.plugins.paradec"):
        vllm.register()
    assert "paradec's models are not available in vLLM: ModuleNotFoundError" in caplog.text


def test_errors_are_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from paradec.integrations.engines.vllm import registration

    def fail() -> None:
        raise AttributeError("another release")

    monkeypatch.setattr(registration, "register", fail)
    with caplog.at_level(logging.WARNING, "vllm.plugins.paradec"):
        vllm.register()
    assert "AttributeError: another release" in caplog.text


def test_request_settings_override_server_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, '{"sampler": "klass", "steps": 4, "temperature": 0.5}')
    defaults = server_defaults(SimpleNamespace(paradec={"steps": 8}))
    actual = settings_of(params(top_p=0.9, top_k=7, extra_args={"paradec": '{"temperature": 0.25}'}), defaults, "a")
    assert actual.sampler == paradec.samplers.create("klass")
    seed = actual.fields.pop("seed")
    assert actual.fields == {"steps": 8, "temperature": 0.25, "top_p": 0.9, "top_k": 7}
    repeated, seed_of_b = (settings_of(params(), defaults, name).fields["seed"] for name in ("a", "b"))
    assert seed == repeated != seed_of_b
    assert actual.stop_ids == (END,) and actual.max_new_tokens == 16
    defaults, extra = {"top_p": 0.5, "top_k": 3}, {"extra_args": {"paradec": {"top_p": 0.7}}}
    for request, top_p in (({"top_p": 0.9}, 0.9), ({}, 0.5), ({"top_p": 0.9, **extra}, 0.7)):
        assert settings_of(params(**request), defaults).fields == {"top_p": top_p, "top_k": 3}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"extra_args": {"paradec": {"tresholds": 1}}}, "unknown name: 'tresholds'"),
        ({"extra_args": {"paradec": {"max_new_tokens": 4}}}, "max_tokens of the request"),
        ({"extra_args": {"paradec": {"cache": "dual"}}}, "unknown name: 'cache'"),
        ({"extra_args": {"paradec": [1]}}, "must be a mapping"),
        ({"extra_args": {"paradec": "{"}}, "is not JSON"),
        ({"extra_args": {"paradec": {"template": [-1]}}}, "template=-1"),
        ({"extra_args": {"paradec": {"template": "text"}}}, "must be token ids"),
        ({"extra_args": {"paradec": {"template": [1] * 17}}}, "more than max_tokens=16"),
        ({"extra_args": {"paradec": {"temperature": -1}}}, "temperature=-1"),
        ({"extra_args": {"paradec": {"seed": [1, 2]}}}, r"seed=\[1, 2\]"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"prompt_logprobs": 1}, "prompt_logprobs=1"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    refuses(lambda: settings_of(params(**settings)), message, (ValueError, TypeError))


def test_configs_match_paradec_load() -> None:
    from checkpoints import FAST_DLLM, SDAR

    actual = SDARConfig.from_dict(SDAR)
    assert actual.canvas_length == SDAR["block_size"] and actual.architectures == ["SDARForCausalLM"]
    assert actual.rope_parameters["rope_theta"] == SDAR["rope_theta"] and actual.head_dim == SDAR["head_dim"]
    assert FastDLLMConfig.from_dict(FAST_DLLM).canvas_length == FAST_DLLM["bd_size"]
    refuses(lambda: SDARConfig.from_dict(SDAR | {"hidden_act": "gelu"}), "hidden_act='gelu'", CheckpointError)
    unsized = {name: value for name, value in SDAR.items() if name != "block_size"}
    assert SDARConfig.from_dict(unsized, name_or_path="JetLM/SDAR-8B-Chat-b16").canvas_length == 16
    assert SDARConfig.from_dict(unsized, name_or_path="something").canvas_length is None


def test_prefill_chunks_end_with_blocks() -> None:
    draw = random.Random(0)
    for _ in range(50):
        sizes = [draw.randint(1, 11) for _ in range(3)]
        computed = np.array([draw.randint(0, 9) for _ in range(3)])
        begins = np.cumsum([0, *sizes])
        expected: dict[tuple[int, int], list[int]] = {}
        for row, size in enumerate(sizes):
            for index in range(size):
                expected.setdefault((row, (int(computed[row]) + index) // BLOCK), []).append(int(begins[row]) + index)
        rows, cuts, ends = cut_at_blocks(begins, computed, BLOCK)
        pieces = list(expected.items())
        assert rows.tolist() == [row for (row, _), _ in pieces]
        assert cuts.tolist() == [columns[0] for _, columns in pieces] + [sum(sizes)]
        offsets = computed - begins[:-1]  # position minus column, by row
        assert ends.tolist() == [columns[-1] + offsets[row] + 1 for (row, _), columns in pieces]


def test_left_neighbours_are_kept_between_forwards() -> None:
    left_shift = LeftShift(requests=3, tokens=8, hidden=2, dtype=torch.float32, device=torch.device("cpu"))
    assert isinstance(left_shift, nn.Module) and not left_shift.state_dict()
    first = torch.arange(10.0).view(5, 2)  # slot 2: three columns; slot 0: two
    left_shift.set_indices(np.array([5 + 2, 0, 1, 5 + 0, 3]), {2: 2}, total=5)
    assert left_shift(first).tolist() == [[0, 0], [0, 1], [2, 3], [0, 0], [6, 7]]
    second = 100 + torch.arange(4.0).view(2, 2)
    left_shift.set_indices(np.array([2 + 2, 0]), {}, total=2)
    assert left_shift(second).tolist() == [[4, 5], [100, 101]]  # the stored state of slot 2, then the left column
    assert left_shift.last_hidden.tolist() == [[0, 0], [0, 0], [4, 5]]


class Runner:
    """A model runner that prefills in chunks and steps random subsets of its requests."""

    def __init__(self, model: Model, draw: random.Random):
        self.model, self.draw, self.served = model, draw, ServedModel(model.facts, {})
        self.slots: dict[int, Slot | None] = {}
        self.tokens: dict[int, list[int]] = {}
        self.prompts: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.ready: set[int] = set()
        self.drafts = torch.zeros((SLOTS, BLOCK), dtype=torch.int64)
        base = SimpleNamespace(sampling_states=None, req_states=SimpleNamespace(draft_tokens=self.drafts))
        repeated = bool(model.facts.shift)
        self.sampler = BlockSampler(base, self.slots, BLOCK, model.facts.mask_id, repeated, SimpleNamespace)

    def add(self, number: int, prompt: list[int], settings: Any) -> None:
        try:
            row = self.served.open_row(prompt, settings_of(settings, {}, "r"))
            self.slots[number] = Slot(self.served, row, len(prompt))
        except (ValueError, TypeError):
            self.slots[number] = None
        self.tokens[number], self.prompts[number], self.computed[number] = list(prompt), len(prompt), 0
        self.ready.discard(number)

    def step(self) -> dict[int, list[int]]:
        numbers = [number for number in self.slots if self.draw.random() < 0.8] or [*self.slots][:1]
        self.draw.shuffle(numbers)
        logits, counts, sizes = [], [0], [0]
        for number in numbers:
            length, start = len(self.tokens[number]), self.computed[number]
            if number not in self.ready:
                end = min(length, start + BLOCK * self.draw.randint(1, 2))
                if end == length:
                    self.ready.add(number)
                counts.append(0)
                sizes.append(end - start)
                continue
            canvas = self.drafts[number, : BLOCK - (length - start)].tolist()
            row = self.tokens[number] + canvas
            logits.append(block_logits(self.model, row, length))
            counts.append(len(canvas))
            sizes.append(len(row) - start)
        batch = SimpleNamespace(
            num_reqs=len(numbers),
            num_draft_tokens=sum(counts),
            cu_num_logits_np=np.cumsum(counts),
            query_start_loc_np=np.cumsum(sizes),
            idx_mapping_np=np.array(numbers),
            prefill_len_np=np.array([self.prompts[number] for number in numbers]),
            num_computed_tokens_np=np.array([self.computed[number] for number in numbers]),
        )
        actual = self.sampler(torch.cat(logits) if logits else torch.zeros((0, self.model.facts.vocab_size)), batch)
        emitted = {}
        for index, number in enumerate(numbers):
            emitted[number] = actual.sampled_token_ids[index, : int(actual.num_sampled[index])].tolist()
            self.computed[number] += sizes[index + 1] - int(actual.num_rejected[index])
            self.tokens[number] += emitted[number]
        return emitted


@pytest.mark.thinned
@pytest.mark.parametrize("prediction", ["same", "shifted"])
@pytest.mark.parametrize("name", ["threshold", "credit", "saber", "editing"])
def test_changing_batches_have_the_tokens_of_generate(name: str, prediction: str) -> None:
    model = tiny(2, "block_causal", prediction)
    draw = random.Random(name)
    runner, waiting, expected, running = Runner(model, draw), [], {}, {}
    for key in range(4):
        prompt = [draw.randrange(1, MASK) for _ in range(draw.randint(1, 11))]
        new = draw.choice((3, 9))
        waiting.append((key, prompt, new))
        output = paradec.generate(model, [prompt], max_new_tokens=new, sampler=name)
        expected[key] = output.sequences[0, output.filled[0]].tolist()[: output.tokens[0]]
    answers = {}
    ends = model.facts.eos_token_ids
    while waiting or running:
        for number in set(range(SLOTS)) - running.keys():
            if waiting:
                key, prompt, new = waiting.pop(0)
                runner.add(number, prompt, params(max_tokens=new, stop_token_ids=list(ends), eos_token_id=None,
                                                  extra_args={"paradec": {"sampler": name}}))  # fmt: skip
                running[number] = key, new
        for number in runner.step():
            answer = runner.tokens[number][runner.prompts[number] :]
            key, new = running[number]
            stop = next((index + 1 for index, token in enumerate(answer) if token in ends), len(answer))
            if stop < len(answer) or (answer and answer[stop - 1] in ends) or len(answer) >= new:
                answers[key] = answer[: min(stop, new)]
                del running[number], runner.slots[number]
    assert answers == expected


def test_a_request_that_cannot_start_answers_with_a_mask() -> None:
    model = tiny(2, "block_causal")
    for prompt, settings, reason in (
        ([1, MASK], params(), "the mask id"),
        ([1, 2], params(extra_args={"paradec": {"sampler": "low_confidence", "steps": 1}}), "steps=1"),
        ([], params(), "empty"),
    ):
        runner = Runner(model, random.Random(0))
        runner.add(0, prompt, settings)
        assert runner.slots[0] is None
        assert reason in runner.served.why_unsupported(prompt, settings)
        if prompt:
            assert runner.step() == {0: [MASK]}


def test_nan_logits_end_their_request() -> None:
    model = tiny(2, "block_causal")
    served = ServedModel(model.facts, {})
    slot = Slot(served, served.open_row([1, 2, 3, 4, 5], settings_of(params())), 5)
    logits = torch.full((3, model.facts.vocab_size), torch.nan)
    assert slot.step(logits, forwards_twice=False) == [MASK] and slot.failed


def test_answers_end_where_vllm_ends_them() -> None:
    served = ServedModel(tiny(2, "block_causal").facts, {})
    for settings, ends, early in (
        (params(), [END], True),
        (params(stop_token_ids=[7]), [END, 7], True),
        (params(stop_token_ids=[7], ignore_eos=True), [7], True),
        (params(ignore_eos=True), list(served.facts.eos_token_ids), False),
    ):
        state = served.open_row([1, 2], settings_of(settings)).state(0)
        assert state.ends.tolist() == ends and state.request.eos_early_stop is early


def test_preempted_requests_continue_with_their_template() -> None:
    served = ServedModel(tiny(2, "block_causal").facts, {})
    settings = settings_of(params(max_tokens=9, extra_args={"paradec": {"template": [5, MASK, 6]}}))
    full = served.open_row([1, 2], settings).state(0).canvas[0].tolist()
    assert full[:5] == [1, 2, 5, MASK, 6] and full[5:11] == [MASK] * 6
    for answer in ([], [5, 7], [5, 7, 6], [5, 7, 6, 8, 8]):
        state = served.open_row([1, 2], settings, answer).state(0)
        assert state.canvas[0].tolist() == [1, 2, *answer, *full[2 + len(answer) :]] and state.requested_end == [11]
