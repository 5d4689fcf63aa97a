"""Make the conformance kit's own cases and checkpoints (`tests/golden/conformance`).

    python benchmarks/conformance_cases.py [--only ties laws canvases rows]

- ties: checkpoints in LLaDA's format whose confidences are exactly 1, or exactly 1/2 with two equally likely tokens,
  whatever the precision. What is predicted depends on how many masks are left, so that an answer also shows how many
  tokens a forward made final. What the methods must do follows from that by hand (`tie_steps`).
- laws: a Llama over five tokens, a drafter near it, and the distribution of all answers of four tokens, enumerated
  with transformers alone.
- canvases: a DiffusionGemma, and answers of transformers' own `generate`.
- rows: which recorded cases make ragged batches. The published code knows no ragged batches, and what it does there
  with the mask's own probability is not stated anywhere: taken are cases in which it decides nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
OUT = GOLDEN / "conformance"


def write(name: str, value: Any) -> None:
    OUT.mkdir(exist_ok=True)
    (OUT / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


# ---- ties ----------------------------------------------------------------------------------------------------------

VOCAB, MASK, END, WIDTH, SHARP = 16, 15, 14, 8, 1e4
EARLY, LATE = (1, 2), (3, 4)
"""What is predicted while more than 45% of the row is masked, and after that; each with a twin."""
TURN = 0.45
PROMPT = [5, 6]
MASKS = 8


def tie_checkpoint(twins: bool) -> str:
    """One layer that attends to everything alike: every mask sees the share of masks in the row, and nothing else.
    Logits are so far apart that the likeliest token has all the probability, or half of it where it has a twin."""
    name = "ties-half" if twins else "ties-one"
    embedding = torch.zeros(VOCAB, WIDTH)
    embedding[:, 1], embedding[MASK, 0], embedding[MASK, 1] = 1, 1, 0
    output = torch.zeros(WIDTH, WIDTH)
    output[2, 0] = output[3, 1] = 1  # the share of masks goes to dimension 2, that of others to 3
    head = torch.zeros(VOCAB, WIDTH)
    head[:, 0] = -SHARP
    share = torch.zeros(WIDTH)
    share[2], share[3] = SHARP * (1 - TURN), -SHARP * TURN  # positive above the turn
    for early, late in list(zip(EARLY, LATE, strict=True))[: 2 if twins else 1]:
        head[early], head[late] = share, -share
    none, ones = torch.zeros(WIDTH, WIDTH), torch.ones(WIDTH)
    block = {"attn_norm": ones, "q_proj": none, "k_proj": none, "v_proj": torch.eye(WIDTH), "attn_out": output}
    block |= {"ff_norm": ones, "ff_proj": none, "up_proj": none, "ff_out": none}
    weights = {"wte": embedding, "ln_f": ones, "ff_out": head}
    weights |= {f"blocks.0.{part}": tensor for part, tensor in block.items()}
    config = json.loads((GOLDEN / "llada-tiny" / "config.json").read_text())
    config |= {"d_model": WIDTH, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "mlp_hidden_size": WIDTH, "mlp_ratio": 1}
    config |= {"vocab_size": VOCAB, "embedding_size": VOCAB, "mask_token_id": MASK}
    config |= {"eos_token_id": END, "pad_token_id": END, "max_sequence_length": 64, "train_max_sequence_length": 64}
    config.pop("auto_map")
    (OUT / name).mkdir(parents=True, exist_ok=True)
    (OUT / name / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    named = {f"model.transformer.{key}.weight": value.clone().contiguous() for key, value in weights.items()}
    save_file(named, OUT / name / "model.safetensors")
    return name


def tie_steps(most: Callable[[int], int], block: int, prompt: int = 2, seen: int = 0, of: int = 0) -> list[list[int]]:
    """The tokens of each forward where it makes at most `most(masks of the block)` final.

    prompt: its length. seen, of: padding that is attended to, so many positions, of which so many hold the mask.
    """
    steps, left = [], MASKS
    while left:
        share = (left + of) / (MASKS + prompt + seen)
        open_masks = (left - 1) % block + 1
        count = min(open_masks, most(open_masks))
        steps.append([EARLY[0] if share > TURN else LATE[0]] * count)
        left -= count
    return steps


def one(masks: int) -> int:
    return 1


def half(masks: int) -> int:
    return MASKS // 2


def every(masks: int) -> int:
    return masks


def capped(masks: int) -> int:
    """WINO's cap, with its defaults."""
    return max(5, min(20, int(0.7 * masks)))


