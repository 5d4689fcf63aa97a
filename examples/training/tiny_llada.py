"""Train the small LLaDA model that ships inside paradec, from nothing, on two CPU cores.

    python examples/training/tiny_llada.py --out runs/tiny --minutes 90      # Ctrl-C at any time ...
    python examples/training/tiny_llada.py --out runs/tiny --minutes 90 --resume     # ... and go on

The model (under 2M parameters) learns the list tasks of ``paradec.tools.evaluation.tasks`` as a masked
diffusion model (LLaDA, arXiv 2502.09992): the prompt is visible, some positions of the answer are
replaced by the mask token, and the model, which attends in both directions, predicts them all at
once. The parts of the file, in order: tokenizer, batches, model and loss, evaluation, export,
optimizer and checkpoints, and the training loop at the end.

``runs/tiny/checkpoint.pt`` is all that a resumed run needs; ``runs/tiny/export`` holds the model
in the file format of the published LLaDA checkpoints (``paradec.load("runs/tiny/export")``).
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from paradec.tools.evaluation.tasks import SYMBOLS, TASKS, WORDS, Example, load_prompts

# Tokenizer ---------------------------------------------------------------------------------------

BOS, EOS, MASK, UNK = "<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>", "<|unk|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = (UNK, SYSTEM, USER, ASSISTANT, BOS, EOS, MASK)
TOKEN_PATTERN = r"\n|\w+|[^\w\s]"

CHAT_TEMPLATE = (  # like LLaDA's it ends with the assistant's turn, asked for or not
    "{% for message in messages %}"
    f"{{{{ ('{BOS}' if loop.first else '') + '<|' + message['role'] + '|>' }}}}"
    "{{ message['content'] | trim }}"
    f"{{% if message['role'] == 'assistant' %}}{EOS}{{% endif %}}"
    "{% endfor %}"
    f"{ASSISTANT}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word, number, punctuation mark and line break.

    A capital at the start of a word is lowered ("Sort" and "sort" are one token); single letters
    keep their case, for they are the symbols of Latin squares.
    """
    instructions = re.findall(r"[A-Za-z]{2,}", re.sub(r"{\w+}", "", " ".join(
        task.template for task in TASKS.values()
    )))  # fmt: skip
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


class Codec:
    """The same tokens as the tokenizer gives, without its overhead; and its special ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.ids: dict[str, int] = tokenizer.get_vocab()
        self.eos, self.mask = self.ids[EOS], self.ids[MASK]
        for task in TASKS.values():  # a shortcut is only as good as its check
            example = task.make(Random(0))
            chat = [{"role": "user", "content": example.prompt}]
            text = tokenizer.apply_chat_template(chat, tokenize=False)
            assert self.prompt(example) == tokenizer.encode(text, add_special_tokens=False)
            assert self.encode(example.answer) == tokenizer.encode(example.answer)
            assert self.decode(self.encode(example.answer)) == example.answer

    def encode(self, text: str) -> list[int]:
        tokens = re.findall(TOKEN_PATTERN, text)
        return [self.ids[t if len(t) == 1 else t.lower()] for t in tokens]

    def prompt(self, example: Example) -> list[int]:
        start = [self.ids[BOS], self.ids[USER]]
        return [*start, *self.encode(example.prompt), self.ids[ASSISTANT]]

    def decode(self, ids: list[int]) -> str:
        """The text up to the first end token."""
        end = ids.index(self.eos) if self.eos in ids else len(ids)
        return self.tokenizer.decode(ids[:end], skip_special_tokens=True)


# Batches -----------------------------------------------------------------------------------------

LENGTHS = {24: 0.5, 32: 0.25, 44: 0.15, 80: 0.1}
"""Length of a batch's rows -> how often. The answer is filled with end tokens up to that length,
so no batch has padding; prompts differ in length, so the answer regions do too. Mostly short for
speed; 80 leaves room for 64 new tokens after any prompt."""


@dataclass(frozen=True)
class Batch:
    """Rows to denoise.

    Attributes:
        ids: (rows, length) prompt, answer, end tokens.
        masked: (rows, length) positions that the model sees as the mask token and must predict.
        weight: (rows, 1) weight of the row in the loss.
    """

    ids: Tensor
    masked: Tensor
    weight: Tensor

    def to(self, device: str) -> Batch:
        return Batch(self.ids.to(device), self.masked.to(device), self.weight.to(device))


def draw_batch(rng: Random, codec: Codec, mixture: dict[str, float], tokens: int) -> Batch:
    """Draw about ``tokens`` tokens' worth of examples, all rows of one length, and mask them."""
    (length,) = rng.choices(list(LENGTHS), LENGTHS.values())
    names, weights = list(mixture), list(mixture.values())
    rows: list[list[int]] = []
    masks: list[list[bool]] = []
    while len(rows) < tokens // length:
        example = TASKS[rng.choices(names, weights)[0]].make(rng)
        prompt, answer = codec.prompt(example), codec.encode(example.answer)
        region = length - len(prompt)
        if len(answer) < region:  # leaves room for at least one end token
            rows.append(prompt + answer + [codec.eos] * (region - len(answer)))
            masks.append([False] * len(prompt) + draw_mask(rng, region, len(answer) + 1))
    ids, masked = torch.tensor(rows), torch.tensor(masks)
    in_region = (ids == codec.ids[ASSISTANT]).long().cumsum(1).sum(1, keepdim=True) - 1
    # LLaDA weighs a row by 1/t (its loss is then a likelihood bound); the cap tames the variance.
    weight = (in_region / masked.sum(1, keepdim=True)).clamp(max=5.0)
    return Batch(ids, masked, weight)


