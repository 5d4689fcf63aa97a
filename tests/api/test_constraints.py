"""Constraints in `generate`, `infill`, `generate_many`, presets and the command line."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoding import covering
from small_models import MASK, VOCAB, tiny, tiny_gemma
from structured import TEXTS, tiny_with_texts
from typer.testing import CliRunner

import paradec
from paradec.cli import app
from paradec.models.adapter import Model

WORDS = "(apple|fig|pear)"
PATTERN = f"{WORDS} fig{{1}}( {WORDS})?"
PROMPT = "Sort: pear fig apple"


def test_constraints_in_generate_and_presets(packaged: Model, tmp_path: Path) -> None:
    prompts = [PROMPT, "Reverse: pear fig apple kiwi", "Shuffle: fig pear plum"]
    request: dict[str, Any] = {"max_new_tokens": 8, "temperature": 1.0, "seed": 5}
    together = paradec.generate(packaged, prompts, constraint=paradec.Regex(PATTERN), **request)
    assert all(re.fullmatch(PATTERN, text) for text in together.text)
    assert together.log_weight is not None and all(weight <= 1e-9 for weight in together.log_weight)
    for index, prompt in enumerate(prompts):
        alone = paradec.generate(packaged, prompt, constraint=paradec.Regex(PATTERN), **request)
        assert [alone.text] == together.text[index : index + 1]
    paradec.Request(constraint=paradec.Regex(PATTERN), **request).save(tmp_path / "mine.preset")
    assert [paradec.generate(packaged, PROMPT, preset=tmp_path / "mine.preset").text] == together.text[:1]


def test_a_constraint_that_the_answer_meets_does_not_change_it(packaged: Model) -> None:
    free = paradec.generate(packaged, PROMPT, max_new_tokens=8)
    out = paradec.generate(packaged, PROMPT, max_new_tokens=8, constraint=paradec.Regex("[a-z ]*"))
    assert out.text == free.text == "apple fig pear" and out.nfe <= free.nfe


def test_holes_may_have_constraints(packaged: Model) -> None:
    chat = [{"role": "user", "content": "Reverse: pear fig apple kiwi"}]
    holed = [*chat, {"role": "assistant", "content": "kiwi <mask:2> pear <mask>"}]
    first, second = paradec.Regex("plum (fig|apple)"), paradec.Choice(["fig", "owl"])
    out = paradec.infill(packaged, holed, constraints=[first, second])
    assert re.fullmatch(first.pattern, out.fills[0]) and out.fills[1] in second.choices  # type: ignore[index]
    out = paradec.infill(packaged, holed, constraints={1: second})
    assert out.fills[1] in second.choices and out.fills[0]  # type: ignore[index]
    out = paradec.infill(packaged, holed, constraint=paradec.Regex("[a-z]+( [a-z]+)?"))
    assert len(out.fills) == 2
    for wrong, part in (
        ({"constraints": [first]}, "constraint has 1 entries"),
        ({"constraints": [second, None]}, "the hole at .* has 2 masks; the constraint fills 1 to 1"),
        ({"constraints": [first, None], "constraint": second}, "both constrain the holes"),
        ({"constraints": {2: first}}, "constraints: hole"),
        ({"constraints": "ab"}, "must be a list"),
    ):
        with pytest.raises(ValueError, match=part):
            paradec.infill(packaged, holed, **wrong)


def test_constraints_on_the_command_line(tmp_path: Path) -> None:
    def answer(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, [*arguments])
        assert result.exit_code == code, result.output
        return result.output

    assert "fig pear apple" in answer("generate", PROMPT, "--choice", "fig pear apple", "--choice", "kiwi")
    assert re.search("fig fig", answer("generate", PROMPT, "--regex", "fig fig"))
    (tmp_path / "a.json").write_text(json.dumps({"type": "integer", "minimum": 7, "maximum": 7}))
    assert "7" in answer("generate", PROMPT, "--json-schema", str(tmp_path / "a.json"))
    filled = answer("infill", "kiwi <mask:2> pear", "--prompt", "Reverse: pear fig apple kiwi", "--hole", "1=plum .*")
    assert "kiwi plum" in filled
    both = answer("generate", PROMPT, "--choice", "a", "--regex", "b", code=2)
    assert "both constrain the answer" in " ".join(both.split())
    assert "lookahead" in answer("generate", PROMPT, "--regex", "a(?=b)", code=2)
    thought = ("generate", PROMPT, "--after", "fig", "--thinking-budget", "3")
    report = json.loads(answer(*thought, "--choice", " pear", "--choice", " apple", "--json"))
    assert report["text"] in (" pear", " apple") and "fig" not in report["reasoning"]
    assert "go with --choice, --regex or --json-schema" in " ".join(answer(*thought, code=2).split())
    assert "N=PATTERN" in answer("infill", "kiwi <mask:2>", "--hole", "x", code=2)


def build_model(family: str, **facts: Any) -> Model:
    known = {"eos_token_id": 39, "tokenizer": tiny_with_texts().tokenizer}
    if family == "canvas":
        return paradec.wrap(tiny_gemma(dtype=torch.float64, vocab=VOCAB, canvas=4), **known | facts)
    causal = {"topology": "causal", "prediction": "shifted"}
    masked: dict[str, Any] = {"topology": family, "prediction": "same", "mask_token_id": MASK}
    if family == "block_causal":
        masked["block_length"] = 4
    return paradec.wrap(tiny(2).unwrap(), **known | (causal if family == "causal" else masked) | facts)


FAMILIES = ["bidirectional", "block_causal", "causal", "canvas"]


@pytest.mark.parametrize(("family", "pattern"), covering(FAMILIES, ["[0-9],?", "[0-9]+(, ?[0-9]+)*", "[,a-c]{3}"]))
def test_end_tokens_with_text_are_never_written(family: str, pattern: str) -> None:
    comma = TEXTS.index(",")
    model = build_model(family, eos_token_id=(39, comma))
    request: dict[str, Any] = {"max_new_tokens": 8, "sampler": "sjd" if family == "causal" else "threshold"}
    draws: dict[str, Any] = {"constraint": paradec.Regex(pattern)}
    draws |= {} if family == "canvas" else {"temperature": 1.0}
    for seed in range(3):
        out = paradec.generate(model, [[1, 2], [3, 4]], seed=seed, **request, **draws)
        assert all(re.fullmatch(pattern, text) for text in out.text), out.text
    for value in (paradec.Regex("[0-9],.*"), paradec.Choice(["yes", "1,2"])):
        with pytest.raises(ValueError, match=rf"token {comma} \(','\), which is an end token"):
            paradec.generate(model, [[1, 2]], constraint=value, **request)


SEEDS = [7, 8, 9]
THINKING: dict[str, dict[str, Any]] = {
    "bidirectional": {"sampler": "threshold", "block_length": 5},
    "block_causal": {"sampler": "low_confidence"},
    "causal": {"sampler": "sjd"},
    "canvas": {"max_new_tokens": 8},
}
MARKERS = [("x,", 3), ("<38>", 2), ("true", None)]


@pytest.mark.filterwarnings("ignore:seed=.* has no effect at temperature 0")
@pytest.mark.parametrize(("family", "marker", "temperature"), covering(THINKING, MARKERS, [0.9, 0.0]))
def test_free_text_precedes_the_answer(family: str, marker: tuple[str, int | None], temperature: float) -> None:
    """Rows equal rows decoded alone. The budget ends free text in which the marker would never occur."""
    model, (after, budget) = build_model(family), marker
    arguments: dict[str, Any] = {"max_new_tokens": 20, **THINKING[family]}
    if family != "canvas":
        arguments["temperature"] = temperature
    prompts = [[1, 2], [3, 4], [5, 6]]
    value = paradec.JsonSchema({"type": "integer", "minimum": 10, "maximum": 99}, after=after, thinking_budget=budget)
    marker_ids = model.tokenizer(after, add_special_tokens=False)["input_ids"]
    constrained = arguments | {"constraint": value}
    out = paradec.generate(model, prompts, seed=SEEDS, logprobs=0, **constrained)
    rows = [paradec.generate(model, [row], seed=seed, **constrained) for row, seed in zip(prompts, SEEDS)]
    if family != "canvas":
        seeded = [{"prompt": prompt, "seed": seed} for prompt, seed in zip(prompts, SEEDS)]
        with paradec.generate_many(model, seeded, batch_size=2, **constrained) as outputs:
            rows += sorted(outputs, key=lambda output: output.index)
    for number, alone in enumerate(rows):
        row = number % 3
        count, single = out.reasoning_tokens[row], number >= 3
        texts = (alone.reasoning, alone.text) if single else (*alone.reasoning, *alone.text)
        assert texts == (out.reasoning[row], out.text[row]) and alone.reasoning_tokens == [count]
        assert 10 <= json.loads(out.text[row]) <= 99 and after not in out.reasoning[row]
        assert value.accepts(out.reasoning[row] + after + out.text[row])
        free, answer = out.new_tokens[row, :count], out.new_tokens[row, count : out.tokens[row]]
        assert model.tokenizer.decode(free).endswith(out.reasoning[row] + after)
        assert model.tokenizer.decode(answer, skip_special_tokens=True) == out.text[row]
        assert count <= (arguments["max_new_tokens"] if budget is None else budget + len(marker_ids))
        scores = out.logprobs.chosen[row, 2 : 2 + out.tokens[row]].isfinite()
        assert scores[0] and len(scores) == out.tokens[row]  # tokens that the constraint forces have no score
    assert "reasoning" not in paradec.generate(model, prompts, **arguments).to_dict()


@pytest.mark.parametrize("family", ["bidirectional", "causal"])
def test_impossible_markers_are_refused(family: str) -> None:
    model, request = build_model(family), {"sampler": "sjd" if family == "causal" else "threshold"}
    number = paradec.Regex("[0-9]{3}", after="x,")
    with pytest.raises(ValueError, match="the shortest text takes 4 tokens, max_new_tokens=3"):
        paradec.generate(model, [[1, 2]], constraint=number, max_new_tokens=3, **request)
    assert paradec.generate(model, [[1, 2]], constraint=number, max_new_tokens=4, **request).reasoning == [""]
    with pytest.raises(ValueError, match="no text that the tokenizer can write without .*<end>.*an end token"):
        paradec.generate(model, [[1, 2]], constraint=paradec.Regex("1", after="<end>"), max_new_tokens=9, **request)
    with pytest.raises(ValueError, match="no text that the tokenizer can write"):
        paradec.generate(model, [[1, 2]], constraint=paradec.Regex("1", after="?"), max_new_tokens=9, **request)


def test_free_text_around_given_tokens() -> None:
    """The answer is the last part of the hole. Budgets that the prompt's tokens exceed are refused."""
    model, value = build_model("bidirectional"), paradec.Regex("[0-9]{2}", after="x", thinking_budget=2)
    ids = [[1, *[MASK] * 5, 3, *[MASK] * 4]]
    out = paradec.infill(model, input_ids=ids, constraints=[value, None])
    assert out.fills is not None and value.accepts(out.fills[0][0])
    ids = [[1, MASK, 10, 10, 10, *[MASK] * 5]]
    late = paradec.Regex("[0-9]{2}", after="x", thinking_budget=3)
    with pytest.raises(ValueError, match="the prompt.s token"):
        paradec.generate(model, input_ids=ids, constraint=late, max_new_tokens=0)
    with pytest.raises(ValueError, match="its thinking_budget is too small for a text of 5 tokens"):
        paradec.infill(model, input_ids=[[1, *[MASK] * 5, 3]], constraint=replace(late, thinking_budget=1))


