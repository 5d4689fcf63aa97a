"""The comparison of ways to make digits: rows of one model are measured again without the others."""

from __future__ import annotations

from typing import Any

from scripts import load_script

script = load_script("benchmarks/digits_scales.py")


def row(label: str, distance: float, commit: str) -> dict[str, Any]:
    return {"label": label, "distance": [distance, distance - 4, distance + 3], "commit": commit, "further": None}


def test_measured_rows_take_the_place_of_their_like_and_all_are_ranked_again() -> None:
    kept = [row("a", 10, "old"), row("b", 20, "old"), row("c", 30, "old")]
    rows = script.ranked(kept, [row("c", 5, "new"), row("d", 25, "new")])
    assert [(each["label"], each["commit"]) for each in rows] == [
        ("c", "new"),
        ("a", "old"),
        ("b", "old"),
        ("d", "new"),
    ]
    assert "further" not in rows[0]
    assert [each["further"] for each in rows[1:]] == [
        script.further(each["distance"], rows[0]["distance"]) for each in rows[1:]
    ]


def test_exact_rows_share_their_choice_and_labels_differ() -> None:
    exact = [method for method in script.METHODS if "exact" in method[0]]
    assert {method[4]["verify"] for method in exact} == {"jacobi", "sjd", "scd"}
    assert all(method[3] is script.EXACT for method in exact)
    labels = [method[0] for method in script.METHODS]
    assert len(set(labels)) == len(labels)
