"""Write the tables of README.md and docs/ from `benchmarks/results/`, and the samplers' settings from their classes.

    python benchmarks/tables.py

Tables on pages are between `<!-- name -->` and `<!-- /name -->`; other text is not changed. Long tables are CSV files
in docs/tables.
"""

from __future__ import annotations

import csv
import io
import re
import string
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # a test reads this file by its path

from laptop import build_table  # noqa: E402
from provenance import RESULTS, read_result  # noqa: E402

Row = dict[str, Any]
Cells = dict[str, dict[str, str]]
"""Texts of cells, by row and column."""


class Formatter(string.Formatter):
    """Formatter of cells with additional formats: "p" writes a share in per cent ("{right:.1p}"), "q" a list [quartile,
    median, quartile], "MiB" a number of bytes. None is an empty cell."""

    def format_field(self, value: Any, spec: str) -> str:
        if value is None:
            return ""
        if spec == "q":
            return "{1:.2f} ({0:.2f}-{2:.2f})".format(*value)
        if spec == "MiB":
            return f"{value / 2**20:.0f}"
        if spec.endswith("p"):
            return format(100 * value, spec[:-1] + "f")
        return str(super().format_field(value, spec))


def table(rows: Iterable[Row], head: str, cells: str) -> str:
    """Format rows as a Markdown table.

    Args:
        head: names of the columns, joined by " | ".
        cells: format string of each cell, over the fields of a row, joined by " | ".
    """
    lines = [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
    return "\n".join([*lines, *(f"| {Formatter().vformat(cells, (), row)} |" for row in rows)])


def cross_table(corner: str, cells: Cells, missing: str) -> str:
    """Format cells by row and column as a table. `corner` is the heading over the rows' names, and like these may
    fill two columns ("a | b"). `missing` is the text of cells without a value."""
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    rows = ({"cells": " | ".join([name, *(row.get(head, missing) for head in columns)])} for name, row in cells.items())
    return table(rows, " | ".join([corner, *columns]).lstrip(), "{cells}")


def add_names(rows: dict[str, Row]) -> Iterable[Row]:
    """Add the name of each row to the row."""
    return ({"name": name} | row for name, row in rows.items())


def describe_changes(changes: dict[str, Any]) -> str:
    """Describe how settings differ from the defaults; "default" if none does."""
    parts = [f"{k} {v:g}" if isinstance(v, (int, float)) and not isinstance(v, bool) else f"{k} {v}"
             for k, v in changes.items()]  # fmt: skip
    return ", ".join(parts) or "default"


def group_by_sampler(data: Row) -> Iterable[Row]:
    """Group rows by sampler; only the first row of a group has the sampler's name and AUP. Groups are sorted by the
    tokens per forward of their first row, descending."""
    groups = defaultdict(list)
    for row in data["results"]:
        groups[row["sampler"]].append(row)
    for name, rows in sorted(groups.items(), key=lambda item: -item[1][0]["tokens_per_forward"]):
        for index, row in enumerate(rows):
            first = {"name": f"`{name}`", "aup": data["aup"].get(name)} if not index else {"name": "", "aup": None}
            yield row | first | {"setting": describe_changes(row["changes"])}


def compare_table(data: Row) -> str:
    """Right answers and forwards of `paradec compare`."""
    rows = []
    for row in group_by_sampler(data):
        one, many = row["one_answer"], row["many_answers"]
        shares = {"one": one[0] / one[1], "many": many[0] / many[1]}
        rows.append(row | shares | {"padding": row["padding_forwards"] / (one[1] + many[1])})
    head = "sampler | setting | right, one answer | right, many answers | forwards | only padding | tokens per forward"
    cells = "{name} | {setting} | {one:.1p} | {many:.1p} | {forwards:.1f} | {padding:.1f} | {tokens_per_forward:.2f}"
    return table(rows, head + " | AUP", cells + " | {aup:.0f}")


def heldout_table(first: Row, second: Row) -> str:
    """Settings chosen from the results `first`, as measured on other prompts (`second`, from
    benchmarks/compare_heldout.py), the fastest first."""
    before = {(row["sampler"], describe_changes(row["changes"])): row for row in first["results"]}
    base, rows = second["results"][0], []
    num_prompts = base["one_answer"][1] + base["many_answers"][1]
    for row in second["results"]:
        if second["chosen"].get(row["sampler"]) == row["changes"]:
            values = {"setting": describe_changes(row["changes"]), "share": row["forwards"] / base["forwards"]}
            results = before[row["sampler"], values["setting"]], row
            values["right"] = [result["one_answer"][0] + result["many_answers"][0] for result in results]
            rows.append(row | values | {"bounds": [num_prompts * share for share in row["interval"]]})
    rows.sort(key=lambda row: row["forwards"])
    head = f"sampler | setting | chosen by: right of {num_prompts} | right of {num_prompts} others | 95 % | forwards"
    cells = "`{sampler}` | {setting} | {right[0]} | {right[1]} | {bounds[0]:.0f}-{bounds[1]:.0f} | {forwards:.2f}"
    return table(rows, head + " | of the baseline's", cells + " | {share:.2f}")


def schedules_table(rows: list[Row]) -> str:
    """Samplers that commit a fixed number of tokens per step, and `threshold`, from benchmarks/headline.py."""
    shown = []
    for row in rows:
        tokens = f"{1 / row['changes'].get('steps', 1):.0f}" if row["changes"] else "all above 0.9"
        blocks = "that end at the end token" if "blocks" in row["changes"] else row["changes"].get("block_length", 32)
        bounds = [row["of"] * share for share in row["interval"]]
        shown.append(row | {"at_once": tokens, "blocks": blocks, "bounds": bounds})
    head = f"sampler | tokens a step | blocks | right, of {rows[0]['of']} | 95 % | forwards | only padding"
    cells = "`{sampler}` | {at_once} | {blocks} | {right} | {bounds[0]:.0f}-{bounds[1]:.0f} | {forwards:.1f}"
    return table(shown, head, cells + " | {padding_forwards:.1f}")


def _cases(data: Row) -> list[Row]:
    """Comparisons with public code: for each case paradec's row, the peer's row, and the ratios."""
    cases = []
    for name, case in data["cases"].items():
        contestants = {row["name"]: row for row in case["contestants"]}
        peer, entry = list(contestants)[-1], contestants["paradec"]
        same = entry.get("compared_with")
        tokens = "drawn" if same is None else "equal" if same["equal"] else "differ"
        bare = contestants.get("matrix products alone", {}).get(f"cpu_over_{peer}", [None] * 3)[1]
        row = {"case": name, "peer": peer, "ours": entry, "theirs": contestants[peer], "tokens": tokens, "bare": bare}
        cases.append(case | row | {key: entry.get(f"{key}_{peer}") for key in ("cpu_over", "wall_over", "cpu_beyond")})
    return cases


PEAKS = "{ours[peak_mib]:.0f} / {theirs[peak_mib]:.0f}"


def peers_text_table(data: Row) -> str:
    """Whole answers compared with public decoders of LLaDA and Dream, with quartiles."""
    rows = _cases(data)
    head = "case | CPU time over the peer's | wall time over the peer's | peak MiB, paradec / peer | tokens"
    cells = f"{{case}} | {{cpu_over:q}} | {{wall_over:q}} | {PEAKS} | {{tokens}}"
    if rows[0]["bare"] is not None:
        head += " | products alone | (paradec - products) / (peer - products)"
        cells += " | {bare:.2f} | {cpu_beyond:q}"
    low, high = data["load_average"]
    about = f"({data['processor']}, load average {low:.1f} to {high:.1f}.)"
    return "\n".join([table(rows, head + " | patched", cells + " | {patched}"), "", about])


def peers_rule_table(data: Row) -> str:
    """Time of a decoding step without the model's call, compared with dInfer's rule, with quartiles."""
    rows = [row | {"step": 1e3 * row["ours"]["cpu_seconds"][1] / data["steps"]} for row in _cases(data)]
    head = "logits | milliseconds a step | over dInfer's | tokens"
    return table(rows, head, "{case} | {step:.1f} | {cpu_over:q} | {tokens}")


def peers_sjd_table(sizes: dict[str, Row]) -> str:
    """CPU time of images by `sjd` compared with its public code, with quartiles: for a whole image and per forward."""
    rows = [row | {"size": size} for size, data in sizes.items() for row in _cases(data)]
    for row in rows:
        row["forward"] = row["cpu_over"][1] * row["theirs"]["forwards"] / row["ours"]["forwards"]
    head = "| codes | forwards, paradec / peer | CPU time over the peer's | of a forward | peak MiB, paradec / peer"
    cells = "{size}, `{case}` | {tokens} | {ours[forwards]} / {theirs[forwards]} | {cpu_over:q} | {forward:.2f}"
    return table(rows, head, f"{cells} | {PEAKS}")


def peers_pictures_table(*results: Row) -> str:
    """Forecasting in diffusers pipelines compared with other libraries: ratios of CPU time per run, with quartiles."""
    rows = []
    for case, entry in [case for data in results for case in data["cases"].items()]:
        for row in entry["contestants"]:
            ratios = {}
            for base in ("diffusers", "cache-dit"):
                over = row.get(f"cpu_over_{base}")
                ratios[base] = (
                    "1" if base == row["name"] else f"{over[1]:.2f} ({over[0]:.2f}-{over[2]:.2f})" if over else "-"
                )
            rows.append({"cells": " | ".join([case, row["name"], *ratios.values()])})
    return table(rows, "| | over diffusers' hook | over cache-dit", "{cells}")


def settings_table() -> str:
    """Settings of all registered samplers and caches with their defaults, and the settings that each preset changes."""
    from paradec import caches, samplers

    def list_values(values: dict[str, Any]) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in values.items())

    rows = []
    for registry in (samplers, caches):
        for name in registry.names():
            cls = registry.get(name)
            presets = getattr(cls, "presets", {}).items()
            presets = "; ".join(f"{preset}({list_values(changes)})" for preset, changes in presets)
            rows.append({"kind": cls.kind, "name": name, "settings": list_values(cls.settings()), "presets": presets})
    return table(rows, "kind | name | settings | presets", "{kind} | {name} | {settings} | {presets}")


