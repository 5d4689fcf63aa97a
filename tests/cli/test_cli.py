"""The command line, on the packaged model."""

import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import interrupts, refused, run, start
from decoding import refuses
from places import GOLDEN
from tokenized_models import tokenizer_of

import paradec
from paradec.cli import show, work

PROMPT = "Sort: pear fig apple"


@pytest.fixture(autouse=True)
def no_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARADEC_DEBUG", raising=False)


EQUAL = "warning: all answers are equal: temperature 0 takes the likeliest token every time (--temperature 1 draws)\n"
COST = re.compile(r"^\d+ tokens?, .* s(, interrupted.*)?\n", re.MULTILINE)
"""The line on standard error that states the cost."""


def ok(*arguments: object, stdin: str | bytes | None = None, warning: str = "") -> str:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    assert COST.sub("", result.stderr) == warning
    return result.stdout


def report(*arguments: object, stdin: str | bytes | None = None, warning: str = "") -> dict[str, Any]:
    return json.loads(ok("generate", *arguments, "--json", stdin=stdin, warning=warning))


def test_generate_prints_the_answer_and_its_cost() -> None:
    result = run("generate", PROMPT)
    cost = result.stderr.removesuffix("\n")
    expected = paradec.generate(paradec.load(), PROMPT)
    assert result.stdout == f"{expected.text}\n"  # in a pipe only the answer
    forwards = "1 forward" if expected.nfe == 1 else f"{expected.nfe} forwards"
    start = f"{expected.tokens[0]} tokens, {forwards}, {expected.tokens_per_forward:.1f} tokens per forward, "
    assert cost.startswith(start) and cost.endswith(" s")


def test_a_cache_has_its_settings_in_parentheses() -> None:
    flags = ("--max-new-tokens", 8, "--block-length", 8, "--sampler", "low_confidence", "--steps", 8, "--json")
    counts = []
    for cache in ("none", "dkv_decode(refresh_interval=1)", "dkv_decode(refresh_interval=8)"):
        result = run("generate", PROMPT, *flags, "--cache", cache)  # standard error has a warning
        counts.append(json.loads(result.stdout)["forwarded_tokens"])
    assert counts[0] == counts[1] > counts[2]
    assert "did you mean 'refresh_interval'" in refused("generate", PROMPT, "--cache", "dkv_decode(refresh=1)")


OWN = """
from dataclasses import dataclass
from paradec.caches.prefix import PrefixCache
from paradec.samplers.masked.rules.threshold import Threshold

@dataclass(frozen=True)
class Mine(Threshold):
    name = "mine_of_a_file"

@dataclass(frozen=True)
class Kept(PrefixCache):
    name = "kept_of_a_file"

class Wrong(Threshold):
    name = "wrong_of_a_file"
    def select(self, view):
        return view.scoress
"""


