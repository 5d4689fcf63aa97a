"""`paradec generate --in FILE --out FILE`: one line for every prompt, even if others fail."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ok, refused, run

import paradec
from paradec.cli import files, show, work
from paradec.core.version import DRAWS

CHAT = [{"role": "user", "content": "Reverse: pear fig apple"}]
GOOD = ["Sort: pear fig apple", CHAT, "Copy: fig fox cow", "Shuffle: lion mole cow", "Sort: pear fig apple"]


@pytest.fixture(autouse=True, scope="module")
def loaded() -> Iterator[None]:
    model = paradec.load()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paradec, "load", lambda *_, **__: model)
        yield


def write_prompts(folder: Path, entries: list[Any], name: str = "prompts.jsonl") -> Path:
    file = folder / name
    file.write_text("\n".join(entry if isinstance(entry, bytes) else json.dumps(entry) for entry in entries) + "\n")
    return file


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Read the entries of a file of answers without their settings, which must be equal in every line."""
    result = [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]]
    settings = [entry.pop("settings") for entry in result]
    assert settings == settings[:1] * len(result)
    return result


def as_prompts(*texts: Any) -> list[Any]:
    return [{"messages": text} if isinstance(text, list) else {"prompt": text} for text in texts]


@pytest.mark.thinned
@pytest.mark.parametrize("batch", [1, 2, 100])
def test_answers_are_in_the_order_of_the_prompts(batch: int, tmp_path: Path) -> None:
    source, out = write_prompts(tmp_path, as_prompts(*GOOD)), tmp_path / "answers.jsonl"
    printed = ok("generate", "--in", source, "--out", out, "--batch", batch, "--seed", 0, "--temperature", 1)
    answers = read_lines(out)
    model = paradec.load()
    chats = [text if isinstance(text, list) else [{"role": "user", "content": text}] for text in GOOD]
    expected = paradec.generate(model, chats, seed=0, temperature=1.0)
    assert [entry["text"] for entry in answers] == expected.text
    assert [entry["nfe"] for entry in answers] == expected.row_nfe
    assert [entry["tokens"] for entry in answers] == expected.tokens
    assert [entry["prompt"] for entry in answers] == GOOD and [entry["line"] for entry in answers] == [1, 2, 3, 4, 5]
    summary, cost = printed.splitlines()
    assert summary == f"5 answers in {out}"
    firsts = range(0, 5, batch)
    forwards = sum(max(expected.row_nfe[first : first + batch]) for first in firsts)
    calls = f"{forwards} forwards ({sum(expected.row_nfe)} row calls), "
    assert cost.startswith(f"{sum(expected.tokens)} tokens, {calls}")