def _difference(name: str, digits: int) -> str:
    """Build the format string of a difference from the baseline, with its interval."""
    low, high = (f"{{{name}_interval[{end}]:+.{digits}f}}" for end in (0, 1))
    return f"{{{name}:+.{digits}f}} ({low} to {high})"


def antibody_table(data: Row) -> str:
    """Recovered residues and forwards, from benchmarks/antibody.py."""
    head = "sampler | setting | fillings | forwards | recovered, % | versus baseline (95 %) | AUP"
    cells = "{name} | {setting} | {fillings} | {forwards:.1f} | {recovery:.1f} | "
    return table(group_by_sampler(data), head, cells + _difference("versus_baseline", 1) + " | {aup:.0f}")


def protein_exact_table(data: Row) -> str:
    """Model calls of the exact samplers at temperature 0.1 (`jacobi` also at 0.001 and 1), and CPU time relative to the
    public code."""
    columns = [("jacobi", 0.001), ("jacobi", 0.1), ("jacobi", 1), ("jacobi, chain", 0.1), ("sjd", 0.1), ("scd", 0.1)]
    calls_of = {(row["chain"], row["sampler"], row["temperature"]): row["calls"] for row in data["designs"]}
    rows = []
    for row in data["chains"]:
        calls = [calls_of[(row["chain"], *case)] for case in columns]
        rows.append(row | {"calls": " | ".join(f"{median(counts):g} ({max(counts)})" for counts in calls)})
    head = "chain | residues | `jacobi` at 0.001 | 0.1 | 1 | in chain order | `sjd` | `scd` | CPU time, 1 design"
    cells = "{chain} | {residues} | {calls} | {decoding_1:.2f} | {both_1:.2f} | {decoding_8:.2f} | {both_8:.2f}"
    return table(rows, head + " | with encoding | 8 designs | with encoding", cells)