def test_samplers_and_caches_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (paradec.samplers.registry, paradec.caches.registry):
        monkeypatch.setattr(registry, "_targets", dict(registry._targets))
    file = tmp_path / "own.py"
    file.write_text(OWN)
    actual = report(PROMPT, "--sampler", f"{file}:Mine(threshold=0.5)", "--cache", f"{file}:Kept", "--block-length", 8)
    assert actual["sampler"]["sampler"] == "mine_of_a_file" and actual["sampler"]["threshold"] == 0.5
    assert actual["cache"] == "kept_of_a_file"
    union = report(PROMPT, "--sampler", f"credit(threshold=0.8)+{file}:Mine")
    assert [rule["sampler"] for rule in union["sampler"]["rules"]] == ["credit", "mine_of_a_file"]
    assert ok("chat", stdin=f"/sampler {file}:Mine\n").startswith("mine_of_a_file(threshold=0.9, ")
    tables = [json.loads(ok("caches", "--sampler", name, "--json")) for name in (f"{file}:Mine", "threshold")]
    actual, expected = ({row["cache"]: row["why"] for row in table} for table in tables)
    assert actual == expected
    for command in ("generate", "chat"):
        error = run(command, *([PROMPT] if command == "generate" else []), "--sampler", f"{file}:Wrong", stdin=PROMPT)
        assert error.exit_code == 2 and error.stderr.count("\n") == 1
        assert re.search(r"own.py:\d+: AttributeError: .*scoress", error.stderr)
    plan = ("eval", "--tasks", "paradec_sort", "--dry-run", "--json")
    planned = json.loads(ok(*plan, "--sampler", f"{file}:Mine(threshold=0.5)", "--cache", f"{file}:Kept"))
    assert planned["sampler"]["threshold"] == 0.5 and planned["recipe"]["request"]["cache"] == "kept_of_a_file"
    unknown_option = refused("generate", PROMPT, "--sampler", f"{file}:Mine", "--threshold", 0.5)
    assert f'--sampler="{file}:Mine(threshold=...)"' in unknown_option
    preset = tmp_path / "own.json"
    preset.write_text('{"sampler": {"sampler": "of_another_file", "tau": 0.7}, "cache": "of_another_file"}')
    assert report(PROMPT, "--preset", preset, "--sampler", "credit", "--cache", "dual")["cache"] == "dual"
    for arguments in (("--sampler", "nonsense"), ("--preset", preset)):
        error = refused("generate", PROMPT, *arguments)
        assert "a custom sampler is given as --sampler FILE.py:CLASS" in error and "register" not in error
    with pytest.raises(ValueError, match="unknown sampler.*a custom sampler is given as an instance"):
        paradec.generate(paradec.load(), PROMPT, sampler=f"{file}:Mine(threshold=0.5)")


def test_json_has_the_fields_of_the_output() -> None:
    data = report(PROMPT, "--sampler", "low_confidence", "--steps", 8, "--max-new-tokens", 8, "--block-length", 8)
    request = {"sampler": "low_confidence", "steps": 8, "max_new_tokens": 8, "block_length": 8}
    expected = paradec.generate(paradec.load(), PROMPT, **request)
    new_tokens = expected.new_tokens[0].tolist()
    assert data.pop("seconds") > 0
    assert data.pop("new_tokens") == (new_tokens[: expected.tokens[0]] if expected.finished[0] else new_tokens)
    for name in ("tokens", "finished", "row_nfe"):
        assert data.pop(name) == getattr(expected, name)[0]
    for name in ("text", "nfe", "row_forwards", "forwarded_tokens", "tokens_per_forward"):
        assert data.pop(name) == getattr(expected, name)
    sampler = paradec.samplers.create("low_confidence").to_dict()
    assert data == {"sampler": sampler, "cache": "none", "interrupted": False}


SPARSE = ("--attention", "sparsed", "--attention-set", "select=0.2", "--attention-set", "block-size=4")


def test_attention_and_its_settings() -> None:
    request = {"sampler": "low_confidence", "max_new_tokens": 8, "block_length": 8}
    flags = ("--sampler", "low_confidence", "--max-new-tokens", 8)
    data = report(PROMPT, *flags, "--block-length", 8, *SPARSE, "--attention-set", "dense-steps=1")
    chosen = paradec.SparseD(select=0.2, block_size=4, dense_steps=1)
    expected = paradec.generate(paradec.load(), PROMPT, attention=chosen, **request)
    assert data["text"] == expected.text and data["nfe"] == expected.nfe
    assert data["attention"] == dataclasses.asdict(expected.attention)
    assert data["attention"]["sparse_calls"][0] > 0 and data["attention"]["density"][0] < 1
    assert "attention" not in report(PROMPT, *flags, "--attention", "dense")
    filled = json.loads(ok("infill", "Sort : <mask> fig", "--json", *SPARSE))
    assert filled["attention"]["pattern_calls"] is not None


