"""Train a small DFlash drafter for the packaged digit model, on one CPU core, and count what it saves.

    python examples/training/dflash_drafter.py --out runs/dflash [--minutes 10]     # the same command goes on

The data are the model's own pictures, drawn as they will be decoded (guidance 2). A place is chosen in each; the
drafter sees what layers of the model made of the codes before it, with and without the class, and a block of masks.
Both distributions are guided as the model's are, and brought near the codes of the block. Later places count less: a
draft is worth something only if all before it are accepted.

The folder is in transformers' format: ``paradec.load_drafter("runs/dflash", base=paradec.load("digits-ar"))`` reads it.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

import paradec
from paradec.models.decoder import LayerOutputs

BLOCK, LAYERS, SCALE, DECAY = 8, 2, 2.0, 4.0
"""Codes of a block, the drafter's layers, guidance, and how fast places lose weight (their e-th part after so many)."""
TARGETS = [0, 2]
"""Layers of the model that are read, of four."""
CLASSES, CODES = 10, 49


def pictures(model: paradec.models.adapter.Model, count: int) -> tuple[Tensor, Tensor]:
    """Codes [N, 49] and labels [N] of the model's own pictures."""
    labels = torch.arange(count) % CLASSES
    out = paradec.generate_images(model, class_labels=labels.tolist(), sampler="scd", seed=1, output_type="latent")
    return out.codes.reshape(count, CODES), labels


@torch.no_grad()
def read(model: paradec.models.adapter.Model, codes: Tensor, labels: Tensor) -> Tensor:
    """What the model's layers make of the label and the codes, [N, 50, layers * D]."""
    network = model.module
    first = network.cls_embedding.embedding_table(labels).unsqueeze(1)
    embeddings = torch.cat((first, network.tok_embeddings(codes)), 1)
    with LayerOutputs(network.layers, TARGETS) as outputs:
        last = network.backbone(embeddings, torch.arange(-1, CODES).expand(len(codes), -1))
    return outputs.concatenate(last)


def block_logits(
    drafter: MuseGlimmerAssistantModel,
    model: paradec.models.adapter.Model,
    features: Tensor,
    anchor: Tensor,
    code: Tensor,
) -> Tensor:
    """Logits [N, BLOCK - 1, V] of the codes after position anchor [N], where code [N] is (0 is the class)."""
    count, width = features.shape[:2]
    ids = torch.full((count, BLOCK), drafter.config.mask_token_id)
    ids[:, 0] = code
    block = anchor[:, None] + torch.arange(BLOCK)
    seen = torch.arange(width) < anchor[:, None]
    mask = torch.cat((seen, torch.ones(count, BLOCK, dtype=torch.bool)), 1)[:, None, None].expand(-1, 1, BLOCK, -1)
    hidden = drafter(
        noise_embeds=model.module.tok_embeddings(ids),
        context_hidden_states=features,
        attention_mask={"full_attention": mask},
        position_ids=torch.cat((torch.arange(width).expand(count, -1), block), 1),
    ).last_hidden_state
    return model.module.head(hidden[:, 1:])


def loss_of(
    drafter: MuseGlimmerAssistantModel, model: paradec.models.adapter.Model, codes: Tensor, labels: Tensor
) -> Tensor:
    """Nats per draft, weighted, at one place of each picture."""
    count = len(codes)
    both = torch.cat((labels, torch.full_like(labels, CLASSES)))
    features = read(model, codes.repeat(2, 1), both)
    anchor = torch.randint(1, CODES, (count,))  # code i is at position i + 1
    code = codes.gather(1, anchor[:, None] - 1).squeeze(1)
    given, without = block_logits(drafter, model, features, anchor.repeat(2), code.repeat(2)).chunk(2)
    logits = without + SCALE * (given - without)
    at = anchor[:, None] + torch.arange(BLOCK - 1)
    wanted = codes.gather(1, at.clamp(max=CODES - 1))
    weight = torch.exp(-torch.arange(BLOCK - 1) / DECAY) * (at < CODES)
    nats = cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view_as(weight)
    return (nats * weight).sum() / weight.sum()


def made(dim: int) -> MuseGlimmerAssistantModel:
    """A new drafter for a model of that width."""
    torch.manual_seed(0)
    config = MuseGlimmerAssistantConfig(
        hidden_size=dim,
        intermediate_size=2 * dim,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=dim // 4,
        layer_types=["full_attention"] * LAYERS,
        block_size=BLOCK,
        mask_token_id=0,  # all ids are codes; only the first column of a block can mean it
        target_layer_ids=TARGETS,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )
    return MuseGlimmerAssistantModel(config)


def train(folder: Path, minutes: float, count: int) -> None:
    """Until so many CPU minutes are spent; goes on with what is in the folder."""
    model = paradec.load("digits-ar")
    model.module.requires_grad_(False)
    file = folder / "data.pt"
    if not file.exists():
        torch.save(pictures(model, count), file)
    codes, labels = torch.load(file, weights_only=True)
    held = len(codes) // 10
    drafter, rate = made(model.hidden_size), 2e-3
    if (folder / "model.safetensors").exists():
        drafter.load_state_dict(load_file(folder / "model.safetensors"))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=rate, weight_decay=0.01)
    begin, said, step, mean = time.process_time(), 0.0, 0, math.nan
    generator = np.random.default_rng(0)
    while (spent := time.process_time() - begin) < 60 * minutes:
        share = spent / (60 * minutes)
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * share))
        at = torch.as_tensor(generator.integers(held, len(codes), 64))
        loss = loss_of(drafter, model, codes[at], labels[at])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        step, mean = step + 1, float(loss.detach()) if math.isnan(mean) else 0.98 * mean + 0.02 * float(loss.detach())
        if spent - said > 30:
            said = spent
            drafter.save_pretrained(folder)
            with torch.no_grad():
                kept = loss_of(drafter, model, codes[:held], labels[:held])
            print(f"step {step}, {spent:.0f} s: {mean:.3f} nats, held out {float(kept):.3f}", flush=True)
    drafter.save_pretrained(folder)


def measure(folder: Path, count: int) -> None:
    """Forwards for a picture, of the model and of what drafts, for labels and a seed that nothing was trained on."""
    model = paradec.load("digits-ar")
    create = paradec.samplers.create
    samplers = {
        "scd": create("scd"),
        "speculative, digits-ar-drafter": create("speculative", drafter=paradec.load("digits-ar-drafter")),
        "speculative, DFlash": create("speculative", drafter=paradec.load_drafter(folder, base=model)),
    }
    labels = [index % CLASSES for index in range(count)]
    for name, sampler in samplers.items():
        given = {"class_labels": labels, "seed": 12345, "output_type": "latent"}
        out = paradec.generate_images(model, sampler=sampler, **given)
        print(f"{name}: {np.mean(out.row_nfe):.1f} forwards, {np.mean(out.draft_nfe or [0]):.1f} of the drafter")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/dflash"))
    parser.add_argument("--minutes", type=float, default=10.0, help="CPU minutes")
    parser.add_argument("--pictures", type=int, default=3000, help="drawn from the model to train on")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    train(args.out, args.minutes, args.pictures)
    measure(args.out, 100)


if __name__ == "__main__":
    main()
