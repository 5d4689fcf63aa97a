"""Reading and writing of text and JSON files: ends of lines, invalid JSON, atomic writes."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from places import ROOT

from paradec.cli.files import read_lines as read_file_of_prompts
from paradec.core import text_files
from paradec.core.trace import Trace
from paradec.request import Request
from paradec.samplers.forecast.rules import MagRatios
from paradec.samplers.forecast.step_schedule import BlockSchedule
from paradec.tools.evaluation import read_questions
from paradec.tools.evaluation.compare import Comparison
from paradec.tools.training.learn2pd import read_prompts as read_for_learn2pd
from paradec.tools.tuning.prompts import read_prompts as read_for_tuning

BOM = b"\xef\xbb\xbf"
DEEP = "[" * 100_000
JSON_LINES: dict[str, Callable[[Path], list[Any]]] = {
    "generate": lambda file: [line.prompt for line in read_file_of_prompts(file)],
    "compare": lambda file: [question.prompt for question in read_questions(file)],
    "tune": lambda file: [entry.prompt for entry in read_for_tuning(file)],
    "learn2pd": read_for_learn2pd,
}
ends = st.sampled_from(["\n", "\r\n"])
letters = st.characters(exclude_categories=["Cs"], exclude_characters="\n") | st.sampled_from("\r\x0c\x1c\x85\u2028")
texts = st.text(letters)
words = st.lists(texts.map(lambda text: f"x{text}x"), min_size=1, max_size=4)


@pytest.mark.parametrize("name", JSON_LINES)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompts=words, end=ends, mark=st.sampled_from([b"", BOM]))
@example(prompts=["a\x0cb\x85c\u2028d", "e\rf"], end="\r\n", mark=BOM)
def test_only_newlines_end_lines_of_json(name: str, prompts: Any, end: str, mark: bytes, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": prompt, "answer": "y"}, ensure_ascii=False) for prompt in prompts]
    file.write_bytes(mark + (end + end).join(lines).encode())
    assert JSON_LINES[name](file) == prompts


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompts=words, end=ends)
@example(prompts=["a\x0cb\x85c\u2028d", "e\rf"], end="\r\n")
def test_only_newlines_end_lines_of_text(prompts: list[str], end: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(BOM + (end + end).join(prompts).encode())
    assert read_for_learn2pd(file) == [line.prompt for line in read_file_of_prompts(file)] == prompts
    numbers = [line.number for line in read_file_of_prompts(file)]
    assert numbers == list(range(1, 2 * len(prompts), 2))  # blank lines are numbered too


@pytest.mark.parametrize("load", [Request.load, Trace.load, Comparison.from_json, BlockSchedule.load, MagRatios.load])
def test_json_may_have_a_byte_order_mark_but_not_be_deep(load: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(DEEP)
    with pytest.raises(ValueError, match=r"mine.json.*more than 100 deep"):
        load(file)
    Request(temperature=0.5, stop_strings="\u2028\x85").save(file)
    file.write_bytes(BOM + file.read_bytes())
    assert Request.load(file) == Request(temperature=0.5, stop_strings="\u2028\x85")
    Trace([[1]]).save(file)
    file.write_bytes(BOM + file.read_bytes())
    assert Trace.load(file) == Trace([[1]])


@settings(max_examples=40, deadline=None)
@example({"é": "\ud800"})
@example([[[]]])
@given(st.recursive(st.text(), lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner)))
def test_data_is_written_as_one_line(data: Any) -> None:
    line = text_files.json_bytes(data)
    assert line.count(b"\n") == 1 and line.endswith(b"\n") and text_files.parse_json(line.decode()) == data


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file, link = tmp_path / "a.json", tmp_path / "link.json"
    Request(temperature=0.5).save(file)
    before = file.read_bytes()
    with pytest.raises(TypeError):
        text_files.write_json(file, {"a": object()})
    assert file.read_bytes() == before
    with pytest.raises(ZeroDivisionError), text_files.replace_file(file) as draft:
        draft.write_text("half")
        raise ZeroDivisionError
    assert file.read_bytes() == before
    link.symlink_to(file)
    text_files.write_json(link, {"a": 1})
    assert link.is_symlink() and json.loads(file.read_text()) == {"a": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "link.json"]


WRITER = """
import sys
from paradec.core.text_files import read_json, write_json
file, who = sys.argv[1:]
for turn in range(150):
    write_json(file, {"who": who, "long": ["y" * 50] * 400})
    found = read_json(file)
    assert len(found["long"]) == 400 and found["who"] in ("0", "1"), found
"""


def test_two_processes_write_one_file(tmp_path: Path) -> None:
    """No write fails, and readers see complete files only. Leftovers of a killed process do no harm."""
    file = tmp_path / "a.json"
    (tmp_path / "a.json.part").write_text("half")
    command = [sys.executable, "-c", WRITER, str(file)]
    writers = [subprocess.Popen([*command, who], cwd=ROOT, stderr=subprocess.PIPE, text=True) for who in "01"]
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        assert writer.returncode == 0, errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.json.part"]
