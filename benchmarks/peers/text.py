"""paradec compared with the public decoders of LLaDA and Dream: whole answers of a random checkpoint, in turns.

    python benchmarks/peers/text.py --python ENVIRONMENT/bin/python \\
        --fast-dllm CHECKOUT --llada CHECKOUT --dkv-cache CHECKOUT --dinfer CHECKOUT [--turns 7] [--size small]

The public decoders need an older transformers: `--python` is an interpreter with torch, transformers 4.46.3, einops and
safetensors. Each decoder runs in a separate process, loads the same random checkpoint as paradec (in LLaDA's or Dream's
format), and takes turns with this process. All have one thread; times are CPU times. Decoders without a checkout are
left out. The cases are the published settings:

- Fast-dLLM and dInfer: threshold 0.9, blocks of 32.
- LLaDA and Dream: half as many steps as tokens. The "sampled" cases have temperature 0.7 (Dream also top_p=0.95).
- dKV-Cache: a forward over all positions every eighth step.

Tokens are compared, except in the "sampled" cases, whose random numbers differ. The result also has the load of the
machine, and quartiles over turns of (paradec - products) / (peer - products), where products is the time of the matrix
products, which both programs must compute.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
from common import Contestant, Elsewhere
from provenance import write_result
from safetensors.torch import save_file

import paradec

RESULT = common.BENCHMARKS / "results" / "peers_text.json"
SIZES = {
    # hidden size, layers, heads, intermediate size, vocabulary, prompt, answer; "words" has LLaDA's vocabulary
    "tiny": (64, 2, 4, 128, 500, 16, 32),
    "small": (384, 6, 6, 1024, 32_000, 32, 64),
    "words": (384, 6, 6, 1024, 126_464, 32, 64),
}
PATCHED = {
    "llada": "its model class is only on the hub: Fast-dLLM's copy is used",
    "dream": "its code is only on the hub: Fast-dLLM's copies of model and decoding are used",
    "fast_dllm": "nothing",
    "dkv_cache": "nothing; what it prints is discarded",
    "dinfer": "the imports in its __init__ files are skipped; vllm and sglang are empty modules with rank 0 of 1",
}
"""By decoder: what is changed to run it."""


def random_matrix(draw: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=draw) * scale / math.sqrt(shape[-1])


def checkpoint(folder: Path, size: str) -> dict[str, int]:
    """Write a random model in LLaDA's format; return its sizes. The last layer is scaled so that the model is confident
    of some tokens, and `threshold` commits several per step."""
    hidden, layers, heads, inner, vocab, _, _ = SIZES[size]
    draw = torch.Generator().manual_seed(0)
    normal = partial(random_matrix, draw)
    top = "model.transformer."
    weights = {
        f"{top}wte.weight": torch.randn((vocab, hidden), generator=draw),
        f"{top}ln_f.weight": torch.ones(hidden),
        f"{top}ff_out.weight": normal(vocab, hidden, scale=4.0),
    }
    for layer in range(layers):
        block = f"{top}blocks.{layer}."
        weights |= {f"{block}{name}.weight": torch.ones(hidden) for name in ("attn_norm", "ff_norm")}
        names = ("q_proj", "k_proj", "v_proj", "attn_out")
        weights |= {f"{block}{name}.weight": normal(hidden, hidden) for name in names}
        weights |= {f"{block}{name}.weight": normal(inner, hidden) for name in ("ff_proj", "up_proj")}
        weights[f"{block}ff_out.weight"] = normal(hidden, inner)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "activation_type": "silu", "alibi": False, "architectures": ["LLaDAModelLM"], "attention_dropout": 0.0,
        "attention_layer_norm": False, "attention_layer_norm_with_affine": True, "bias_for_layer_norm": False,
        "block_group_size": 1, "block_type": "llama", "d_model": hidden, "embedding_dropout": 0.0,
        "embedding_size": vocab, "eos_token_id": vocab - 2, "flash_attention": False, "include_bias": False,
        "include_qkv_bias": False, "init_device": "cpu", "input_emb_norm": False, "layer_norm_type": "rms",
        "layer_norm_with_affine": True, "mask_token_id": vocab - 1, "max_sequence_length": 1024,
        "mlp_hidden_size": inner, "mlp_ratio": 4, "model_type": "llada", "multi_query_attention": None,
        "n_heads": heads, "n_kv_heads": heads, "n_layers": layers, "pad_token_id": vocab - 2,
        "residual_dropout": 0.0, "rms_norm_eps": 1e-05, "rope": True, "rope_full_precision": True,
        "rope_theta": 500000.0, "scale_logits": False, "torch_dtype": "float32", "use_cache": False,
        "vocab_size": vocab, "weight_tying": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return {"hidden": hidden, "layers": layers, "heads": heads, "inner": inner, "words": vocab}


def dream_checkpoint(folder: Path, size: str) -> None:
    """Write a random model of a size of `SIZES` in Dream's format."""
    hidden, layers, heads, inner, vocab, _, _ = SIZES[size]
    draw = torch.Generator().manual_seed(0)
    normal = partial(random_matrix, draw)
    weights = {
        "model.embed_tokens.weight": torch.randn((vocab, hidden), generator=draw),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": normal(vocab, hidden, scale=4.0),
    }
    for layer in range(layers):
        block = f"model.layers.{layer}."
        norms = ("input_layernorm", "post_attention_layernorm")
        weights |= {f"{block}{name}.weight": torch.ones(hidden) for name in norms}
        for name in "qkv":
            weights[f"{block}self_attn.{name}_proj.weight"] = normal(hidden, hidden)
            weights[f"{block}self_attn.{name}_proj.bias"] = torch.zeros(hidden)
        weights[f"{block}self_attn.o_proj.weight"] = normal(hidden, hidden)
        weights |= {f"{block}mlp.{name}_proj.weight": normal(inner, hidden) for name in ("gate", "up")}
        weights[f"{block}mlp.down_proj.weight"] = normal(hidden, inner)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["DreamModel"], "model_type": "Dream", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": inner, "vocab_size": vocab,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "tie_word_embeddings": False,
        "torch_dtype": "float32", "mask_token_id": vocab - 1, "eos_token_id": vocab - 2, "pad_token_id": vocab - 2,
        "bos_token_id": vocab - 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def cases(options: argparse.Namespace) -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    """Build the cases to run: {name: (decoder, its settings, paradec's request)}."""
    answer = SIZES[options.size][-1]
    rule = {"sampler": paradec.samplers.create("threshold", threshold=0.9)}
    entries: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {}
    for cache in ("none", "prefix", "dual"):
        entries[f"fast_dllm {cache}"] = ("fast_dllm", {"cache": cache, "threshold": 0.9}, {**rule, "cache": cache})
    for cache in ("none", "dual"):
        entries[f"dinfer {cache}"] = ("dinfer", {"cache": cache, "threshold": 0.9}, {**rule, "cache": cache})
    steps = answer // 2
    for name, temperature in (("llada", 0.0), ("llada sampled", 0.7)):
        request = {"sampler": "low_confidence", "steps": steps, "temperature": temperature}
        entries[name] = ("llada", {"steps": steps, "temperature": temperature}, request)
    for name, drawn in (("dream", {"temperature": 0.0}), ("dream sampled", {"temperature": 0.7, "top_p": 0.95})):
        request = {"sampler": "entropy", "steps": steps, "block_length": None, **drawn}
        entries[name] = ("dream", {"steps": steps, **drawn}, request)
    entries["dkv_cache"] = (
        "dkv_cache",
        {"steps": answer, "refresh": 8},
        {"sampler": "low_confidence", "cache": paradec.caches.create("dkv_decode", refresh_interval=8)},
    )
    return {
        name: case
        for name, case in entries.items()
        if getattr(options, case[0]) is not None and name.startswith(options.only)
    }


