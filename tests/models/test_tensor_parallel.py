"""Tensor parallelism: the same tokens as in one process, a part of the store in each, errors instead of hangs."""

import copy
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import MOE_NAMES, moe_facts, write_family
from decoding import refuses
from packaging.version import Version
from places import GOLDEN, ROOT, SUPPORT
from typer.testing import CliRunner

import paradec
from paradec import caches
from paradec.batching.batch import Batch
from paradec.cli.app import app
from paradec.models import tensor_parallel
from paradec.models.adapter import Model
from paradec.models.tensor_parallel import distributed_config

PROMPTS = [[5, 6, 7, 8, 9, 4], [5, 6, 7, 8], [5, 6, 7, 10, 11, 12, 13, 14, 15, 16]]
SPARSE = paradec.SparseD(select=0.3, block_size=2, dense_steps=2)
REQUEST: dict[str, Any] = {
    "max_new_tokens": 12, "block_length": 4, "temperature": 0.7, "seed": 3, "eos_early_stop": False,
}  # fmt: skip


def run_ranks(check: str, arguments: Any = None, size: int = 2, timeout: float = 240) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, check, str(size), folder, json.dumps(arguments)]
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        package = Path(paradec.__file__).parent.parent
        environment |= {"PYTHONPATH": os.pathsep.join([str(package), str(SUPPORT)]), "OMP_NUM_THREADS": "1"}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, text=True, env=environment, start_new_session=True, **streams)
        try:
            printed = process.communicate(timeout=timeout)[0]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, printed[-4000:]
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]


def main(check: str, size: str, folder: str, arguments: str) -> int:
    torch.set_num_threads(1)
    import transformers.distributed.tensor_parallel
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401 (once, before the fork)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(int(size)):
        if (child := os.fork()) == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            try:
                actual = CHECKS[check](rank, **(json.loads(arguments) or {}))
                Path(folder, f"{rank}.json").write_text(json.dumps(actual))
                while rank == 0 and len(list(Path(folder).glob("*.json"))) < int(size):  # rank 0 hosts the store
                    time.sleep(0.02)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    for _ in children:
        ended, status = os.wait()
        if status:  # end the other ranks, like torchrun
            for child in children:
                if child != ended:
                    os.kill(child, signal.SIGKILL)
            return 1
    return 0


def load_model(name: str, folder: str | None, **arguments: Any) -> Model:
    source = GOLDEN / name if folder is None or (GOLDEN / name).is_dir() else Path(folder, name)
    facts = moe_facts(source.name) if source.name in MOE_NAMES else {}
    return paradec.load(source, dtype="float64", **facts, **arguments)


