"""Tables of the commands: on a terminal drawn by rich, else tab-separated lines; or as markdown, LaTeX or CSV."""

from __future__ import annotations

import csv
import inspect
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import typer

FIRST_LINE = re.compile(r"(\w+(?:, \w+)*): (.*)")
"""First line of an entry in a docstring's `Args:`: one or several names, and their description."""
MAX_NAME_WIDTH = 24  # names of up to this length are not broken over lines
MAX_WIDTH = 10_000  # assumed width of the terminal when a table's minimum width is measured


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], heads: bool = True) -> None:
    """Print a table. On a terminal too narrow for it, print one cell per line. heads: whether to print column names."""
    if not sys.stdout.isatty():
        for row in (columns, *rows) if heads else rows:
            typer.echo("\t".join(row))
        return
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    console, rows = Console(), list(rows)
    grid = Table(box=box.SIMPLE_HEAD if heads else None, show_header=heads, padding=(0, 1), pad_edge=False)
    name_width = min(MAX_NAME_WIDTH, max((len(row[0]) for row in rows), default=0))
    for index, column in enumerate(columns):
        grid.add_column(column, overflow="fold", min_width=None if index else name_width)
    for row in rows:
        grid.add_row(*map(Text, row))
    if Measurement.get(console, console.options.update(max_width=MAX_WIDTH), grid).minimum <= console.width:
        console.print(grid)
        return
    for row in rows:
        for column, cell in zip(columns, row, strict=True):
            echo(f"{column}: {cell}" if heads else cell)


def echo(text: str) -> None:
    """Print a text; on a terminal, wrap its lines."""
    if not sys.stdout.isatty():
        typer.echo(text)
        return
    from rich.console import Console

    Console(highlight=False, markup=False).print(text)


def list_entries(registry: Any, extra: dict[str, dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """List a registry as data, with `extra` fields by name. If a class cannot be imported, its summary is the error."""
    from paradec.core.registry import to_data

    rows = []
    for name in registry.names():
        try:
            cls = registry.get(name)
        except ImportError as error:
            missing = {"name": name, "family": "other packages", "summary": str(error)}
            rows.append(missing | {"paper": "", "arxiv": "", "settings": {}})
            continue
        entry: dict[str, Any] = {"name": name}
        entry |= {key: getattr(cls, key, "") for key in ("family", "summary", "paper", "arxiv")}
        entry["settings"] = {key: to_data(value) for key, value in cls.settings().items()}
        rows.append(entry | (extra or {}).get(name, {}))
    return rows


def print_entries(components: list[dict[str, Any]], hint: str) -> None:
    """Print entries: on a terminal names, summaries and a hint, elsewhere lines with all fields."""
    if not sys.stdout.isatty():
        rows = []
        for entry in components:
            settings = ", ".join(f"{key}={value}" for key, value in entry["settings"].items())
            paper = entry["paper"] + (f" (arXiv:{entry['arxiv']})" if entry["arxiv"] else "")
            rows.append((entry["name"], entry["family"], settings or "-", paper or "-", entry["summary"]))
        table(("name", "family", "settings", "paper", "summary"), rows)
        return
    table(("name", "summary"), [(entry["name"], entry["summary"]) for entry in components])
    echo(hint)


def print_component(kind: str, name: str, cls: Any, as_json: bool, extra: dict[str, Any]) -> None:
    """Print all facts of one sampler or cache (`kind`): effect, paper, settings with defaults, presets, `extra`."""
    from paradec.core.registry import to_data

    about, setting_texts = split_docstring(cls)
    settings = {
        key: {"default": to_data(value), "about": setting_texts.get(key, "")} for key, value in cls.settings().items()
    }
    presets = {key: dict(value) for key, value in getattr(cls, "presets", {}).items()}
    arxiv = getattr(cls, "arxiv", "")
    data: dict[str, Any] = {"name": name, "family": cls.family, "summary": cls.summary, "about": about}
    data |= {"paper": cls.paper, "arxiv": arxiv, "settings": settings, "presets": presets, **extra}
    if as_json:
        typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
        return
    lines = {"family": cls.family, "paper": cls.paper + (f", https://arxiv.org/abs/{arxiv}" if arxiv else "")} | extra
    lines |= {f"preset {key}": ", ".join(f"{k}={v}" for k, v in changes.items()) for key, changes in presets.items()}
    lines = {key: str(value) for key, value in lines.items() if value}
    lines |= {f"{key}={setting['default']}": setting["about"] for key, setting in settings.items()}
    call = [f"{next(iter(settings))}=..."] if settings else []
    is_builtin = cls.__module__.startswith("paradec.")
    builtin_call = f"paradec.{kind}s.create({', '.join([repr(name), *call])})"
    lines["in Python"] = builtin_call if is_builtin else f"{cls.__name__}({', '.join(call)})"
    echo(f"{name}: {cls.summary}\n\n{about}\n")
    table(("", ""), lines.items(), heads=False)


def split_docstring(cls: Any) -> tuple[str, dict[str, str]]:
    """Split a docstring into its text without `Args:`, and descriptions of settings (also those of base classes)."""
    about: list[str] = []
    setting_texts: dict[str, str] = {}
    for base in reversed(getattr(cls, "__mro__", (cls,))):
        text, sections = _split_sections(inspect.cleandoc(base.__doc__ or ""))
        setting_texts |= sections
        about = text if base is cls else about
    return "\n\n".join(about), setting_texts


def _split_sections(doc: str) -> tuple[list[str], dict[str, str]]:
    paragraphs: list[str] = []
    sections: dict[str, str] = {}
    for block in re.split(r"\n\s*\n", doc):
        first, _, body = block.partition("\n")
        if first.strip() != "Args:":
            if not re.match(r"(Raises|Returns|Attributes):", first):
                paragraphs.append(" ".join(block.split()))
            continue
        names: list[str] = []
        for line in inspect.cleandoc(body).splitlines():
            first_line = FIRST_LINE.fullmatch(line)
            if first_line:
                names = first_line[1].split(", ")
                sections |= dict.fromkeys(names, first_line[2])
            else:
                sections |= {name: f"{sections[name]} {line.strip()}" for name in names}
    return [text for text in paragraphs if text], sections


LATEX = str.maketrans({char: f"\\{char}" for char in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "\n": " ",
})  # fmt: skip


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table in markdown; columns from the third on are numbers, aligned right."""

    def line(cells: Sequence[str]) -> str:
        escaped = (cell.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ") for cell in cells)
        return f"| {' | '.join(escaped)} |"

    marks = ["---" if index < 2 else "--:" for index in range(len(columns))]
    return "\n".join([line(columns), "|" + "|".join(marks) + "|", *map(line, rows)])


def latex(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a LaTeX `tabular` with the rules of the package booktabs."""

    def line(cells: Sequence[str]) -> str:
        return " & ".join(cell.translate(LATEX) for cell in cells) + r" \\"

    alignment = "".join("l" if index < 2 else "r" for index in range(len(columns)))
    head, end = rf"\begin{{tabular}}{{{alignment}}}", r"\end{tabular}"
    return "\n".join([head, r"\toprule", line(columns), r"\midrule", *map(line, rows), r"\bottomrule", end])


def comma_separated(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table as CSV (RFC 4180), with line feeds as line ends."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue().rstrip("\n")


FORMATS: Mapping[str, Callable[[Sequence[str], Sequence[Sequence[str]]], str]] = {
    "markdown": markdown,
    "latex": latex,
    "csv": comma_separated,
}