SHORT_DIGITS = ("ar", "sjd", "scd", "speculative", "gsd", "lantern++", "lantern", "zipar, window 3")
QUALITY = (
    "{accuracy[0]:.1p} ({accuracy[1]:.1p}-{accuracy[2]:.1p}) | {distance[0]:.1f} ({distance[1]:.1f}-{distance[2]:.1f})"
)


def digits_table(data: Row, short: bool) -> str:
    """Forwards and quality, from benchmarks/digits.py. With `short`, one setting for each sampler, without
    intervals."""
    rows = {row["label"]: row | {"exact": "yes" if row["lossless"] else "no"} for row in data["settings"]}
    for row in rows.values():
        row["drafter"] = f"{row['draft_forwards']:.1f}" if row["draft_forwards"] else "-"
        row["added"] = f", drafter {row['drafter']}" if row["draft_forwards"] else ""
    if short:
        head = "sampler | lossless | forwards | right, % | Frechet distance | p"
        cells = "`{label}` | {exact} | {forwards[0]:.1f}{added} | {accuracy[0]:.1p} | {distance[0]:.1f}"
        return table([rows[label] for label in SHORT_DIGITS], head, cells + " | {permutation_p:.3f}")
    head = "setting | lossless | forwards | drafter's forwards | tokens per forward | right class, % | Frechet distance"
    cells = "`{label}` | {exact} | {forwards[0]:.1f} | {drafter} | {tokens_per_forward:.2f} | "
    return table(rows.values(), head + " | same distribution, p", cells + QUALITY + " | {permutation_p:.3f}")