def decoder(model: Any, prompt: torch.Tensor, request: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """Build a function that decodes with paradec and returns the tokens [1, prompt + answer]."""

    def run() -> torch.Tensor:
        return paradec.generate(model, input_ids=prompt, **request).sequences

    return run


def products(model: Any, decode: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Build a function that repeats only the matrix products of one call of `decode`, in its order and shapes: a lower
    bound of the time. Products inside attention are left out. The function returns the tokens of `decode`."""
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    inputs: dict[torch.Size, torch.Tensor] = {}

    def record(part: torch.nn.Linear, args: tuple[torch.Tensor, ...]) -> None:
        shape = args[0].shape
        calls.append((inputs.setdefault(shape, torch.randn(shape).to(args[0].dtype)), part.weight))

    linears = [part for part in model.module.modules() if type(part) is torch.nn.Linear]
    hooks = [part.register_forward_pre_hook(record) for part in linears]
    try:
        tokens = decode()
    finally:
        for hook in hooks:
            hook.remove()

    @torch.inference_mode()
    def run() -> torch.Tensor:
        for hidden, weight in calls:
            torch.nn.functional.linear(hidden, weight)
        return tokens

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in PATCHED.keys() - {"dream"}:  # Fast-dLLM's checkout has it
        parser.add_argument(f"--{name.replace('_', '-')}", type=Path, metavar="CHECKOUT")
    parser.add_argument("--python", required=True)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--only", default="", help="prefix of the names of cases to run")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    if args.llada is not None and args.fast_dllm is None:
        parser.error("--llada also needs --fast-dllm, whose copy of the model it runs")
    args.dream = args.fast_dllm
    torch.set_num_threads(1)
    prompt_length, answer = SIZES[args.size][-2:]
    result: dict[str, Any] = {**common.machine(), "dtype": args.dtype, "turns": args.turns, "cases": {}}
    loads = [common.load()]
    with tempfile.TemporaryDirectory() as away:
        folders = {name: Path(away) / name for name in ("llada", "dream")}
        for folder in folders.values():
            folder.mkdir()
        result["model"] = sizes = checkpoint(folders["llada"], args.size)
        dream_checkpoint(folders["dream"], args.size)
        vocab = sizes["words"]
        draw = torch.Generator().manual_seed(1)
        prompt = torch.randint(0, vocab - 2, (1, prompt_length), generator=draw)
        models = {name: paradec.load(folder, dtype=args.dtype) for name, folder in folders.items()}
        for name, (reference, theirs, settings) in cases(args).items():
            folder, model = (by_format.get(reference, by_format["llada"]) for by_format in (folders, models))
            checkout = getattr(args, reference)
            task = {
                "folder": str(folder), "prompt": prompt.tolist(), "answer": answer, "block": 32, "steps": answer,
                "mask": vocab - 1, "end": vocab - 2, "dtype": args.dtype, "version": common.checkout_commit(checkout),
                "model_checkout": str(args.fast_dllm), **theirs,
            }  # fmt: skip
            (folder / "task.json").write_text(json.dumps(task))
            script = Path(__file__).with_name("text_reference.py")
            request = {"max_new_tokens": answer, "block_length": 32, "eos_early_stop": False, **settings}
            contestants: list[Contestant] = [Contestant("paradec", decoder(model, prompt, request))]
            bare = Contestant("matrix products alone", products(model, contestants[0].run))
            contestants.append(bare)
            arguments = (reference, str(checkout), str(folder / "task.json"))
            with Elsewhere(reference, args.python, script, *arguments) as peer:
                contestants.append(peer)
                common.alternate(contestants, args.turns, warm_up=2)
            for contestant in contestants:  # some decoders return the prompt, too
                contestant.result = contestant.result[:, -answer:]
            aims = {} if settings.get("temperature") else {"paradec": reference}
            entries = common.report(contestants, (reference,), aims, bare.name)
            loads.append(common.load())
            result["cases"][name] = {"patched": PATCHED[reference], "contestants": entries}
            print(common.show(name, entries, (reference,)), flush=True)
    result["load_average"] = [min(loads), max(loads)]
    write_result(args.out, result)


if __name__ == "__main__":
    main()
