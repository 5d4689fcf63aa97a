"""Other sets of recorded cases, made of those in tests/golden: fewer cases, in files of other names, of checkpoints of
other names. The tokens of text models stand in another order, so that every id is another one.

`SETS` has a function for each family, which writes the set into a folder that its variable (`places.golden`) can name,
and parts of the names of the tests that then replay it.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from places import GOLDEN
from safetensors.torch import load_file, save_file
from torch import Tensor


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data), encoding="utf-8")


class Reordered:
    """A vocabulary in another order: old id i is new id (i * step + 5) mod size."""

    def __init__(self, size: int):
        self.new = [(i * (size // 2 - 1 if size % 4 == 0 else 5) + 5) % size for i in range(size)]
        assert len(set(self.new)) == size

    def __call__(self, ids: Any) -> Any:
        """The new ids of ids in lists of any depth; None and -1 stay."""
        if isinstance(ids, list):
            return [self(each) for each in ids]
        return ids if ids is None or ids < 0 else self.new[ids]

    def tokens(self, tensor: Tensor, dim: int) -> Tensor:
        """What is sorted by the old ids along `dim`, by the new ones."""
        return tensor.index_select(dim, torch.tensor(self.new).argsort())

    def in_fields(self, data: dict[str, Any]) -> dict[str, Any]:
        """A configuration's ids."""
        return {key: self(value) if "token_id" in key else value for key, value in data.items()}


def checkpoint(source: Path, target: Path, logits: tuple[str, ...] = ()) -> Reordered:
    """Write a checkpoint with another vocabulary. logits: names of files with logits of it, and ids where these stand
    beside them."""
    config = read(source / "config.json")
    order = Reordered(config["vocab_size"])
    for path in source.iterdir():
        if path.suffix == ".json" and path.name.endswith("config.json"):
            write(target / path.name, order.in_fields(read(path)))
    weights = load_file(source / "model.safetensors")
    for name, tensor in weights.items():
        if any(part in name for part in ("wte.", "embed", "lm_head", "diffusion_head", "transformer.ff_out")):
            weights[name] = order.tokens(tensor, 0).contiguous()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    for name in logits:
        arrays = load_file(source / name)
        for key, tensor in arrays.items():
            if key.startswith("ids"):
                arrays[key] = torch.tensor(order.new)[tensor]
            elif tensor.shape[-1] == config["vocab_size"]:
                arrays[key] = order.tokens(tensor, -1).contiguous()
        save_file(arrays, target / name)
    return order


def recorded(trace: dict[str, Any], order: Reordered, count: int, **named: Any) -> dict[str, Any]:
    """A file of traces in another vocabulary, with so many of its cases."""
    trace = trace | named | {"cases": trace["cases"][:count]}
    for key in ("mask_id", "eos_id"):
        trace[key] = order(trace[key])
    settings = trace["settings"]
    if "delimiter_ids" in settings:
        settings["delimiter_ids"] = order(settings["delimiter_ids"])
    for case in trace["cases"]:
        for key in ("prompt_ids", "final_ids", "returned"):
            if key in case:
                case[key] = order(case[key])
        for step in case["steps"]:
            step["commit"] = [[row, position, order(token)] for row, position, token in step["commit"]]
            if "edit" in step:
                step["edit"] = [[row, position, order(old), order(new)] for row, position, old, new in step["edit"]]
            if "sampled" in step:
                step["sampled"] = order(step["sampled"])
    return trace


