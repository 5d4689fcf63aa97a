"""Models that are spread over processes: the tokens of one process, half the store, and errors instead of hangs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from places import GOLDEN, ROOT, SUPPORT
from spread import PROMPTS, answers, in_ranks, place_of
from text_families import write
from typer.testing import CliRunner

import paradec
from paradec import caches
from paradec.cli.app import app
from paradec.models.tensor_parallel import Plan, RankError

BIDIRECTIONAL: list[dict[str, Any]] = [
    {"cache": "none"},
    {"cache": "dual"},
    {"cache": "none", "sparse": True},
    {"cache": "dual", "sparse": True},
]
FORMATS: dict[str, list[dict[str, Any]]] = {
    "llada-tiny": [*BIDIRECTIONAL, {"cache": "prefix", "share_prefix": True}, {"cache": "dual", "many": True}],
    "dream-tiny": [*BIDIRECTIONAL, {"cache": "dual", "guidance_scale": 1.7}],
    "sdar": [{"cache": "none"}, {"cache": "dual"}, {"cache": "block"}],
}
"""What is decoded in the default suite. (SparseD's lists are for full attention, which SDAR has not.)"""


def expected(formats: dict[str, list[dict[str, Any]]], folder: Path) -> dict[str, Any]:
    """What one process answers."""
    return {
        name: answers(paradec.load(place_of(name, str(folder)), dtype="float64"), cases)
        for name, cases in formats.items()
    }


def check_same(found: list[Any], wanted: dict[str, Any], size: int) -> None:
    """Every rank has one process's tokens in as many calls, and its share of keys, values and lists."""
    for ranks in found:
        assert ranks.keys() == wanted.keys()
        for name, cases in wanted.items():
            for mine, one in zip(ranks[name], cases, strict=True):
                assert mine["tokens"] == one["tokens"], name
                assert mine.get("nfe") == one.get("nfe"), name
                assert mine.get("sparse") == one.get("sparse")
                for what in ("store", "pattern"):
                    assert size * mine.get(what, 0) == one.get(what, 0), (name, what)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that are not golden: SDAR's, and half of LLaDA's."""
    folder = tmp_path_factory.mktemp("spread")
    write(folder / "sdar", "sdar")
    shutil.copytree(GOLDEN / "llada-tiny", folder / "broken")
    os.truncate(folder / "broken" / "model.safetensors", 1000)
    (folder / "prompts.txt").write_text("Reverse: pear fig apple\nSort: pear fig apple\n")
    return folder


def lines(folder: Path) -> list[list[str]]:
    """Commands that two processes run."""
    files = ["--in", str(folder / "prompts.txt"), "--out", str(folder / "answers.jsonl"), "--batch", "1"]
    return [
        ["generate", "Reverse: pear fig apple", "--temperature", "1.5", "-n", "2", "--max-new-tokens", "8"],
        ["generate", *files],
        ["generate", "-"],
        ["generate", "Sort: pear", "--device", "cpu"],
        ["compare"],
        ["samplers"],
    ]


@pytest.fixture(scope="module")
def short(folder: Path) -> list[Any]:
    """What two processes did."""
    return in_ranks("short", {"formats": FORMATS, "folder": str(folder), "lines": lines(folder)})


def test_two_processes_decode_what_one_does(short: list[Any], folder: Path) -> None:
    wanted = expected(FORMATS, folder)
    check_same([rank["grid"] for rank in short], wanted, 2)
    sparse = [case for cases in wanted.values() for case in cases if "sparse" in case]
    assert len(sparse) == 4
    assert all(case["sparse"] > 0 and case["pattern"] > 0 for case in sparse)
    assert all(case["store"] > 0 for case in (wanted["llada-tiny"][1], wanted["sdar"][2]))


def test_what_ranks_were_given_must_be_the_same(short: list[Any]) -> None:
    first, second = (rank["differences"] for rank in short)
    for name, what in {"prompt": "prompt", "seed": "seed", "sampler": "request"}.items():
        for rank in (first, second):
            assert rank[name].startswith(f"ValueError: rank 1 was given another {what} than rank 0 for a request")
    assert first["many"] == second["many"]
    assert first["many"][0] == ""
    assert "rank 1 was given another prompt than rank 0 for a prompt" in first["many"][1]
    # and nothing was left half done: the next request is as good as any
    assert first["again"] == second["again"]


def test_what_is_drawn_is_rank_0s(short: list[Any]) -> None:
    first, second = (rank["differences"] for rank in short)
    assert first["drawn"][1] != second["drawn"][1]  # their generators differ
    assert first["drawn"][0] == second["drawn"][0]
    for name in ("generator", "reference"):
        assert first[name] == second[name]
    model = paradec.load(GOLDEN / "llada-tiny", dtype="float64")
    request = {"max_new_tokens": 12, "block_length": 4, "temperature": 0.7, "eos_early_stop": False}
    alone = paradec.generate(model, PROMPTS, generator=torch.Generator().manual_seed(5), **request)
    assert first["generator"] == alone.new_tokens.tolist()


def test_a_rank_that_fails_is_named_to_the_others(short: list[Any]) -> None:
    first, second = (rank["differences"] for rank in short)
    assert second["half a checkpoint"].startswith("CheckpointError: the weights of")
    assert first["half a checkpoint"].startswith("RankError: rank 0 waits in vain for the weights: rank 1 failed:")
    assert "cannot be read" in first["half a checkpoint"]
    assert first["seconds"] < 60  # and does not wait as long as weights may take
    assert first["another checkpoint"] == second["another checkpoint"]
    assert "rank 1 reads another checkpoint than rank 0" in first["another checkpoint"]
    assert second["callback"] == "ZeroDivisionError: of its own"
    assert first["callback"].startswith("RankError: rank 0 of 2 lost the others in model call")
    assert first["callback"].endswith("rank 1 failed: ZeroDivisionError: of its own")
    assert first["after"].startswith("RankError: rank 0 of 2 cannot go on: call")
    assert second["after"].startswith("RankError: rank 1 waited 2.5 s for a request, and rank 0 did not come")
    for rank in (first, second):
        assert all("\n" not in text for text in rank.values() if isinstance(text, str))


def test_other_tokens_are_noticed(short: list[Any]) -> None:
    for rank in short:
        assert rank["differences"]["tokens"].startswith("RankError: rank 1 has decoded other tokens than rank 0")


def test_memory_is_asked_of_all(short: list[Any]) -> None:
    first, second = (rank["differences"]["memory"] for rank in short)
    # 2 (keys, values) x 3 layers x 3 rows x 23 slots x 2 heads of 4 x 32 numbers of 8 bytes
    text = "the key/value store of 3 x 22 positions would take 207.0 KiB, more than this machine's memory (4.0 KiB)"
    assert second.startswith(f"ValueError: {text}")
    assert first.startswith(f"ValueError: rank 1: {text}")


def test_what_a_spread_model_cannot(short: list[Any]) -> None:
    for rank, found in enumerate(each["differences"] for each in short):
        assert f"float64 on cpu, rank {rank} of 2)" in found["repr"]
        assert found["embeddings"] == [64, 128]
        assert found["copy"].startswith("TypeError: llada-tiny is spread over processes, and can be neither copied nor")
        assert "is spread over processes (tp_plan)" in found["save"]
        assert found["thread"].startswith("RuntimeError: a model spread over processes is used by one thread")


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.21"), reason="before 5.21 transformers gathers no odd vocabulary"
)
def test_commands_print_once(short: list[Any], folder: Path) -> None:
    first, second = (rank["commands"] for rank in short)
    assert [code for code, _, _ in first] == [code for code, _, _ in second] == [0, 0, 2, 2, 2, 0]
    # drawn without a seed: the processes agree on one, and the text is any
    assert [line[:4] for line in first[0][1].splitlines()] == ["[1] ", "[2] "]
    assert "tokens" in first[0][2]
    entries = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [entry["text"] for entry in entries] == ["apple fig pear", "apple fig pear"]
    assert "2 answers in" in first[1][1]
    assert first[2][2].strip() == (
        "error: 2 processes cannot all read standard input: give the prompt in quotes, or --in FILE"
    )
    assert "--device cpu is for one process" in first[3][2]
    assert "paradec compare runs in one process, and was started in 2" in first[4][2]
    assert "threshold" in first[5][1]
    assert not any(out or err for index, (_, out, err) in enumerate(second) if index not in (2, 3, 4))
    assert not any(out for _, out, _ in second)


# ---- before any process waits --------------------------------------------------------------------------------------


def test_arguments_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    source = GOLDEN / "llada-tiny"
    for given, message in (
        ({"tp_plan": "auto"}, "this one is alone: start them with torchrun --nproc-per-node N"),
        ({"tp_plan": 2}, "tp_plan=2 must be 'auto' or a mapping"),
        ({"tp_plan": {}}, "tp_plan={} must be 'auto' or a mapping"),
        ({"tp_plan": "auto", "device": "cpu"}, "device=cpu goes with neither device_map nor tp_plan"),
        ({"tp_plan": "auto", "device_map": "cpu"}, "tp_plan='auto' does not go with device_map='cpu'"),
        ({"tp_plan": "auto", "quantization_config": {}}, "tp_plan='auto' does not go with quantization_config"),
        ({"tp_timeout": 5}, "tp_timeout=5 goes with tp_plan='auto'"),
        ({"tp_plan": "auto", "tp_timeout": 0}, r"tp_timeout=0 must be a number in \(0, 86400\]"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            paradec.load(source, **given)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="tp_plan='auto' is not for image models"):
        paradec.load("digits-ar", tp_plan="auto")


def test_heads_that_cannot_be_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 48}
    with pytest.raises(ValueError, match="num_key_value_heads=6 of 'x' among 4 processes; it can among 1, 2, 3, 6"):
        Plan("auto", 1).layout(transformers.LlamaConfig(**sizes), "x")
    with pytest.raises(ValueError, match="transformers has no plan for 'gpt2'"):
        Plan("auto", 1).layout(transformers.GPT2Config(), "x")
    assert Plan("auto", 1).layout(transformers.LlamaConfig(**sizes | {"num_key_value_heads": 4}), "x").tp_size == 4
    # experts alone are shared out whatever the heads are
    config = transformers.LlamaConfig(**sizes)
    config.base_model_tp_plan = {"layers.*.mlp.up_proj": "colwise"}
    assert Plan("auto", 1).layout(config, "x").tp_plan == "auto"


def test_a_copy_for_some_of_the_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=16)
    )
    module._tp_size = 2  # as transformers leaves it
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="LlamaForCausalLM is spread over 2 of 4 processes"):
        paradec.wrap(module)


def test_one_process_of_torchrun_has_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    model = paradec.load(GOLDEN / "llada-tiny", tp_plan="auto")
    assert model.ranks is None
    assert not torch.distributed.is_initialized()


def test_commands_for_one_process_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    for command in (["chat"], ["serve"], ["image"], ["compare"]):
        found = CliRunner().invoke(app, command)
        assert found.exit_code == 2
        assert f"paradec {command[0]} runs in one process" in found.output


def test_the_error_is_one_that_callers_of_networks_catch() -> None:
    assert issubclass(RankError, ConnectionError)


# ---- longer ----------------------------------------------------------------------------------------------------------


ORDERED = "dkv_greedy"
"""The cache that must know what a step will commit before it is evaluated."""


def every_cache() -> dict[str, list[dict[str, Any]]]:
    greedy = {"temperature": 0.0, "sampler": "low_confidence"}
    cases: dict[str, list[dict[str, Any]]] = {}
    for name in ("llada-tiny", "dream-tiny", "sdar"):
        block = name == "sdar"
        made = [cache for cache in caches.names() if cache not in ("recap", "block", "hierarchical")]
        if block:
            made = ["none", "prefix", "dual", "block", "hierarchical"]
        cases[name] = [{"cache": cache} | extra for cache in made if cache != ORDERED for extra in ({}, greedy)]
        cases[name] += [{"cache": ORDERED, "sampler": "random"}] if name == "llada-tiny" else []
        if not block:
            cases[name] += [{"cache": cache, "sparse": True} for cache in ("none", "prefix", "dual")]
            cases[name] += [{"cache": cache, "guidance_scale": 2.5} for cache in ("none", "dual")]
        cases[name] += [{"cache": "prefix", "share_prefix": True}, {"cache": "dual", "many": True}]
    return cases


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:cache=")
def test_every_cache(folder: Path) -> None:
    formats = every_cache()
    wanted = expected(formats, folder)
    found = in_ranks("grid", {"formats": formats, "folder": str(folder)}, timeout=500)
    check_same(found, wanted, 2)


@pytest.mark.full
def test_four_processes(folder: Path) -> None:
    formats = {"llada-tiny": FORMATS["llada-tiny"]}
    check_same(in_ranks("grid", {"formats": formats}, size=4), expected(formats, folder), 4)


def torchrun(arguments: list[str], **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)]), "OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=environment, start_new_session=True, **streams, **options)


@pytest.mark.full
def test_torchrun_prints_once() -> None:
    process = torchrun(["-m", "paradec", "generate", "Reverse: pear fig apple kiwi"])
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-2000:]
    assert out == "kiwi apple fig pear\n" and errors.count("tokens, 1 forward, ") == 1


@pytest.mark.full
def test_a_process_that_is_killed_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal, paradec\n"
        "model = paradec.load(tp_plan='auto')\n"
        "def kill(state, commit):\n"
        "    if model.ranks.rank: os.kill(os.getpid(), signal.SIGKILL)\n"
        "paradec.generate(model, 'Reverse: pear fig apple kiwi', sampler='low_confidence', callback=kill)\n"
        "print('GOES ON')\n"
    )
    begin = time.monotonic()
    process = torchrun([str(script)])
    try:
        out, errors = process.communicate(timeout=200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    assert "GOES ON" not in out
    assert "RankError: rank 0 of 2 lost the others in model call" in errors or "Signal 9" in errors
    assert time.monotonic() - begin < 200