def test_suffix_windows(tmp_path: Path) -> None:
    flags = ("--sampler", "low_confidence", "--block-length", 8, "--max-new-tokens", 40)
    data = report(PROMPT, *flags, "--suffix", "uniform:16:4", "--seed", 0)
    request: dict[str, Any] = {"sampler": "low_confidence", "block_length": 8, "suffix": "uniform:16:4", "seed": 0}
    expected = paradec.generate(paradec.load(), PROMPT, max_new_tokens=40, **request)
    assert data["text"] == expected.text and data["forwarded_tokens"] == expected.forwarded_tokens
    assert data["forwarded_tokens"] < report(PROMPT, *flags)["forwarded_tokens"]
    compare = ("compare", "--samplers", "low_confidence", "--tasks", "copy", "--limit", 1, *flags[2:], "--json")
    attention = json.loads(ok(*compare, *SPARSE, "--out", tmp_path / "attention"))
    suffix = json.loads(ok(*compare, "--suffix", "8", "--out", tmp_path / "suffix"))
    assert suffix["setup"]["suffix"] == {"window": 8} and "suffix" not in attention["setup"]
    assert attention["setup"]["attention"] == paradec.SparseD(select=0.2, block_size=4).to_dict()
    for full, cut in zip(attention["results"], suffix["results"], strict=True):
        assert cut["forwarded_tokens"] < full["forwarded_tokens"]
    for name in ("attention", "suffix"):
        assert name in refused(*compare, "--out", tmp_path / name, "--resume")


def test_several_answers_and_several_prompts() -> None:
    prompts = [PROMPT, "Reverse: pear fig apple kiwi"]
    data = report("-", "--lines", "-n", 2, stdin="\n\n".join(prompts) + "\n", warning=EQUAL)
    assert data["text"] == ["apple fig pear"] * 2 + ["kiwi apple fig pear"] * 2
    assert data["tokens"] == [len(ids) for ids in data["new_tokens"]] == [4, 4, 5, 5]
    lines = ok("generate", PROMPT, "-n", 2, warning=EQUAL).splitlines()
    assert lines == ["[1] apple fig pear", "[2] apple fig pear"]