def digits_scales_table(data: Row) -> str:
    """Methods that generate digits in few forwards, from benchmarks/digits_scales.py, sorted by distance."""
    rows = []
    for row in data["methods"]:
        values = row["settings"] | {name: value for name, value in row["request"].items() if name != "steps"}
        texts = {"chosen": describe_changes({name: value for name, value in values.items() if value != 0})}
        texts["large"] = f" + {row['draft_forwards']:.0f} large" if row["draft_forwards"] else ""
        texts["apart"] = "{:.1f} ({:.1f} to {:.1f})".format(*row["further"]) if row["further"] else ""
        rows.append(row | texts)
    head = "method | model | chosen | forwards | positions | CPU, ms | right class, % | Frechet distance"
    cells = "`{label}` | `{model}` | {chosen} | {forwards[0]:.1f}{large} | {positions:.0f} | {milliseconds:.1f} | "
    return table(rows, head + " | further than the first", cells + QUALITY + " | {apart}")


def many_table(data: Row) -> str:
    """Costs of fixed batches over those of batches whose free slots are refilled, from benchmarks/many.py."""
    names = ("slots", "calls_x_batch_size", "cpu_seconds", "wall_seconds")
    ratios = " | ".join(f"{{fixed_over_refilled[{name}]:.2f}}" for name in names)
    head = "| slots | calls x batch | CPU time | wall time | equal answers"
    return table(add_names(data["beside"]), head, f"{{name}} | {ratios} | {{equal_answers}} of {{prompts}}")


def occupancy_table(data: Row) -> str:
    """Share of batch slots in use, by batch size, from benchmarks/many.py."""
    shares = {str(row["batch_size"]): f"{100 * row['occupancy']:.0f}" for row in data["occupancy"]}
    return cross_table("batch", {"slots with a row, %": shares}, missing="")


def server_table(data: Row) -> str:
    """Response times for clients of `paradec serve`, from benchmarks/server.py."""
    rows = ({"name": name.replace("_", " ")} | data[name] for name in ("one_at_a_time", "together", "among_bad_ones"))
    head = "| requests | at once | lost | p50, s | p99, s | tokens per second"
    cells = "{name} | {requests} | {at_once} | {lost} | {p50_seconds} | {p99_seconds} | {tokens_per_second}"
    return table(rows, head, cells)


def conversations_table(data: Row) -> str:
    """Costs of conversations with and without stored prefixes, from benchmarks/conversations.py."""
    rows = []
    for kind in ("causal", "block_causal"):
        ratios = data[kind]["cpu_ratio_without_reuse"].items()
        costs = {name: sorted([*cost["quartiles"], cost["median"]]) for name, cost in ratios}  # for the format "q"
        row = {"name": kind.replace("_", "-"), "ratio": data[kind]["positions_ratio"]}
        rows.append(row | data[kind]["conversations"] | costs)
    head = "model | positions | CPU, s | p50, s | p99, s | CPU, nothing shared | wider model"
    times = (f"{{kept[{name}]:.1f}} / {{none[{name}]:.1f}}" for name in ("cpu_seconds", "p50_seconds", "p99_seconds"))
    positions = "{ratio:.2f} ({kept[positions]:,} / {none[positions]:,})"
    return table(rows, head, " | ".join(["{name}", positions, *times, "{narrow:q}", "{wide:q}"]))


