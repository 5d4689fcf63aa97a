"""Constraints through the entry points, on the packaged model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import paradec
from paradec.cli import app
from paradec.models.adapter import Model

WORDS = "(apple|fig|pear)"
PATTERN = f"{WORDS} fig{{1}}( {WORDS})?"
PROMPT = "Sort: pear fig apple"


@pytest.fixture(scope="module")
def packaged() -> Model:
    return paradec.load()


def test_generate_and_presets(packaged: Model, tmp_path: Path) -> None:
    prompts = [PROMPT, "Reverse: pear fig apple kiwi", "Shuffle: fig pear plum"]
    asked: dict[str, Any] = {"max_new_tokens": 8, "temperature": 1.0, "seed": 5}
    together = paradec.generate(packaged, prompts, constraint=paradec.Regex(PATTERN), **asked)
    assert all(re.fullmatch(PATTERN, text) for text in together.text)
    assert together.log_weight is not None and all(weight <= 1e-9 for weight in together.log_weight)
    for index, prompt in enumerate(prompts):
        alone = paradec.generate(packaged, prompt, constraint=paradec.Regex(PATTERN), **asked)
        assert [alone.text] == together.text[index : index + 1]
    paradec.Request(constraint=paradec.Regex(PATTERN), **asked).save(tmp_path / "mine.preset")
    again = paradec.generate(packaged, PROMPT, preset=tmp_path / "mine.preset")
    assert [again.text] == together.text[:1]


def test_an_answer_that_fits_anyway_is_the_same(packaged: Model) -> None:
    free = paradec.generate(packaged, PROMPT, max_new_tokens=8)
    out = paradec.generate(packaged, PROMPT, max_new_tokens=8, constraint=paradec.Regex("[a-z ]*"))
    assert out.text == free.text == "apple fig pear" and out.nfe <= free.nfe


def test_holes(packaged: Model) -> None:
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
        ({"constraints": [first]}, "constraint has 1 entries, and row 0 2 holes"),
        ({"constraints": [second, None]}, "the hole at .* has 2 masks; the constraint fills 1 to 1"),
        ({"constraints": [first, None], "constraint": second}, "both say it"),
        ({"constraints": {2: first}}, "constraints: hole"),
        ({"constraints": "ab"}, "must be a list"),
    ):
        with pytest.raises(ValueError, match=part):
            paradec.infill(packaged, holed, **wrong)


def test_command_line(tmp_path: Path) -> None:
    def answer(*arguments: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, [*arguments])
        assert done.exit_code == code, done.output
        return done.output

    assert "fig pear apple" in answer("generate", PROMPT, "--choice", "fig pear apple", "--choice", "kiwi")
    assert re.search("fig fig", answer("generate", PROMPT, "--regex", "fig fig"))
    (tmp_path / "a.json").write_text(json.dumps({"type": "integer", "minimum": 7, "maximum": 7}))
    assert "7" in answer("generate", PROMPT, "--json-schema", str(tmp_path / "a.json"))
    filled = answer("infill", "kiwi <mask:2> pear", "--prompt", "Reverse: pear fig apple kiwi", "--hole", "1=plum .*")
    assert "kiwi plum" in filled
    both = answer("generate", PROMPT, "--choice", "a", "--regex", "b", code=2)
    assert "both say what an answer must be" in " ".join(both.split())
    assert "lookahead" in answer("generate", PROMPT, "--regex", "a(?=b)", code=2)
    assert "N=PATTERN" in answer("infill", "kiwi <mask:2>", "--hole", "x", code=2)
