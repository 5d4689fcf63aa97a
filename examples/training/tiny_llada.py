"""Train the packaged masked diffusion model of text, on two CPU cores.

    python examples/training/tiny_llada.py --out runs/tiny               # Ctrl-C at any time ...
    python examples/training/tiny_llada.py --out runs/tiny --resume      # ... and continue

The model (under 2M parameters) learns the list tasks of `paradec.tools.evaluation.tasks` as a masked diffusion model
(LLaDA, arXiv 2502.09992): the prompt is visible, some positions of the answer are masked, and the bidirectional model
predicts all masked positions at once.

`--resume` continues from `runs/tiny/checkpoint.pt`. The model is written to `runs/tiny/export`, in the file format of
the published LLaDA checkpoints (`paradec.load("runs/tiny/export")`).
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import math
import os
import re
import signal
import threading
import time
from collections import defaultdict
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import paradec
from paradec.tools.evaluation.tasks import SYMBOLS, TASKS, WORDS, Example, load_prompts

HIDDEN, LAYERS, MLP = 192, 5, 384
TOKENS, PARTS = 3072, 4
"""Tokens in an optimizer step, and the number of batches into which they are split."""
RATE, SMOOTHING = 8e-4, 0.01
"""Peak learning rate (ten times that for Muon), and label smoothing."""

BOS, EOS, MASK, UNK = "<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>", "<|unk|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = (UNK, SYSTEM, USER, ASSISTANT, BOS, EOS, MASK)
TOKEN_PATTERN = r"\n|\w+|[^\w\s]"

CHAT_TEMPLATE = (  # as in LLaDA's, the assistant's turn always begins at the end
    "{% for message in messages %}"
    f"{{{{ ('{BOS}' if loop.first else '') + '<|' + message['role'] + '|>' }}}}"
    "{{ message['content'] | trim }}"
    f"{{% if message['role'] == 'assistant' %}}{EOS}{{% endif %}}"
    "{% endfor %}"
    f"{ASSISTANT}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per word, digit, punctuation mark and line break.

    A capital at the start of a word becomes lower case ("Sort" and "sort" are one token). Single letters, the symbols
    of Latin squares, keep their case.
    """
    templates = re.sub(r"{\w+}", "", " ".join(task.template for task in TASKS.values()))
    instructions = re.findall(r"[A-Za-z]{2,}", templates)
    words = sorted({*WORDS, *(word.lower() for word in instructions)})
    vocabulary = ["\n", ":", ",", ".", *"0123456789", *SYMBOLS, *words, *SPECIAL]
    core = Tokenizer(models.WordLevel({t: i for i, t in enumerate(vocabulary)}, unk_token=UNK))
    core.normalizer = normalizers.Sequence([normalizers.Replace(Regex(f"{s}(?=[a-z])"), s.lower()) for s in SYMBOLS])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN_PATTERN), "removed", invert=True)
    core.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="##", cleanup=False),  # joins with spaces; no token has a ##
            decoders.Fuse(),
            decoders.Replace(Regex(r" *\n *"), "\n"),
            decoders.Replace(Regex(r" +(?=[:,.])"), ""),
        ]
    )
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        unk_token=UNK,
        mask_token=MASK,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode_prompt(tokenizer: PreTrainedTokenizerFast, example: Example) -> list[int]:
    chat = [{"role": "user", "content": example.prompt}]
    return tokenizer.encode(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False)


LENGTHS = {24: 0.5, 32: 0.25, 44: 0.15, 80: 0.1}
"""Probability of each row length. End tokens extend answers to the row's length, so no batch has padding."""

Batch = tuple[Tensor, Tensor, Tensor]
"""Ids [B, L] of prompt, answer and end tokens; [B, L] bool, the positions to predict; [B, 1], the rows' weights."""


def draw_batch(rng: Random, tokenizer: PreTrainedTokenizerFast, mixture: dict[str, float], tokens: int) -> Batch:
    """Draw masked examples of about `tokens` tokens in total; all rows have the same length."""
    (length,) = rng.choices(list(LENGTHS), LENGTHS.values())
    names, weights = list(mixture), list(mixture.values())
    rows: list[list[int]] = []
    masks: list[list[bool]] = []
    while len(rows) < tokens // length:
        example = TASKS[rng.choices(names, weights)[0]].make(rng)
        prompt, answer = encode_prompt(tokenizer, example), tokenizer.encode(example.answer)
        region = length - len(prompt)
        if len(answer) < region:  # leaves room for at least one end token
            rows.append(prompt + answer + [tokenizer.eos_token_id] * (region - len(answer)))
            masks.append([False] * len(prompt) + draw_mask(rng, region, len(answer) + 1))
    ids, masked = torch.tensor(rows), torch.tensor(masks)
    region_size = (ids == tokenizer.convert_tokens_to_ids(ASSISTANT)).long().cumsum(1).sum(1, keepdim=True) - 1
    # LLaDA weighs a row by 1/t (its loss is then a likelihood bound); the cap tames the variance.
    weight = (region_size / masked.sum(1, keepdim=True)).clamp(max=5.0)
    return ids, masked, weight