def caches_table(data: Row) -> str:
    """Speed-ups of caches over none, from `benchmarks/caches.py speed`: one row per cache, one column per request."""
    cells: Cells = defaultdict(dict)
    for row in data["rows"]:
        request = "{rows} x ({prompt} + {new}), blocks of {block}, {steps} steps".format(**row)
        saved = row["bookkeeping_of_saved"]
        share = f"{100 * row['positions']:.0f}%, {'nothing saved' if saved is None else f'{100 * saved:.1f}%'}"
        cells[f"`{row['cache']}`"][request] = f"{row['speed_up']:.2f}x ({share})"
    return cross_table("cache", cells, missing="")


def suffix_table(data: Row) -> str:
    """Savings of suffix windows, from `benchmarks/suffix.py cost`: a row per answer length, a column per setting."""
    cells: Cells = defaultdict(dict)
    for row in data["rows"]:
        way = f"`{row['cache']}`" + (f", {row['suffix']}" if row["suffix"] else "")
        share = f" ({row['of_positions']:.2f}; CPU {row['of_cpu']:.2f})" if row["suffix"] else ""
        cells[str(row["answer"])][way] = f"{row['positions']:,}{share}"
    return cross_table("answer", cells, missing="")


def suffix_accuracy_table(data: Row) -> str:
    """Right answers with suffix windows, from `benchmarks/suffix.py accuracy`: a row per window, columns of slots."""
    cells: Cells = defaultdict(dict)
    for row in data["rows"]:
        value = f"{100 * row['right']:.1f} ({row['positions']:.0f}; {row['forwards']:.1f} forwards)"
        cells[row["suffix"] or "all masks"][f"{row['slots']} slots"] = value
    return cross_table("suffix", cells, missing="")


def caches_accuracy_table(data: Row) -> str:
    """Right answers with caches, from `benchmarks/caches.py accuracy`: a row per cache, a column per sampler."""
    cells: Cells = defaultdict(dict)
    for row in data["rows"]:
        name, *changes = row["cache"].split()
        value = f"{100 * row['right']:.1f} ({row['positions_per_answer']:.0f})"
        cells[", ".join([f"`{name}`", *changes])][f"`{row['sampler']}`"] = value
    together = dict(sorted(cells.items(), key=lambda item: [*cells].index(item[0].split(",")[0])))
    return cross_table("cache", together, missing="refused")


def caches_prefix_table(data: Row) -> str:
    """Requests with and without a stored or shared prefix, from `benchmarks/caches.py prefix`."""
    rows = [row | {"speed_up": row["seconds_without"] / row["seconds"]} for row in data["rows"]]
    cells = "{what} | {speed_up:.2f}x | {positions} of {positions_without}"
    cells += " | {store_bytes:MiB} of {store_bytes_without:MiB} MiB"
    return table(rows, "request | speed-up | positions evaluated | store", cells)


def sparsed_table(data: Row) -> str:
    """Block-sparse compared with dense attention, from benchmarks/sparsed.py."""
    head = "positions | select | blocks read | speed-up | ideal | finding the lists, in dense attentions"
    cells = "{length} | {select} | {density:.0p}% | {speed_up:.2f} | {ideal:.2f} | {estimation:.2f}"
    return table(data["rows"], head, cells)


def canvases_table(data: Row) -> str:
    """Rows, calls and times compared with transformers' lock step, from `benchmarks/canvases.py --part schedule`."""
    rows = []
    for row in data["schedule"]["rows"]:
        default = next(result for result in row["encode_wait"] if result["wait"] == row["default_wait"])
        calls = [result["decoder_calls"] + result["encoder_calls"] for result in (row["transformers"], default)]
        rows.append(row | {"ours": default, "calls": calls, "with_ends": "yes" if row["ends"] else "no"})
    head = "settles | ends | steps a canvas | rows: transformers | paradec | fewer | fewer on the same paths"
    cells = (
        "{settles} | {with_ends} | {steps_per_canvas[mean]} ({steps_per_canvas[low]} to {steps_per_canvas[high]}) | "
    )
    cells += "{transformers[rows]} | {ours[rows]} | {ours[rows_fewer]:.2f}x | {ours[rows_fewer_same_paths]:.2f}x | "
    cells += "{calls[0]} | {calls[1]} | {ours[calls_times]:.2f}x | "
    cells += "{cpu_ratio[median]:.2f}x less ({cpu_ratio[low]:.2f} to {cpu_ratio[high]:.2f})"
    return table(rows, head + " | calls: transformers | paradec | times | processor time", cells)


