"""A table as text for a paper, a page or a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence

LATEX = str.maketrans({sign: f"\\{sign}" for sign in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "\n": " ",
})  # fmt: skip


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as GitHub, GitLab and pandoc read it; numbers are on the right."""

    def line(cells: Sequence[str]) -> str:
        return (
            "| "
            + " | ".join(cell.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ") for cell in cells)
            + " |"
        )

    marks = ["---" if place < 2 else "--:" for place in range(len(columns))]
    return "\n".join([line(columns), "|" + "|".join(marks) + "|", *map(line, rows)])


def latex(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A `tabular` with the rules of the package booktabs."""

    def line(cells: Sequence[str]) -> str:
        return " & ".join(cell.translate(LATEX) for cell in cells) + r" \\"

    kinds = "".join("l" if place < 2 else "r" for place in range(len(columns)))
    begin, end = rf"\begin{{tabular}}{{{kinds}}}", r"\end{tabular}"
    return "\n".join([begin, r"\toprule", line(columns), r"\midrule", *map(line, rows), r"\bottomrule", end])


def comma_separated(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of RFC 4180, which end at a line feed."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue().rstrip("\n")


FORMATS: Mapping[str, Callable[[Sequence[str], Sequence[Sequence[str]]], str]] = {
    "markdown": markdown,
    "latex": latex,
    "csv": comma_separated,
}
