"""Writes the tables of README.md and docs/comparison.md from benchmarks/results/{compare,antibody}.json.

    python benchmarks/tables.py

Tables stand between `<!-- name -->` and `<!-- /name -->`; nothing else is touched.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def setting(changes: dict[str, Any]) -> str:
    """What an entry changes of the defaults, in words."""
    parts = [f"{k} {v:g}" if isinstance(v, (int, float)) and not isinstance(v, bool) else f"{k} {v}"
             for k, v in changes.items()]  # fmt: skip
    return ", ".join(parts) or "default"


def by_sampler(results: list[dict[str, Any]], aup: dict[str, float]) -> list[tuple[str, list[dict[str, Any]]]]:
    """The entries of each sampler, the sampler with the largest AUP first."""
    groups = defaultdict(list)
    for entry in results:
        groups[entry["sampler"]].append(entry)
    return sorted(groups.items(), key=lambda item: -aup.get(item[0], 0.0))


def compare_table(data: dict[str, Any], defaults_only: bool) -> str:
    """Right answers and forwards of `paradec compare`."""
    lines = ["| sampler | setting | right, one answer | right, many answers | forwards | tokens per forward | AUP |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name, entries in by_sampler(data["results"], data["aup"]):
        for index, entry in enumerate(entries):
            if defaults_only and entry["changes"]:
                continue
            cells = [f"`{name}`" if not index else "", setting(entry["changes"])]
            for many in (False, True):
                counts = [count for task, count in entry["tasks"].items() if data["many"][task] == many]
                cells.append(f"{100 * sum(right for right, _ in counts) / sum(of for _, of in counts):.1f}")
            cells += [f"{entry['nfe']:.1f}", f"{entry['tokens_per_forward']:.2f}"]
            cells.append(f"{data['aup'][name]:.0f}" if not index and name in data["aup"] else "")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def antibody_table(data: dict[str, Any], defaults_only: bool) -> str:
    """Recovered residues and forwards of benchmarks/antibody.py."""
    lines = [
        "| sampler | setting | fillings | forwards | recovered, % | versus baseline (95 %) | AUP |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, entries in by_sampler(data["results"], data["aup"]):
        chosen = [entry for entry in entries if not entry["changes"]] or entries[:1] if defaults_only else entries
        for index, entry in enumerate(chosen):
            found = entry["all"]
            low, high = found["versus_baseline_interval"]
            cells = [f"`{name}`" if not index else "", setting(entry["changes"])]
            cells += [str(found["fillings"]), f"{found['nfe']:.1f}"]
            cells += [f"{found['recovery']:.1f}", f"{found['versus_baseline']:+.1f} ({low:+.1f} to {high:+.1f})"]
            cells.append(f"{data['aup'][name]:.0f}" if not index and name in data["aup"] else "")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    compare = json.loads((RESULTS / "compare.json").read_text())
    antibody = json.loads((RESULTS / "antibody.json").read_text())
    for path, defaults_only in ((ROOT / "README.md", True), (ROOT / "docs" / "comparison.md", False)):
        text = path.read_text()
        tables = {
            "compare": compare_table(compare, defaults_only),
            "antibody": antibody_table(antibody, defaults_only),
        }
        for name, table in tables.items():
            pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
            if not pattern.search(text):
                raise SystemExit(f"{path.name} has no <!-- {name} --> ... <!-- /{name} -->")
            text = pattern.sub(lambda match, table=table: match[1] + table + "\n" + match[2], text)
        path.write_text(text)
        print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