def canvases_wait_table(data: Row) -> str:
    """Decoder and encoder calls: a table row per `encode_wait`, a column per measured setting."""
    cells: Cells = defaultdict(dict)
    for entry in data["schedule"]["rows"]:
        label = f"{entry['settles']}, {'with' if entry['ends'] else 'no'} ends"
        rows = {f"`encode_wait` {row['wait']}": row for row in entry["encode_wait"]}
        for name, row in ({"lock step (transformers)": entry["transformers"]} | rows).items():
            cells[name][label] = f"{row['decoder_calls']} + {row['encoder_calls']}"
    return cross_table("decoder + encoder calls", cells, missing="")


def canvases_memory_table(data: Row) -> str:
    """Peak memory above the loaded model, from `benchmarks/canvases.py --part memory`."""
    unit, rows = data["memory"]["logits_of_a_row"], []
    for row in data["memory"]["peaks"]:
        rows.append(row | {"by_stage": ", ".join(f"{name} {size / unit:.1f}" for name, size in row["stages"].items())})
    head = "| rows | peak, MiB | in logits of a row: by stage"
    return table(rows, head, "{who} | {rows} | {peak:MiB} | {by_stage}")


def token_stats_table(data: Row, part: str) -> str:
    """One part of the result of benchmarks/token_stats.py; times are multiples of the first row's."""
    cells: Cells = defaultdict(dict)
    for name, row in data[part].items():
        (low, high), middle = row["times_base_quartiles"], row["times_base"]
        spread = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        cells[name]["CPU time"] = f"1 ({row['cpu_ms']:.1f} ms)" if middle == 1 else spread
    about = f"(Medians of ratios within a turn, with quartiles; load at most {data['load']:.1f}.)"
    return "\n".join([cross_table("", cells, missing=""), "", about])


def taylorseer_tables(data: Row) -> tuple[str, str]:
    """Two tables, from benchmarks/taylorseer.py: errors of methods (paradec's on three schedules), and their costs."""
    errors: Cells = defaultdict(dict)
    costs: Cells = defaultdict(dict)
    for row in data["rows"]:
        model, (label, _, schedule) = row["model"], row["method"].removeprefix("paradec, ").rpartition(", ")
        cell = "-" if row["error"] is None else f"{row['error']:.3f}"
        memory = "-" if row["memory"] is None else f"{row['memory'] / 1e3:.0f}"
        cost = "-, -, - kB" if row["error"] is None else f"{row['calls']}, {row['flops']:.0%}, {memory} kB"
        if not row["method"].startswith("paradec"):
            costs[row["method"]][model] = cost
            errors[row["method"]][model] = cell
            continue
        errors[label][model] = f"{errors[label][model]} / {cell}" if model in errors[label] else cell
        if label.endswith(", taylor 1") and schedule == "the paper's schedule":
            costs[f"paradec, {label.removesuffix(', taylor 1')}"][model] = cost
    del errors["all steps"]
    return cross_table("", errors, missing="-"), cross_table("", costs, missing="-")


def evaluations_table(rows: list[Row]) -> str:
    """Digits in few evaluations, from benchmarks/digits_masked.py. Of the diffusion transformer, only plain DDIM runs
    and that file's `OTHERS` are listed, with the pixel error."""
    head = "setting | full evaluations | evaluations | right class, % | Frechet distance"
    cells = "{label} | {full:.1f} | {evaluations[0]:.2f} | " + QUALITY
    if "pixel_error" not in rows[0]:
        return table(rows, head, cells)
    shown = [row | {"error": _pixel_error(row)} for row in rows if row["curve"] in ("ddim", "others")]
    return table(shown, head + " | pixel error", cells + " | {error}")


def _pixel_error(row: Row) -> str:
    """Format the pixel errors relative to the references of 20 and 50 steps."""
    return " / ".join(f"{error:.4f}" for _, error in sorted(row["pixel_error"].items()))


def even_steps_table(rows: list[Row]) -> str:
    """Right class, Frechet distance and pixel error by basis and target, with a column for each budget."""
    cells: Cells = defaultdict(dict)
    for row in rows:
        if row["curve"] not in ("ddim", "others"):
            numbers = f"{100 * row['accuracy'][0]:.1f} %, {row['distance'][0]:.1f}, {_pixel_error(row)}"
            cells[row["curve"]][row["label"].rpartition(", ")[2]] = numbers
    return cross_table("", cells, missing="-")


