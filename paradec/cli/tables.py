"""Tables that the commands print, and what they say of one sampler or cache.

On a terminal they fit its width: columns that there is no room for are left out, and named. Elsewhere they are
tab-separated lines with everything. rich is imported when something is drawn.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

FAMILIES = {
    "masked": "masked models: which undecided positions become final",
    "draft_verify": "causal models: drafts that one forward verifies",
    "forecast": "diffusion transformers: which solver steps are forecast",
    "continuous": "models of continuous tokens (MAR)",
    "groups": "models that are fed groups of positions (LPD)",
    "cache": "what is recomputed at a step, and what is kept",
}
"""Headings of listings, by family. A family of another package is under its own name."""
NARROWEST = 20
"""Columns that a description gets at least, beside a name."""
FIRST_LINE = re.compile(r"(\w+(?:, \w+)*): (.*)")
"""How an entry of a docstring's `Args:` begins: one name, or several that are explained together."""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table: ruled on a terminal, where it is too narrow entry by entry; tab-separated lines elsewhere."""
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            typer.echo("\t".join(row))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console, rows = Console(), list(rows)
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    if _fits(console, table):
        console.print(table)
        return
    for row in rows:  # words would be cut
        entry = Table.grid(padding=(0, 1))
        for place, (name, cell) in enumerate(zip(columns, row, strict=True)):
            style = "bold" if place == 0 else ""
            entry.add_row(Text(f"{'' if place == 0 else '  '}{name}", style="dim"), Text(cell, style, overflow="fold"))
        console.print(entry)


def _fits(console: Console, table: Any, whole: bool = False) -> bool:
    """Whether every word of a table has room on the terminal, or every `whole` line of its cells."""
    from rich.measure import Measurement

    found = Measurement.get(console, console.options.update(max_width=10_000), table)
    return (found.maximum if whole else found.minimum) <= console.width


# Samplers and caches -----------------------------------------------------------------------------------------------