def text(folder: Path, methods: tuple[str, ...] | None = None, files: int = 2, count: int = 3) -> None:
    """So many files of each method and checkpoint, with so many cases each, and the checkpoints beside the folder.
    Files with a temperature are left out: noise is drawn token by token."""
    names = {"llada-tiny": "first", "dream-tiny": "second"}
    orders = {}
    for old, new in names.items():
        orders[old] = checkpoint(GOLDEN / old, folder.parent / new, ("logits_check.safetensors",))
        table = read(GOLDEN / old / "tokenizer_table.json")
        table["table"] = [table["table"][i] for i in torch.tensor(orders[old].new).argsort().tolist()]
        write(folder.parent / new / "tokenizer_table.json", table)
    for method in sorted(path.name for path in (GOLDEN / "traces").iterdir()):
        if methods is not None and method not in methods:
            continue
        found: dict[str, list[dict[str, Any]]] = {}
        for path in sorted((GOLDEN / "traces" / method).glob("*.json")):
            trace = read(path)
            if not trace["settings"].get("temperature"):
                found.setdefault(trace["model"], []).append(trace)
        for model, traces in found.items():
            for number, trace in enumerate(traces[:: max(1, len(traces) // files)][:files]):
                setting = f"{trace['setting'].partition('_')[0]} {number}"
                other = recorded(trace, orders[model], count, model=names[model], setting=setting)
                write(folder / method / f"of {names[model]} {number}.json", other)


def mixtures(folder: Path, files: int = 2, count: int = 2) -> None:
    """Mixtures of experts: what they compute, and so many files of each method."""
    names, orders = {"llada2-tiny": "two", "llada-moe-tiny": "one", "sdar-moe-tiny": "three"}, {}
    for old, new in names.items():
        source = GOLDEN / "moe" / old
        order = orders[old] = checkpoint(source, folder / new, ("forwards.safetensors",))
        found = read(source / "forwards.json")
        found["facts"] |= {key: order(found["facts"][key]) for key in ("mask", "eos", "pad")}
        for case in found["cases"]:
            for each in (case, *case.get("calls", [])):
                if "input_ids" in each:
                    each["input_ids"] = order(each["input_ids"])
        write(folder / new / "forwards.json", found | {"model": new})
    for method in sorted(path.name for path in (GOLDEN / "moe" / "traces").iterdir()):
        paths = sorted((GOLDEN / "moe" / "traces" / method).glob("*.json"))
        for number, path in enumerate(paths[:: max(1, len(paths) // files)][:files]):
            trace = read(path)
            old = trace["model"]
            other = recorded(trace, orders[old], count, model=names[old], setting=f"setting {number}")
            write(folder / "traces" / method / f"number {number}.json", other)


def next_image(folder: Path, step: int = 2) -> None:
    """Every second case of each system, and the models under other names."""
    source = GOLDEN / "next-image"
    names = {}  # of models, by system and old name
    for path in sorted(source.glob("*/*.config.json")):
        old = path.name.removesuffix(".config.json")
        names[path.parent.name, old] = f"net {len(names)}"
    for (system, old), new in names.items():
        said = read(source / system / f"{old}.config.json")
        if "vae" in said:
            said["vae"] = "var/" + names["var", said["vae"].removeprefix("var/")]
        write(folder / system / f"{new}.config.json", said)
        (folder / system / f"{new}.safetensors").symlink_to(source / system / f"{old}.safetensors")
    for system in sorted({system for system, _ in names}):
        kinds: dict[frozenset[str], list[Path]] = {}
        for path in sorted((source / system).glob("*.json")):
            said = read(path)
            if "id" in said:
                kind = {"steps", "shuffled_candidates", "mask", "reconstruction"} & said.keys()
                kinds.setdefault(frozenset(kind), []).append(path)
        for number, path in enumerate(path for paths in kinds.values() for path in paths[::step]):
            said, new = read(path), f"{number} of them"
            for key in ("model", "teacher", "target", "draft", "drafter", "refiner"):
                if key in said:
                    place = "var" if key == "refiner" or key == "teacher" and system == "dd-var" else system
                    said[key] = names[place, said[key]]
            write(folder / system / f"{new}.json", said | {"id": new})
            if path.with_suffix(".safetensors").exists():
                (folder / system / f"{new}.safetensors").symlink_to(path.with_suffix(".safetensors"))


def renamed(folder: Path, family: str, kind: str = "*.json", step: int = 2, number: int = 0) -> None:
    """Every second file of a family, under another name."""
    for at, path in enumerate(sorted((GOLDEN / family).glob(kind))[::step], start=number):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"case {at}{path.suffix}").symlink_to(path)


def diffusion(folder: Path) -> None:
    """Every second recorded state, schedule, mask and run; the transformers under the names that they must have."""
    source = GOLDEN / "diffusion"
    renamed(folder, "diffusion", "taylor-*.json", step=3)
    renamed(folder, "diffusion", "variant-*.json", number=10)
    write(folder / "some of them.json", read(source / "schedules.json")[::2])
    masks = read(source / "step_masks.json")
    masks["masks"] = {name: dict(list(found.items())[::2]) for name, found in list(masks["masks"].items())[::2]}
    write(folder / "step_masks.json", masks)
    latents, arrays = read(source / "golden_latents.json"), np.load(source / "golden_latents.npz")
    names = {old: f"run {number}" for number, old in enumerate(list(latents["cases"])[1::2])}
    latents["cases"] = {new: latents["cases"][old] for old, new in names.items()}
    write(folder / "golden_latents.json", latents)
    np.savez(folder / "golden_latents.npz", **{new: arrays[old] for old, new in names.items()})
    for name in ("golden_tiny_dit.safetensors", "golden_tiny_flux.safetensors"):
        (folder / name).symlink_to(source / name)


def recap(folder: Path) -> None:
    """One run of each of the two models, of weights of another name, and every second schedule."""
    for number, name in enumerate(("recap-maskgit-2", "recap-mar-2")):
        said = read(GOLDEN / "recap" / f"{name}.json")
        write(folder / f"run {number}.json", said | {"weights": f"net {number}.safetensors"})
        (folder / f"net {number}.safetensors").symlink_to(GOLDEN / "recap" / said["weights"])
    write(folder / "schedules of it.json", read(GOLDEN / "recap" / "recap-schedules.json")[::2])


def llamagen(folder: Path) -> None:
    """Two files: captions; classes and the autoencoder."""
    arrays = load_file(GOLDEN / "llamagen" / "llamagen_tiny.safetensors")
    folder.mkdir(parents=True)
    for name, parts in (("captions", ("t2i",)), ("classes", ("c2i", "vq"))):
        found = {key: tensor for key, tensor in arrays.items() if key.startswith(parts)}
        save_file(found, folder / f"{name}.safetensors")


def proteins(folder: Path) -> None:
    """The two structures that are told in the file, in files of their own."""
    for case in read(GOLDEN / "proteins" / "cases.json"):
        if "structure" in case:
            write(folder / f"of {case['name']}.json", [case | {"name": f"other {case['name']}"}])
    (folder / "weights.pt").symlink_to(GOLDEN / "proteins" / "small.pt")


def ligands(folder: Path) -> None:
    """Two cases under other names; files and weights are found in tests/golden."""
    lines = (GOLDEN / "ligands" / "cases.jsonl").read_text(encoding="utf-8").splitlines()
    told = [json.loads(line) for line in lines]
    folder.mkdir(parents=True)
    kept = [case | {"name": f"other {case['name']}"} for case in told if case["name"] in ("bound-gaps", "labels")]
    (folder / "cases.jsonl").write_text("\n".join(map(json.dumps, kept)), encoding="utf-8")


def drafters(folder: Path) -> None:
    """Every second case, of drafters of other names; every second verification of siblings. Rollouts and MTP: every
    second case, with other ids."""
    for number, source in enumerate(sorted(path.parent for path in (GOLDEN / "drafters").glob("mtp-*/model"))):
        _heads(source, folder / f"heads {number}")
    source, target = (parent / "drafters" for parent in (GOLDEN / "drafters", folder))
    shutil.copytree(source / "base", target / "base")
    cases = read(source / "cases.json")
    tensors, kept = load_file(source / "cases.safetensors"), {}
    shared = {name: value for name, value in tensors.items() if "/" not in name}
    for number, (key, case) in enumerate(list(cases.items())[::2]):
        name = re.sub("^(eagle3|dflash2|dspark)", r"\1 other", case["drafter"])
        if not (target / name).exists():
            shutil.copytree(source / case["drafter"], target / name)
        kept[f"{number}"] = case | {"drafter": name}
        of_case = {part: value for part, value in tensors.items() if part.startswith(f"{key}/")}
        shared |= {f"{number}/{part.removeprefix(key)[1:]}": value for part, value in of_case.items()}
    write(target / "cases.json", kept)
    save_file(shared, target / "cases.safetensors")
    renamed(folder / "sjd_pac", "drafters/sjd_pac")
    source, target = GOLDEN / "drafters" / "rollouts", folder / "rollouts"
    cases, tensors = list(enumerate(read(source / "cases.json")))[::2], load_file(source / "cases.safetensors")
    orders = {"sdar-tiny": checkpoint(source / "sdar-tiny", target / "sdar other")}
    found, numbers = [], {}
    for new, (old, case) in enumerate(cases):
        own = {name: tensors[f"{old}/{name}"] for name in tensors_of(tensors, old)}
        if (order := orders.get(case["model"])) is not None:
            case |= {"model": "sdar other", "prompt": order(case["prompt"]), "mask": order(case["mask"])}
            own["final"] = torch.tensor(order(own["final"].tolist()))
            own["grad/lm_head.weight"] = order.tokens(own["grad/lm_head.weight"], 0).contiguous()
        found.append(case)
        numbers |= {f"{new}/{name}": tensor for name, tensor in own.items()}
    write(target / "cases.json", found)
    save_file(numbers, target / "cases.safetensors")


def _heads(source: Path, target: Path) -> None:
    """Every second case of a model with MTP heads, from the last to the first."""
    order = checkpoint(source / "model", target / "model")
    tensors, cases, kept = load_file(source / "cases.safetensors"), read(source / "cases.json"), {}
    for new, old in enumerate(range(len(cases))[::-2]):
        for name in tensors_of(tensors, old):
            found = tensors[f"{old}/{name}"]
            if name.endswith(("input_ids", "drafts")):
                found = torch.tensor(order(found.tolist()))
            kept[f"{new}/{name}"] = order.tokens(found, -1).contiguous() if name.endswith("logits") else found
    cases = [case | {name: order(case[name]) for name in ("prompt", "sequence")} for case in cases[::-2]]
    write(target / "cases.json", cases)
    save_file(kept, target / "cases.safetensors")


def tensors_of(tensors: dict[str, Tensor], number: int) -> list[str]:
    """The names of a case's tensors, without its number."""
    return [name.partition("/")[2] for name in tensors if name.startswith(f"{number}/")]


def autumn(folder: Path) -> None:
    """Every second table of scaled rotary angles; Nemotron-Labs-Diffusion under other names and ids, some traces."""
    tables = read(GOLDEN / "autumn" / "rope" / "tables.json")
    write(folder / "rope" / "tables.json", tables | {"cases": dict(list(tables["cases"].items())[::2])})
    source = GOLDEN / "autumn" / "nld"
    for number, old in enumerate(sorted(path.parent.name for path in source.glob("*/config.json"))):
        new = f"nld number {number}"
        order = checkpoint(source / old, folder / "nld" / new, ("forwards.safetensors",))
        shutil.copytree(source / old / "linear_spec_lora", folder / "nld" / new / "linear_spec_lora")
        found = read(source / old / "forwards.json")
        found["facts"] |= {key: order(found["facts"][key]) for key in ("mask", "eos", "bos")}
        for case in found["cases"]:
            for each in (case, *case.get("before", [])):
                each["input_ids"] = order(each["input_ids"])
        write(folder / "nld" / new / "forwards.json", found)
        traces = [read(path) for path in sorted((source / "traces").glob(f"{old}__*.json"))]
        for at, trace in enumerate(traces):
            if not trace["settings"].get("temperature"):
                trace["model"] = new
                for case in trace["cases"]:
                    for key in ("prompt_ids", "tokens"):
                        case[key] = order(case[key])
                    for entry in case.get("rounds", []):
                        entry["block"] = order(entry["block"])
                    for step in case.get("steps", []):
                        if "seed" in step:
                            step["seed"] = order(step["seed"])
                        if "commit" in step:
                            step["commit"] = [[place, order(token)] for place, token in step["commit"]]
                write(folder / "nld" / "traces" / f"{number} {at}.json", trace)
    source = GOLDEN / "autumn" / "s2d2"
    order = checkpoint(source / "sdar-tiny", folder / "s2d2" / "sdar other")
    for path in sorted(source.glob("sdar-tiny__*greedy_exact.json")):
        trace = read(path) | {"model": "sdar other"}
        trace["stop_ids"] = order(trace["stop_ids"])
        for case in trace["cases"]:
            for key in ("prompt_ids", "block1_tokens", "tokens"):
                case[key] = order(case[key])
        write(folder / "s2d2" / f"other__{path.stem}.json", trace)
    source = GOLDEN / "autumn" / "indel"
    cases, tensors = read(source / "cases.json"), load_file(source / "logits.safetensors")
    cases["cases"] = [case | {"name": f"block {case['name']}"} for case in cases["cases"][::3]]
    write(folder / "indel" / "cases.json", cases)
    save_file(
        {case["name"]: tensors[case["name"][6:]] for case in cases["cases"]}, folder / "indel" / "logits.safetensors"
    )
    source, target = GOLDEN / "autumn" / "llada22" / "llada22-tiny", folder / "llada22" / "llada22-tiny"
    order = checkpoint(source, target, ("forwards.safetensors",))
    found, answers = read(source / "forwards.json"), read(source / "answers.json")
    for key, value in found["facts"].items():
        found["facts"][key] = value if key == "block" else order(value)
    for case in found["cases"]:
        for each in (case, *case.get("calls", [])):
            if "input_ids" in each:
                each["input_ids"] = order(each["input_ids"])
    for case in answers["cases"]:
        for key in ("prompt_ids", "canvas", "answer"):
            case[key] = order(case[key])
        for step in (step for block in case["blocks"] for step in block["steps"]):
            step["ids"] = order(step["ids"])
    write(target / "forwards.json", found)
    write(target / "answers.json", answers)
    source = GOLDEN / "autumn" / "s2d2"
    # draws follow the order of the ids, which stays
    shutil.copytree(source / "sdar-tiny", folder / "s2d2" / "sdar drawn")
    for path in sorted(source.glob("sdar-tiny__b4__*.json")):
        trace = read(path) | {"model": "sdar drawn"}
        if "steps" in trace["cases"][0]:
            write(folder / "s2d2" / f"drawn__{path.stem}.json", trace | {"cases": trace["cases"][::-2]})


def images_autumn(folder: Path) -> None:
    """SeaCache's recorded runs from the last to the first, every second one; GLM-Image's under other names."""
    source, target = GOLDEN / "images-autumn", folder / "seacache"
    cases, arrays = read(source / "seacache" / "cases.json"), np.load(source / "seacache" / "arrays.npz")
    shutil.copytree(source / "seacache" / "transformer", target / "transformer")
    chosen = range(len(cases))[::-2]
    write(target / "cases.json", [cases[number] for number in chosen])
    parts = ("noise", "prompt", "negative", "plain", "latents")
    kept = {f"{at}/{part}": arrays[f"{number}/{part}"] for at, number in enumerate(chosen) for part in parts}
    np.savez(target / "arrays.npz", **kept)
    source, target = source / "glm_image", folder / "glm_image"
    for part in ("model", "dit"):
        shutil.copytree(source / part, target / part)
    cases, recorded, pipeline = read(source / "cases.json")[::-1], np.load(source / "pipeline.npz"), {}
    for number, case in enumerate(cases):
        old, case["case"] = case["case"], f"number {number}"
        shutil.copy(source / f"{old}.npz", target / f"number {number}.npz")
        found = [key for key in recorded if key.startswith(f"{old}/")]
        pipeline |= {f"number {number}/{key.partition('/')[2]}": recorded[key] for key in found}
    write(target / "cases.json", cases)
    np.savez(target / "pipeline.npz", **pipeline)


def structured(folder: Path, step: int = 2) -> None:
    """Every second case of each kind; words, of those that draw nothing, and questions stand in another order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((GOLDEN / "structured").glob("*.json")):
        found.setdefault(read(path)["kind"], []).append(read(path))
    for kind, cases in found.items():
        for number, case in enumerate(cases[::-step]):
            if kind in ("run", "law", "holes", "refused"):
                case = _with_words_moved(case)
            if kind == "decide":
                case = _with_options_turned(case)
            write(folder / f"other {kind} {number}.json", case)


def _with_options_turned(case: dict[str, Any]) -> dict[str, Any]:
    """Questions of another order and other names, of which those with options have them in another order."""
    expected, names = case["expected"], {name: f"other {name}" for name in reversed(case["questions"])}
    for name, said in case["questions"].items():
        if said["type"] != "choice":
            continue
        answer, logits = expected["answers"][name], case["logits"]
        said["criteria"] = dict(reversed(said["criteria"].items()))
        expected["options"][name].reverse()
        logits[name].reverse()
        answer["probabilities"] = dict(reversed(answer["probabilities"].items()))
    for table in (case["questions"], case["logits"], *expected.values()):
        for old, new in names.items():
            table[new] = table.pop(old)
    return case


def _with_words_moved(case: dict[str, Any]) -> dict[str, Any]:
    """A case of constrained decoding in which word v is word v + 1, and the last one the first."""
    size, expected = len(case["vocab"]), case["expected"]

    def new(ids: Any) -> Any:
        return [new(each) for each in ids] if isinstance(ids, list) else ids if ids is None else (ids + 1) % size

    def moved(numbers: list[Any]) -> list[Any]:
        return [*numbers[-1:], *numbers[:-1]]

    case |= {"vocab": moved(case["vocab"]), "end": new(case["end"])}
    if "canvas" in case:
        case["canvas"] = new(case["canvas"])
    if "automaton" in case:
        case["automaton"]["step"] = [moved(row) for row in case["automaton"]["step"]]
    if "model" in case:
        pair = [[moved([moved(word) for word in other]) for other in place] for place in case["model"]["pair"]]
        case["model"] = {"bias": [moved(place) for place in case["model"]["bias"]], "pair": pair}
    for each in expected.get("steps", ()):
        for key in {"commit", "forced"} & each.keys():
            each[key] = [[at, new(word)] for at, word in each[key]]
    if "tokens" in expected:
        expected["tokens"] = new(expected["tokens"])
    for name in {"global", "stepwise", "masked"} & expected.keys():
        expected[name] = [[new(text), mass] for text, mass in expected[name]]
    return case


SETS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "traces": (text, ("llada/of first 1", "lopa/of second 1", "test_logits[full-second]")),
    "moe": (mixtures, ("llada20_generate/number 1", "sdar_generate/number 0", "test_logits[three-full]")),
    "next-image": (next_image, ("of them", "test_replays_the_rule[")),
    "diffusion": (diffusion, ("case 0", "case 10", "some of them", "run 3")),
    "recap": (recap, ("run 0", "run 1")),
    "llamagen": (llamagen, ("captions-t2i", "classes-c2i", "classes-vq")),
    "proteins": (proteins, ("other two", "other few")),
    "ligands": (ligands, ("other bound-gaps", "other labels")),
    "images-autumn": (images_autumn, ("test_seacache_replays_diffusers[0]", "[number 3-scd]", "pipeline[number 0]")),
    "drafters": (
        drafters,
        (
            "[eagle3 other-original]",
            "[eagle3 other.1-speculators]",
            "[dspark other-rnn]",
            "[dflash2 other-zlab]",
            "test_recorded_calls[heads 1]",
            "recorded_cases[6]",
            "replays_a_recorded_verification[case 9]",
        ),
    ),
    "structured": (
        structured,
        (
            "[other run 0]",
            "[other law 0]",
            "[other marginals 1]",
            "[other holes 0]",
            "test_decide.py::test_recorded_answers[other decide 0]",
        ),
    ),
    "autumn": (autumn, ("[default]", "[nld number 0-one_call_9_1]", "[0 ", "[none-drawn__")),
    **{
        family: (functools.partial(renamed, family=family), ("case 0", "case 9"))
        for family in ("sjd", "gsd", "scd", "lantern")
    },
}
