"""Train the packaged model on to a block-causal one: minutes on one CPU core.

    python examples/training/tiny_blocks.py --out runs/tiny-blocks --minutes 24
    python examples/training/tiny_blocks.py --out runs/tiny-blocks --minutes 24 --pause 8            # a part of it ...
    python examples/training/tiny_blocks.py --out runs/tiny-blocks --minutes 24 --pause 8 --resume   # the next part

The packaged model (`tiny_llada.py`) sees both directions. From its weights this trains one that sees its
own block and those before it. A row is read twice in one call, as it is and with masks (block diffusion, arXiv
2503.09573): a block with masks sees itself and the blocks before it as they are. In turns, the blocks are what decoding
reads: 8 positions counted from position 0, as SDAR and LLaDA2 have them; 1, which token by token decoding and the
verification of drafts read; and masks of up to 8 positions after tokens in blocks of 1, which are drafts.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from tiny_llada import Codec, build_tokenizer
from torch import Tensor

import paradec
from paradec.models.base import Model
from paradec.tools.evaluation.tasks import TASKS

BLOCK = 8
LENGTHS = {24: 0.4, 32: 0.3, 48: 0.2, 80: 0.1}
"""Length of a batch's rows -> how often; whole blocks."""
LEFT_OUT = ("latin_square",)
"""Tasks that take more training than this model gets."""


CODEC: list[Codec] = []


def draw(seed: int, tokens: int, length: int) -> tuple[list[list[int]], list[int]]:
    """About so many tokens' worth of rows, prompt, answer and end tokens, and where their answers begin."""
    if not CODEC:
        CODEC.append(Codec(build_tokenizer()))
    codec, rng = CODEC[0], Random(seed)
    names = [name for name in TASKS if name not in LEFT_OUT]
    rows: list[list[int]] = []
    starts: list[int] = []
    while len(rows) < tokens // length:
        example = TASKS[rng.choice(names)].make(rng)
        prompt, answer = codec.prompt(example), codec.encode(example.answer)
        if len(prompt) + len(answer) < length:
            rows.append(prompt + answer + [codec.eos] * (length - len(prompt) - len(answer)))
            starts.append(len(prompt))
    return rows, starts


MODES = ((BLOCK, BLOCK), (1, 1), (1, BLOCK), (1, 1), (1, BLOCK))
"""Blocks of what is read as it is, and of what is read with masks, in turns; the first is best known."""


def visible(clean: Tensor, noisy: Tensor) -> Tensor:
    """[2 L, 2 L] bool, the row as it is, then with masks. Of both, [L] numbers of the blocks; those of masks begin
    where blocks of the others do."""
    at = torch.arange(len(clean), device=clean.device)
    first = torch.searchsorted(noisy, noisy)  # where the block of each position begins
    sees = clean[:, None] >= clean[None, :]
    before = at[None, :] < first[:, None]
    own = noisy[:, None] == noisy[None, :]
    return torch.cat((torch.cat((sees, torch.zeros_like(sees)), 1), torch.cat((before, own), 1)))