def ties() -> None:
    """Methods that take what is at the threshold, methods that take only what is above it, and ragged batches whose
    rows predict something else if they see what pads them."""
    cases: list[dict[str, Any]] = []
    common = {"max_new_tokens": MASKS, "mask_id": MASK, "eos_id": END}
    for twins in (False, True):
        checkpoint, value = f"conformance/{tie_checkpoint(twins)}", 0.5 if twins else 1.0
        methods: list[tuple[str, dict[str, Any], str, Callable[[int], int], int]] = [
            ("threshold", {"threshold": value}, ">=", every, 8),
            ("threshold", {"threshold": value}, ">=", every, 4),
            ("wino", {"threshold": value, "threshold_back": 0.0}, ">", capped, 8),
            ("editing", {"threshold": value, "editing_threshold": 1.0}, ">", every, 8),
        ]
        for method, settings, right, at_threshold, block in methods:
            asked = common | {"checkpoint": checkpoint, "prompts": [PROMPT], "block_length": block}
            answers = {
                "compares confidence >= threshold": [tie_steps(at_threshold, block)],
                "compares confidence > threshold": [tie_steps(one, block)],
            }
            cases.append(
                {
                    "name": f"ties/{method}_{value:g}_bl{block}",
                    "asked": asked | {"method": method, "settings": settings},
                    "answers": answers,
                    "right": f"compares confidence {right} threshold",
                    "twins": [list(EARLY), list(LATE)] if twins else [],
                }
            )
    prompts = [[5] * length for length in (2, 12, 40)]
    for method, settings, most in (("threshold", {"threshold": 0.5}, every), ("low_confidence", {}, half)):
        asked = common | {"checkpoint": "conformance/ties-one", "prompts": prompts, "block_length": MASKS}
        asked |= {"method": method, "settings": settings} | ({"steps": 2} if most is half else {})
        longest, answers = max(map(len, prompts)), {}
        for name, share in (("hides padding", None), ("sees padding as masks", 1), ("sees padding as tokens", 0)):
            answers[name] = []
            for prompt in prompts:
                seen = 0 if share is None else longest - len(prompt)
                answers[name].append(tie_steps(most, MASKS, len(prompt), seen, seen * (share or 0)))
        entry = {"name": f"rows/{method}_padding", "asked": asked, "answers": answers, "right": "hides padding"}
        cases.append(entry | {"twins": []})
    write("ties.json", {"cases": cases})


# ---- distributions -------------------------------------------------------------------------------------------------

VOCABULARY, NEW = 5, 4
PROMPTS = ([2, 0], [4, 1, 3, 3])
DRAWN: dict[str, dict[str, Any]] = {
    "temperature1": {"temperature": 1.0},
    "temperature0.7_topk3": {"temperature": 0.7, "top_k": 3},
}
LOSSLESS: dict[str, dict[str, Any]] = {
    "speculative": {"window": 4, "drafter": "conformance/law-llama-drafter"},
    "sjd": {"window": 4},
    "scd/gumbel": {"window": 4, "refresh": "gumbel"},
    "scd/maximal": {"window": 4, "refresh": "maximal"},
    "jacobi": {"window": 4},
}


