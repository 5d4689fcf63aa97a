"""CPU time of a decoding step without the model's call, compared with dInfer's compiled rule on the same logits.

    python benchmarks/peers/rule.py --python ENVIRONMENT/bin/python --dinfer CHECKOUT [--turns 15]

The threshold rule at 0.9 fills blocks of 32 in eight steps with prepared logits. Of dInfer, its decoder's `decode` is
timed, compiled by torch as published. Of paradec, everything between two calls of the model is timed (`query`,
`propose` and `commit`), with logits of the undecided positions only, as its models return them. The programs take turns
on one thread; times are CPU times. Their tokens are compared. Writes benchmarks/results/peers_rule.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import common
import torch
from common import Contestant, Elsewhere
from provenance import write_result
from text_reference import rule_logits
from transformers import LlamaConfig, LlamaForCausalLM

import paradec

RESULT = common.BENCHMARKS / "results" / "peers_rule.json"
BLOCK, STEPS, THRESHOLD = 32, 8, 0.9
CASES = ((126_464, 1), (126_464, 4), (32_000, 1), (32_000, 8))
"""(Vocabulary size, number of rows)."""


def random_model(vocab: int) -> Any:
    """Build a small model. It is never called, since the logits are prepared."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 1, "intermediate_size": 48, "num_attention_heads": 4}
    module = LlamaForCausalLM(LlamaConfig(vocab_size=vocab, max_position_embeddings=512, **sizes))
    return paradec.wrap(module, mask_token_id=vocab - 1, prediction="same", topology="bidirectional")


class PreparedRule(contextlib.AbstractContextManager[None]):
    """paradec's threshold rule on prepared logits (one tensor [rows, BLOCK, vocabulary] per step). A call fills one
    block. Entering the context creates the block's state, which is not timed."""

    def __init__(self, model: Any, logits: list[torch.Tensor]):
        self.model, self.logits = model, list(logits)
        self.method: Any = paradec.samplers.create("threshold", threshold=THRESHOLD)
        self.state: Any = None
        with self, torch.inference_mode():
            self._run_steps(reduce_logits=True)

    def __enter__(self) -> None:
        prompts = [[1, 2]] * len(self.logits[0])
        self.state = self.method.start(self.model, prompts, max_new_tokens=BLOCK, block_length=BLOCK)

    def __exit__(self, *reason: object) -> None:
        pass

    def _run_steps(self, reduce_logits: bool = False) -> None:
        """Fill the block step by step. `reduce_logits`: keep only the logits of each step's requested positions."""
        for step, logits in enumerate(self.logits):
            (query,) = self.method.query(self.state)
            columns = query.window.columns
            if reduce_logits and columns is not None:
                index = columns.unsqueeze(-1).expand(-1, -1, logits.shape[-1])
                self.logits[step] = logits = logits.gather(1, index)
            self.method.commit(self.state, self.method.propose(self.state, [logits], [query]))

    def __call__(self) -> torch.Tensor:
        with torch.inference_mode():
            self._run_steps()
        return self.state.canvas[:, -BLOCK:].clone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dinfer", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--python", required=True)
    parser.add_argument("--turns", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {**common.machine(), "turns": args.turns, "block": BLOCK, "steps": STEPS, "cases": {}}
    for vocab, rows in CASES:
        model = random_model(vocab)
        logits = rule_logits(vocab, rows, BLOCK, STEPS)
        task = {
            "words": vocab, "rows": rows, "block": BLOCK, "steps": STEPS, "threshold": THRESHOLD, "mask": vocab - 1,
            "end": vocab - 2, "version": common.checkout_commit(args.dinfer),
        }  # fmt: skip
        rule = PreparedRule(model, logits)
        contestants = [Contestant("paradec", rule, around=rule)]
        with tempfile.TemporaryDirectory() as away:
            path = Path(away) / "task.json"
            path.write_text(json.dumps(task))
            script = Path(__file__).with_name("text_reference.py")
            with Elsewhere("dinfer", args.python, script, "dinfer_rule", str(args.dinfer), str(path)) as peer:
                contestants.append(peer)
                common.alternate(contestants, args.turns, warm_up=3)
        entries = common.report(contestants, ("dinfer",), {"paradec": "dinfer"})
        result["cases"][f"{vocab} words, {rows} rows"] = {"contestants": entries}
        print(common.show(f"{vocab} words, {rows} rows", entries, ("dinfer",)), flush=True)
    write_result(RESULT, result)


if __name__ == "__main__":
    main()
