"""`paradec.integrations.ray`, tested without Ray."""

from __future__ import annotations

import pickle
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoding import refuses

import paradec
import paradec.integrations.ray as jobs

ROWS = {
    "id": np.array([4, 2, 9, 7]),
    "prompt": np.array(["Shuffle: pear fig apple kiwi"] * 2 + ["Sort: pear fig apple", "Hello"]),
    "label": np.array(["a", "b", "c", "d"]),
}
REQUEST: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def predictor() -> jobs.Predictor:
    return jobs.Predictor(load={"dtype": "float64"}, batch_size=2, seed=3, **REQUEST)


def test_answers_depend_only_on_prompt_and_id_and_seed(predictor: jobs.Predictor) -> None:
    actual = predictor(ROWS)
    assert actual["label"] is ROWS["label"] and actual["text"][3] == "" and "'Hello'" in actual["error"][3]
    seeds = [jobs.seed_of(3, int(name)) for name in ROWS["id"][:3]]
    alone = paradec.generate(predictor.model, [str(text) for text in ROWS["prompt"][:3]], seed=seeds, **REQUEST)
    assert actual["text"][:3] == alone.text and actual["tokens"][:3] == alone.tokens
    assert actual["forwards"][:3] == alone.row_nfe and actual["error"][:3] == [""] * 3
    assert predictor({name: values[2::-1] for name, values in ROWS.items()})["text"] == actual["text"][2::-1]
    assert predictor({name: values[1:2] for name, values in ROWS.items()})["text"] == actual["text"][1:2]


def test_seeds_of_rows_differ() -> None:
    seeds = {jobs.seed_of(seed, name) for seed in range(3) for name in (0, 1, "0", "1", "a")}
    assert len(seeds) == 15 and all(0 <= seed < 2**63 for seed in seeds)


def test_a_missing_column_is_named_in_the_error(predictor: jobs.Predictor) -> None:
    refuses(lambda: predictor({"id": [1], "text": ["x"]}), "no column 'prompt'; they have \\['id', 'text'\\]")


def test_models_and_column_names_can_be_chosen(predictor: jobs.Predictor) -> None:
    predictor_with_id = jobs.Predictor(model=lambda: predictor.model, prompt="question", id="name")
    assert predictor_with_id({"name": ["x"], "question": ["Sort: pear fig apple"]})["text"] == ["apple fig pear"]


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    refuses(lambda: jobs.answer(None, tmp_path), "needs ray.*: install paradec's extra 'ray'", ImportError)


def test_the_package_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(paradec)) is paradec


class FakeDataset:
    """The methods of `ray.data.Dataset` that the check of ids calls."""

    def __init__(self, rows: list[dict[str, Any]]):
        self.rows = rows

    def columns(self) -> list[str] | None:
        return list(self.rows[0]) if self.rows else None

    def select_columns(self, names: list[str]) -> FakeDataset:
        return FakeDataset([{name: row[name] for name in names} for row in self.rows])

    def iter_rows(self) -> Any:
        return iter(self.rows)


def test_ids_are_checked_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def rows(*ids: Any) -> Any:
        return FakeDataset([{"id": name, "prompt": "Sort: fig"} for name in ids])

    for valid in (rows(), rows(1), rows("a", "1", 1, np.int64(2), np.str_("b"))):
        jobs.check_ids(valid)
    ray = types.ModuleType("ray")
    ray.data = types.ModuleType("ray.data")  # type: ignore[attr-defined]
    monkeypatch.setattr(jobs, "check_installed", lambda: None)
    for name, module in (("ray", ray), ("ray.data", ray.data)):
        monkeypatch.setitem(sys.modules, name, module)
    for wrong, message in (
        (rows("a", "b", "a"), "id 'a' occurs twice, the second time in the dataset"),
        (rows(3, np.int64(3)), "id 3 occurs twice"),
        (rows(1.5), "id 1.5 in the dataset is neither a text nor an int"),
        (rows([1]), "neither a text nor an int"),
        (FakeDataset([{"name": 1}]), r"no column 'id'; it has \['name'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            jobs.answer(wrong, tmp_path / "answers")
    assert not any(tmp_path.iterdir())


def test_an_id_of_an_earlier_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="id 2 occurs twice, the second time in .*b.parquet"):
        jobs._unique_ids([3, 2], jobs._unique_ids([1, 2], set(), tmp_path / "a.parquet"), tmp_path / "b.parquet")
