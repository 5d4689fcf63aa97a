"""A decoder of one's own, held to the conformance kit: `paradec verify` asks it, and says where it differs.

    cd examples && paradec verify --target verify_own_decoder:answer
    python examples/verify_own_decoder.py            # the same, for the methods that are here
    python examples/verify_own_decoder.py --tiny     # a few cases of them

Nothing of paradec is used to decode: LLaDA in plain PyTorch from the file's tensors with three methods, and speculative
decoding over a causal model of transformers. docs/conformance.md says what a request holds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

METHODS = ("low_confidence", "threshold", "wino", "speculative")
Compare = Callable[[Tensor, float], Tensor]


def answer(
    request: dict[str, Any], *, above: Compare = torch.gt, sees_padding: bool = False, acceptance: float = 1.0
) -> dict[str, Any]:
    """What `paradec verify` calls. The keywords are three ways to get it wrong, for tests of the kit.

    Args:
        above: how WINO compares a confidence with its threshold. sees_padding: let the rows of a batch attend to what
            is padded on to shorter ones. acceptance: a factor of the probability that a draft is accepted with.
    """
    if request["method"] not in METHODS or request["cache"] is not None or request["guidance_scale"] != 1:
        raise NotImplementedError("low_confidence, threshold, wino and speculative, without caches or guidance")
    if request["method"] == "speculative":
        return {"ids": speculative(request, acceptance)}
    simple = request["temperature"] == 0 and "quota_per_step" not in request["settings"]
    if not simple or request["settings"].get("threshold_back", 0) > 0 or not is_llada(request["checkpoint"]):
        raise NotImplementedError("LLaDA at temperature 0; WINO without taking tokens back")
    return masked(request, above, sees_padding)


# ---- LLaDA ---------------------------------------------------------------------------------------------------------


def is_llada(folder: str) -> bool:
    return json.loads((Path(folder) / "config.json").read_text())["architectures"] == ["LLaDAModelLM"]


@lru_cache
def checkpoint(folder: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json, and the tensors by their names without prefix, float64."""
    weights = load_file(Path(folder) / "model.safetensors")
    named = {name.removeprefix("model.transformer."): tensor.double() for name, tensor in weights.items()}
    return json.loads((Path(folder) / "config.json").read_text()), named