def loss_of(model: torch.nn.Module, ids: Tensor, starts: Tensor, mask_id: int, clean: int, block: int) -> Tensor:
    """Weighted cross-entropy of masked answer positions. Over blocks of 1 all are masked, or all but the first of each
    block of masks, which begin anywhere; else each block of a row has a share of masks of its own."""
    rows, length = ids.shape
    at = torch.arange(length, device=ids.device)
    share = torch.rand(rows, math.ceil(length / block), device=ids.device)
    # the states that decoding meets: everything masked, most of all
    share = torch.where(torch.rand_like(share) < 0.3, torch.ones_like(share), share)
    wanted = share.repeat_interleave(block, 1)[:, :length]
    masked = (torch.rand(rows, length, device=ids.device) < wanted) & (at >= starts[:, None])
    offset = 0
    if clean == 1:
        wanted, masked = torch.ones_like(wanted), (at >= starts[:, None])
        offset = int(torch.randint(block, ()))
        if block > 1 and torch.rand(()) < 0.5:
            masked = masked & ((at + offset) % block > 0)
    both = torch.cat((ids, ids.masked_fill(masked, mask_id)), 1)
    sees = visible(at // clean, (at + offset) // block).expand(rows, 1, -1, -1)
    positions = at.repeat(2).expand(rows, -1)
    logits = model(input_ids=both, attention_mask=sees, position_ids=positions).logits[:, length:]
    losses = F.cross_entropy(logits.transpose(1, 2).float(), ids, reduction="none", label_smoothing=0.02)
    weights = masked / wanted.clamp(min=0.1)
    return (losses * weights).sum() / weights.sum()


def load_blocks(folder: Path) -> Model:
    """The model in the folder, in LLaDA's format, with blocks from position 0."""
    model = paradec.load(folder)
    facts, tokenizer = model.facts, model.tokenizer
    return paradec.wrap(
        model.unwrap(),
        mask_token_id=facts.mask_token_id,
        eos_token_id=facts.eos_token_ids,
        topology="block_causal",
        block_length=BLOCK,
        prediction="same",
        tokenizer=tokenizer,
    )


def main(
    out: Annotated[Path, typer.Option(help="folder of the checkpoint")],
    minutes: Annotated[float, typer.Option(help="of training, all parts together")] = 24.0,
    pause: Annotated[float, typer.Option(help="minutes after which this part ends")] = math.inf,
    resume: Annotated[bool, typer.Option(help="go on from the part that the folder holds")] = False,
    device: str = "cpu",
    workers: int = 1,
    tokens: int = 1024,
    lr: float = 1e-3,
    seed: int = 0,
) -> None:
    """Train for so many minutes and write the checkpoint."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    codec, rng = Codec(build_tokenizer()), Random(seed)
    packaged = paradec.load()
    model = packaged.module.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    step, before, shown = 0, 0.0, [0.0] * len(MODES)
    if resume:
        state = torch.load(out / "training.pt", map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, before, shown = state["step"], state["seconds"], state["shown"]
        rng.seed(f"{seed} {step}")
        torch.manual_seed(seed + step)
    began = time.monotonic()
    lengths, often = list(LENGTHS), list(LENGTHS.values())
    with ProcessPoolExecutor(workers) as pool:

        def more() -> tuple[int, object]:
            (length,) = rng.choices(lengths, often)
            return length, pool.submit(draw, rng.randrange(2**40), tokens, length)

        waiting = [more() for _ in range(3 * workers)]
        while (spent := (before + time.monotonic() - began) / (60 * minutes)) < 1:
            if time.monotonic() - began > 60 * pause:
                break
            _, future = waiting.pop(0)
            waiting.append(more())
            rows, starts = future.result()  # type: ignore[attr-defined]
            for group in optimizer.param_groups:  # rises, stays, falls in the last half
                group["lr"] = lr * min(1.0, (step + 1) / 50, max(0.02, 2 * (1 - spent)))
            ids, begin = torch.tensor(rows, device=device), torch.tensor(starts, device=device)
            mode = step % len(MODES)
            loss = loss_of(model, ids, begin, codec.mask, *MODES[mode])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step, shown[mode] = step + 1, shown[mode] * 0.95 + 0.05 * loss.item()
            if step % 150 == 0:
                losses = ", ".join(f"{each:.3f}" for each in shown)
                print(f"step {step}: losses {losses}, {100 * spent:.0f} % of the time", flush=True)
        for _, future in waiting:
            future.cancel()  # type: ignore[attr-defined]
    out.mkdir(parents=True, exist_ok=True)
    seconds = before + time.monotonic() - began
    weights, moments = model.state_dict(), optimizer.state_dict()
    kept = {"model": weights, "optimizer": moments, "step": step, "seconds": seconds, "shown": shown}
    torch.save(kept, out / "training.pt")
    model.cpu().eval()
    packaged.save_pretrained(out)
    print(f"{step} steps in {seconds / 60:.1f} minutes; written to {out}")


if __name__ == "__main__":
    typer.run(main)