def probes_published_table(data: Row) -> str:
    """Errors and costs of published settings, from benchmarks/probes.py."""
    cells: Cells = defaultdict(dict)
    for row in data["published"]:
        cells[row["way"]][row["model"]] = _error_and_cost(row)
    return cross_table("", cells, missing="-")


def forecasts_table(head: str, rows: list[Row], cell: Callable[[Row], str]) -> str:
    """A table row for each pair of step budget and rule for when to evaluate, a column for each model."""
    ways = dict.fromkeys(row["way"] for row in rows)
    cells: Cells = {f"{budget} | {way}": {} for budget in dict.fromkeys(row["budget"] for row in rows) for way in ways}
    for row in rows:
        cells[f"{row['budget']} | {row['way']}"][row["model"]] = cell(row)
    return cross_table(f"{head} |", cells, missing="-")


def _error(row: Row) -> str:
    """Format the mean error and half of its 95 % interval."""
    return "{:.3f} +- {:.3f}".format(*row["error"])


def _over_even(row: Row) -> str:
    """Format the error divided by that of evenly spread evaluations: geometric mean and 95 % interval."""
    return "{:.2f} ({:.2f}-{:.2f})".format(*row["over_even"])


def _error_and_cost(row: Row) -> str:
    """Format the error, and the evaluated blocks and CPU time as shares of a run that evaluates every step."""
    return f"{_error(row)}; {row['blocks']:.0%}, {row['cpu']:.0%}"


def numbers_table(headline: Row, peers: Row, proteins: Row, digits: Row) -> str:
    """The main results of paradec, each next to the number that it is compared with."""
    default, baseline = headline["reporting"][:2]
    equal = [row for row in _cases(peers) if row["tokens"] == "equal"]
    cpu = [row["cpu_over"][1] for row in equal]
    memory = {key: [row[key]["peak_mib"] for row in equal] for key in ("ours", "theirs")}
    residues = [row["residues"] for row in proteins["chains"]]
    calls = [median(row["calls"]) for row in proteins["designs"] if row["sampler"] == "jacobi"]
    pictures = {row["label"]: row["forwards"][0] for row in digits["settings"]}
    lines = [
        (
            "forwards per answer, packaged text model",
            f"{default['forwards']:.1f} with `threshold`; {default['right']} of {default['of']} right",
            f"{baseline['forwards']:.1f} at one token per step; {baseline['right']} right",
        ),
        ("forwards per picture of 49 codes", f"{pictures['scd']:.1f} with `scd`", f"{pictures['ar']:.1f} code by code"),
        (
            f"calls per protein design of {min(residues)} to {max(residues)} residues",
            f"{min(calls):g} to {max(calls):g} (medians), the same tokens",
            "one per residue",
        ),
        ("CPU time per answer", f"{min(cpu):.2f} to {max(cpu):.2f}, the same tokens", "1: the public code"),
        (
            "memory per answer, MiB",
            "{:.0f} to {:.0f}".format(min(memory["ours"]), max(memory["ours"])),
            "{:.0f} to {:.0f}: the public code".format(min(memory["theirs"]), max(memory["theirs"])),
        ),
        ("anything on a GPU or with 8B weights", "not measured", ""),
    ]
    return table(({"cells": " | ".join(line)} for line in lines), "measured | paradec | compared with", "{cells}")


def to_csv(text: str) -> str:
    """Convert a Markdown table to comma-separated values; lines around the table are left out."""
    buffer = io.StringIO()
    rows = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    cells = (re.split(r" ?\| ?", row.replace("`", ""))[1:-1] for row in rows)
    csv.writer(buffer, lineterminator="\n").writerows(cells)
    return buffer.getvalue()


def replace_marked(text: str, name: str, content: str) -> str:
    """Replace the text between `<!-- name -->` and `<!-- /name -->` on a page.

    Raises:
        SystemExit: the page has no such marks.
    """
    pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"the page has no <!-- {name} --> ... <!-- /{name} -->")
    return pattern.sub(lambda match: match[1] + content + "\n" + match[2], text)