def causal(seed: int, near: Any = None) -> Any:
    """A small Llama; with `near`, in between that one and a random one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}
    module = LlamaForCausalLM(LlamaConfig(**sizes, **none))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.35)
        if near is not None:
            for parameter, other in zip(module.parameters(), near.parameters(), strict=True):
                parameter.copy_(0.3 * parameter + 0.7 * other)
    return module.eval()


def next_distribution(logits: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """[N, V] probabilities that tokens are drawn with."""
    scaled = logits / temperature
    if top_k is not None:
        scaled = scaled.masked_fill(scaled < scaled.topk(top_k, -1).values[:, -1:], -torch.inf)
    return scaled.softmax(-1)


def distributions() -> None:
    model = causal(0)
    for name, module in (("law-llama", model), ("law-llama-drafter", causal(1, near=model))):
        module.save_pretrained(OUT / name)
        (OUT / name / "generation_config.json").unlink(missing_ok=True)
    model, cases = model.double(), []
    every = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=NEW)))
    for drawn, number in itertools.product(DRAWN, range(len(PROMPTS))):
        prompt = PROMPTS[number]
        ids = torch.cat((torch.tensor(prompt).expand(len(every), -1), every), 1)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[:, len(prompt) - 1 : -1]
        probabilities = torch.ones(len(every), dtype=torch.float64)
        settings = DRAWN[drawn]
        for at in range(NEW):
            distribution = next_distribution(logits[:, at], settings["temperature"], settings.get("top_k"))
            probabilities *= distribution.gather(1, every[:, at : at + 1])[:, 0]
        asked = {"checkpoint": "conformance/law-llama", "prompts": [prompt], "max_new_tokens": NEW, "draws": "own"}
        possible = probabilities > 0
        entry = {"name": f"{drawn}_prompt{number}", "asked": asked | settings}
        entry |= {"answers": every[possible].tolist(), "probabilities": probabilities[possible].tolist()}
        cases.append(entry)
    write("laws.json", {"methods": LOSSLESS, "cases": cases})


# ---- canvases ------------------------------------------------------------------------------------------------------

SHORT = {"max_denoising_steps": 12, "confidence_threshold": 0.35}


def canvases() -> None:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from canvases import VOCAB as VOCABULARY
    from canvases import tiny_module

    module = tiny_module()
    module.save_pretrained(OUT / "diffusion-gemma-tiny")
    cases = []
    for rows, stop, seed in itertools.product((1, 3), (True, False), range(3)):
        generator = torch.Generator().manual_seed(100 + seed)
        ids = torch.randint(14, VOCABULARY, (rows, 9), generator=generator)
        torch.manual_seed(seed)
        found = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=48,
            stability_threshold=1 if stop else None,
            **SHORT,
        ).sequences
        asked = {"checkpoint": "conformance/diffusion-gemma-tiny", "prompts": ids.tolist(), "max_new_tokens": 48}
        asked |= {"method": "diffusion_gemma", "settings": SHORT | {"early_stop": stop}, "seed": seed, "draws": "torch"}
        name = f"{'stops' if stop else 'all_steps'}_{rows}_rows_{seed}"
        cases.append({"name": name, "asked": asked, "ids": found.tolist()})
    write("canvases.json", {"cases": cases})


# ---- rows ----------------------------------------------------------------------------------------------------------


def rows() -> None:
    from paradec.tools.conformance.archive import Data, members
    from paradec.tools.conformance.cases import Case
    from paradec.tools.conformance.compare import difference
    from paradec.tools.conformance.targets import Ours, checked, request
    from paradec.tools.conformance.traces import recorded

    data, ours = Data(GOLDEN, members(GOLDEN), ""), Ours()
    batches: dict[str, list[int]] = {}
    for name, entries in recorded(data):
        chosen: dict[int, int] = {}
        first: Any = None
        for number, asked, expected in entries:
            length = len(asked.prompts[0])
            alike = first is None or asked.alike(first)
            if len(asked.prompts) > 1 or asked.draws != "none" or length in chosen or not alike:
                continue
            # alone, under a reading that leaves the mask's own probability out: what that changes is left out
            case = Case(f"{name}/{number}", "rows", asked, expected)
            wanted = request(case, data)
            if expected[0].certain and difference(case, checked(ours(wanted), wanted)) is None:
                chosen[length], first = number, asked
        if len(chosen) > 1:  # the longest first: the others are padded
            batches[name] = [chosen[length] for length in sorted(chosen, reverse=True)]
        print(name, batches.get(name), flush=True)
    lines = ",\n".join(f"  {json.dumps(name)}: {members}" for name, members in batches.items())
    (OUT / "rows.json").write_text(f'{{"batches": {{\n{lines}\n}}}}\n', encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    kinds = {"ties": ties, "laws": distributions, "canvases": canvases, "rows": rows}
    parser.add_argument("--only", nargs="+", choices=kinds, default=list(kinds))
    torch.set_num_threads(1)
    for name in parser.parse_args().only:
        kinds[name]()


if __name__ == "__main__":
    main()
