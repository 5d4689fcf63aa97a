"""`--quantization int8` of the commands, on a model with a layer that is large enough for int8."""

import inspect
import json
from pathlib import Path

import pytest
from checkpoints import FAMILY_WORDS, LLADA, random_weights, write_checkpoint, write_tokenizer
from commands import refused, run

import paradec
from paradec.cli.chat import chat
from paradec.cli.compare import compare
from paradec.cli.generate import generate, infill
from paradec.cli.serve import serve
from paradec.models.int8 import Int8Config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a float32 LLaDA whose MLP matrices have a million weights."""
    folder = tmp_path_factory.mktemp("llada")
    config = LLADA | {"n_layers": 1, "d_model": 64, "mlp_hidden_size": 2**14, "vocab_size": len(FAMILY_WORDS)}
    config |= {"mask_token_id": 3, "eos_token_id": 0}
    write_checkpoint(folder, config, {name: weight.float() for name, weight in random_weights(config).items()})
    write_tokenizer(folder, "<|mdm_mask|>")
    return folder


def test_answers_equal_those_of_the_rounded_model(folder: Path, tmp_path: Path) -> None:
    options = ("--model", folder, "--quantization", "int8", "--max-new-tokens", 8)
    result = run("generate", "w5 w6", "--raw", *options, "--json")
    model = paradec.load(folder, quantization="int8")
    expected = paradec.generate(model, "w5 w6", max_new_tokens=8, chat=False)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["new_tokens"] == expected.new_tokens[0, : expected.tokens[0]].tolist()
    assert json.loads(result.stdout)["text"] == expected.text
    sizes = [part.weight.numel() for part in model.module.modules() if type(part).__name__ == "Int8Linear"]
    assert sizes == [2**20] * 3
    (tmp_path / "in.txt").write_text("w5 w6\n")
    files = ("--in", tmp_path / "in.txt", "--out", tmp_path / "out.jsonl", "--raw")
    assert run("generate", *files, *options).exit_code == 0
    line = json.loads((tmp_path / "out.jsonl").read_text())
    assert (line["text"], line["settings"]["quantization"]) == (expected.text, "int8")
    assert "--out" in refused("generate", *files, "--resume", "--model", folder, "--max-new-tokens", 8)


def test_commands_have_the_option() -> None:
    for command in (generate, infill, chat, serve, compare):
        assert "quantization" in inspect.signature(command).parameters
    for wrong in ("int4", "int8(bits=1)", "int8+int8"):
        assert "quantization" in refused("generate", "x", "--quantization", wrong)
    assert "must be 'int8', also with settings in parentheses: activations, min_weights, weight_bits" in refused(
        "generate", "x", "--quantization", "int8(bits=1)"
    )


def test_settings_are_written_in_parentheses() -> None:
    command = ("generate", "Sort: pear fig apple", "--json", "--quantization")
    result = run(*command, "int8(min_weights=1, activations=8)")
    assert result.exit_code == 0, result.output
    model = paradec.load(quantization=Int8Config(min_weights=1, activations=8))
    assert json.loads(result.stdout)["text"] == paradec.generate(model, "Sort: pear fig apple").text
    assert "Int8Linear" in {type(part).__name__ for part in model.module.modules()}
    assert "min_weights=0 must be" in refused(*command, "int8(min_weights=0)")