def decode_cases(model: Model, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    result = []
    for case in cases:
        request = REQUEST | case
        if request.pop("sparse", False):
            request["attention"] = SPARSE
        out = paradec.generate(model, PROMPTS, **request)
        entry: dict[str, Any] = {"tokens": out.new_tokens.tolist(), "nfe": out.row_nfe}
        entry["store"] = 0 if out.cost is None else out.cost.store_bytes
        if out.attention is not None:
            entry["sparse"] = sum(out.attention.sparse_calls)
            entry["pattern"] = out.attention.pattern_bytes
        result.append(entry)
    return result


def decode_formats(rank: int, formats: dict[str, list[dict[str, Any]]], folder: str | None = None) -> Any:
    return {name: decode_cases(load_model(name, folder, tp_plan="auto"), cases) for name, cases in formats.items()}


def error_text(call: Callable[[], Any]) -> str:
    try:
        return f"nothing: {call()!r}"
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"


def load_mismatched_checkpoints(rank: int, folder: str) -> dict[str, Any]:
    source, broken = GOLDEN / "llada-tiny", Path(folder, "broken")
    result = {"half a checkpoint": error_text(lambda: paradec.load(broken if rank else source, tp_plan="auto"))}
    other = GOLDEN / "dream-tiny" if rank else source
    return result | {"another checkpoint": error_text(lambda: paradec.load(other, tp_plan="auto"))}


def run_requests(rank: int) -> dict[str, Any]:
    model = paradec.load(GOLDEN / "llada-tiny", dtype="float64", tp_plan="auto")
    result: dict[str, Any] = {}

    def tokens_of(prompt: Any = PROMPTS, **request: Any) -> Any:
        return paradec.generate(model, prompt, **(REQUEST | request)).new_tokens.tolist()

    result["prompt"] = tokens_of(prompt=[[5, 6, 7 + rank]])
    result["seed"] = tokens_of(seed=3 + rank)
    result["request"] = tokens_of(sampler=["threshold", "credit"][rank], max_new_tokens=12 - 4 * rank)
    torch.manual_seed(rank)
    result["drawn"] = [tokens_of(seed=None), torch.initial_seed()]
    generator = torch.Generator().manual_seed(5 + rank)
    result["generator"] = tokens_of(seed=None, generator=generator)
    reference = {"sampler": "low_confidence", "prompt": PROMPTS[:1], "rng": "reference", "seed": None, "cache": "none"}
    result["reference"] = tokens_of(**reference, generator=generator)
    for name, call in {
        "Batch": lambda: Batch(model),
        "generate_many": lambda: list(paradec.generate_many(model, PROMPTS)),
        "update_weights": lambda: model.update_weights({}),
        "save_pretrained": lambda: model.save_pretrained("nowhere"),
        "a copy or pickle": lambda: copy.deepcopy(model),
        "too long": lambda: tokens_of(cache="dual", max_new_tokens=10**6),
        "thread": lambda: ThreadPoolExecutor(1).submit(tokens_of).result(),
    }.items():
        result[name] = error_text(call)

    def failing(state: Any, commit: Any) -> None:
        if rank or not only_rank_1:
            raise ZeroDivisionError("planned")

    failing_request: dict[str, Any] = {"callback": failing, "sampler": "low_confidence"}
    only_rank_1 = False
    result["all"] = error_text(lambda: tokens_of(**failing_request))
    result["again"] = tokens_of()
    only_rank_1, begin = True, time.monotonic()
    tensor_parallel.FAILURE_WAIT = timedelta(seconds=1)
    result["one"] = error_text(lambda: tokens_of(**failing_request))
    result["seconds"] = time.monotonic() - begin
    if rank:
        result["after"] = error_text(tokens_of)
    return result


def command(rank: int, words: list[str]) -> list[Any]:
    from paradec.cli.app import app

    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = out, err  # type: ignore[assignment]
        code: Any = None
        try:
            app(words)
        except SystemExit as end:
            code = end.code
        finally:
            sys.stdout, sys.stderr = streams
        for stream in (out, err):
            stream.seek(0)
        return [code, out.read(), err.read()]


def run_short_checks(rank: int, formats: Any, folder: str, words: list[str]) -> dict[str, Any]:
    result = {"loads": load_mismatched_checkpoints(rank, folder), "grid": decode_formats(rank, formats, folder)}
    return result | {"command": command(rank, words), "requests": run_requests(rank)}


CHECKS: dict[str, Callable[..., Any]] = {"short": run_short_checks, "grid": decode_formats}
BIDIRECTIONAL: list[dict[str, Any]] = [
    {"cache": cache} | sparse for sparse in ({}, {"sparse": True}) for cache in ("none", "dual")
]
FORMATS: dict[str, list[dict[str, Any]]] = {
    "llada-tiny": [*BIDIRECTIONAL, {"cache": "prefix", "share_prefix": True}],
    "dream-tiny": [*BIDIRECTIONAL, {"cache": "dual", "guidance_scale": 1.7}],
    "sdar": [{"cache": "none"}, {"cache": "dual"}, {"cache": "block"}],
}
"""Checkpoint -> requests. None for SDAR has sparse attention, because SparseD needs bidirectional attention."""
SHORT: dict[str, list[dict[str, Any]]] = {
    "llada-tiny": [FORMATS["llada-tiny"][index] for index in (1, 2, 4)],
    "dream-tiny": [FORMATS["dream-tiny"][index] for index in (0, 3, 4)],
    "sdar": FORMATS["sdar"][1:],
}
"""Requests of the default tests."""


def decode_in_one_process(formats: dict[str, list[dict[str, Any]]], folder: Path) -> dict[str, Any]:
    return {name: decode_cases(load_model(name, str(folder)), cases) for name, cases in formats.items()}


def check_same(actual: list[Any], expected: dict[str, Any], size: int) -> None:
    for rank in actual:
        assert rank.keys() == expected.keys()
        for name, cases in expected.items():
            for mine, single in zip(rank[name], cases, strict=True):
                assert mine["tokens"] == single["tokens"], name
                assert mine["nfe"] == single["nfe"], name
                assert mine.get("sparse") == single.get("sparse")
                for what in ("store", "pattern"):
                    assert size * mine.get(what, 0) == single.get(what, 0), (name, what)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spread")
    write_family(folder / "sdar", "sdar")
    shutil.copytree(GOLDEN / "llada-tiny", folder / "broken")
    os.truncate(folder / "broken" / "model.safetensors", 1000)
    (folder / "prompts.txt").write_text("Reverse: pear fig apple\nSort: pear fig apple\n")
    return folder


@pytest.fixture(scope="module")
def rank_results(folder: Path) -> list[Any]:
    words = ["generate", "--in", str(folder / "prompts.txt"), "--out", str(folder / "answers.jsonl"), "--batch", "1"]
    return run_ranks("short", {"formats": SHORT, "folder": str(folder), "words": words})


def test_two_processes_decode_like_one(rank_results: list[Any], folder: Path) -> None:
    wanted = decode_in_one_process(SHORT, folder)
    check_same([rank["grid"] for rank in rank_results], wanted, 2)
    sparse = [case for cases in wanted.values() for case in cases if "sparse" in case]
    assert len(sparse) == 2
    assert all(case["sparse"] > 0 and case["pattern"] > 0 for case in sparse)
    assert all(case["store"] > 0 for case in (wanted["llada-tiny"][0], wanted["sdar"][1]))


def test_all_ranks_decode_the_request_of_rank_0(rank_results: list[Any]) -> None:
    first, second = (rank["requests"] for rank in rank_results)
    model = paradec.load(GOLDEN / "llada-tiny", dtype="float64")
    generator = torch.Generator().manual_seed(5)
    arguments: dict[str, dict[str, Any]] = {
        "prompt": {"prompt": [[5, 6, 7]]},
        "seed": {},
        "request": {"sampler": "threshold"},
        "generator": {"seed": None, "generator": generator},
        "reference": {"sampler": "low_confidence", "prompt": PROMPTS[:1], "rng": "reference", "seed": None}
        | {"cache": "none", "generator": generator},
    }
    for name, request in arguments.items():
        alone = paradec.generate(model, request.pop("prompt", PROMPTS), **(REQUEST | request)).new_tokens.tolist()
        assert first[name] == second[name] == alone, name
    assert first["drawn"][1] != second["drawn"][1]  # their generators differ
    assert first["drawn"][0] == second["drawn"][0]


def test_a_checkpoint_that_one_rank_cannot_read_fails_on_all(rank_results: list[Any]) -> None:
    first, second = (rank["loads"] for rank in rank_results)
    assert second["half a checkpoint"].startswith("CheckpointError: the weights of")
    assert first["half a checkpoint"].startswith("ConnectionError: rank 1 failed: CheckpointError: the weights of")
    assert first["another checkpoint"] == second["another checkpoint"]
    assert "ValueError: rank 1 reads another checkpoint than rank 0" in first["another checkpoint"]


def test_unsupported_requests_of_distributed_models_are_refused(rank_results: list[Any]) -> None:
    for actual in (each["requests"] for each in rank_results):
        for name in ("Batch", "generate_many", "update_weights", "save_pretrained", "a copy or pickle"):
            message = f"ValueError: {name} does not work with llada-tiny, which is spread over processes (tp_plan)"
            assert actual[name] == message
        assert actual["thread"].startswith("RuntimeError: a model that is spread over processes must be used in one")


def test_an_error_on_all_ranks_leaves_the_model_usable(rank_results: list[Any]) -> None:
    for actual in (each["requests"] for each in rank_results):
        assert actual["too long"].startswith("ValueError: ")
        assert actual["all"] == "ZeroDivisionError: planned"
        assert actual["again"] == actual["seed"]


def test_a_rank_that_fails_ends_the_others(rank_results: list[Any]) -> None:
    first, second = (rank["requests"] for rank in rank_results)
    assert second["one"] == "ZeroDivisionError: planned"
    assert first["one"] == "ConnectionError: rank 1 failed: ZeroDivisionError: planned"
    assert second["after"].startswith("ConnectionError: this process cannot continue after ZeroDivisionError: planned")
    assert first["seconds"] < 60


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.21"), reason="before 5.21 transformers gathers no odd vocabulary"
)
def test_commands_print_once(rank_results: list[Any], folder: Path) -> None:
    first, second = (rank["command"] for rank in rank_results)
    assert first[0] == 0 and "2 answers in" in first[1]
    assert second == [None, "", ""]
    entries = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [entry["text"] for entry in entries] == ["apple fig pear", "apple fig pear"]