@pytest.mark.thinned
@pytest.mark.parametrize("command", [("generate", "Shuffle: pear fig apple"), ("infill", "fox <mask:2> cow <mask>")])
def test_batches_are_one_request(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("-n", 7, "--temperature", 1, "--top-p", 0.95, "--top-k", 20, "--seed", 3, "--json")
    full = json.loads(ok(*command, *flags))
    assert len(set(full["text"])) > 1
    monkeypatch.setattr(work, "MAX_ROWS", 3)
    parts = json.loads(ok(*command, *flags))
    assert parts.pop("seconds") > 0 and full.pop("seconds") > 0
    assert parts.pop("nfe") >= full.pop("nfe")  # summed over batches
    assert parts == full
    lines = ok(*command, *flags[:-1]).splitlines()
    assert sorted(lines) == [f"[{number}] {text}" for number, text in enumerate(full["text"], 1)]
    message = refused(*command, *flags[:-1], "--trace", "steps.json")
    assert "--trace records one batch, which is 3 answers here, not 7" in message


def test_stop_strings() -> None:
    data = report(PROMPT, "--stop", "pear", "--stop", "fig")
    assert (data["text"], data["tokens"], data["finished"]) == ("apple fig", 2, True)


def test_infill() -> None:
    text, question = "kiwi <mask:2> pear", "Reverse: pear fig apple kiwi"
    result = run("infill", text, "--prompt", question)
    answer, cost = result.stdout.removesuffix("\n"), result.stderr
    assert answer == "kiwi apple fig pear"
    assert cost.startswith("2 tokens, ")
    data = json.loads(ok("infill", "-", "--prompt", question, "--json", "--sampler", "low_confidence", stdin=text))
    assert data["fills"] == ["apple fig"] and data["nfe"] == 2 and "new_tokens" not in data
    assert data["text"] == answer
    assert ok("infill", "fox ___ cow", "--mask", "___", "--max-new-tokens", 1).startswith("fox ")
    # without a question the words are arbitrary, but all holes are filled
    assert len(ok("infill", "kiwi <mask:2> pear").splitlines()[0].split()) == 4
    assert ok("infill", "kiwi <mask:2> pear", "--no-holes-eos-inf").startswith("kiwi pear\n")
    assert refused("infill", "fox cow").startswith("error: the prompt of row 0 has nothing to fill")


def test_version_and_help() -> None:
    assert ok("--version") == f"paradec {paradec.__version__}\n"
    assert "generate" in ok() and ok() == ok("--help") and "--sampler" in ok("generate", "-h")


HUGE = str(10**30)
GENERATE = [
    *(("--steps", "many"), ("--steps", HUGE), ("--block-length", "0"), ("--top-k", "0"), ("-n", "0"), ("--seed", "-1")),
    *(("--temperature", "nan"), ("--top-p", "1.5"), ("--guidance-scale", "inf"), ("--max-new-tokens", HUGE)),
    *((name, "") for name in ("--cache", "--sampler", "--attention", "--blocks", "--stop")),
    *(("--sampler", "threshold("), ("--set", "=1"), ("--set", "threshold=-1"), ("--set", "threshold=" + 9999 * "[")),
    *(("--suffix", value) for value in ("x", "64:3", "gaussian:0", HUGE)),
    *(("--trace", value) for value in ("FOLDER", "FILE/steps.json", "caf\udce9.json")),
    ("--no-such-option", "1"),
]
IMAGES = [
    *((name, "0") for name in ("--steps", "-n", "--height", "--width", "--columns", "--enlarge", "--interval")),
    *((name, "nan") for name in ("--temperature", "--guidance-scale", "--top-p")),
    *(("--class", value) for value in ("", "a", "5-3", "0-" + HUGE)),
    *(("--top-k", "-1"), ("--seed", "-1"), ("--cache", "dual"), ("--out", "FOLDER"), ("--out", "sheet.txt")),
    *(("--model", "FOLDER"), ("--model", "FILE"), ("--trace", "FILE/trace.png"), ("--prompt", "caf\udce9")),
    *(("--sampler", ""), ("--steps", "4")),
]
COMPARE = [
    *((name, "0") for name in ("--limit", "--batch", "--max-new-tokens", "--block-length")),
    *((name, "no-such") for name in ("--tasks", "--samplers", "--cache", "--suffix", "--prompts", "--format")),
    *(("--samplers", value) for value in ("treshold", "taylorseer", "nowhere.py:Own")),
    *(("--out", "no/such/results.json"), ("--plot", "no/such/frontier.png"), ("--cache", "dual(look=1)")),
    *(("--seed", "-1"), ("--prompts", "FOLDER"), ("--prompts", "FILE"), ("--out", "FOLDER"), ("--plot", "curve.txt")),
]
TRAIN = [
    *((f"--{name}", "0") for name in ("per-task", "batch", "epochs", "max-new-tokens", "lr", "block-length")),
    *((name, "no-such") for name in ("--kind", "--cache", "--prompts")),
    *(("--threshold", "2"), ("--false-accept-weight", "0"), ("--seed", "-1")),
    *(("--prompts", "FILE"), ("--records", "FILE"), ("--out", "FOLDER")),
]


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("command", "option"),
    [
        *((("generate", PROMPT), option) for option in GENERATE),
        *((("infill", "fox <mask>"), option) for option in [*GENERATE[:3], ("--mask", ""), ("--mask", " ")]),
        *((("image", "--out", "sheet.png"), option) for option in IMAGES),
        *((("compare",), option) for option in COMPARE),
        *((("learn2pd", "train", "--out", "filter.safetensors"), option) for option in TRAIN),
    ],
    ids=lambda entry: " ".join(entry)[:40].encode("ascii", "replace").decode(),
)
def test_wrong_options_are_refused_before_a_model_is_loaded(
    command: tuple[str, ...], option: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "FILE").write_bytes(b"\xff\x00")
    monkeypatch.chdir(tmp_path)
    loads = []
    monkeypatch.setattr(paradec, "load", lambda *_, **__: loads.append(1))
    if option[0] in command:
        command = tuple(entry for entry in command if entry not in ("--out", "sheet.png", "filter.safetensors"))
    if command[0] == "image" and option[0] not in ("--class", "--prompt"):
        command = (*command, "--class", "3")
    refused(*command, *option)
    assert not loads or option == ("--model", "FILE")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["FILE", "FOLDER"]


