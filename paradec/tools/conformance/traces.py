"""Recorded traces of the published code: what is asked for each, and what of it is compared.

What the published loops do with no effect on any token is left out of the comparison, so that an engine need not repeat
it: forwards that make nothing final, rows that wait for each other, and everything after the place where a loop
stopped (`Expected.compared`). Left out as a whole are files in which the published code makes tokens final that it has
no logits for, and those whose draws were recorded from a stream that no other code has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paradec.tools.conformance.archive import FOLDERS, TRACES, Data, checkpoint


@dataclass(frozen=True)
class Asked:
    """A request, as plain data: what a target is given (docs/conformance.md explains every field)."""

    checkpoint: str
    """A folder of the data."""
    prompts: list[list[int]]
    max_new_tokens: int
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    block_length: int | None = None
    steps: int | None = None
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    guidance_scale: float = 1.0
    cache: Mapping[str, Any] | None = None
    """Its name under "name", then its settings."""
    seed: int = 0
    draws: str = "none"
    """"none", "torch" (the published code's, from torch's CPU generator after `torch.manual_seed(seed)`), or "own"."""
    mask_id: int | None = None
    eos_id: int | None = None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Asked:
        """From a file of the kit."""
        return cls(**data)

    def but(self, **changes: Any) -> Asked:
        """A copy with other fields."""
        return dataclasses.replace(self, **changes)

    def alike(self, other: Asked) -> bool:
        """Whether both ask for the same but for prompts and seed."""
        return self.but(prompts=[], seed=0) == other.but(prompts=[], seed=0)


@dataclass(frozen=True)
class Expected:
    """What one row must come to."""

    ids: list[int]
    """Prompt and answer."""
    steps: list[dict[int, int]] | None
    """Token by position, of every forward that changed something that is compared; None where only the answer is
    compared."""
    compared: frozenset[int]
    """Positions. Others are those that the published loop left undecided where it stopped, or filled without a look."""
    certain: bool
    """Whether the published code decides alike in float32 and float64."""


def recorded(data: Data) -> Iterator[tuple[str, list[tuple[int, Asked, list[Expected]]]]]:
    """(name, [(number of the case, what is asked, what each row must come to)]) of every file of traces."""
    for top in TRACES:
        for file in data.names(top):
            folder = file.split("/")[-2]
            if folder not in FOLDERS:
                continue
            trace = data.json(file)
            found = []
            for number, case in enumerate(trace["cases"]):
                asked = _asked(folder, trace, case, checkpoint(top, trace["model"]))
                if asked is not None:
                    rows = [_expected(folder, trace, case, row, asked) for row in range(len(case["prompt_ids"]))]
                    found.append((number, asked, rows))
            if found:
                yield f"{folder}/{file.rsplit('/', 1)[-1].removesuffix('.json')}", found


# ---- what is compared ----------------------------------------------------------------------------------------------


def changes(
    steps: Iterable[Iterable[tuple[int, int, int]]], row: int, canvas: Sequence[int], compared: Container[int]
) -> list[dict[int, int]]:
    """What each of `steps` [(row, position, token)] changed in one row at the positions that are `compared`, without
    those that changed nothing. canvas: the row's ids before the first step."""
    now, found = list(canvas), []
    for step in steps:
        changed = {}
        for of, position, token in step:
            if of == row and position in compared and now[position] != token:
                changed[position] = now[position] = token
        if changed:
            found.append(changed)
    return found