def test_wrong_arguments_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    source = GOLDEN / "llada-tiny"
    for arguments, message in (
        ({"tp_plan": "auto"}, "needs several processes: start them with torchrun --nproc-per-node N"),
        ({"tp_plan": 2}, "tp_plan=2 must be 'auto' or a mapping"),
        ({"tp_plan": {}}, "tp_plan={} must be 'auto' or a mapping"),
        ({"tp_plan": "auto", "device": "cpu"}, "device=cpu goes with neither device_map nor tp_plan"),
        ({"tp_plan": "auto", "device_map": "cpu"}, "tp_plan='auto' does not go with device_map='cpu'"),
        ({"tp_plan": "auto", "quantization_config": {}}, "tp_plan='auto' does not go with quantization_config"),
    ):
        assert "\n" not in refuses(partial(paradec.load, source, **arguments), message)
    refuses(lambda: paradec.load("digits-ar", tp_plan="auto"), "tp_plan='auto' is not for image models")


def test_heads_that_the_processes_cannot_share_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 48}
    with pytest.raises(ValueError, match="for 'x' cannot divide num_key_value_heads=6 among 4 processes"):
        distributed_config("auto", transformers.LlamaConfig(**sizes), "x")
    refuses(lambda: distributed_config("auto", transformers.GPT2Config(), "x"), "transformers has no plan for 'gpt2'")
    assert distributed_config("auto", transformers.LlamaConfig(**sizes | {"num_key_value_heads": 4}), "x").tp_size == 4
    # the number of heads does not matter to a plan that splits only MLPs
    config = transformers.LlamaConfig(**sizes)
    config.base_model_tp_plan = {"layers.*.mlp.up_proj": "colwise"}
    assert distributed_config("auto", config, "x").tp_plan == "auto"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        *((name, f"paradec {name} runs in one process") for name in ("chat", "serve", "image", "compare")),
        ("generate -", "several processes cannot all read standard input"),
        ("generate Reverse: --device cpu", "--device cpu is for one process"),
    ],
)
def test_commands_of_one_process_are_refused_in_several(
    monkeypatch: pytest.MonkeyPatch, command: str, message: str
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    actual = CliRunner().invoke(app, command.split())
    assert actual.exit_code == 2
    assert message in actual.output


COMMITS_FIRST = "dkv_greedy"
"""The cache that needs to know the next commits before the forward."""


def cases_of_every_cache() -> dict[str, list[dict[str, Any]]]:
    greedy = {"temperature": 0.0, "sampler": "low_confidence"}
    cases: dict[str, list[dict[str, Any]]] = {}
    for name in ("llada-tiny", "dream-tiny", "sdar"):
        block = name == "sdar"
        names = [cache for cache in caches.names() if cache not in ("recap", "block", "hierarchical")]
        if block:
            names = ["none", "prefix", "dual", "block", "hierarchical"]
        cases[name] = [{"cache": cache} | extra for cache in names if cache != COMMITS_FIRST for extra in ({}, greedy)]
        cases[name] += [{"cache": COMMITS_FIRST, "sampler": "random"}] if name == "llada-tiny" else []
        if not block:
            cases[name] += [{"cache": cache, "sparse": True} for cache in ("none", "prefix", "dual")]
            cases[name] += [{"cache": cache, "guidance_scale": 2.5} for cache in ("none", "dual")]
        cases[name] += [{"cache": "prefix", "share_prefix": True}]
    return cases


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:cache=")
def test_two_processes_decode_like_one_with_every_cache(folder: Path) -> None:
    formats = cases_of_every_cache()
    wanted = decode_in_one_process(formats, folder)
    check_same(run_ranks("grid", {"formats": formats, "folder": str(folder)}, timeout=500), wanted, 2)


@pytest.mark.full
@pytest.mark.parametrize(("name", "size"), [("llada-tiny", 4), *((f"moe/{name}", 2) for name in MOE_NAMES)])
def test_four_processes_and_mixtures_of_experts(folder: Path, name: str, size: int) -> None:
    formats = {name: FORMATS.get(name, [{"cache": "none"}])}
    check_same(run_ranks("grid", {"formats": formats}, size=size), decode_in_one_process(formats, folder), size)


def torchrun(arguments: list[str]) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)]), "OMP_NUM_THREADS": "1"}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, env=environment, start_new_session=True, **streams)
    try:
        out, errors = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, errors


@pytest.mark.full
@pytest.mark.parametrize("failure", ["raise ValueError('planned')", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_torchrun_ends_all_when_one_fails(tmp_path: Path, failure: str) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, signal, time, paradec\n"
        "model = paradec.load(tp_plan='auto')\n"
        "def fail(state, commit):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        print('FAILS AT', time.time(), flush=True)\n"
        f"        {failure}\n"
        "paradec.generate(model, 'Reverse: pear fig apple kiwi', sampler='low_confidence', callback=fail)\n"
        "print('GOES ON')\n"
    )
    code, out, errors = torchrun([str(script)])
    assert code != 0
    assert "GOES ON" not in out
    assert time.time() - float(out.split()[2]) < 60
    assert "ValueError: planned" in errors or "Signal 9" in errors


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