def draw_mask(rng: Random, region: int, answer: int) -> list[bool]:
    """Which of the ``region`` positions after the prompt to mask (at least one of them).

    Mostly a uniform ratio, as in LLaDA. The rest are the states that decoding meets: everything
    masked (its first step), and all known to the left of a block, all masked to the right of it
    (block by block decoding), with a block that the ``answer`` and its first end token reach.
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


# Model and loss ----------------------------------------------------------------------------------


def build_model(vocab_size: int, hidden: int, layers: int, mlp: int) -> LlamaForCausalLM:
    """A LLaDA is a Llama without the causal mask; only the names in the file differ."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def logits_of(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """Logits (rows, length, vocabulary) for ids (rows, length), every position seeing every one."""
    rows, length = ids.shape
    visible = torch.ones(1, 1, length, length, dtype=torch.bool, device=ids.device)
    return model(input_ids=ids, attention_mask=visible.expand(rows, -1, -1, -1)).logits


def loss_of(model: torch.nn.Module, batch: Batch, mask_id: int, smoothing: float) -> Tensor:
    """Weighted cross-entropy of the masked positions, per answer-region position.

    Label smoothing keeps confidences off 1.0: float32 softmax would otherwise give many positions
    exactly 1.0, and the order in which a sampler commits them would be an accident.
    """
    logits = logits_of(model, batch.ids.masked_fill(batch.masked, mask_id))
    losses = F.cross_entropy(logits.transpose(1, 2).float(), batch.ids, reduction="none", label_smoothing=smoothing)
    weights = batch.masked * batch.weight
    return (losses * weights).sum() / weights.sum()


# Evaluation --------------------------------------------------------------------------------------


@torch.no_grad()
def decode(model: torch.nn.Module, canvas: Tensor, mask_id: int, threshold: float | None) -> Tensor:
    """Fill the masked positions of ``canvas`` (rows, length); the most confident come first.

    ``threshold`` None commits one token per step, 0.0 all at once, and anything between every
    token that is at least so confident (and the most confident).
    """
    canvas = canvas.clone()
    while (open_ := canvas == mask_id).any():
        logits = logits_of(model, canvas)
        logits[..., mask_id] = -torch.inf
        confidence, token = logits.softmax(-1).max(-1)
        confidence = confidence.masked_fill(~open_, -1.0)
        commit = torch.zeros_like(open_).scatter_(1, confidence.argmax(1, keepdim=True), True)
        if threshold is not None:
            commit |= confidence >= threshold
        canvas = torch.where(commit & open_, token, canvas)
    return canvas


def accuracy(
    model: torch.nn.Module,
    codec: Codec,
    examples: list[Example],
    threshold: float | None,
    canvas: int | None = None,
) -> dict[str, float]:
    """Share of right answers by task; the answer region is 32 or 64 tokens, or ``canvas``."""
    device = next(model.parameters()).device
    groups: dict[tuple[int, int], list[Example]] = defaultdict(list)  # equal shapes share a batch
    for example in examples:
        region = canvas or (32 if TASKS[example.task].max_answer_tokens < 32 else 64)
        groups[len(codec.prompt(example)), region].append(example)
    right: dict[str, list[bool]] = defaultdict(list)
    for (length, region), group in groups.items():
        rows = [codec.prompt(example) + [codec.mask] * region for example in group]
        filled = decode(model, torch.tensor(rows, device=device), codec.mask, threshold)
        for example, ids in zip(group, filled[:, length:].tolist(), strict=True):
            right[example.task].append(TASKS[example.task].check(example, codec.decode(ids)))
    return {name: sum(right[name]) / len(right[name]) for name in TASKS if name in right}


# Export ------------------------------------------------------------------------------------------


def llada_name(name: str) -> str:
    """The LLaDA name of a Llama weight (``ff_out`` occurs twice there, with two meanings)."""
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


def llada_config(config: LlamaConfig, codec: Codec) -> dict[str, Any]:
    """``config.json`` with the fields of the published LLaDA checkpoints."""
    return {
        "activation_type": "silu",
        "alibi": False,
        "architectures": ["LLaDAModelLM"],
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "attention_layer_norm_with_affine": True,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": config.hidden_size,
        "embedding_dropout": 0.0,
        "embedding_size": config.vocab_size,
        "eos_token_id": codec.eos,
        "flash_attention": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "init_device": "cpu",
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mask_token_id": codec.mask,
        "max_sequence_length": config.max_position_embeddings,
        "mlp_hidden_size": config.intermediate_size,
        "mlp_ratio": 4,
        "model_type": "llada",
        "multi_query_attention": None,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "n_layers": config.num_hidden_layers,
        "pad_token_id": codec.eos,
        "residual_dropout": 0.0,
        "rms_norm_eps": config.rms_norm_eps,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": config.rope_parameters["rope_theta"],
        "scale_logits": False,
        "torch_dtype": "float32",
        "use_cache": False,
        "vocab_size": config.vocab_size,
        "weight_tying": False,
    }


def export(model: LlamaForCausalLM, codec: Codec, folder: Path) -> None:
    """Write the model in LLaDA's file format, with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {llada_name(k): v.cpu().contiguous() for k, v in model.state_dict().items()}
    partial = folder / "model.safetensors.partial"  # a reader never meets half a file
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors makes files that only their owner can read
    os.replace(partial, folder / "model.safetensors")
    generation = {
        "eos_token_id": codec.eos,
        "pad_token_id": codec.eos,
        "max_new_tokens": 64,  # the longest answer region that it was trained on
        "use_cache": False,
    }
    for name, fields in (
        ("config.json", llada_config(model.config, codec)),
        ("generation_config.json", generation),
        (
            "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": BOS,
                "eos_token": EOS,
                "pad_token": EOS,
                "unk_token": UNK,
                "mask_token": MASK,
                "add_bos_token": False,
                "clean_up_tokenization_spaces": False,
                "model_max_length": 512,
                "chat_template": CHAT_TEMPLATE,
            },
        ),
    ):
        (folder / name).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    codec.tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))