def test_free_text_and_answer_are_streamed(packaged: Model) -> None:
    value, pieces = paradec.Regex(f" ?{WORDS}", after="fig", thinking_budget=5), list[torch.Tensor]()
    streamer: Any = SimpleNamespace(put=pieces.append, end=lambda: None)
    out = paradec.generate(packaged, PROMPT, constraint=value, max_new_tokens=12, streamer=streamer)
    streamed = torch.cat([piece.flatten() for piece in pieces])
    assert streamed.tolist() == out.sequences[0, : len(streamed)].tolist() and len(streamed) > len(pieces[0][0]) + 2
    assert isinstance(out.reasoning, str) and "fig" not in out.reasoning
    assert re.fullmatch(value.pattern, out.text)  # type: ignore[arg-type]
    assert value.accepts(f"{out.reasoning}fig{out.text}")


@pytest.mark.parametrize("family", ["bidirectional", "block_causal", "causal"])
def test_masks_with_text_are_never_written(family: str) -> None:
    model = build_model(family, mask_token_id=TEXTS.index("x"))
    request: dict[str, Any] = {"max_new_tokens": 8, "sampler": "sjd" if family == "causal" else "threshold"}
    value = paradec.Regex("[x0-3]{3}")
    out = paradec.generate(model, [[1, 2]] * 4, constraint=value, temperature=1.0, seed=2, **request)
    assert all(re.fullmatch("[0-3]{3}", text) for text in out.text)
    for value in (paradec.Regex("x[0-9]"), paradec.Choice(["yes", "xa"])):
        with pytest.raises(ValueError, match=rf"token {TEXTS.index('x')} \('x'\), which is the model's mask"):
            paradec.generate(model, [[1, 2]], constraint=value, **request)