def draw_mask(rng: Random, region: int, answer: int) -> list[bool]:
    """Draw which of the `region` positions after the prompt to mask (at least one).

    In 65 % of the cases the ratio is uniform, as in LLaDA. Otherwise the mask is one that occurs in decoding: all
    positions, or a random part of a block and all positions after it. The block begins within the first `answer`
    positions (the answer and one end token).
    """
    pattern, ratio = rng.random(), rng.random()
    if pattern < 0.15:
        return [True] * region
    start, stop = 0, region
    if pattern < 0.35:
        block = rng.choice((4, 8, 16, 32))
        start = block * rng.randrange(math.ceil(answer / block))
        stop = start + block
    mask = [k >= start and (k >= stop or rng.random() < ratio) for k in range(region)]
    if not any(mask):
        mask[rng.randrange(start, min(stop, region))] = True
    return mask


def build_model(vocab_size: int) -> LlamaForCausalLM:
    """Build a random Llama. A LLaDA is a Llama without the causal mask, and with other names of weights in files."""
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // 32, num_key_value_heads=HIDDEN // 32, max_position_embeddings=512,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, use_cache=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def logits_of(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """Compute logits (rows, length, vocabulary) of ids (rows, length) with bidirectional attention."""
    rows, length = ids.shape
    visible = torch.ones(1, 1, length, length, dtype=torch.bool, device=ids.device)
    return model(input_ids=ids, attention_mask=visible.expand(rows, -1, -1, -1)).logits


def loss_of(model: torch.nn.Module, batch: Batch, mask_id: int) -> Tensor:
    """Compute the weighted cross-entropy of the masked positions.

    Without label smoothing many confidences would be exactly 1.0 in float32, and their order random.
    """
    ids, masked, weight = batch
    logits = logits_of(model, ids.masked_fill(masked, mask_id))
    losses = F.cross_entropy(logits.transpose(1, 2).float(), ids, reduction="none", label_smoothing=SMOOTHING)
    weights = masked * weight
    return (losses * weights).sum() / weights.sum()


def accuracy(folder: Path, examples: list[Example], sampler: str) -> dict[str, float]:
    """Compute the share of right answers of the exported model, by task."""
    model = paradec.load(folder)
    right: dict[str, list[bool]] = defaultdict(list)
    for length in (32, 64):
        group = [e for e in examples if (32 if TASKS[e.task].max_answer_tokens < 32 else 64) == length]
        out = paradec.generate(model, [e.prompt for e in group], sampler=sampler, max_new_tokens=length, steps=length)
        for example, text in zip(group, out.text, strict=True):
            right[example.task].append(TASKS[example.task].check(example, text))
    return {name: sum(right[name]) / len(right[name]) for name in TASKS if name in right}


def llada_name(name: str) -> str:
    """Convert the name of a Llama weight to LLaDA's, which calls two kinds of weights `ff_out`."""
    for llama, llada in (
        ("model.layers.", "model.transformer.blocks."),
        ("model.embed_tokens.", "model.transformer.wte."),
        ("model.norm.", "model.transformer.ln_f."),
        ("lm_head.", "model.transformer.ff_out."),
        ("self_attn.o_proj", "attn_out"),
        ("self_attn.", ""),
        ("mlp.gate_proj", "ff_proj"),
        ("mlp.up_proj", "up_proj"),
        ("mlp.down_proj", "ff_out"),
        ("post_attention_layernorm", "ff_norm"),
        ("input_layernorm", "attn_norm"),
    ):
        name = name.replace(llama, llada)
    return name


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the model in LLaDA's file format, with its tokenizer.

    The JSON files have the fields of the packaged model, with this model's sizes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {llada_name(k): v.cpu().contiguous() for k, v in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes files that only their owner can read
    packaged = Path(str(importlib.resources.files("paradec") / "assets" / "tiny-llada"))
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        fields = json.loads((packaged / name).read_text(encoding="utf-8"))
        if name == "config.json":
            fields |= {"d_model": HIDDEN, "n_layers": LAYERS, "mlp_hidden_size": MLP}
            fields |= {
                "vocab_size": len(tokenizer),
                "embedding_size": len(tokenizer),
                "mask_token_id": tokenizer.mask_token_id,
            }
        (folder / name).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))


