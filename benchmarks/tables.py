"""Writes the tables of README.md and docs/ from `benchmarks/results/`, and the samplers' settings from their classes.

    python benchmarks/tables.py

`paradec/samplers/listing.json` is written too.

Tables are between `<!-- name -->` and `<!-- /name -->`; nothing else is touched.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def setting(changes: dict[str, Any]) -> str:
    """What an entry changes of the defaults, in words."""
    parts = [f"{k} {v:g}" if isinstance(v, (int, float)) and not isinstance(v, bool) else f"{k} {v}"
             for k, v in changes.items()]  # fmt: skip
    return ", ".join(parts) or "default"


def by_sampler(results: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """The entries of each sampler, the sampler with the most tokens per forward in its first entry first."""

    def speed(entry: dict[str, Any]) -> float:
        return entry["all"]["tokens_per_forward"] if "all" in entry else entry["tokens_per_forward"]

    groups = defaultdict(list)
    for entry in results:
        groups[entry["sampler"]].append(entry)
    return sorted(groups.items(), key=lambda item: -speed(item[1][0]))


def compare_table(data: dict[str, Any], defaults_only: bool) -> str:
    """Right answers and forwards of `paradec compare`."""
    lines = [
        "| sampler | setting | right, one answer | right, many answers | forwards | only padding | tokens per forward "
        "| AUP |",
        "|---" * 8 + "|",
    ]
    for name, entries in by_sampler(data["results"]):
        for index, entry in enumerate(entries):
            if defaults_only and entry["changes"]:
                continue
            cells = [f"`{name}`" if not index else "", setting(entry["changes"])]
            for many in (False, True):
                counts = [count for task, count in entry["tasks"].items() if data["many"][task] == many]
                cells.append(f"{100 * sum(right for right, _ in counts) / sum(of for _, of in counts):.1f}")
            asked = sum(of for _, of in entry["tasks"].values())
            cells += [f"{entry['nfe']:.1f}", f"{entry['padding_forwards'] / asked:.1f}"]
            cells.append(f"{entry['tokens_per_forward']:.2f}")
            cells.append(f"{data['aup'][name]:.0f}" if not index and name in data["aup"] else "")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def headline_table(data: dict[str, Any]) -> str:
    """The best setting of one token per step beside the default sampler, of benchmarks/headline.py."""
    baseline = data["reporting"][1]
    rows = {f"one token per step, in {_blocks(baseline)}": baseline, "`threshold`, the default": data["reporting"][0]}
    lines = [f"| | right, of {baseline['of']} prompts | forwards per answer | tokens per answer |", "|---|---|---|---|"]
    for label, row in rows.items():
        lines.append(f"| {label} | {row['right']} | {row['forwards']:.1f} | {row['tokens']:.1f} |")
    return "\n".join(lines)


def _blocks(row: dict[str, Any]) -> str:
    """How a row of benchmarks/headline.py cuts the answer into blocks."""
    changes = row["changes"]
    if "blocks" in changes:
        return "blocks that end at the end token"
    return f"blocks of {changes.get('block_length', 32)}"


def schedules_table(rows: list[dict[str, Any]]) -> str:
    """Samplers with a schedule, beside `threshold`, in blocks of several lengths, of benchmarks/headline.py."""
    heads = ["sampler", "tokens a step", "blocks", f"right, of {rows[0]['of']}", "95 %", "forwards", "only padding"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        low, high = (row["of"] * share for share in row["interval"])
        a_step = f"{1 / row['changes'].get('steps', 1):.0f}" if row["changes"] else "as many as are sure"
        cells = [f"`{row['sampler']}`", a_step, _blocks(row).removeprefix("blocks ").removeprefix("of ")]
        cells += [str(row["right"]), f"{low:.0f}-{high:.0f}", f"{row['forwards']:.1f}"]
        lines.append("| " + " | ".join([*cells, f"{row['padding_forwards']:.1f}"]) + " |")
    return "\n".join(lines)


def _headline_rows(data: dict[str, Any]) -> list[dict[str, Any]]:
    """`threshold`, the baseline, and the same filling whole blocks of 32."""
    return [*data["reporting"][:2], data["reporting"][-1]]


DECODERS = {"llada": "LLaDA", "dream": "Dream", "fast_dllm": "Fast-dLLM", "dinfer": "dInfer", "dkv_cache": "dKV-Cache"}


def beside_table(data: dict[str, Any]) -> str:
    """What README.md says of benchmarks/peers/text.py: CPU time and memory over those of the public decoders."""
    lines = ["| the public code of | cache | our CPU time over its | peak MiB, ours / its | tokens |", "|---" * 5 + "|"]
    for key, called in DECODERS.items():
        for name, case in data["cases"].items():
            project, _, cache = name.partition(" ")
            if project == key and "compared_with" in case["contestants"]["paradec"]:  # the same tokens: greedy
                ours, theirs = case["contestants"]["paradec"], case["contestants"][key]
                cells = [
                    called,
                    cache or ("its own" if key == "dkv_cache" else "none"),
                    f"{ours[f'cpu_over_{key}'][1]:.2f}",
                ]
                cells.append(f"{ours['peak_mib']:.0f} / {theirs['peak_mib']:.0f}")
                cells.append("equal" if ours["compared_with"]["equal"] else "differ")
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def settings_table() -> str:
    """Every registered sampler's settings with their defaults, and its presets."""
    from paradec import samplers
    from paradec.cli.tables import entries

    lines = ["| sampler | settings | presets |", "|---|---|---|"]
    for entry in entries(samplers):
        values = ", ".join(f"`{key}={value}`" for key, value in entry["settings"].items())
        presets = ", ".join(f"`{name}`" for name in getattr(samplers.get(entry["name"]), "presets", {}))
        lines.append(f"| `{entry['name']}` | {values} | {presets} |")
    return "\n".join(lines)