def test_the_end_of_the_last_line_is_not_part_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[Any] = []
    monkeypatch.setattr(sys.modules["paradec.cli.generate"], "decode", lambda name, prompt, **_: prompts.append(prompt))
    for stdin in ("fox\ncow", "fox\r\ncow\r\n", b"\xef\xbb\xbffox\ncow\n"):
        assert run("generate", "-", stdin=stdin).exit_code == run("infill", "-", stdin=stdin).exit_code == 0
    assert prompts == ["fox\ncow"] * 6
    run("generate", "fox\n")
    assert prompts[-1] == "fox\n"  # an argument is unchanged


def test_invalid_text_gives_one_line() -> None:
    for data, message in (
        (b"Sort: \xe4pfel\n", "standard input is not UTF-8 text: invalid continuation byte at byte 6"),
        (b"\x7fELF\x02\x01\x01\x00", "standard input is not text: it has a zero byte at position 7"),
    ):
        result = run("generate", "-", stdin=data)
        assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {message}\n")
    odd = "caf\udce9"  # how Python decodes bytes that are not UTF-8
    for arguments in (["generate", odd], ["generate", PROMPT, "--stop", odd], ["infill", "<mask>", "--mask", odd]):
        assert "is not UTF-8 text" in refused(*arguments)


def test_debugging_shows_the_traceback_and_keeps_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run("generate", PROMPT, "--sampler", "no-such")
    monkeypatch.setenv("PARADEC_DEBUG", "1")
    result = run("generate", PROMPT, "--sampler", "no-such")
    assert result.exit_code == plain.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr and "Traceback" not in plain.stderr
    assert result.stderr.endswith(plain.stderr)