class Trainer:
    """Training state and step; checkpoints save the state.

    The layers' matrices are trained with Muon, which needed a quarter fewer steps than AdamW. torch's Muon
    orthogonalises in bfloat16; the packaged weights were trained with the same iterations in float32.
    """

    def __init__(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.model, self.mask_id = model, tokenizer.mask_token_id
        named = dict(model.named_parameters())
        inner = [p for n, p in named.items() if "layers" in n and p.ndim == 2]
        outer = [p for n, p in named.items() if not ("layers" in n and p.ndim == 2)]
        self.optimizers = [
            torch.optim.Muon(inner, lr=10 * RATE, weight_decay=0.05),
            torch.optim.AdamW(outer, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        ]
        self.rates = [10 * RATE, RATE]
        self.average = {k: v.clone() for k, v in model.state_dict().items()}
        self.rng = Random(seed)
        self.mixture = dict.fromkeys(TASKS, 1.0)
        self.step, self.seconds = 0, 0.0

    def train_step(self, batches: list[Batch], pool: Executor, progress: float) -> float:
        """Make one optimizer step on the mean loss of the batches; return this loss.

        After a warm-up the rate is constant; it falls to zero over the last half of `progress` in [0, 1]. Each thread
        of the pool processes whole batches, so a core that is busy elsewhere delays one batch, not every operation.
        """
        scale = min(1.0, (self.step + 1) / 200, max(0.0, 2.0 * (1.0 - progress)))
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
        parameters = list(self.model.parameters())

        def gradients(batch: Batch) -> tuple[float, tuple[Tensor, ...]]:
            loss = loss_of(self.model, batch, self.mask_id)
            return loss.item(), torch.autograd.grad(loss, parameters)

        losses, parts = zip(*pool.map(gradients, batches), strict=True)
        for p, grads in zip(parameters, zip(*parts, strict=True), strict=True):
            p.grad = torch.stack(grads).mean(0)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        decay = min(0.998, self.step / (self.step + 10))
        for name, value in self.model.state_dict().items():
            self.average[name].lerp_(value, 1.0 - decay)
        return sum(losses) / len(losses)

    def averaged(self) -> LlamaForCausalLM:
        """Build the model with the moving average of the weights."""
        model = LlamaForCausalLM(self.model.config)
        model.load_state_dict(self.average)
        return model.eval()

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "average": self.average,
            "rng": self.rng.getstate(),
            "mixture": self.mixture,
            "step": self.step,
            "seconds": self.seconds,
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        self.average = state["average"]
        version, numbers, gauss = state["rng"]
        self.rng.setstate((version, tuple(numbers), gauss))
        self.mixture, self.step, self.seconds = state["mixture"], state["step"], state["seconds"]


def report(title: str, folder: Path, examples: list[Example]) -> dict[str, float]:
    """Print the shares of right answers by task with three samplers; return those with `threshold` at 0.9."""
    samplers = ("low_confidence", "threshold(threshold=0.9)", "threshold(threshold=0)")
    scores = {sampler: accuracy(folder, examples, sampler) for sampler in samplers}
    print(f"{title:16}" + "".join(f"{name:>26}" for name in scores))
    for task in TASKS:
        print(f"{task:16}" + "".join(f"{100 * column[task]:25.1f}%" for column in scores.values()))
    print(flush=True)
    return scores[samplers[1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/tiny"), help="folder (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=90.0, help="minutes of training (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="maximum number of steps")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the examples")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,))
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint, folder = args.out / "checkpoint.pt", args.out / "export"

    tokenizer = build_tokenizer()
    model = build_model(len(tokenizer))
    trainer = Trainer(model, tokenizer, args.seed)
    if args.resume:
        trainer.load(checkpoint)
    stop = threading.Event()  # ends the loop between two steps; an exception could interrupt a step
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    begin, before, losses = time.monotonic(), trainer.seconds, []
    logged = saved = evaluated = begin
    while not stop.is_set():
        progress = max(trainer.step / args.steps if args.steps else 0.0, trainer.seconds / (60 * args.minutes))
        if progress >= 1:
            break
        batches = [draw_batch(trainer.rng, tokenizer, trainer.mixture, TOKENS // PARTS) for _ in range(PARTS)]
        losses.append(trainer.train_step(batches, pool, progress))
        now = time.monotonic()
        trainer.seconds = before + now - begin
        if now - logged > 30:
            mean = sum(losses) / len(losses)
            print(f"{trainer.seconds / 60:6.1f} min  step {trainer.step:6d}  loss {mean:.4f}", flush=True)
            logged, losses = now, []
        if now - evaluated > 480:
            export(trainer.averaged(), tokenizer, folder)
            probe = Random(f"{args.seed} {trainer.step}")  # new prompts: the packaged ones stay unseen
            examples = [task.make(probe) for task in TASKS.values() for _ in range(32)]
            scores = report(f"step {trainer.step}", folder, examples)
            # tasks with errors are drawn up to five times as often
            trainer.mixture = {name: 1.0 + 4.0 * (1.0 - score) for name, score in scores.items()}
            evaluated = time.monotonic()
        if now - saved > 120:
            trainer.save(checkpoint)
            saved = now
    trainer.save(checkpoint)
    export(trainer.averaged(), tokenizer, folder)
    if stop.is_set():
        print("stopped; --resume continues", flush=True)
        return
    report("packaged prompts", folder, load_prompts(limit=2 if args.steps else None))


if __name__ == "__main__":
    main()