def test_constraints_of_holes_exclude_end_tokens() -> None:
    comma = TEXTS.index(",")
    model = build_model("bidirectional", eos_token_id=(39, comma))
    request: dict[str, Any] = {"input_ids": [[1, MASK, MASK, 2, MASK, 3]], "constraints": [paradec.Regex("1,"), None]}
    with pytest.raises(ValueError, match=rf"token {comma} \(','\), which is an end token"):
        paradec.infill(model, **request)
    assert paradec.infill(model, holes_eos_inf=False, **request).fills[0][0] == "1,"


def test_errors_of_constraints_name_the_remedy() -> None:
    model = paradec.load()

    def message(**arguments: Any) -> str:
        with pytest.raises((ValueError, TypeError)) as caught:
            paradec.generate(model, "Sort: pear fig apple", max_new_tokens=16, **arguments)
        return str(caught.value)

    assert "after='fig': its texts may have to begin" in message(constraint=paradec.Choice(["apple"], after="fig"))
    assert "after='</think>': that marker cannot be written" in message(
        constraint=paradec.Choice([" apple"], after="</think>")
    )
    assert paradec.generate(
        model, "Sort: pear fig apple", max_new_tokens=16, constraint=paradec.Choice([" apple"], after="fig")
    ).text.endswith(" apple")
    assert "must be paradec.Choice([...])" in message(constraint=["apple", "fig"])
    assert "after=...): a constraint has the marker" in message(after="fig")
    assert "thinking_budget=...)" in message(thinking_budget=3)
    full = paradec.generate(model, PROMPT, max_new_tokens=2, constraint=paradec.Choice(["apple fig"]))
    assert (full.text, full.finished) == ("apple fig", [False])