def test_a_failing_prompt_has_an_error_and_the_others_answers(tmp_path: Path) -> None:
    entries = [
        {"prompt": GOOD[0], "id": "a"}, {"prompt": "Hello"}, {"prompt": 3, "id": 7}, {"prompt": ""}, [1, 2],
        "Copy: fig fox cow", {"messages": [{"role": "user"}]}, {"prompt": "Copy: " + "fig " * 600},
    ]  # fmt: skip
    source, out = write_prompts(tmp_path, entries), tmp_path / "answers.jsonl"
    with source.open("a") as file:
        file.write("\n{no json\n")
    result = run("generate", "--in", source, "--out", out)
    assert result.exit_code == 1 and "2 answers in" in result.stdout and "7 failed" in result.stdout
    actual = read_lines(out)
    assert [entry["line"] for entry in actual] == [1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert actual[0]["id"] == "a" and actual[2]["id"] == 7 and "id" not in actual[1]
    assert [entry.get("text") for entry in actual] == ["apple fig pear", *[None] * 4, "fig fox cow", *[None] * 3]
    errors = [entry.get("error", "") for entry in actual]
    assert "outside the model's vocabulary: 'Hello'" in errors[1] and "must be a text" in errors[2]
    assert "empty" in errors[3] and "neither a text nor an object" in errors[4] and "role" in errors[6]
    assert "512" in errors[7] and "no JSON" in errors[8]
    data = json.loads(run("generate", "--in", source, "--out", tmp_path / "b.jsonl", "--json").stdout)
    assert (data["prompts"], data["answered"], data["failed"], data["tokens"]) == (9, 2, 7, 8)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_killed_job_resumes_to_the_same_lines(every: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the output at a byte, resume, and compare with an uninterrupted job. every: at all bytes, else at some."""
    entries = [{"prompt": "Shuffle: pear fig apple", "id": "é\u2028\x85🦊"}, "H\u2028llo", {"messages": CHAT, "id": 7}]
    source, full, out = write_prompts(tmp_path, entries), tmp_path / "complete.jsonl", tmp_path / "answers.jsonl"
    flags = ("--temperature", 1, "--batch", 2, "--max-new-tokens", 6, "--seed", 3)
    assert run("generate", "--in", source, "--out", full, *flags).exit_code == 1
    data = full.read_bytes()
    assert "é\u2028\x85🦊".encode() in data and [entry["line"] for entry in read_lines(full)] == [1, 2, 3]
    write, seen = files.write_lines, []
    # record the file that the resumed job has written before it sorts the lines
    monkeypatch.setattr(files, "write_lines", lambda *arguments: (seen.append(out.read_bytes()), write(*arguments)))
    inside = [index for index, byte in enumerate(data) if byte & 0xC0 == 0x80]
    ends = [index + offset for index, byte in enumerate(data) if byte == 10 for offset in (0, 1)]
    for cut in range(len(data) + 1) if every else sorted({0, 1, 9, len(data) // 2, *inside, *ends}):
        out.write_bytes(data[:cut])
        result = run("generate", "--in", source, "--out", out, "--resume", *flags)
        assert result.exit_code == 1 and out.read_bytes() == data, cut
        assert sorted((seen or [data])[-1].split(b"\n")) == sorted(data.split(b"\n")), cut
    parts = data.splitlines(keepends=True)
    for first, second in ((2, 0), (1, 2), (2, 1)):  # two lines in another order, the second cut short
        out.write_bytes(parts[first] + parts[second][:-20])
        assert run("generate", "--in", source, "--out", out, "--resume", *flags).exit_code == 1
        assert out.read_bytes() == data
    sampling = ("--temperature", 1, "--batch", 1)  # without --seed, a resumed job has the first job's seed
    full.unlink()
    assert run("generate", "--in", source, "--out", full, *sampling).exit_code == 1
    out.write_bytes(full.read_bytes()[: len(data) // 2])
    assert run("generate", "--in", source, "--out", out, "--resume", *sampling).exit_code == 1
    assert out.read_bytes() == full.read_bytes()


OTHER_SETTINGS: list[tuple[tuple[Any, ...], list[str]]] = [
    (("--temperature", 0.5), ["temperature is 1.0 in the file and 0.5 here"]),
    (("--temperature", 1, "--model", "./nowhere/"), ["model is 'packaged' in the file and 'nowhere' here"]),
    (("--temperature", 1, "--dtype", "float64"), ["dtype is not set in the file and 'float64' here"]),
    (("--sampler", "credit"), ["temperature is 1.0 in the file and not set here", "sampler is not set in the file"]),
]


def test_jobs_with_other_settings_cannot_resume(tmp_path: Path) -> None:
    source, out = write_prompts(tmp_path, as_prompts(*GOOD[:2], "Hello")), tmp_path / "answers.jsonl"
    assert run("generate", "--in", source, "--out", out, "--temperature", 1, "--seed", 3).exit_code == 1
    settings = json.loads(out.read_bytes().split(b"\n")[2])["settings"]  # a failed prompt has settings too
    request = {"temperature": 1.0, "seed": 3, "draws": DRAWS}
    assert settings == {"paradec": paradec.__version__, "model": "packaged", "request": request}
    out.write_bytes(out.read_bytes()[:-30])
    before = out.read_bytes()
    for flags, parts in OTHER_SETTINGS:
        message = refused("generate", "--in", source, "--out", out, "--resume", *flags)
        assert "was made with other settings (line 1)" in message and all(part in message for part in parts), flags
        assert out.read_bytes() == before
    draws = f', "draws": {DRAWS}'.encode()
    assert draws in before
    out.write_bytes(before.replace(draws, b""))
    message = refused("generate", "--in", source, "--out", out, "--resume", "--temperature", 1)
    assert f"draws is not set in the file and {DRAWS} here" in message


def test_resuming_compares_sampler_settings_and_versions(tmp_path: Path) -> None:
    source, out = write_prompts(tmp_path, as_prompts(GOOD[0])), tmp_path / "answers.jsonl"
    flags = ("generate", "--in", source, "--out", out)
    ok(*flags, "--sampler", "credit", "--set", "threshold=0.8", "--cache", "dual")
    repeated = ("--resume", "--sampler", "credit", "--cache", "dual")
    assert "sampler.threshold is 0.8 in the file and 0.9 here. Give" in refused(*flags, *repeated)
    assert " cache is {'cache': 'dual', " in refused(*flags, "--resume", "--sampler", "credit")
    text = out.read_text()
    saved = json.loads(text)["settings"]["request"]
    (tmp_path / "preset.json").write_text(json.dumps(saved))  # the request of a line is a valid preset
    ok(*flags, "--resume", "--preset", tmp_path / "preset.json")
    out.write_text(text.replace(f'"paradec": "{paradec.__version__}"', '"paradec": "0.0.1"'))
    result = run(*flags, *repeated, "--set", "threshold=0.8")
    assert result.exit_code == 0 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("warning: ") and "has answers of paradec '0.0.1'" in result.stderr
    out.write_text(json.dumps(json.loads(text) | {"settings": {"request": 3}}) + "\n")
    assert "has no settings for line 1" in refused(*flags, *repeated)


def test_files_without_answers_are_not_overwritten(tmp_path: Path) -> None:
    source, out = write_prompts(tmp_path, as_prompts(GOOD[0])), tmp_path / "answers.jsonl"
    for text in (b"my notes", b'{"line": 1, \n', b'{"line": ' + b"[" * 5000 + b"\n"):
        out.write_bytes(text)
        assert "holds no answers at line 1" in refused("generate", "--in", source, "--out", out, "--resume")
        assert out.read_bytes() == text
    out.write_bytes(b'{"line": ' + b"[" * 5000)
    ok("generate", "--in", source, "--out", out, "--resume")
    assert [entry["text"] for entry in read_lines(out)] == ["apple fig pear"]
    out.write_bytes(b"\xef\xbb\xbf" + out.read_bytes().replace(b"\n", b"\r\n"))  # as some editors save it
    ok("generate", "--in", source, "--out", out, "--resume")
    assert [entry["text"] for entry in read_lines(out)] == ["apple fig pear"]


def test_invalid_lines_fail_alone(tmp_path: Path) -> None:
    entries = [{"prompt": "Sort: \ud800", "id": "\udfff"}, GOOD[0], b"[" * 100_000]
    source, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    source.write_text("\n".join(each.decode() if isinstance(each, bytes) else json.dumps(each) for each in entries))
    for resume in ((), ("--resume",)):
        assert run("generate", "--in", source, "--out", out, *resume).exit_code == 1
        actual = read_lines(out)
        assert "is not UTF-8 text" in actual[0]["error"] and "more than 100 deep" in actual[2]["error"]
        assert (actual[0]["prompt"], actual[0]["id"], actual[1]["text"]) == ("Sort: \ud800", "\udfff", "apple fig pear")


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    source, out = write_prompts(tmp_path, as_prompts(*GOOD)), tmp_path / "answers.jsonl"
    missing = refused("generate", "--in", tmp_path / "missing.jsonl", "--out", out)
    assert "'--in'" in missing and "does not exist" in missing
    assert "is a directory" in refused("generate", "--in", tmp_path, "--out", out)
    out.write_text(json.dumps({"line": 2, "prompt": "another", "text": ""}) + "\n")
    assert "is not empty" in refused("generate", "--in", source, "--out", out)
    assert "answers another prompt" in refused("generate", "--in", source, "--out", out, "--resume")
    assert "are one file" in refused("generate", "--in", source, "--out", source, "--resume")
    fresh = tmp_path / "fresh.jsonl"
    for arguments, message in (
        (("--in", source), "needs --out"),
        (("--out", fresh), "--out needs --in"),
        (("--resume",), "--resume needs --in"),
        (("--in", source, "--out", fresh, "--live"), "leave out --live"),
        (("--in", source, "--out", fresh, "Sort: fig"), "leave out a prompt"),
        (("--in", source, "--out", fresh, "--sampler", "wino", "--cache", "dkv_pd"), "dkv_pd"),
        (("--in", write_prompts(tmp_path, [], "none.jsonl"), "--out", fresh), "has no prompts"),
        (
            ("--in", write_prompts(tmp_path, ["text,label"], "t.csv"), "--out", fresh),
            'a "prompt" per line; with pandas',
        ),
    ):
        assert message in refused("generate", *arguments), arguments
        assert not fresh.exists()


def test_text_files_and_more_answers_than_fit_into_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "MAX_ROWS", 2)
    source, out = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    source.write_text("Shuffle: pear fig apple\r\n\nCopy: fig fox cow\n")
    ok("generate", "--in", source, "--out", out, "-n", 3, "--temperature", 1, "--seed", 5)
    texts = ["Shuffle: pear fig apple", "Copy: fig fox cow"]
    expected = paradec.generate(paradec.load(), texts, num_return_sequences=3, temperature=1.0, seed=5)
    actual = read_lines(out)
    assert [entry["line"] for entry in actual] == [1, 3]
    assert [text for entry in actual for text in entry["text"]] == expected.text
    assert [nfe for entry in actual for nfe in entry["nfe"]] == expected.row_nfe


UNEVEN = ["Reverse: pear fig apple kiwi plum", "Copy: fig", "Sort: pear fig apple", "Copy: fig cow"]
STEPWISE = ("--sampler", "low_confidence", "--max-new-tokens", 12, "--block-length", 4)


@pytest.mark.thinned
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("cause", ["interrupt", "no memory", "an error"])
def test_interrupted_batches_write_every_answer_once(copies: int, cause: str, tmp_path: Path, monkeypatch: Any) -> None:
    source, out = write_prompts(tmp_path, as_prompts(*UNEVEN)), tmp_path / "answers.jsonl"
    flags = ("--in", source, "--out", out, "-n", copies, "--batch", 4 * copies, "--seed", 0, *STEPWISE)
    raised = {"interrupt": KeyboardInterrupt, "no memory": torch.OutOfMemoryError, "an error": FloatingPointError("x")}
    update, steps = show.Bar.update, []

    def watch(bar: Any, state: Any, commit: Any) -> None:
        update(bar, state, commit)
        steps.append(state.running.sum())
        if steps[-1] in (copies, 2 * copies) and not raised.get("done"):
            raised["done"] = True
            raise raised[cause]

    monkeypatch.setattr(show.Bar, "update", watch)
    result = run("generate", *flags)
    if cause == "interrupt":
        answers = [entry["line"] for entry in read_lines(out)]
        assert result.exit_code == 130 and 0 < len(answers) < 4 and answers == sorted(answers)
        assert f"interrupted at {len(answers)} of 4: --resume continues" in result.output
        result = run("generate", *flags, "--resume")
    assert result.exit_code == 0, result.output
    model = paradec.load()
    request = {"sampler": "low_confidence", "max_new_tokens": 12, "block_length": 4, "num_return_sequences": copies}
    expected = paradec.generate(model, UNEVEN, **request)
    answers = read_lines(out)
    texts = [entry["text"] if copies > 1 else [entry["text"]] for entry in answers]
    assert [entry["line"] for entry in answers] == [1, 2, 3, 4] and sum(texts, []) == expected.text


def test_lines_may_have_a_constraint(tmp_path: Path) -> None:
    first, second = {"choice": ["fig owl", "owl fig"]}, {"regex": "fox [a-z]+"}
    entries = [
        {"prompt": "Copy: kiwi fig"},
        {"prompt": "Sort: owl fig", "constraint": first},
        {"prompt": "Sort: fig owl", "constraint": first},
        {"prompt": "Copy: fox cow", "id": "a", "constraint": second},
        {"prompt": "Copy: fox cow", "constraint": {"regex": "(?=a)b"}},
        {"prompt": "Copy: fox cow", "constraint": {"regex": "(fox ){9}fox"}},
    ]
    source, out = write_prompts(tmp_path, entries), tmp_path / "answers.jsonl"
    command = ("generate", "--in", source, "--out", out, "--max-new-tokens", 6, "--regex", "kiwi.*")
    assert run(*command).exit_code == 1
    actual = read_lines(out)
    assert actual[0]["text"].startswith("kiwi") and "constraint" not in actual[0]
    model, together = paradec.load(), [entry["prompt"] for entry in entries[1:3]]
    expected = paradec.generate(model, together, constraint=first, max_new_tokens=6)
    assert [entry["text"] for entry in actual[1:3]] == expected.text and {*expected.text} <= {*first["choice"]}
    assert [entry["constraint"] for entry in actual[1:4]] == [first, first, second]
    assert actual[3]["text"].startswith("fox ") and actual[3]["id"] == "a"
    assert "lookahead" in actual[4]["error"] and "max_new_tokens=6" in actual[5]["error"]
    entries[3]["constraint"] = first
    write_prompts(tmp_path, entries)
    assert "answers another prompt than line 4" in refused(*command, "--resume")


def test_logprobs_of_files_equal_those_of_single_answers(tmp_path: Path) -> None:
    source, out = write_prompts(tmp_path, as_prompts(GOOD[0], GOOD[2])), tmp_path / "answers.jsonl"
    ok("generate", "--in", source, "--out", out, "--logprobs", 2, "--batch", 1)
    for entry in read_lines(out):
        expected = json.loads(ok("generate", entry["prompt"], "--logprobs", 2, "--json"))["logprobs"]
        assert entry["logprobs"] == expected and len(expected[0]["likely"]) == 2
    several = tmp_path / "several.jsonl"
    ok("generate", "--in", source, "--out", several, "--logprobs", 0, "-n", 2, "--temperature", 1)
    assert [len(entry["logprobs"]) for entry in read_lines(several)] == [2, 2]


def test_a_line_without_a_prompt_says_what_it_has(tmp_path: Path) -> None:
    source, out = write_prompts(tmp_path, [{"id": 1, "text": "Sort: pear fig apple"}]), tmp_path / "answers.jsonl"
    assert run("generate", "--in", source, "--out", out).exit_code == 1
    assert read_lines(out)[0]["error"].endswith("'text': rename the one with the text to \"prompt\"")


def test_decide_answers_every_line(tmp_path: Path) -> None:
    entries = [{"prompt": GOOD[0], "id": "a"}, {"prompt": "Hello"}, {"prompt": GOOD[2], "constraint": {"regex": "a"}}]
    source, out = write_prompts(tmp_path, [*entries, GOOD[2]]), tmp_path / "labels.jsonl"
    flags = ("decide", "--in", source, "--out", out, "--span", "=apple|fig|pear")
    result = run(*flags)
    assert result.exit_code == 1 and f"2 answers in {out}, 2 failed" in result.stdout
    answers = read_lines(out)
    question = paradec.Span(texts=["apple", "fig", "pear"])
    for entry, prompt in ((answers[0], GOOD[0]), (answers[3], GOOD[2])):
        expected = paradec.decide(paradec.load(), prompt, {"span": question}).to_dict()["answers"]
        assert entry["prompt"] == prompt and entry["answers"] == json.loads(json.dumps(expected))
    assert answers[0]["id"] == "a" and "vocabulary" in answers[1]["error"] and "constraint" in answers[2]["error"]
    complete = out.read_bytes()
    out.write_bytes(complete[: len(complete) // 2])
    data = json.loads(run(*flags, "--resume", "--json").stdout)
    assert out.read_bytes() == complete and data["there_before"] + data["answered"] == 2 and "tokens" not in data
    assert "is not empty" in refused(*flags)
    assert "questions.pick is not set in the file" in refused(*flags, "--pick", "=a|b", "--resume")
    assert "temperature is 1.0 in the file and 2.0" in refused(*flags, "--temperature", 2, "--resume")
    for wrong in ((), ("x", "--in", source, "--out", out), ("--in", source), ("x", "--out", out), ("x", "--resume")):
        assert "give one text, or --in" in refused("decide", *wrong, "--span", "=a|b")