def samplers_listing() -> str:
    """What `paradec samplers` reads in the place of the classes of paradec's own samplers."""
    from paradec import samplers
    from paradec.cli.tables import entries

    own = [entry for entry in entries(samplers) if samplers.registry.places()[entry["name"]].startswith("paradec.")]
    return json.dumps(own, indent=1, ensure_ascii=False) + "\n"


def heldout_table(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Settings chosen by `first` and measured again by benchmarks/compare_heldout.py, the fastest first."""

    def right(entry: dict[str, Any]) -> int:
        return sum(count for count, _ in entry["tasks"].values())

    def found(data: dict[str, Any], sampler: str) -> dict[str, Any]:
        wanted = (sampler, second["chosen"][sampler])
        return next(entry for entry in data["results"] if (entry["sampler"], entry["changes"]) == wanted)

    asked = sum(of for _, of in second["results"][0]["tasks"].values())
    heads = ["sampler", "setting", f"chosen by: right of {asked}", f"right of {asked} others", "95 %", "forwards"]
    lines = ["| " + " | ".join([*heads, "of the baseline's"]) + " |"]
    lines.append("|---" * 7 + "|")
    base = second["results"][0]["nfe"]
    for name in sorted(second["chosen"], key=lambda name: found(second, name)["nfe"]):
        before, after = found(first, name), found(second, name)
        low, high = after["interval"]
        cells = [f"`{name}`", setting(after["changes"]), str(right(before)), str(right(after))]
        cells += [f"{asked * low:.0f}-{asked * high:.0f}", f"{after['nfe']:.2f}", f"{after['nfe'] / base:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def antibody_table(data: dict[str, Any], defaults_only: bool) -> str:
    """Recovered residues and forwards of benchmarks/antibody.py."""
    lines = [
        "| sampler | setting | fillings | forwards | recovered, % | versus baseline (95 %) | AUP |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, entries in by_sampler(data["results"]):
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


def protein_table(data: dict[str, Any]) -> str:
    """Recovery, scores and forwards of benchmarks/protein.py, of the settings that were chosen on the other chains."""
    lines = [
        "| sampler | setting | forwards | recovered, % | versus baseline (95 %) | score | versus baseline (95 %) "
        "| said | at 0.1: recovered, % | score |",
        "|---" * 10 + "|",
    ]
    warm = {(each["sampler"], setting(each["changes"])): each for each in data["measuring at 0.1"]}
    for entry in _whole(data["measuring at 0"]):
        cells = [f"`{entry['sampler']}`", setting(entry["changes"]), f"{entry['forwards']:.1f}", *_protein_cells(entry)]
        cells.append(f"{entry['said']:.2f}")
        other = warm[entry["sampler"], setting(entry["changes"])]
        cells += [f"{other['recovery']:.1f} ({other['versus_baseline']:+.1f})", f"{other['score']:.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def protein_few_table(data: dict[str, Any]) -> str:
    """The same of ever fewer steps, at both temperatures."""
    lines = [
        "| temperature | sampler | forwards | recovered, % | versus baseline (95 %) | score | versus baseline (95 %) |",
        "|---" * 7 + "|",
    ]
    for temperature in ("0", "0.1"):
        for entry in _whole(data[f"at {temperature}"]):
            cells = [temperature, f"`{entry['sampler']}`", f"{entry['forwards']:.1f}", *_protein_cells(entry)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def protein_exact_table(data: dict[str, Any]) -> str:
    """Calls of the exact samplers at temperature 0.1 (`jacobi` at each), and CPU time beside the public code's."""
    lines = [
        "| chain | residues | `jacobi` at 0.001 | 0.1 | 1 | in chain order | `sjd` | `scd` | CPU time, 1 design "
        "| with encoding | 8 designs | with encoding |",
        "|---" * 12 + "|",
    ]
    for name, chain in data["chains"].items():
        warm = chain["at 0.1"]
        several = [chain[f"at {each}"]["jacobi"] for each in ("0.001", "0.1", "1")]
        several += [warm[each] for each in ("jacobi, chain", "sjd", "scd")]
        calls = [f"{median(each['calls']):g} ({max(each['calls'])})" for each in several]
        times = [f"{chain['cpu'][n][f'share of {what}']:.2f}" for n in ("1", "8") for what in ("decoding", "both")]
        lines.append("| " + " | ".join([name, str(chain["residues"]), *calls, *times]) + " |")
    return "\n".join(lines)


def _whole(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was measured on as many chains as the baseline, which comes first."""
    return [entry for entry in entries if len(entry["chains"]) == len(entries[0]["chains"])]


def _protein_cells(entry: dict[str, Any]) -> list[str]:
    found = []
    for name, change, digits in (("recovery", "versus_baseline", 1), ("score", "score_versus_baseline", 3)):
        low, high = entry[f"{change}_interval"]
        found += [f"{entry[name]:.{digits}f}", f"{entry[change]:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"]
    return found


SHORT_DIGITS = ("ar", "sjd", "scd", "speculative", "gsd", "lantern++", "lantern", "zipar, window 3")


def digits_table(data: dict[str, Any], short: bool) -> str:
    """Forwards and quality of benchmarks/digits.py; short: the rows of docs/samplers_data.md, without intervals."""
    settings = {entry["label"]: entry for entry in data["settings"]}
    if short:
        lines = ["| sampler | lossless | forwards | right, % | Frechet distance | p |"]
    else:
        lines = [
            "| setting | lossless | forwards | drafter's forwards | tokens per forward | right class, % | "
            "Frechet distance | same distribution, p |"
        ]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for label in [name for name in SHORT_DIGITS if name in settings] if short else settings:
        entry = settings[label]
        right, distance = [100 * share for share in entry["accuracy"]], entry["distance"]
        cells = [f"`{label}`", "yes" if entry["lossless"] else "no", f"{entry['forwards'][0]:.1f}"]
        if short:
            drafted = entry["draft_forwards"]
            cells[2] += f", drafter {drafted:.1f}" if drafted else ""
            cells += [f"{right[0]:.1f}", f"{distance[0]:.1f}"]
        else:
            cells += [f"{entry['draft_forwards']:.1f}" if entry["draft_forwards"] else "-"]
            cells += [f"{entry['tokens_per_forward']:.2f}", f"{right[0]:.1f} ({right[1]:.1f}-{right[2]:.1f})"]
            cells += [f"{distance[0]:.1f} ({distance[1]:.1f}-{distance[2]:.1f})"]
        cells.append(f"{entry['permutation_p']:.3f}" if "permutation_p" in entry else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def digits_scales_table(data: dict[str, Any]) -> str:
    """All ways to make digits in few forwards, of benchmarks/digits_scales.py, by the distance."""
    lines = [
        "| method | model | chosen | forwards | positions | CPU, ms | right class, % | Frechet distance | further than "
        "the first |"
    ]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for entry in data["methods"]:
        right, distance = [100 * share for share in entry["accuracy"]], entry["distance"]
        said = entry["settings"] | {name: value for name, value in entry["request"].items() if name != "steps"}
        forwards = f"{entry['forwards'][0]:.1f}"
        forwards += f" + {entry['draft_forwards']:.0f} large" if entry["draft_forwards"] else ""
        apart = entry.get("further")
        cells = [f"`{entry['label']}`", f"`{entry['model']}`", setting({k: v for k, v in said.items() if v != 0})]
        cells += [forwards, f"{entry['positions']:.0f}", f"{entry['milliseconds']:.1f}"]
        cells += [f"{right[0]:.1f} ({right[1]:.1f}-{right[2]:.1f})"]
        cells += [
            f"{distance[0]:.1f} ({distance[1]:.1f}-{distance[2]:.1f})",
            "" if apart is None else "{:.1f} ({:.1f} to {:.1f})".format(*apart),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def many_table(data: dict[str, Any]) -> str:
    """A full batch over fixed ones, of benchmarks/many.py."""
    lines = ["| | slots | calls x batch | CPU time | wall time | equal answers |", "|---" * 6 + "|"]
    for name, entry in data["beside"].items():
        ratio = entry["fixed_over_refilled"]
        cells = [f"{ratio[key]:.2f}" for key in ("slots", "calls_x_batch_size", "cpu_seconds", "wall_seconds")]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {entry['equal_answers']} of {entry['prompts']} |")
    return "\n".join(lines)


def occupancy_table(data: dict[str, Any]) -> str:
    """How full batches of several sizes are, of benchmarks/many.py."""
    entries = data["occupancy"]
    lines = ["| batch | " + " | ".join(str(entry["batch_size"]) for entry in entries) + " |"]
    lines.append("|---" * (len(entries) + 1) + "|")
    lines.append("| slots with a row, % | " + " | ".join(f"{100 * entry['occupancy']:.0f}" for entry in entries) + " |")
    return "\n".join(lines)


def server_table(data: dict[str, Any]) -> str:
    """What clients of `paradec serve` waited, of benchmarks/server.py."""
    lines = ["| | requests | at once | lost | p50, s | p99, s | tokens per second |", "|---" * 7 + "|"]
    for name in ("one_at_a_time", "together", "among_bad_ones"):
        entry = data[name]
        keys = ("requests", "at_once", "lost", "p50_seconds", "p99_seconds", "tokens_per_second")
        cells = (entry[key] for key in keys)
        lines.append(f"| {name.replace('_', ' ')} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def conversations_table(data: dict[str, Any]) -> str:
    """What conversations cost with and without stored beginnings, of benchmarks/conversations.py."""
    head = ["model", "positions", "without", "ratio", "CPU, s", "without", "p50, s", "without", "p99, s", "without"]
    head += ["CPU, nothing shared", "wider model"]
    lines = ["| " + " | ".join(head) + " |", "|---" * 12 + "|"]
    for kind in ("causal", "block_causal"):
        entry = data[kind]
        kept, none = entry["conversations"]["kept"], entry["conversations"]["none"]
        cells = [f"{kept['positions']:,}", f"{none['positions']:,}", f"{entry['positions_ratio']:.2f}"]
        for key in ("cpu_seconds", "p50_seconds", "p99_seconds"):
            cells += [f"{kept[key]:.1f}", f"{none[key]:.1f}"]
        for cost in entry["cpu_ratio_without_reuse"].values():
            cells.append("{:.2f} ({:.2f}-{:.2f})".format(cost["median"], *cost["quartiles"]))
        lines.append(f"| {kind.replace('_', '-')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def jacobi_table(data: dict[str, Any]) -> str:
    """A step beside the model's forward, of benchmarks/jacobi.py."""
    lines = ["| setting | forward, ms | all else, ms | ratio | tokens per step |", "|---" * 5 + "|"]
    for label, entry in data["overhead"].items():
        cells = [f"{entry['forward_ms']:.0f}", f"{entry['overhead_ms']:.1f}", f"{100 * entry['ratio']:.1f} %"]
        lines.append("| " + " | ".join([label, *cells, f"{entry['committed']:.1f}"]) + " |")
    return "\n".join(lines)


def verification_table(data: dict[str, Any]) -> str:
    """Verification beside a loop, of benchmarks/jacobi.py."""
    lines = ["| rows | all at once, ms | loop, ms | ratio |", "|---" * 4 + "|"]
    for label, entry in data["verification"].items():
        cells = [f"{entry['vectorised_ms']:.1f}", f"{entry['looped_ms']:.1f}", f"{entry['ratio']:.1f}"]
        lines.append("| " + " | ".join([label.removeprefix("rows "), *cells]) + " |")
    return "\n".join(lines)


def caches_table(data: dict[str, Any]) -> str:
    """Speed-ups of caches over none, of `benchmarks/caches.py speed`: one row a cache, one column a request."""
    cells: dict[str, dict[str, str]] = {}
    for entry in data["rows"]:
        prompt, new, block, steps = (entry[key] for key in ("prompt", "new", "block", "steps"))
        request = f"{entry['rows']} x ({prompt} + {new}), blocks of {block}, {steps} steps"
        share = f"{100 * entry['positions']:.0f}%, {100 * entry['bookkeeping_of_saved']:.1f}%"
        cells.setdefault(f"`{entry['cache']}`", {})[request] = f"{entry['speed_up']:.2f}x ({share})"
    return _crossed("cache", cells, missing="")


def suffix_table(data: dict[str, Any]) -> str:
    """What suffix windows save, of `benchmarks/suffix.py cost`: one row a length of answer, one column a way."""
    cells: dict[str, dict[str, str]] = {}
    for entry in data["rows"]:
        way = f"`{entry['cache']}`" + (f", {entry['suffix']}" if entry["suffix"] else "")
        share = f" ({entry['of_positions']:.2f}; CPU {entry['of_cpu']:.2f})" if entry["suffix"] else ""
        cells.setdefault(str(entry["answer"]), {})[way] = f"{entry['positions']:,}{share}"
    return _crossed("answer", cells, missing="")


def suffix_accuracy_table(data: dict[str, Any]) -> str:
    """Right answers with suffix windows, of `benchmarks/suffix.py accuracy`: one row a window, one column the slots."""
    cells: dict[str, dict[str, str]] = {}
    for entry in data["rows"]:
        value = f"{100 * entry['right']:.1f} ({entry['positions']:.0f}; {entry['forwards']:.1f} forwards)"
        cells.setdefault(entry["suffix"] or "all masks", {})[f"{entry['slots']} slots"] = value
    return _crossed("suffix", cells, missing="")


def caches_accuracy_table(data: dict[str, Any]) -> str:
    """Right answers under caches, of `benchmarks/caches.py accuracy`: one row a cache, one column a sampler."""
    cells: dict[str, dict[str, str]] = {}
    for entry in data["rows"]:
        name, *changes = entry["cache"].split()
        label = ", ".join([f"`{name}`", *changes])
        value = f"{100 * entry['right']:.1f} ({entry['positions_per_answer']:.0f})"
        cells.setdefault(label, {})[f"`{entry['sampler']}`"] = value
    together = dict(sorted(cells.items(), key=lambda item: [*cells].index(item[0].split(",")[0])))
    return _crossed("cache", together, missing="refused")


def _crossed(corner: str, cells: dict[str, dict[str, str]], missing: str) -> str:
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    lines = [f"| {corner} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(row.get(column, missing) for column in columns) + " |"
              for name, row in cells.items()]  # fmt: skip
    return "\n".join(lines)


def caches_prefix_table(data: dict[str, Any]) -> str:
    """Requests over a kept or shared prefix beside the same ones without, of `benchmarks/caches.py prefix`."""
    lines = ["| request | speed-up | positions evaluated | store |", "|---" * 4 + "|"]
    for entry in data["rows"]:
        store, without = (entry[key] / 2**20 for key in ("store_bytes", "store_bytes_without"))
        cells = [entry["what"], f"{entry['seconds_without'] / entry['seconds']:.2f}x"]
        cells += [f"{entry['positions']} of {entry['positions_without']}", f"{store:.0f} of {without:.0f} MiB"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sparsed_table(data: dict[str, Any]) -> str:
    """Block-sparse beside dense attention, of benchmarks/sparsed.py."""
    header = ["positions", "select", "blocks read", "speed-up", "ideal", "finding the lists, in dense attentions"]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for entry in data["rows"]:
        cells = [str(entry["length"]), str(entry["select"]), f"{100 * entry['density']:.0f}%"]
        cells += [f"{entry[key]:.2f}" for key in ("speed_up", "ideal", "estimation")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def canvases_table(data: dict[str, Any]) -> str:
    """Rows, calls and times beside lock step, of `benchmarks/canvases.py --part schedule`."""
    head = ["settles", "ends", "steps a canvas", "rows: transformers", "ours", "fewer", "fewer on the same paths"]
    head += ["calls: transformers", "ours", "times", "processor time"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for entry in data["schedule"]["rows"]:
        steps, theirs, ratio = entry["steps_per_canvas"], entry["transformers"], entry["cpu_ratio"]
        ours = next(row for row in entry["encode_wait"] if row["wait"] == entry["default_wait"])
        cells = [entry["settles"], "yes" if entry["ends"] else "no"]
        cells += [f"{steps['mean']} ({steps['low']} to {steps['high']})"]
        cells += [str(theirs["rows"]), str(ours["rows"]), f"{ours['rows_fewer']:.2f}x"]
        cells += [f"{ours['rows_fewer_same_paths']:.2f}x", str(theirs["decoder_calls"] + theirs["encoder_calls"])]
        cells += [str(ours["decoder_calls"] + ours["encoder_calls"]), f"{ours['calls_times']:.2f}x"]
        cells += [f"{ratio['median']:.2f}x less ({ratio['low']:.2f} to {ratio['high']:.2f})"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def canvases_wait_table(data: dict[str, Any]) -> str:
    """Decoder and encoder calls: one row a wait, one column a setting."""
    cells: dict[str, dict[str, str]] = {}
    for entry in data["schedule"]["rows"]:
        setting = f"{entry['settles']}, {'with' if entry['ends'] else 'no'} ends"
        rows = {f"`encode_wait` {row['wait']}": row for row in entry["encode_wait"]}
        for name, row in ({"lock step (transformers)": entry["transformers"]} | rows).items():
            cells.setdefault(name, {})[setting] = f"{row['decoder_calls']} + {row['encoder_calls']}"
    return _crossed("decoder + encoder calls", cells, missing="")


def canvases_cost_table(data: dict[str, Any]) -> str:
    """Milliseconds per position of a step outside the model, of `benchmarks/canvases.py --part cost`."""
    lines = ["| kept | ours, ms | transformers, ms | ratio | of ours | of transformers |", "|---" * 6 + "|"]
    for entry in data["cost"]["steps"]:
        ratio = entry["ratio"]
        cells = [f"{100 * entry['kept']:.0f} %", f"{entry['ours_ms']['median']:.1f}"]
        cells += [f"{entry['transformers_with_soft_ms']:.1f}"]
        cells += [f"{ratio['median']:.1f}x ({ratio['low']:.1f} to {ratio['high']:.1f})"]
        for who in ("ours", "transformers"):
            cells.append(", ".join(f"{name} {ms:.1f}" for name, ms in entry[f"{who}_parts_ms"].items() if ms >= 0.05))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def canvases_memory_table(data: dict[str, Any]) -> str:
    """Peaks above the loaded model, of `benchmarks/canvases.py --part memory`."""
    memory = data["memory"]
    lines = ["| | rows | peak, MiB | in logits of a row: by stage |", "|---" * 4 + "|"]
    for entry in memory["peaks"]:
        stages = ", ".join(f"{name} {size / memory['logits_of_a_row']:.1f}" for name, size in entry["stages"].items())
        lines.append(f"| {entry['who']} | {entry['rows']} | {entry['peak'] / 2**20:.0f} | {stages} |")
    return "\n".join(lines)


def peers_text_table(data: dict[str, Any]) -> str:
    """Whole decodes beside public decoders of LLaDA and Dream, with quartiles."""
    beyond = "load_average" in data
    lines = [
        "| beside | CPU time over theirs | wall time over theirs | peak MiB, ours / theirs | tokens | products alone | "
        + ("(ours - products) / (theirs - products) | " if beyond else "")
        + "patched |",
        "|---" * (8 if beyond else 7) + "|",
    ]
    for name, case in data["cases"].items():
        reference = list(case["contestants"])[-1]
        for who, one in case["contestants"].items():
            if who.startswith("paradec"):
                quartiles = (one[f"{clock}_over_{reference}"] for clock in ("cpu", "wall"))
                cells = [f"{middle:.2f} ({low:.2f}-{high:.2f})" for low, middle, high in quartiles]
                cells.append(f"{one['peak_mib']:.0f} / {case['contestants'][reference]['peak_mib']:.0f}")
                same = one.get("compared_with")
                cells.append("drawn" if same is None else "equal" if same["equal"] else "differ")
                told = name if who == "paradec" else f"{name}, {who.removeprefix('paradec ')}"
                bare = case["contestants"].get("matrix products alone", {}).get(f"cpu_over_{reference}")
                cells.append(f"{bare[1]:.2f}" if bare and who == "paradec" else "")
                if beyond:
                    low, middle, high = one[f"cpu_beyond_{reference}"]
                    cells.append(f"{middle:.2f} ({low:.2f}-{high:.2f})")
                lines.append(f"| {told} | " + " | ".join(cells) + f" | {case['patched']} |")
    if beyond:
        low, high = data["load_average"]
        layout = f'weights loaded with `weight_layout="{data["weight_layout"]}"`'
        lines += ["", f"({data['processor']}, load average {low:.1f} to {high:.1f}; {layout}.)"]
    return "\n".join(lines)


def peers_text_line(data: dict[str, Any]) -> str:
    """The same in one line: CPU time over theirs, and what is left beside the products."""
    cells = []
    for name, case in data["cases"].items():
        reference, own = list(case["contestants"])[-1], case["contestants"]["paradec"]
        cells.append(f"{name} {own[f'cpu_over_{reference}'][1]:.2f}, {own[f'cpu_beyond_{reference}'][1]:.2f}")
    return "; ".join(cells) + "."


def processor_steps_table(found: dict[str, dict[str, Any]], part: str) -> str:
    """A part of `benchmarks/token_stats.py --steps`, as multiples of its first row, on each processor."""
    found = {maker: data for maker, data in found.items() if part in data}
    cells = {maker: data[part]["steps" if part == "steps" else "laws"] for maker, data in found.items()}
    lines = ["| | " + " | ".join(found) + " |", "|---" * (1 + len(found)) + "|"]
    for name in next(iter(cells.values())):
        row = []
        for each in cells.values():
            (low, high), middle = each[name]["times_base_quartiles"], each[name]["times_base"]
            alone = f"{each[name]['cpu_ms']:.1f} ms"
            row.append(f"1 ({alone})" if middle == 1 else f"{middle:.2f} ({low:.2f} to {high:.2f})")
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    loads = ", ".join(f"{maker} {max(data[part]['load']):.1f}" for maker, data in found.items())
    return "\n".join([*lines, "", f"(Medians of ratios within a turn, with quartiles; load at most: {loads}.)"])


def layout_table(data: dict[str, Any]) -> str:
    """Products with matrices that lie column by column over the same as they lay, by positions."""
    positions = list(data["rows"][0]["positions"])
    lines = ["| in x out, positions | " + " | ".join(positions) + " |", "|---" * (len(positions) + 1) + "|"]
    for row in data["rows"]:
        cells = [f"{row['positions'][each]['times_base']:.2f}" for each in positions]
        lines.append(f"| {row['in']} x {row['out']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def loading_table(data: dict[str, Any]) -> str:
    """What load and save take and leave in memory, with quartiles."""
    lines = [
        "| | load, s | own + file's MiB after load | after a forward | first forward, later ones, s | save, s | "
        "own + file's MiB after |",
        "|---" * 7 + "|",
    ]
    for who, row in data["rows"].items():

        def seconds(name: str, row: dict[str, Any] = row) -> str:
            low, middle, high = row[f"{name}_seconds"]
            return f"{middle:.3f} ({low:.3f}-{high:.3f})"

        def mib(name: str, row: dict[str, Any] = row) -> str:
            return f"{row[f'{name}_own_mib'][1]:.0f} + {row[f'{name}_file_mib'][1]:.0f}"

        forwards = f"{seconds('first_forward')}, {seconds('forward')}"
        cells = [seconds("load"), mib("load"), mib("first_forward"), forwards, seconds("save"), mib("save")]
        lines.append(f"| {who} | " + " | ".join(cells) + " |")
    low, high = data["load_average"]
    turns = f"{data['turns']} turns on {data['machine']}, load average {low:.0f} to {high:.0f}"
    return "\n".join([*lines, "", f"({turns}; medians and quartiles of processor time.)"])


def peers_rule_table(data: dict[str, Any]) -> str:
    """A step outside of the model's call beside dInfer's rule, with quartiles."""
    lines = ["| logits | milliseconds a step | over dInfer's | tokens |", "|---" * 4 + "|"]
    for name, case in data["cases"].items():
        ours = case["contestants"]["paradec"]
        low, middle, high = ours["cpu_over_dinfer"]
        cells = [f"{1e3 * ours['cpu_seconds'][1] / data['steps']:.1f}", f"{middle:.2f} ({low:.2f}-{high:.2f})"]
        cells.append("equal" if ours["compared_with"]["equal"] else "differ")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def peers_sjd_table(sizes: dict[str, dict[str, Any]]) -> str:
    """Pictures by `sjd` beside its public code, with quartiles: whole ones, and one forward."""
    lines = ["| | codes | forwards, ours / theirs | CPU time over theirs | of a forward | peak MiB, ours / theirs |"]
    lines.append("|---" * 6 + "|")
    for size, name, case in [(size, *each) for size, data in sizes.items() for each in data["cases"].items()]:
        ours, theirs = case["paradec"], case["sjd"]
        low, middle, high = ours["cpu_over_sjd"]
        forward = middle * theirs["forwards"] / ours["forwards"]
        same = "drawn" if "compared_with" not in ours else "equal" if ours["compared_with"]["equal"] else "differ"
        cells = [f"{size}, `{name}`", same, f"{ours['forwards']} / {theirs['forwards']}"]
        cells += [f"{middle:.2f} ({low:.2f}-{high:.2f})", f"{forward:.2f}"]
        cells.append(f"{ours['peak_mib']:.0f} / {theirs['peak_mib']:.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def drafters_table(parts: dict[str, list[dict[str, Any]]]) -> str:
    """Ways to draft without a trained drafter: parts by what they are of."""
    lines = ["| | drafts | setting | forwards | calls | positions | CPU time |", "|---" * 7 + "|"]
    for what, rows in parts.items():
        for row in rows:
            low, middle, high = row["cpu_over_token_by_token"]
            cells = [what, row["way"], row["setting"] or "-", f"{row['forwards']:.1f}", f"{row['draft_calls']:.1f}"]
            lines.append(
                "| " + " | ".join([*cells, f"{row['positions']:.1f}", f"{middle:.2f} ({low:.2f}-{high:.2f})"]) + " |"
            )
    return "\n".join(lines)


def peers_pictures_table(*results: dict[str, Any]) -> str:
    """Forecasts beside others: CPU time of a run over that of each of them, with quartiles."""
    head = ["diffusers", "cache-dit", "paradec, before"]
    lines = ["| | | over diffusers' hook | over cache-dit | over paradec before |", "|---|---|---|---|---|"]
    for data in results:
        for model, entry in data["results"].items():
            for name, one in entry["contestants"].items():
                cells = []
                for base in head:
                    low, middle, high = one.get(f"cpu_over_{base}", [0.0] * 3)
                    cells.append("1" if base == name else f"{middle:.2f} ({low:.2f}-{high:.2f})" if middle else "-")
                lines.append(f"| {model} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def pipelined_table(data: dict[str, Any]) -> str:
    """Right answers, forwards, rows and positions with several open blocks and with branches."""
    lines = [f"| sampler | blocks | cache | right, of {data['prompts']} | forwards | rows | positions |"]
    lines.append("|---|---|---|---|---|---|---|")
    for entry in data["results"]:
        kind, changes = entry["blocks"].rstrip(")").split("(")
        left_out = ("align=", "full=", "forced='first'")
        said = [part for part in changes.split(", ") if not part.startswith(left_out)]
        cells = [entry["sampler"], f"`{kind}({', '.join(said)})`", f"`{entry['cache']}`", str(entry["right"])]
        cells += [f"{entry['forwards']:.2f}", f"{entry['rows']:.2f}", f"{entry['positions']:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


COSTS = {"forwards": "forwards", "positions": "positions", "cpu": "CPU seconds"}
"""Of benchmarks/ranking.py."""


def ranking_table(place: dict[str, Any]) -> str:
    """What was reported at one place of benchmarks/ranking.py: by kind, the least CPU first."""
    lines = [
        "| kind | candidate | score, % | versus `threshold` (95 %) | forwards | positions | CPU, ms | of `threshold`'s "
        "| above today's by |",
        "|---" * 9 + "|",
    ]
    kinds = ("today", "knobs", "new")
    for row in sorted(place["reported"], key=lambda row: (kinds.index(row["kind"]), row["cpu"])):
        change, low, high = (100 * value for value in row["versus_baseline"])
        middle, least, most = row["cpu_of_baseline"]
        above = [COSTS[cost] for cost, found in row["against"]["today"].items() if found["above"]]
        cells = [row["kind"], row["name"], f"{100 * row['score']:.1f}", f"{change:+.1f} ({low:+.1f} to {high:+.1f})"]
        cells += [f"{row['forwards']:.2f}", f"{row['positions']:.0f}", f"{1e3 * row['cpu']:.1f}"]
        cells += [f"{middle:.2f} ({least:.2f}-{most:.2f})", ", ".join(above)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ranking_places_table(data: dict[str, Any]) -> str:
    """How much was measured at each place of benchmarks/ranking.py."""
    lines = ["| place | candidates | prompts that choose | reported candidates | prompts | in a turn | in a batch |"]
    lines.append("|---" * 7 + "|")
    for name, place in data["places"].items():
        sizes = place["prompts"]
        cells = [len(place["choosing"]), sizes["choosing"], len(place["reported"]), sizes["reported"]]
        lines.append("| " + " | ".join([name, *map(str, [*cells, sizes["timed"], sizes["batch"]])]) + " |")
    return "\n".join(lines)


def ranking_answers_table(data: dict[str, Any]) -> str:
    """By place and cost of benchmarks/ranking.py: how many new candidates are above the others, and the best one."""
    lines = ["| place | cost | above today's rules | above those with knobs too |", "|---" * 4 + "|"]
    for name, place in data["places"].items():
        for cost, label in COSTS.items():
            cells = [_best_above(place["reported"], cost, rivals) for rivals in ("today", "older")]
            lines.append(f"| {name} | {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _best_above(rows: list[dict[str, Any]], cost: str, rivals: str) -> str:
    """The highest score of what is above and not clearly worse than the baseline, the cheaper one of equal ones."""
    good = [row for row in rows if row["against"][rivals][cost]["above"] and row["versus_baseline"][2] >= 0]
    if not good:
        return "none"
    best = max(good, key=lambda row: (row["score"], -row[cost]))
    nearest, ratio = (best["against"][rivals][cost][key] for key in ("nearest", "ratio"))
    beside = f"{ratio:.2f} of {nearest}" if nearest else "nothing is as good"
    return f"{len(good)}; {best['name']}: {100 * best['score']:.1f} %, {beside}"


def ranking_alone_table(place: dict[str, Any]) -> str:
    """What each addition does to `threshold`, on the half that chose."""
    lines = ["| `threshold` with | score, % | forwards | positions | CPU, ms |", "|---" * 5 + "|"]
    for row in place["choosing"]:
        rule, *more = row["name"].split(", ")
        if rule == "threshold" and not {"suffix", "cache"} <= {entry.split()[0] for entry in more}:
            cells = [", ".join(more) or "nothing", f"{100 * row['score']:.1f}", f"{row['forwards']:.2f}"]
            lines.append("| " + " | ".join([*cells, f"{row['positions']:.0f}", f"{1e3 * row['cpu']:.1f}"]) + " |")
    return "\n".join(lines)


def probes_table(data: dict[str, Any]) -> str:
    """Ways to decide when to evaluate: error, with half of its 95 % interval, and cost, at each budget of steps."""
    models = list(data["results"])
    lines = ["| at most | | " + " | ".join(models) + " |", "|---" * (len(models) + 2) + "|"]
    for budget, way, rows in _probed(data):
        cells = ["-" if row is None else _strayed(row) for row in rows]
        lines.append(f"| {budget} | {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def probes_even_table(data: dict[str, Any]) -> str:
    """The same errors over those of evenly spread evaluations: geometric means with 95 % intervals."""
    models = list(data["results"])
    lines = ["| at most | | " + " | ".join(models) + " |", "|---" * (len(models) + 2) + "|"]
    for budget, way, rows in _probed(data):
        if all(row is None or row["over_even"]["mean"] == 1 for row in rows):
            continue
        cells = []
        for row in rows:
            found = {} if row is None else row["over_even"]
            cells.append(f"{found['mean']:.2f} ({found['low']:.2f}-{found['high']:.2f})" if found else "-")
        lines.append(f"| {budget} | {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def probes_published_table(data: dict[str, Any]) -> str:
    """Settings as published: error and cost, as they are."""
    models = list(data["results"])
    lines = ["| | " + " | ".join(models) + " |", "|---" * (len(models) + 1) + "|"]
    for way in data["results"][models[0]]["published"]:
        rows = [data["results"][model]["published"][way] for model in models]
        lines.append(f"| {way} | {' | '.join(map(_strayed, rows))} |")
    return "\n".join(lines)


def skipping_table(data: dict[str, Any]) -> str:
    """Rules beside even and searched steps: error, with half of its 95 % interval, and over the best even steps."""
    models = list(data["results"])
    lines = ["| steps | | " + " | ".join(models) + " |", "|---" * (len(models) + 2) + "|"]
    for budget in data["results"][models[0]]:
        for way in dict.fromkeys(way for found in data["results"].values() for way in found[budget]):
            cells = []
            for found in data["results"].values():
                row = found[budget].get(way)
                over = {} if row is None else row["over_even"]
                ratio = f"{over['mean']:.2f} ({over['low']:.2f}-{over['high']:.2f})" if over else ""
                error = "" if row is None else f"{row['error']['mean']:.3f} +- {row['error']['half']:.3f}; "
                cells.append(error + ratio or "-")
            lines.append(f"| {budget} | {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _probed(data: dict[str, Any]) -> list[tuple[int, str, list[dict[str, Any] | None]]]:
    """Budget, way, and its row of every model; None where no setting keeps to the budget."""
    models = data["results"]
    ways = list(dict.fromkeys(way for found in models.values() for way in found["ways"]))
    return [
        (budget, way, [found["ways"].get(way, {}).get(str(budget)) for found in models.values()])
        for budget in data["facts"]["budgets"]
        for way in ways
    ]


def _strayed(row: dict[str, Any]) -> str:
    error = row["error"]
    return f"{error['mean']:.3f} +- {error['half']:.3f}; {row['blocks']:.0%}, {row['cpu']:.0%}"


def rendered() -> dict[str, str]:
    """The text of every file that has tables, with the tables of the present results.

    Raises:
        SystemExit: a file has no place for one of its tables.
    """
    names = ("compare", "compare_heldout", "antibody", "antibody_heldout", "digits", "jacobi")
    compare, compare_heldout, antibody, antibody_heldout, digits, jacobi = (_result(name) for name in names)
    canvases, ranking, probes = _result("canvases"), _result("ranking_text"), _result("probes")
    headline = _result("headline")
    steps = {maker: _result(f"token_stats_steps_{maker.lower()}") for maker in ("AMD", "Intel")}
    tables = {
        "README.md": {"headline": headline_table(headline), "beside": beside_table(_result("peers_text"))},
        "docs/attention.md": {"sparsed": sparsed_table(_result("sparsed"))},
        "docs/caches.md": {
            "caches": caches_table(_result("caches")),
            "caches_accuracy": caches_accuracy_table(_result("caches_accuracy")),
            "caches_prefix": caches_prefix_table(_result("caches_prefix")),
            "suffix": suffix_table(_result("suffix")),
            "suffix_accuracy": suffix_accuracy_table(_result("suffix_accuracy")),
        },
        "docs/canvases.md": {
            "canvases": canvases_table(canvases),
            "canvases_wait": canvases_wait_table(canvases),
            "canvases_cost": canvases_cost_table(canvases),
            "canvases_memory": canvases_memory_table(canvases),
        },
        "docs/comparison.md": {
            "headline_rows": schedules_table(_headline_rows(headline)),
            "compare_defaults": compare_table(compare, True),
            "compare_heldout": heldout_table(compare, compare_heldout),
            "antibody_defaults": antibody_table(antibody, True),
        },
        "docs/comparison_data.md": {
            "compare": compare_table(compare, False),
            "schedules": schedules_table(headline["choosing"]),
            "schedules_heldout": schedules_table(headline["reporting"]),
            "antibody": antibody_table(antibody, False),
            "antibody_heldout": antibody_table(antibody_heldout, False),
            "protein": protein_table(_result("protein")),
            "protein_few": protein_few_table(_result("protein_few")),
        },
        "docs/performance.md": {"token_stats_draws": processor_steps_table(steps, "draws")},
        "docs/proteins.md": {"protein_exact": protein_exact_table(_result("protein_exact"))},
        "docs/ranking.md": {
            "ranking_places": ranking_places_table(ranking),
            "ranking_answers": ranking_answers_table(ranking),
            "ranking_64": ranking_table(ranking["places"]["packaged-64"]),
            "ranking_256": ranking_table(ranking["places"]["packaged-256"]),
            "ranking_antibody": ranking_table(ranking["places"]["antibody"]),
            "ranking_alone": ranking_alone_table(ranking["places"]["packaged-64"]),
        },
        "docs/diffusion_data.md": {
            "probes": probes_table(probes),
            "probes_even": probes_even_table(probes),
            "probes_published": probes_published_table(probes),
            "skipping": skipping_table(_result("skipping")),
        },
        "docs/images.md": {
            "digits": digits_table(digits, short=False),
            "jacobi": jacobi_table(jacobi),
            "jacobi_verification": verification_table(jacobi),
        },
        "docs/text.md": {
            "many": many_table(_result("many")),
            "occupancy": occupancy_table(_result("many")),
        },
        "docs/serving.md": {
            "server": server_table(_result("server")),
            "conversations": conversations_table(_result("conversations")),
        },
        "docs/scales.md": {"digits_scales": digits_scales_table(_result("digits_scales"))},
        "docs/samplers.md": {"headline_rows": schedules_table(_headline_rows(headline))},
        "docs/samplers_data.md": {
            "settings": settings_table(),
            "pipelined": pipelined_table(_result("pipelined")),
            "digits": digits_table(digits, short=True),
        },
        "docs/performance_data.md": {
            "peers_text": peers_text_table(_result("peers_text")),
            "peers_text_intel": peers_text_line(_result("peers_text_intel")),
            "peers_rule": peers_rule_table(_result("peers_rule")),
            "token_stats_over_softmax": processor_steps_table(steps, "over_softmax"),
            "token_stats_steps": processor_steps_table(steps, "steps"),
            "layout": layout_table(_result("layout")),
            "loading": loading_table(_result("loading")),
            "peers_text_words": peers_text_table(_result("peers_text_words")),
            "peers_text_bfloat16": peers_text_table(_result("peers_text_bfloat16")),
            "peers_sjd": peers_sjd_table({"small": _result("peers_sjd"), "tiny": _result("peers_sjd_tiny")}),
            "drafters_text": drafters_table(_result("drafters_text")["parts"]),
            "drafters_digits": drafters_table(_result("drafters_digits")["parts"]),
            "peers_pictures": peers_pictures_table(
                *(_result(f"peers_pictures_{size}") for size in ("tiny", "wide", "deep"))
            ),
        },
    }
    found = {}
    for file, named in tables.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        for name, table in named.items():
            pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
            if not pattern.search(text):
                raise SystemExit(f"{file} has no <!-- {name} --> ... <!-- /{name} -->")
            text = pattern.sub(lambda match, table=table: match[1] + table + "\n" + match[2], text)
        found[file] = text
    return found


def _result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def main() -> None:
    for file, text in (rendered() | {"paradec/samplers/listing.json": samplers_listing()}).items():
        (ROOT / file).write_text(text, encoding="utf-8")
        print(f"written to {file}")


if __name__ == "__main__":
    main()