def entries(registry: Any, more: dict[str, dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """What a registry holds, as data: name, family, summary, paper, arXiv number, settings with their defaults.

    A class of another package that cannot be imported has the error as its summary.
    """
    from paradec.core.protocol import plain

    found = []
    for name in registry.names():
        try:
            cls = registry.get(name)
        except ImportError as error:
            missing = {"name": name, "family": "other packages", "summary": str(error)}
            found.append(missing | {"paper": "", "arxiv": "", "settings": {}})
            continue
        entry: dict[str, Any] = {"name": name}
        entry |= {key: getattr(cls, key, "") for key in ("family", "summary", "paper", "arxiv")}
        entry["settings"] = {key: plain(value) for key, value in cls.settings().items()}
        found.append(entry | (more or {}).get(name, {}))
    return found


def listing(found: list[dict[str, Any]], hint: str) -> None:
    """Print entries: on a terminal what each does, by family; tab-separated lines with everything elsewhere.

    Args:
        hint: the last line on a terminal.
    """
    if not sys.stdout.isatty():
        columns = ("name", "family", "settings", "paper", "summary")
        rows = [(e["name"], e["family"], settings_of(e) or "-", paper_of(e) or "-", e["summary"]) for e in found]
        table(columns, rows)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for family in dict.fromkeys(entry["family"] for entry in found):
        members = [entry for entry in found if entry["family"] == family]
        console.print(Text(FAMILIES.get(family, family), style="bold"))
        described([(entry["name"], entry["summary"]) for entry in members])
        console.print()
    console.print(Text(hint, style="dim"))


def described(pairs: Sequence[tuple[str, str]], indent: int = 2, most: int = 40) -> None:
    """Print names with what each is, on a terminal: beside each other, or where there is no room below each other.

    Args:
        most: columns that names take at most; longer ones go on in the next line.
    """
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console()
    longest = min(most, max((len(name) for name, _ in pairs), default=0))
    if indent + longest + 2 + NARROWEST <= console.width:
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(width=longest, overflow="fold")
        for name, text in pairs:
            grid.add_row(Text(name, style="cyan"), Text(text, overflow="fold"))
        console.print(Padding(grid, (0, 0, 0, indent)))
        return
    for name, text in pairs:
        console.print(Padding(Text(name, style="cyan"), (0, 0, 0, indent)))
        console.print(Padding(Text(text, overflow="fold"), (0, 0, 0, indent + 2)))


def settings_of(entry: dict[str, Any]) -> str:
    """ "threshold=0.9, quota_per_step=none"."""
    return ", ".join(f"{key}={value}" for key, value in entry["settings"].items())


def paper_of(entry: dict[str, Any]) -> str:
    """ "Fast-dLLM (arXiv:2505.22618)"."""
    return entry["paper"] + (f" (arXiv:{entry['arxiv']})" if entry["arxiv"] else "")


def sheet(kind: str, name: str, cls: Any, as_json: bool, more: dict[str, Any]) -> None:
    """Print what one sampler or cache is: what it does, its paper, its settings with their defaults, its presets.

    Args:
        kind: "sampler" or "cache". more: further lines, by name.
    """
    from paradec.core.protocol import plain

    about, explained = explanations(cls)
    settings = {
        key: {"default": plain(value), "about": explained.get(key, "")} for key, value in cls.settings().items()
    }
    presets = {key: dict(value) for key, value in getattr(cls, "presets", {}).items()}
    arxiv = getattr(cls, "arxiv", "")
    data: dict[str, Any] = {"name": name, "family": cls.family, "summary": cls.summary, "about": about}
    data |= {"paper": cls.paper, "arxiv": arxiv, "settings": settings, "presets": presets, **more}
    if as_json:
        typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
        return
    lines = {"paper": cls.paper + (f", https://arxiv.org/abs/{arxiv}" if arxiv else "")} | more
    lines |= {f"preset {key}": ", ".join(f"{k}={v}" for k, v in changes.items()) for key, changes in presets.items()}
    told = [(key, str(value)) for key, value in lines.items() if value]
    together: dict[str, list[str]] = {}  # settings that are explained together
    for key, each in settings.items():
        together.setdefault(each["about"] or key, []).append(f"{key}={each['default']}")
    said = [(", ".join(names), text if text not in settings else "") for text, names in together.items()]
    use = f"paradec.{kind}s.create({name!r}{', ' + next(iter(settings)) + '=...' if settings else ''})"
    if not sys.stdout.isatty():
        typer.echo(f"{name}: {cls.summary}\n\n{about}\n")
        for title, text in (*told, *said, ("in Python", use)):
            typer.echo(f"{title}\t{text}")
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text.assemble((name, "bold"), f"  {cls.summary}"), Text(f"\n{about}\n"), sep="\n")
    described(told, indent=0)
    if said:
        console.print(Text("\nsettings", style="bold"))
        described(said, most=24)
    console.print(Text(f"\nin Python: {use}", style="dim"))


def explanations(cls: type) -> tuple[str, dict[str, str]]:
    """A class's docstring: its text around `Args:` in paragraphs of one line, and what it says of each argument.

    Arguments that a base explains are looked up there.
    """
    about: list[str] = []
    explained: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        text, said = _sections(inspect.cleandoc(base.__dict__.get("__doc__") or ""))
        explained |= said
        about = text if base is cls else about
    return "\n\n".join(about), explained


def _sections(doc: str) -> tuple[list[str], dict[str, str]]:
    paragraphs: list[str] = []
    said: dict[str, str] = {}
    for block in re.split(r"\n\s*\n", doc):
        first, _, rest = block.partition("\n")
        if first.strip() != "Args:":
            if not re.match(r"(Raises|Returns|Attributes):", first):
                paragraphs.append(" ".join(block.split()))
            continue
        names: list[str] = []
        for line in inspect.cleandoc(rest).splitlines():
            begun = FIRST_LINE.fullmatch(line)
            if begun:
                names = begun[1].split(", ")
                said |= dict.fromkeys(names, begun[2])
            else:
                said |= {name: f"{said[name]} {line.strip()}" for name in names}
    return [text for text in paragraphs if text], said


# The comparison ----------------------------------------------------------------------------------------------------

BY_WORTH = (
    "right %",
    "forwards",
    "tokens/forward",
    "tokens/forward x baseline",
    "many answers %",
    "one answer %",
    "95 %",
    "AUP",
    "tokens/s",
    "tokens/s x baseline",
)
"""Columns of numbers of a comparison, those first that stay where there is little room; others come after them."""


def comparison(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a comparison (`Comparison.columns` and `table`): on a terminal the settings of a sampler are below it,
    and the numbers that there is no room for are left out."""
    if not sys.stdout.isatty():
        table(columns, rows)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    worth = sorted(range(2, len(columns)), key=lambda c: [*BY_WORTH, columns[c]].index(columns[c]))
    kept = len(worth)
    while kept > 1 and not _fits(console, _numbers(columns, rows, sorted(worth[:kept])), whole=True):
        kept -= 1
    shown = sorted(worth[:kept])
    console.print(_numbers(columns, rows, shown))
    left = [columns[column] for column in range(2, len(columns)) if column not in shown]
    if left:
        note = f"no room here for {', '.join(left)}: a wider terminal, a pipe and --json have them"
        console.print(Text(note, style="dim"))


def _numbers(columns: Sequence[str], rows: Sequence[Sequence[str]], shown: Sequence[int]) -> Any:
    """The comparison with some of its columns of numbers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    found = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    names, before = [], ""
    for sampler, setting, *_ in rows:
        name = Text(sampler if sampler != before else "", style="bold")
        for part in setting.split(", ") if setting != "default" else ():
            name.append(f"{'' if not name.plain else chr(10)}  {part}", style="not bold")
        names.append(name)
        before = sampler
    longest = max((len(line) for name in names for line in name.plain.splitlines()), default=0)
    found.add_column("sampler", min_width=longest, no_wrap=True)
    for column in shown:
        head = columns[column].replace("/forward", "/\nforward").replace(" x ", "\nx ").replace(" answer", "\nanswer")
        found.add_column(head, justify="right", no_wrap=True)
    for name, row in zip(names, rows, strict=True):
        found.add_row(name, *(row[column] for column in shown))
    return found