def llada(folder: str, ids: Tensor, real: Tensor) -> Tensor:
    """Logits [B, L, V] of ids [B, L]; what is not `real` [B, L] bool is seen by nothing."""
    config, weights = checkpoint(folder)
    heads, width = config["n_heads"], config["d_model"] // config["n_heads"]
    frequencies = config["rope_theta"] ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(ids.shape[1], dtype=torch.float32), frequencies).repeat(1, 2)
    cos, sin = angles.cos().double(), angles.sin().double()

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], config["rms_norm_eps"])

    def project(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    x = weights["wte.weight"][ids]
    for layer in range(config["n_layers"]):
        block = f"blocks.{layer}"
        seen = norm(x, f"{block}.attn_norm")
        q, k, v = (
            project(seen, f"{block}.{part}_proj").unflatten(-1, (heads, width)).transpose(1, 2) for part in "qkv"
        )
        mixed = scaled_dot_product_attention(turned(q), turned(k), v, attn_mask=real[:, None, None, :])
        x = x + project(mixed.transpose(1, 2).flatten(2), f"{block}.attn_out")
        seen = norm(x, f"{block}.ff_norm")
        inner = silu(project(seen, f"{block}.ff_proj")) * project(seen, f"{block}.up_proj")
        x = x + project(inner, f"{block}.ff_out")
    return project(norm(x, "ln_f"), "ff_out")


def masked(request: dict[str, Any], above: Compare, sees_padding: bool) -> dict[str, Any]:
    """Block by block, as LLaDA's and Fast-dLLM's code; rows of any length in one batch, padded on the right."""
    prompts, new, mask = request["prompts"], request["max_new_tokens"], request["mask_id"]
    longest = max(map(len, prompts)) + new
    ids = torch.full((len(prompts), longest), mask)
    real = torch.zeros(len(prompts), longest, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
        real[row, : len(prompt) + new] = True
    length = request["block_length"] or new
    steps = []
    for block in range(0, new, length):
        spans = [range(len(prompt) + block, len(prompt) + min(block + length, new)) for prompt in prompts]
        number = 0
        while any((ids[row, list(span)] == mask).any() for row, span in enumerate(spans)):
            logits = llada(request["checkpoint"], ids, real | sees_padding)
            best, tokens = logits.softmax(-1).max(-1)
            step = []
            for row, span in enumerate(spans):
                left = [at for at in span if ids[row, at] == mask]
                chosen = chosen_of(request, best[row, left], number, len(span), above) if left else []
                step += [[row, left[index], int(tokens[row, left[index]])] for index in chosen]
            for row, at, token in step:
                ids[row, at] = token
            steps.append(step)
            number += 1
    return {"ids": [ids[row, : len(prompt) + new].tolist() for row, prompt in enumerate(prompts)], "steps": steps}


def chosen_of(request: dict[str, Any], confidence: Tensor, number: int, length: int, above: Compare) -> list[int]:
    """Which of a row's undecided positions become final, of their confidences."""
    ranked = confidence.argsort(descending=True, stable=True)
    settings = request["settings"]
    if request["method"] == "low_confidence":
        if request["steps"] is None:
            return ranked[:1].tolist()
        planned = request["steps"] * length // request["max_new_tokens"]
        return ranked[: length // planned + (number < length % planned)].tolist()
    if request["method"] == "threshold":
        sure = confidence >= settings["threshold"]
    else:  # WINO's cap, with its defaults
        sure = above(confidence, settings["threshold"])
        sure[ranked[max(5, min(20, int(0.7 * len(confidence)))) :]] = False
    sure[ranked[0]] = True
    return sure.nonzero()[:, 0].tolist()


# ---- speculative decoding ------------------------------------------------------------------------------------------


@lru_cache
def causal(folder: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def distributions(folder: str, ids: Tensor, request: dict[str, Any]) -> Tensor:
    """[B, L, V]: the distribution of the token after each of `ids` [B, L]."""
    logits = causal(folder)(input_ids=ids, use_cache=False).logits / request["temperature"]
    if request["top_k"] is not None:
        logits = logits.masked_fill(logits < logits.topk(request["top_k"], -1).values[..., -1:], -torch.inf)
    return logits.softmax(-1)


@torch.no_grad()
def speculative(request: dict[str, Any], acceptance: float) -> list[list[int]]:
    """Leviathan et al., arXiv 2211.17192, algorithm 1; draws of all rows with one generator, row by row at their own
    place. Prompts are equal, as where draws are counted."""
    prompts, new, window = request["prompts"], request["max_new_tokens"], request["settings"]["window"]
    if any(prompt != prompts[0] for prompt in prompts) or request["temperature"] == 0:
        raise NotImplementedError("speculative decoding of several prompts, or without a temperature")
    generator = torch.Generator().manual_seed(request["seed"])
    begin, rows = len(prompts[0]), torch.arange(len(prompts))
    ids = torch.zeros(len(prompts), begin + new + 2 * window, dtype=torch.long)
    ids[:, :begin] = torch.tensor(prompts)
    ends = torch.full((len(prompts),), begin)

    def draw(distribution: Tensor) -> Tensor:
        return torch.multinomial(distribution, 1, generator=generator)[:, 0]

    while (ends < begin + new).any():
        drafted = ids.clone()
        q = []
        for slot in range(window - 1):
            guess = distributions(request["settings"]["drafter"], drafted, request)[rows, ends + slot - 1]
            drafted[rows, ends + slot] = draw(guess)
            q.append(guess)
        p = distributions(request["checkpoint"], drafted, request)
        running, before = ends < begin + new, ends.clone()
        accepting = running.clone()
        for slot in range(window - 1):
            token = drafted[rows, before + slot]
            target, guess = p[rows, before + slot - 1], q[slot]
            odds = acceptance * target[rows, token] / guess[rows, token]
            accepted = torch.rand(len(rows), generator=generator, dtype=torch.float64) < odds
            rest = (target - guess).clamp(min=0)
            rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, target)
            chosen = torch.where(accepted, token, draw(rest))
            ids[rows[accepting], (before + slot)[accepting]] = chosen[accepting]
            ends += accepting
            accepting = accepting & accepted
        last = draw(p[rows, before + window - 2])  # after drafts that were all accepted
        ids[rows[accepting], (before + window - 1)[accepting]] = last[accepting]
        ends += accepting
    return ids[:, : begin + new].tolist()


def main() -> None:
    from paradec.tools.conformance import archive, report
    from paradec.tools.conformance.cases import cases
    from paradec.tools.conformance.run import DRAWS, TOLERANCE, Run, run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the archive of the cases; a checkout of paradec has them")
    parser.add_argument("--tiny", action="store_true", help="a few cases")
    args = parser.parse_args()
    with archive.opened(args.data) as data:
        methods = METHODS[1:] if args.tiny else METHODS
        groups = ("ties", "laws") if args.tiny else ()
        narrowed = {"method": "+".join(methods)} | ({"group": "+".join(groups)} if groups else {})
        draws = DRAWS // 20 if args.tiny else DRAWS
        into = Run("verify_own_decoder:answer", data.version, data.digest, TOLERANCE, draws, narrowed)
        print(report.text(run(answer, data, cases(data, methods, groups), into)))


if __name__ == "__main__":
    main()
