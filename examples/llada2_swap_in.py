"""Replace the scheduler of diffusers' LLaDA2Pipeline, and count the forwards.

python examples/llada2_swap_in.py --model inclusionAI/LLaDA2.1-mini --trust-remote-code --device cuda
python examples/llada2_swap_in.py --tiny           # the small model inside paradec: no download, no GPU

Compare answers, not only forwards: a scheduler that commits more tokens at once needs fewer forwards, but makes errors
where tokens depend on each other. With --tiny the question is a Latin square (every line and column has each letter
once), whose answer can be checked: diffusers' scheduler returns a wrong square after 8 forwards, CreditDecoding a
square with a wrong last line after 13, and the other two a right one after 16.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from diffusers import BlockRefinementScheduler, LLaDA2Pipeline

import paradec
from paradec import schedulers
from paradec.tools.evaluation.tasks import Example, get_task


def tiny_pipeline(device: str | None) -> tuple[LLaDA2Pipeline, str, dict[str, Any]]:
    """Build a pipeline of the packaged model, which was trained without blocks, so one large block is used."""
    model = paradec.load(device=device)
    pipe = LLaDA2Pipeline(model.module, BlockRefinementScheduler(block_length=64), model.tokenizer)
    request = {"gen_length": 40, "num_inference_steps": 64, "mask_token_id": model.facts.mask_token_id}
    return pipe, "Latin square: A F I K", request | {"eos_token_id": model.facts.eos_token_ids[0]}


def published_pipeline(args: argparse.Namespace) -> tuple[LLaDA2Pipeline, str, dict[str, Any]]:
    """Build a pipeline of a published LLaDA2, whose model code is in the checkpoint."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trusted = {"trust_remote_code": args.trust_remote_code}
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype, **trusted).to(args.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model, **trusted)
    question = "A train covers 120 km in 1.5 hours. How long does it need for 200 km? Answer briefly."
    return LLaDA2Pipeline(model, BlockRefinementScheduler(), tokenizer), question, {"gen_length": 256}


def verdict(question: str, answer: str) -> str:
    """Say whether an answer to a Latin square is right; "" for other questions."""
    task = get_task("latin_square")
    verb, _, symbols = question.partition(": ")
    if verb != task.template.partition(":")[0]:
        return ""
    right = task.check(Example(task.name, question, tuple(symbols.split())), answer)
    return ", a right answer" if right else ", a wrong answer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", help="by default a question that the model can answer")
    parser.add_argument("--model", default="inclusionAI/LLaDA2.1-mini", help="hub id or folder (default: %(default)s)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the model code of the checkpoint")
    parser.add_argument("--tiny", action="store_true", help="use the small model inside paradec")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default=None)
    args = parser.parse_args()

    pipe, question, request = tiny_pipeline(args.device) if args.tiny else published_pipeline(args)
    pipe.set_progress_bar_config(disable=True)
    calls: list[torch.Size] = []
    pipe.model.register_forward_hook(lambda module, given, output: calls.append(output.logits.shape))

    config = pipe.scheduler.config
    for cls in (
        BlockRefinementScheduler,
        schedulers.ThresholdScheduler,
        schedulers.CreditDecodingScheduler,
        schedulers.LocalLeapScheduler,
    ):
        pipe.scheduler = cls.from_config(config)
        calls.clear()
        prompt = args.prompt or question
        answer = pipe(prompt, editing_threshold=None, **request).texts[0]
        origin = " (diffusers' own)" if cls is BlockRefinementScheduler else ""
        print(f"\n{cls.__name__}{origin}: {len(calls)} forwards{verdict(prompt, answer)}\n{answer}")


if __name__ == "__main__":
    main()