# Training ----------------------------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """Momentum, its matrices replaced by the nearest orthogonal ones (github.com/KellerJordan/Muon).

    Here it needed about a quarter fewer steps than AdamW to the same loss, early in training.
    ``torch.optim.Muon`` does the same in bfloat16, which most CPUs only emulate; here it is
    float32, and matrices of one shape are treated together.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                by_shape[p.shape].append(p)
            for (rows, columns), matrices in by_shape.items():
                directions = []
                for p in matrices:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    average.lerp_(p.grad, 1.0 - group["momentum"])
                    directions.append(p.grad.lerp(average, group["momentum"]))  # Nesterov
                step = group["lr"] * max(1.0, rows / columns) ** 0.5
                for p, update in zip(matrices, orthogonalize(torch.stack(directions)), strict=True):
                    p.mul_(1.0 - group["lr"] * group["weight_decay"]).sub_(step * update)


def orthogonalize(x: Tensor) -> Tensor:
    """Nearly orthogonal matrices near x (batch, rows, columns), by Newton-Schulz iterations.

    The coefficients (Muon's) bring every singular value close to 1 in five iterations.
    """
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


class Trainer:
    """Everything that a checkpoint holds, and the step that advances it."""

    def __init__(self, model: LlamaForCausalLM, codec: Codec, lr: float, seed: int) -> None:
        self.model, self.codec = model, codec
        named = dict(model.named_parameters())
        inner = [p for n, p in named.items() if "layers" in n and p.ndim == 2]
        outer = [p for n, p in named.items() if not ("layers" in n and p.ndim == 2)]
        self.optimizers = [
            Muon(inner, lr=10 * lr),
            torch.optim.AdamW(outer, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        ]
        self.rates = [10 * lr, lr]
        self.average = {k: v.clone() for k, v in model.state_dict().items()}
        self.rng = Random(seed)
        self.mixture = dict.fromkeys(TASKS, 1.0)
        self.step, self.seconds = 0, 0.0

    def train_step(
        self,
        forward: torch.nn.Module,
        batches: list[Batch],
        pool: Executor,
        progress: float,
        smoothing: float,
    ) -> float:
        """One optimizer step on the mean loss of the batches; returns it.

        ``progress`` in [0, 1] sets the learning rate: constant, then down to zero over the last
        half (unlike on a cosine, the plan can be changed while the rate is constant). The threads
        of the pool take one batch after another instead of sharing every operation: a core that
        is busy elsewhere then delays one batch, where it would delay every operation.
        """
        scale = min(1.0, (self.step + 1) / 200, max(0.0, 2.0 * (1.0 - progress)))
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
        parameters = list(self.model.parameters())

        def gradients(batch: Batch) -> tuple[float, tuple[Tensor, ...]]:
            loss = loss_of(forward, batch, self.codec.mask, smoothing)
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
        """A copy of the model with the moving average of the weights."""
        model = LlamaForCausalLM(self.model.config)
        model.load_state_dict(self.average)
        return model.to(self.model.device).eval()

    def save(self, path: Path) -> None:
        """Write the checkpoint; a crash half-way leaves the previous one."""
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
        """Go on from a checkpoint."""
        state = torch.load(path, map_location=self.model.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.average = state["average"]
        version, numbers, gauss = state["rng"]
        self.rng.setstate((version, tuple(numbers), gauss))
        self.mixture, self.step, self.seconds = state["mixture"], state["step"], state["seconds"]


def report(title: str, columns: dict[str, dict[str, float]]) -> None:
    """Print a table: one line per task, one column of percentages per way of decoding."""
    print(f"{title:16}" + "".join(f"{name:>16}" for name in columns))
    for task in TASKS:
        cells = (f"{100 * column[task]:15.1f}%" for column in columns.values())
        print(f"{task:16}" + "".join(cells) + ("  (many answers)" * TASKS[task].many_answers))
    print(flush=True)


def main(
    out: Annotated[Path, typer.Option(help="Folder for checkpoint.pt and export/.")],
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after so many steps.")] = None,
    minutes: Annotated[float, typer.Option(help="Stop after so many minutes of training.")] = 90.0,
    resume: Annotated[bool, typer.Option(help="Go on from the checkpoint in --out.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; 2 if not given.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of the weights and of the examples.")] = 0,
    tokens: Annotated[int, typer.Option(min=320, help="Tokens in a step's batches.")] = 3072,
    parts: Annotated[int, typer.Option(min=1, help="Batches in a step.")] = 4,
    lr: Annotated[float, typer.Option(help="Peak learning rate; ten times that for Muon.")] = 8e-4,
    smoothing: Annotated[float, typer.Option(help="Label smoothing.")] = 0.01,
    hidden: Annotated[int, typer.Option(help="Width, a multiple of the head size 32.")] = 192,
    layers: Annotated[int, typer.Option(min=1)] = 5,
    mlp: Annotated[int, typer.Option(min=1, help="Width of the feed-forward layers.")] = 384,
    compiled: Annotated[bool, typer.Option(help="Use torch.compile.")] = True,
    save_every: Annotated[float, typer.Option(help="Minutes between checkpoints.")] = 2.0,
    evaluate_every: Annotated[float, typer.Option(help="Minutes between evaluations.")] = 8.0,
) -> None:
    """Train the small LLaDA model that ships inside paradec."""
    if hidden < 32 or hidden % 32:
        raise typer.BadParameter(f"--hidden {hidden} is not a positive multiple of 32")
    if tokens // parts < max(LENGTHS):
        raise typer.BadParameter(
            f"--tokens {tokens} in --parts {parts} leaves {tokens // parts} a batch; "
            f"the longest rows need at least {max(LENGTHS)}"
        )
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter(f"--device {device}: PyTorch finds no CUDA device here")
    threads = threads or min(2, os.cpu_count() or 1)
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / "checkpoint.pt"

    codec = Codec(build_tokenizer())
    model = build_model(len(codec.ids), hidden, layers, mlp).to(device)
    trainer = Trainer(model, codec, lr, seed)
    if resume:
        if not checkpoint.exists():
            raise typer.BadParameter(f"--resume: there is no {checkpoint}")
        trainer.load(checkpoint)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count:,} parameters, {len(codec.ids)} tokens, step {trainer.step}", flush=True)

    forward = torch.compile(model, dynamic=False) if compiled else model
    began = saved = logged = evaluated = time.monotonic()
    before, losses, seen = trainer.seconds, [], 0

    def progress() -> float:
        by_steps = trainer.step / steps if steps else 0.0
        return max(by_steps, trainer.seconds / (60 * minutes))

    stop = threading.Event()  # an exception could come between two halves of a step
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())

    while progress() < 1.0 and not stop.is_set():
        batches = [draw_batch(trainer.rng, codec, trainer.mixture, tokens // parts).to(device) for _ in range(parts)]
        losses.append(trainer.train_step(forward, batches, pool, progress(), smoothing))
        seen += sum(batch.ids.numel() for batch in batches)
        now = time.monotonic()
        trainer.seconds = before + now - began
        if now - logged > 30:
            mean = sum(losses) / len(losses)
            speed = seen / (now - logged)
            elapsed = trainer.seconds / 60
            print(
                f"{elapsed:6.1f} min  step {trainer.step:6d}  loss {mean:.4f}  {speed:,.0f} tokens/s",
                flush=True,
            )
            logged, losses, seen = now, [], 0
        if now - evaluated > 60 * evaluate_every:
            probe = Random(f"{seed} {trainer.step}")  # fresh prompts: the shipped stay unseen
            examples = [task.make(probe) for task in TASKS.values() for _ in range(32)]
            average = trainer.averaged()
            scores = accuracy(average, codec, examples, 0.9)  # cheaper than one per step
            at_once = accuracy(average, codec, examples, 0.0)
            report(f"step {trainer.step}", {"threshold 0.9": scores, "all at once": at_once})
            # What is not yet learned is drawn up to five times as often.
            trainer.mixture = {name: 1.0 + 4.0 * (1.0 - s) for name, s in scores.items()}
            export(average, codec, out / "export")
            logged = evaluated = time.monotonic()
        if now - saved > 60 * save_every:
            trainer.save(checkpoint)
            saved = now
    trainer.save(checkpoint)
    average = trainer.averaged()
    export(average, codec, out / "export")
    if stop.is_set():
        print("stopped; --resume goes on from here", flush=True)
        return
    examples = load_prompts()
    report(
        "shipped prompts",
        {
            "one per step": accuracy(average, codec, examples, None),
            "threshold 0.9": accuracy(average, codec, examples, 0.9),
            "all at once": accuracy(average, codec, examples, 0.0),
        },
    )


if __name__ == "__main__":
    typer.run(main)