def _expected(folder: str, trace: Mapping[str, Any], case: Mapping[str, Any], row: int, asked: Asked) -> Expected:
    prompt, final, mask = case["prompt_ids"][row], case["final_ids"][row], trace["mask_id"]
    until = end = len(prompt) + asked.max_new_tokens
    if folder == "dinfer" and trace["settings"]["early_stop"] and trace["eos_id"] in final[len(prompt) :]:
        # it stops after the block that holds the end, and fills what is after it
        at, length = final.index(trace["eos_id"], len(prompt)) - len(prompt), trace["settings"]["block_length"]
        until = min(end, len(prompt) + (at // length + 1) * length)
    compared = frozenset(at for at in range(until) if final[at] != mask)
    canvas = [*prompt, *[mask] * max(0, len(final) - len(prompt))]
    steps: list[dict[int, int]] | None = None
    if asked.method != "freedave":  # which promises its base's tokens; when it finds them is left to an engine
        steps = changes(([tuple(entry) for entry in step["commit"]] for step in case["steps"]), row, canvas, compared)
    return Expected(final[:end], steps, compared, bool(case["fp64_same"]) and case.get("margin", 1.0) >= 1e-5)


# ---- what is asked -------------------------------------------------------------------------------------------------


def _asked(folder: str, trace: Mapping[str, Any], case: Mapping[str, Any], checkpoint: str) -> Asked | None:
    """None where the kit leaves a case out."""
    settings, prompts = trace["settings"] | {"setting": trace["setting"]}, case["prompt_ids"]
    new = settings.get("max_new_tokens", settings.get("gen_length"))
    if new is None:
        new = len(case["final_ids"][0]) - len(prompts[0])
    found = _REQUESTS.get(folder, _text)(folder, settings, len(prompts[0]))
    if found is None:
        return None
    asked = Asked(checkpoint, prompts, new, **found)
    return asked.but(seed=case["seed"], mask_id=trace["mask_id"], eos_id=trace["eos_id"])


def _cache_of(folder: str, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The cache of Fast-dLLM and AdaBlock."""
    function = settings.get("function", "")
    if settings.get("dual_cache") or "dual_cache" in function:
        return {"name": "dual"}
    # Fast-dLLM's code for blocks of Dream always has a cache
    by_blocks = folder == "fastdllm-dream" and "dual_cache" in settings
    return {"name": "prefix"} if by_blocks or "prefix_cache" in function else None


def _text(folder: str, settings: Mapping[str, Any], prompt: int) -> dict[str, Any] | None:
    """LLaDA, Dream, Fast-dLLM and AdaBlock."""
    cache, shifted = _cache_of(folder, settings), folder.endswith("dream")
    if shifted and cache is not None:
        return None  # the first token of each block becomes final unasked
    found: dict[str, Any] = {"cache": cache, "temperature": settings["temperature"]}
    found["guidance_scale"] = 1 + settings.get("cfg_scale", 0.0)
    if folder.startswith("adablock"):
        given = {name: settings[name] for name in ("threshold", "delimiter_threshold")}
        given["init_block_length"] = settings["init_block_length" if folder == "adablock" else "block_length"]
        return found | {"method": "adablock", "settings": given | {"delimiters": settings["delimiter_ids"]}}
    found["block_length"] = settings.get("block_length")
    if not shifted:
        if settings.get("threshold") is not None:
            return found | {"method": "threshold", "settings": {"threshold": settings["threshold"]}}
        if settings.get("factor") is not None:
            given = {"factor": settings["factor"], "reference_last_rank": True}
            return found | {"method": "factor", "settings": given}
        by_chance = settings["remasking"] == "random" or settings["temperature"] > 0
        found |= {"draws": "torch"} if by_chance else {}
        return found | {"method": settings["remasking"], "steps": settings["steps"]}
    found |= {name: settings[name] for name in ("top_p", "top_k", "steps")}
    if settings["alg"] == "confidence_threshold":
        given = {"threshold": settings["threshold"], "quota_per_step": "carry"}
        return found | {"method": "threshold", "settings": given}
    return found | _dream_rule(settings)


def _dream_rule(settings: Mapping[str, Any]) -> dict[str, Any]:
    given = {"eps": settings["eps"]} | ({} if settings["alg"] == "origin" else {"alg_temp": settings["alg_temp"]})
    by_chance = settings["alg"] == "origin" or settings["temperature"] > 0 or bool(settings.get("alg_temp"))
    return {"method": settings["alg"], "settings": given} | ({"draws": "torch"} if by_chance else {})


def _dinfer(folder: str, settings: Mapping[str, Any], prompt: int) -> dict[str, Any]:
    given = {name: value for name, value in settings["decoder"].items() if name != "use_float64"}
    found: dict[str, Any] = {"block_length": settings["block_length"]}
    if settings["setting"].startswith("credit"):
        names = {"credit_alpha": "fusion", "boost_gamma": "exponent", "decay_beta": "decay"}
        own = {"fusion": 0.7, "exponent": 0.2, "decay": 0.8} | {names.get(name, name): given[name] for name in given}
        return found | {"method": "credit", "settings": own}
    return found | {"method": "hierarchy" if "low_threshold" in given else "threshold", "settings": given}


def _dkv(folder: str, settings: Mapping[str, Any], prompt: int) -> dict[str, Any] | None:
    found: dict[str, Any] = {name: settings[name] for name in ("temperature", "block_length", "steps")}
    if settings["variant"] == "greedy":
        found |= {"method": "random", "settings": {"order": "block"}, "draws": "torch"}
        cache = {"name": "dkv_greedy", "window": settings.get("window_size")}
    elif settings["remasking"] == "random":
        return None  # numbers are drawn for what the cache evaluates, in that order
    else:
        found |= {"method": "low_confidence"}
        cache = {"name": "dkv_decode"}
    if not settings["enable_cache"]:
        return found
    return found | {"cache": cache | {"refresh_interval": settings["cache_reloading_step"]}}


def _dkv_dream(folder: str, settings: Mapping[str, Any], prompt: int) -> dict[str, Any] | None:
    found = {name: settings[name] for name in ("temperature", "steps", "top_p", "top_k")} | _dream_rule(settings)
    if not settings["use_cache"]:
        return found
    if settings["cache_type"] == "prefill":
        return found | {"cache": {"name": "dkv_prefill"}}
    if settings["shift_type"] == "right":
        return None  # tokens become final that have no logits
    name = {"decoded": "dkv_decode", "pd": "dkv_pd"}[settings["cache_type"]]
    given = {"refresh_interval": settings["cache_steps"], "shift_type": settings["shift_type"]}
    return found | {"cache": {"name": name} | given}


def _freedave(folder: str, settings: Mapping[str, Any], prompt: int) -> dict[str, Any]:
    threshold, drafts = settings.get("confidence_threshold"), settings.get("draft_steps", 1)
    found: dict[str, Any] = {"cache": {"name": "dual" if settings["dual_cache"] else "prefix"}}
    found |= {name: settings[name] for name in ("block_length", "temperature")}
    base = {"sampler": "low_confidence"} if threshold is None else {"sampler": "threshold", "threshold": threshold}
    if settings["method"] == "static":
        return found | {"method": base.pop("sampler"), "settings": base}
    mode = "tree" if settings["draft_mode"] == "tree_attention" else "batch"
    given = {"base": base, "draft_steps": drafts, "draft_mode": mode}
    # with a threshold a draft is right where it holds no more than the base would have made final
    return found | {"method": "freedave", "settings": given | {"agreement": "exact" if threshold is None else "subset"}}


def _llada20(folder: str, settings: Mapping[str, Any], prompt: int) -> dict[str, Any] | None:
    if settings.get("temperature"):
        return None
    length = settings.get("block_length", settings.get("block_size"))
    new = settings.get("gen_length", settings.get("max_new_tokens"))
    steps = min(settings.get("steps", settings.get("steps_per_block")), new // settings.get("minimal_topk", 1))
    blocks = -(-(prompt + new) // length) - prompt // length
    found: dict[str, Any] = {"block_length": length}
    if settings["threshold"] > 1:  # which fills by count alone
        return found | {"method": "low_confidence"}
    given = {"threshold": settings["threshold"]}
    if steps >= length:  # one a step at least
        return found | {"method": "threshold", "settings": given}
    return found | {"method": "threshold", "settings": given | {"quota_per_step": "least"}, "steps": steps * blocks}


def _llada21(folder: str, settings: Mapping[str, Any], prompt: int) -> dict[str, Any] | None:
    if settings.get("temperature"):
        return None
    given = {name: settings[name] for name in ("threshold", "max_post_steps") if name in settings}
    # above 1 nothing is edited
    given |= {"editing_threshold": min(settings["editing_threshold"], 1.0), "least": settings.get("num_to_transfer", 1)}
    return {"method": "editing", "settings": given, "block_length": settings["block_length"]}


def _llada_moe(folder: str, settings: Mapping[str, Any], prompt: int) -> dict[str, Any]:
    return {"method": "low_confidence", "block_length": settings["block_length"], "steps": settings["steps"]}


_REQUESTS = {
    "dinfer": _dinfer,
    "dkv": _dkv,
    "dkv-dream": _dkv_dream,
    "freedave": _freedave,
    "llada20_generate": _llada20,
    "llada20_batch": _llada20,
    "llada21_generate": _llada21,
    "llada_moe_generate": _llada_moe,
}
