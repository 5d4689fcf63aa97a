"""Cost and quality of next-scale models (VAR) on the packaged digits, compared with other methods of few forwards.

    python benchmarks/digits_scales.py              # writes results/digits_scales.json
    python benchmarks/digits_scales.py --draw       # only the images
    python benchmarks/tables.py                     # run afterwards: updates the table in docs/tables

Every method has a few settings. The one with the smallest Frechet distance over 200 images is chosen, and measured
again on 500 images with other seeds, which are reported. Class accuracy and distance are those of
`benchmarks/digits.py`, with 95 % intervals (Wilson's; bootstrap). Methods are ranked by the distance; if the interval
of the difference to the best method contains 0, the two cannot be separated.

The models differ: `digits-ar` is a LlamaGen and `digits-maskgit` a masked transformer, over the same 49 VQ codes;
`digits-lpd` is an LPD over these codes; `digits-var` and `digits-var-small` are VARs over 88 codes of another VQ, in
five scales. Forwards of different models are not comparable, so two more costs are reported per image: positions
evaluated (in all branches of guidance, by all models), and CPU milliseconds (one core, batches of 100, without the VQ
decoder).

The three exact methods of `digits-lpd` sample the same distribution, that of one code per call, so one choice of order
and guidance serves all three. With 49 groups, `digits-lpd` decodes one code per call.
"""

from __future__ import annotations

import argparse
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from digit_quality import frechet_distance, load_classifier, moments
from digits import batches, evaluate_images
from provenance import COMMIT, RESULTS, read_result, write_result
from tables import digits_scales_table

import paradec
from paradec.api.images import contact_sheet

ROOT = Path(__file__).resolve().parent.parent
FIGURE = ROOT / "docs" / "figures" / "digits_scales.png"
CHOOSING, REPORTED = 10_000_000, 20_000_000
"""Seeds from which the images for the choice and the reported images start."""
Setting = tuple[dict[str, Any], dict[str, Any]]
"""Settings of the sampler, and fields of the request."""


def combine(sampler: dict[str, list[Any]], request: dict[str, list[Any]]) -> list[Setting]:
    """List all combinations of the values of sampler settings and request fields."""

    def combined(values: dict[str, list[Any]]) -> list[dict[str, Any]]:
        return [dict(zip(values, combination, strict=True)) for combination in product(*values.values())]

    return [(settings, fields) for settings in combined(sampler) for fields in combined(request)]


GUIDANCE: dict[str, list[Any]] = {"guidance_scale": [1.5, 2.0, 3.0]}
GROWING: dict[str, list[Any]] = {"guidance_scale": [2.5, 4.0, 6.0]}
"""LPD's guidance grows from 1 to these values."""
MASKED = {**GUIDANCE, "steps": [8]}
SCALES: dict[str, list[Any]] = {"guidance_scale": [1.0, 1.5, 2.0, 3.0], "temperature": [0.9, 1.0], "top_k": [0]}
Method = tuple[str, str, str, list[Setting], dict[str, Any]]
"""(label, model, sampler, settings to choose from, sampler settings that are added to the chosen ones)."""
ORDERS: dict[str, list[Any]] = {"order": ["lpd", "random"]}
EXACT = combine({**ORDERS, "lossless": [True]}, GROWING)
METHODS: list[Method] = [
    ("ar", "digits-ar", "sjd", combine({"window": [1]}, GUIDANCE), {}),
    ("sjd", "digits-ar", "sjd", combine({}, GUIDANCE), {}),
    ("maskgit, 8 steps", "digits-maskgit", "maskgit", combine({"choice_temperature": [1.0, 2.0, 4.5]}, MASKED), {}),
    ("halton, 8 steps", "digits-maskgit", "halton", combine({}, MASKED), {}),
    ("lpd, 8 steps", "digits-maskgit", "lpd", combine({}, MASKED), {}),
    ("var", "digits-var", "var", combine({}, SCALES), {}),
    ("var, small model", "digits-var-small", "var", combine({}, SCALES), {}),
    *(
        (f"code, split {split}", "digits-var-small", "code", combine({"split": [split]}, SCALES), {})
        for split in range(1, 5)
    ),
    *(
        (f"lpd, exact by {method}", "digits-lpd", "groups", EXACT, {"verify": method})
        for method in ("jacobi", "sjd", "scd")
    ),
    *(
        (f"lpd, {count} groups", "digits-lpd", "groups", combine(ORDERS, {**GROWING, "steps": [count]}), {})
        for count in (49, 16, 12, 8)
    ),
]


def create(sampler: str, settings: dict[str, Any]) -> Any:
    """Create a sampler; `code` gets `digits-var` as its drafter."""
    extra = {"drafter": paradec.load("digits-var")} if sampler == "code" else {}
    return paradec.samplers.create(sampler, **settings, **extra)


