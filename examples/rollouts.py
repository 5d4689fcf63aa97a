"""Reinforcement learning with rollouts: the packaged model learns to write an answer in one forward.

    python examples/rollouts.py                        # about a minute on one core, no download
    python examples/rollouts.py --task latin_square --rounds 60 --seed 1
    python examples/rollouts.py --tiny                 # two small rounds, as a test

"Insert a word anywhere" has many right answers. Tokens that are drawn together, independently of each other, mix
several right answers into a wrong one, so the model must learn to prefer one answer. The reward is 1 for a right answer
and 0 for a wrong one. Each round draws several answers to each of a few prompts. An answer's advantage is its reward
minus the mean of its prompt's rewards, divided by their standard deviation (GRPO, arXiv 2402.03300). The loss is PPO's
clipped loss over all decisions, with the ratio of replayed to recorded probabilities. A copy of the model is trained,
and its weights go to the decoding model after each round. Prompts for training and measuring are disjoint.
"""

from __future__ import annotations

import argparse
import copy
import random
from typing import Any

import torch
from torch import Tensor

import paradec
from paradec.tools.evaluation.tasks import get_task, load_prompts

REQUEST = {"sampler": "threshold(threshold=0)", "max_new_tokens": 16}
"""With threshold 0 the first step commits every token."""


def rewards(task: Any, examples: list[Any], out: Any) -> Tensor:
    """Compute rewards [B] float32: 1 for right answers, else 0."""
    return torch.tensor([float(task.check(example, text)) for example, text in zip(examples, out.text, strict=True)])


def measure(model: Any, task: Any, examples: list[Any], seed: int) -> str:
    """Measure the share of right answers at temperature 1 (drawn) and at temperature 0 (likeliest tokens)."""
    prompts = [example.prompt for example in examples]
    drawn = paradec.generate(model, prompts * 4, temperature=1.0, seed=seed, **REQUEST)
    likeliest = paradec.generate(model, prompts, **REQUEST)
    shares = rewards(task, examples * 4, drawn).mean(), rewards(task, examples, likeliest).mean()
    return f"{shares[0]:.3f} of the drawn answers are right, {shares[1]:.3f} of the likeliest"


def loss_of(model: Any, rollout: paradec.Rollout, advantage: Tensor, clip: float = 0.2) -> tuple[Tensor, Tensor]:
    """Compute PPO's clipped loss, and the largest distance of a ratio from 1."""
    decided = rollout.decided
    ratio = (paradec.replay(model, rollout, batch_size=32) - rollout.logp)[decided].exp()
    gain = advantage.unsqueeze(1).expand(decided.shape)[decided]
    return -torch.min(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain).mean(), (ratio.detach() - 1).abs().max()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="insert_random", help="a task of the packaged model (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=16, help="prompts in a round (default: %(default)s)")
    parser.add_argument("--answers", type=int, default=8, help="answers to each (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate (default: %(default)s)")
    parser.add_argument(
        "--epochs", type=int, default=2, help="steps of the optimizer in a round (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="two short rounds")
    args = parser.parse_args()
    if args.tiny:
        args.rounds, args.prompts, args.answers = 2, 4, 8

    torch.manual_seed(args.seed)
    task, held_out, draws = get_task(args.task), load_prompts(args.task), random.Random(args.seed)
    policy = paradec.load()
    trained = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(trained.module.parameters(), lr=args.rate, weight_decay=0.0)
    print(f"{args.task}, seed {args.seed}: {len(held_out)} prompts for measuring")
    print(f"before: {measure(policy, task, held_out, args.seed)}")
    for number in range(1, args.rounds + 1):
        examples = [task.make(draws) for _ in range(args.prompts)]
        examples = [example for example in examples for _ in range(args.answers)]
        prompts = [example.prompt for example in examples]
        out = paradec.generate(policy, prompts, temperature=1.0, seed=draws.getrandbits(60), rollout=True, **REQUEST)
        reward = rewards(task, examples, out)
        groups = reward.view(args.prompts, args.answers)
        advantage = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
        distances = []
        for _ in range(args.epochs):
            loss, distance = loss_of(trained, out.rollout, advantage)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained.module.parameters(), 1.0)
            optimizer.step()
            distances.append(f"{distance:.1e}")
        version = policy.update_weights(trained.module.state_dict())
        print(f"round {number}: reward {reward.mean():.3f}, ratios off 1 by {', '.join(distances)}, weights {version}")
    print(f"after: {measure(policy, task, held_out, args.seed)}")


if __name__ == "__main__":
    main()