def render_files() -> dict[str, str]:
    """Render every file that contains tables, from the current results: text by path.

    Raises:
        SystemExit: a page lacks the marks of one of its tables.
    """
    names = ("compare", "compare_heldout", "antibody", "antibody_heldout", "digits", "digits_masked", "headline")
    compare, compare_heldout, antibody, antibody_heldout, digits, digits_masked, headline = map(_result, names)
    canvases, probes, token_stats = _result("canvases"), _result("probes"), _result("token_stats")
    taylorseer, many = taylorseer_tables(_result("taylorseer")), _result("many")
    peers, proteins = _result("peers_text"), _result("protein_exact")
    pages = {
        "README.md": {"laptop": build_table(_result("laptop")["runs"])},
        "docs/own_machine.md": {"laptop": build_table(_result("laptop")["runs"])},
        "docs/serving.md": {
            "server": server_table(_result("server")),
            "conversations": conversations_table(_result("conversations")),
        },
        "docs/results.md": {
            "numbers": numbers_table(headline, peers, proteins, digits),
            "headline_rows": schedules_table([*headline["reporting"][:2], headline["reporting"][-1]]),
            "digits": digits_table(digits, short=True),
        },
    }
    files = {
        "settings": settings_table(),
        "compare": compare_table(compare),
        "compare_heldout": heldout_table(compare, compare_heldout),
        "many": many_table(many),
        "occupancy": occupancy_table(many),
        "suffix_accuracy": suffix_accuracy_table(_result("suffix_accuracy")),
        "peers_sjd": peers_sjd_table({"small": _result("peers_sjd"), "tiny": _result("peers_sjd_tiny")}),
        "schedules": schedules_table(headline["choosing"]),
        "schedules_heldout": schedules_table(headline["reporting"]),
        "antibody": antibody_table(antibody),
        "antibody_heldout": antibody_table(antibody_heldout),
        "protein_exact": protein_exact_table(proteins),
        "sparsed": sparsed_table(_result("sparsed")),
        "caches": caches_table(_result("caches")),
        "caches_accuracy": caches_accuracy_table(_result("caches_accuracy")),
        "caches_prefix": caches_prefix_table(_result("caches_prefix")),
        "suffix": suffix_table(_result("suffix")),
        "canvases_wait": canvases_wait_table(canvases),
        "canvases": canvases_table(canvases),
        "canvases_memory": canvases_memory_table(canvases),
        "digits": digits_table(digits, short=False),
        "digits_masked": evaluations_table(digits_masked["masked"]),
        "digits_scales": digits_scales_table(_result("digits_scales")),
        "digits_dit": evaluations_table(digits_masked["dit"]),
        "digits_dit_even": even_steps_table(digits_masked["dit"]),
        "probes": forecasts_table("at most", probes["ways"], _error_and_cost),
        "probes_even": forecasts_table(
            "at most", [row for row in probes["ways"] if row["over_even"][0] != 1], _over_even
        ),
        "probes_published": probes_published_table(probes),
        "skipping": forecasts_table(
            "steps", _result("skipping")["ways"], lambda row: f"{_error(row)}; {_over_even(row)}"
        ),
        "taylorseer": taylorseer[0],
        "taylorseer_costs": taylorseer[1],
        "token_stats_over_softmax": token_stats_table(token_stats, "over_softmax"),
        "token_stats_draws": token_stats_table(token_stats, "draws"),
        "token_stats_steps": token_stats_table(token_stats, "steps"),
        "peers_rule": peers_rule_table(_result("peers_rule")),
        "peers_pictures": peers_pictures_table(
            *(_result(f"peers_pictures_{size}") for size in ("tiny", "wide", "deep"))
        ),
    }
    files |= {
        name: peers_text_table(_result(name))
        for name in ("peers_text", "peers_text_intel", "peers_text_words", "peers_text_bfloat16")
    }
    texts = {f"docs/tables/{name}.csv": to_csv(text) for name, text in files.items()}
    for file, tables in pages.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        for name, content in tables.items():
            text = replace_marked(text, name, content)
        texts[file] = text
    return texts


def _result(name: str) -> Any:
    return read_result(RESULTS / f"{name}.json")


def main() -> None:
    (ROOT / "docs" / "tables").mkdir(exist_ok=True)
    for file, text in render_files().items():
        (ROOT / file).write_text(text, encoding="utf-8")
        print(f"written to {file}")


if __name__ == "__main__":
    main()