@torch.inference_mode()
def run(name: str, sampler: str, setting: Setting, images: int, seed: int) -> dict[str, Any]:
    """Generate images, all classes equally often, and measure their cost."""
    settings, request = setting
    model, method = paradec.load(name), create(sampler, settings)
    pictures, forwards, drafted, positions, cpu = [], [], [], 0, 0.0
    for start, labels in batches(images):
        begin = time.process_time()
        out = paradec.generate_images(
            model, class_labels=labels, sampler=method, seed=seed + start, output_type="latent", **request
        )
        cpu += time.process_time() - begin
        pictures.append(model.decode(out.tokens, model.grid()))
        forwards += out.row_nfe
        drafted += out.draft_nfe
        positions += out.forwarded_tokens
    if sampler == "code":  # `out` does not count the first scales, which the drafter evaluates
        split = settings["split"]
        ends, branches = model.facts.ends, 1 if request["guidance_scale"] == 1 else 2
        positions += images * branches * ends[split - 1]
    return {
        "pictures": torch.cat(pictures),
        "forwards": torch.tensor(forwards).numpy(),
        "draft_forwards": sum(drafted) / images,
        "positions": positions / images,
        "milliseconds": 1000 * cpu / images,
    }


def choose_setting(label: str, name: str, sampler: str, settings: list[Setting], images: int, judge: Any) -> Setting:
    """Choose the setting whose `images` images have the smallest distance."""
    held_out = (judge.held_out_mean, judge.held_out_covariance)
    distances = []
    for index, setting in enumerate(settings):
        pictures = run(name, sampler, setting, images, CHOOSING + 100_000 * index)["pictures"]
        distance = frechet_distance(moments(judge.features(pictures)), held_out)
        print(f"  {label} {setting}: {distance:.1f}", flush=True)
        distances.append(distance)
    return settings[min(range(len(distances)), key=distances.__getitem__)]


def distance_difference(first: list[float], second: list[float]) -> list[float]:
    """Subtract two distances [value, low, high]: first - second, and the ends of its 95 % interval."""
    half = ((first[2] - first[0]) ** 2 + (second[2] - second[0]) ** 2) ** 0.5
    return [first[0] - second[0], first[0] - second[0] - half, first[0] - second[0] + half]


def figure(results: list[dict[str, Any]]) -> None:
    """Draw for each method, in the order of the table, a row with two images of every digit."""
    rows: list[Any] = []
    for entry in results:
        method, model = create(entry["sampler"], entry["settings"]), paradec.load(entry["model"])
        labels = [label for label in range(10) for _ in range(2)]
        out = paradec.generate_images(model, class_labels=labels, sampler=method, seed=1, **entry["request"])
        rows += [image.convert("RGB").resize((56, 56)) for image in out.images]
    contact_sheet(rows, columns=20).save(FIGURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=500, help="number of reported images")
    parser.add_argument("--choosing", type=int, default=200, help="number of images of each setting for the choice")
    parser.add_argument("--draw", action="store_true", help="only draw the images of an existing result")
    parser.add_argument("--out", type=Path, default=RESULTS / "digits_scales.json")
    args = parser.parse_args()
    for name in ("images", "choosing"):
        if getattr(args, name) < 10 or getattr(args, name) % 10:
            parser.error(f"--{name} {getattr(args, name)} must be a multiple of 10: all classes equally often")
    torch.set_num_threads(1)
    if args.draw:
        figure(read_result(args.out)["methods"])
        return
    judge = load_classifier()
    rows: list[dict[str, Any]] = []
    choices: dict[str, Setting] = {}
    for index, (label, name, sampler, settings, added) in enumerate(METHODS):
        among = repr((name, sampler, settings))
        if among not in choices:
            choices[among] = choose_setting(label, name, sampler, settings, args.choosing, judge)
        setting = (choices[among][0] | added, choices[among][1])
        generated = run(name, sampler, setting, args.images, REPORTED + 100_000 * index)
        entry = {"label": label, "model": name, "sampler": sampler, "settings": setting[0], "request": setting[1]}
        entry |= evaluate_images(generated, judge)[0] | {"choices": len(settings), "commit": COMMIT}
        rows.append(entry | {key: generated[key] for key in ("draft_forwards", "positions", "milliseconds")})
        print(f"{label}: distance {entry['distance'][0]:.1f}, accuracy {entry['accuracy'][0]:.3f}", flush=True)
    rows.sort(key=lambda entry: entry["distance"][0])
    for entry in rows[1:]:
        entry["further"] = distance_difference(entry["distance"], rows[0]["distance"])
    result = {"images": args.images, "choosing": args.choosing, "methods": rows}
    write_result(args.out, result)
    print(digits_scales_table(read_result(args.out)))
    figure(rows)


if __name__ == "__main__":
    main()