def test_an_interrupt_prints_the_decoded_part(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count(1)

    def update(*_: object) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(show.Bar, "update", update)
    result = run("generate", PROMPT, "--sampler", "low_confidence", "--max-new-tokens", 8, "--json")
    assert result.exit_code == 130
    data = json.loads(result.stdout)
    assert data["interrupted"] and data["nfe"] == 2


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
@pytest.mark.parametrize(
    ("as_module", "debug", "imported"),
    [(False, "0", "torch.nn"), pytest.param(True, "1", "transformers.utils.import_utils", marks=pytest.mark.further)],
)
def test_an_interrupt_during_the_start(as_module: bool, debug: str, imported: str, tmp_path: Path) -> None:
    """Interrupt the import of torch (before the command runs), or the loading of the model."""
    script = tmp_path / "paradec"
    script.write_text("import sys\nfrom paradec.cli import app\nsys.exit(app())\n")
    begin = ["-m", "paradec"] if as_module else [str(script)]
    command = [sys.executable, "-X", "importtime", *begin, "generate", PROMPT]
    process = start(args=command, env={"PARADEC_DEBUG": debug})
    for line in process.stderr:  # one line for every imported module
        if imported in line:
            process.send_signal(signal.SIGINT)
            break
    stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (130, "")
    assert "Traceback" not in stderr and ("File " in stderr) == (debug == "1")


def test_an_interrupt_while_many_answers_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are printed as soon as they are ready, so those before the interrupt are printed."""
    echo = typer.echo

    def print_and_interrupt(message: str, **options: Any) -> None:
        echo(message, **options)
        if message.startswith("[1] "):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(typer, "echo", print_and_interrupt)
    with interrupts():
        flags = ("-n", 40, "--batch", 4, "--temperature", 1, "--max-new-tokens", 4)
        result = run("generate", "Shuffle: pear fig apple", *flags)
    lines = result.stdout.splitlines()
    assert result.exit_code == 130
    assert sorted(int(line[1 : line.index("]")]) for line in lines) == list(range(1, len(lines) + 1))
    assert result.stderr.endswith(f", interrupted after {len(lines)} of 40 answers\n")


def test_an_error_of_the_library_names_the_option() -> None:
    assert refused("generate", "Sort: fig", "--max-new-tokens", "-1").startswith("error: --max-new-tokens=-1 must be")
    assert refused("generate", "Sort: fig", "--set", "threshold=7").startswith("error: threshold=7 must be")


def test_a_closed_pipe_is_no_error() -> None:
    process = start("tasks")
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 1


def test_module_runs_as_a_command() -> None:
    process = start(args=[sys.executable, "-m", "paradec", "generate"], stdin=subprocess.DEVNULL)
    stdout, stderr = process.communicate()
    assert (process.returncode, stdout, stderr.count("\n")) == (2, "", 1)


def test_a_preset_is_a_request_that_python_saved(tmp_path: Path) -> None:
    """Values of the preset replace the defaults of options; options on the command line override both."""
    path = tmp_path / "mine.json"
    sampler = paradec.samplers.create("threshold", threshold=0.5)
    request = paradec.Request(sampler=sampler, cache="dual", max_new_tokens=8, temperature=1.0, seed=3, top_k=9)
    request.save(path)
    model = paradec.load()
    changed = {"seed": 4, "temperature": 0.5, "max_new_tokens": 2}
    flags = ["--seed", "4", "--temperature", "0.5", "--max-new-tokens", "2"]
    for options, changes in (([], {}), (flags, changed)):
        actual = report(PROMPT, "--preset", path, *options)
        assert len(actual["new_tokens"]) <= changes.get("max_new_tokens", 8)
        expected = paradec.generate(model, PROMPT, preset=path, **changes)
        assert actual["text"] == expected.text and actual["cache"] == "dual"
        assert actual["new_tokens"] == expected.new_tokens[0, : expected.tokens[0]].tolist()
    assert "give --sampler" in refused("generate", PROMPT, "--preset", path, "--set", "threshold=0.9")
    path.write_text('{"temprature": 1}')
    assert "did you mean 'temperature'" in refused("infill", "a <mask>", "--preset", path)


def test_canvases_are_decoded_by_their_own_sampler(tmp_path: Path) -> None:
    from small_models import tiny_gemma
    from tokenized_models import byte_level_tokenizer

    tokenizer = byte_level_tokenizer()
    tiny_gemma(vocab=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    arguments = ["one two", "--model", str(tmp_path), "--seed", "1", "--max-new-tokens", "20", "--json"]
    chosen = json.loads(run("generate", *arguments).stdout)
    assert chosen["sampler"]["sampler"] == "diffusion_gemma" and chosen["cache"] == "canvas"
    assert chosen["nfe"] > chosen["encoder_calls"] == 2
    for name in ("entropy_threshold", "threshold"):  # two rules of diffusion_gemma
        actual = json.loads(run("generate", *arguments, "--sampler", name).stdout)
        assert actual["sampler"]["rule"]["sampler"] == name
    assert "t_max and t_min are settings of the sampler" in refused("generate", *arguments, "--temperature", "0.5")


def test_log_probabilities_are_printed_and_in_json() -> None:
    actual = json.loads(run("generate", PROMPT, "--logprobs", "2", "--json").stdout)
    model = paradec.load()
    out = paradec.generate(model, PROMPT, logprobs=2)
    entries = actual["logprobs"]
    assert [entry["token"] for entry in entries] == [model.tokenizer.decode([token]) for token in actual["new_tokens"]]
    expected = out.logprobs.chosen[0, -len(out.new_tokens[0]) :][: len(entries)].tolist()
    assert [entry["logprob"] for entry in entries] == pytest.approx(expected, abs=1e-4)
    assert all(len(entry["likely"]) == 2 and entry["likely"][0][0] == entry["token"] for entry in entries)
    lines = run("generate", PROMPT, "--logprobs", "0").stdout.splitlines()
    assert lines[0] == actual["text"] and len(lines) == 1 + len(entries) and "'apple'" in lines[1]


def test_decide_answers_questions_as_the_function_does() -> None:
    fruit = ("apple", "fig", "pear")
    expected = paradec.decide(paradec.load(), PROMPT, {"span": paradec.Span(texts=fruit)})["span"]
    actual = json.loads(run("decide", PROMPT, "--span", "=apple|fig|pear", "--json").stdout)["answers"]["span"]
    assert actual["value"] == expected.value and dict(actual["probabilities"]) == dict(expected.probabilities)
    lines = run("decide", PROMPT, "--span", "=apple|fig|pear").stdout.splitlines()
    assert lines[1].split("\t")[:2] == ["span", expected.value]
    twice = ["--span", "=apple|fig", "--span", "=pear|fig"]
    wrong = [([], "--yes-no"), (["--pick", "x"], "--pick"), (["--span", "=a|a"], "different")]
    for arguments, message in [*wrong, (twice, "is called 'span'")]:
        failed = run("decide", PROMPT, *arguments)
        assert failed.exit_code == 2 and message in failed.stderr


@pytest.mark.parametrize("command", "generate infill chat image design serve compare tune eval".split())
def test_help_has_the_model_first_and_an_example(command: str) -> None:
    text = run(command, "--help").stdout
    assert not re.search(r"<(str|int|float|bool|list|file|path)", text) and f"Example: paradec {command}" in text
    if command != "design":
        options = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
        assert options[0] == "--model"


def test_a_tokenizer_for_a_checkpoint_without_one(tmp_path: Path) -> None:
    checkpoint = GOLDEN / "llada-tiny"
    words = json.loads((checkpoint / "tokenizer_table.json").read_text())["table"]
    tokenizer = tokenizer_of(words)
    tokenizer.save_pretrained(tmp_path / "words")
    expected = paradec.generate(paradec.load(checkpoint), [5], max_new_tokens=8)
    for value in (tokenizer, tmp_path / "words", str(tmp_path / "words")):
        model = paradec.load(checkpoint, tokenizer=value)
        output = paradec.generate(model, words[5], max_new_tokens=8)
        assert output.new_tokens.tolist() == expected.new_tokens.tolist() and output.text
    options = ("--model", checkpoint, "--tokenizer", tmp_path / "words")
    data = report(words[5], *options, "--max-new-tokens", 8)
    assert data["new_tokens"] == expected.new_tokens[0, : expected.tokens[0]].tolist()
    assert "has no chat template" in refused("chat", *options)
    assert "has no tokenizer; give --tokenizer" in refused("chat", "--model", checkpoint)
    assert "or --tokenizer=..." in refused("generate", words[5], "--model", checkpoint)
    with pytest.raises(ValueError, match=r"has no tokenizer; give input ids, or load\(..., tokenizer=...\)"):
        paradec.generate(paradec.load(checkpoint), words[5])
    for wrong, message in ((3, "tokenizer=3 must be"), (str(tmp_path), "no tokenizer.json"), ("", "tokenizer='' must")):
        refuses(partial(paradec.load, checkpoint, tokenizer=wrong), message)
    refuses(lambda: paradec.load("digits-ar", tokenizer=tokenizer), "is not for image models")


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("generate --gen-length 8", "it is called --max-new-tokens here"),
        ("chat --alg entropy", "it is called --sampler here"),
        ("infill --remasking random", "it is called --sampler here"),
        ("generate --threshold 0.9", '--sampler="threshold(threshold=...)"'),
        ("compare --threshold 0.9", '--samplers="threshold(threshold=...)"'),
        ("generate --sampler entropy --threshold 0.9", "settings of sampler 'entropy': alg_temp, eps; 'threshold' is"),
        ("generate --mask-id 3", "the mask id is the checkpoint's"),
        ("serve --load-in-8bit", "write --quantization=int8"),
        ("generate --use-cache", "write --cache=prefix"),
        ("generate --output-history", "write --trace=FILE;"),
        ("image --sampler teacache --threshold 0.3", "write --set threshold=VALUE"),
        ("design weights.pt chain.pdb --window 1", '--sampler="jacobi(window=...)"'),
        ("generate --temprature 1", "(Possible options: --temperature"),
    ],
)
def test_options_of_other_tools_get_a_hint(command: str, hint: str) -> None:
    assert hint in refused(*command.split())
