"""SJD's public code on LlamaGen, run for `sjd.py` in a separate interpreter and environment.

    python benchmarks/peers/sjd_reference.py CHECKOUT TASK.json

The public code is neither changed nor copied: its classes and its solver are called as in its script. Modules that are
missing on this machine are replaced; `sjd.PATCHED` lists them.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import serve


class NoClock:
    """Replacement of `torch.cuda.Event`, with which the public code times itself."""

    def __init__(self, **kwargs: Any):
        pass

    def record(self) -> None:
        pass

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def sjd(checkout: Path, task: dict[str, Any]) -> Callable[[], Any]:
    """Build a function that generates one image and returns its codes and the number of forwards: [1, cells + 1]."""
    sys.modules["absl"] = types.SimpleNamespace(logging=logging)  # type: ignore[assignment]
    torch.cuda.Event, torch.cuda.synchronize = NoClock, lambda: None  # type: ignore[assignment,misc]
    sys.path[:0] = [str(checkout), str(checkout / "lumina_mgpt")]
    from llamagen.llamagen import ModelArgs, Transformer
    from llamagen.llamagen_solver import LlamaGenSolver, renew_llamagen
    from safetensors.torch import load_file
    from scheduler.jacobi_iteration_lumina_mgpt import renew_sampler

    sizes = task["sizes"]
    model = Transformer(ModelArgs(**sizes))
    cells = sizes["block_size"]
    settings = {
        "jacobi_loop_interval_l": 1,
        "jacobi_loop_interval_r": cells - task["window"] - 2,
        "max_num_new_tokens": task["window"],
        "guidance_scale": task["guidance"],
        "seed": None,
        "multi_token_init_scheme": "random",
        "do_cfg": True,
        "prefix_token_sampler_scheme": "speculative_jacobi",
        "use_chameleon_tokenizer": False,
    }
    for renew in (renew_llamagen, renew_sampler):
        model.__class__ = renew(model.__class__)
        model._init_new_params(**settings)
    model.img_vocab = torch.arange(sizes["vocab_size"])
    model.load_state_dict(load_file(task["weights"]), strict=False)
    model.to(getattr(torch, task["dtype"])).eval()
    forwards = 0

    inference = model.inference  # called by the prefill and by every step

    def count_and_call(*args: Any, **kwargs: Any) -> Any:
        nonlocal forwards
        forwards += 1
        return inference(*args, **kwargs)

    model.inference = count_and_call
    solver = LlamaGenSolver(model=model, image_top_k=task["top_k"], image_top_p=1.0)

    def run() -> Any:
        nonlocal forwards
        forwards = 0
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():  # discard its prints
            codes = solver.generate(
                torch.tensor([task["label"]]), cells, None, cfg_scale=task["guidance"], temperature=1.0,
                top_k=task["top_k"], top_p=1.0, sample_logits=True,
            )  # fmt: skip
        return torch.cat((codes[:, :cells].long(), torch.tensor([[forwards]])), 1)

    return run


def main() -> None:
    checkout, task = Path(sys.argv[1]).resolve(), json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    serve(sjd(checkout, task), version=str(task.get("version", "")))


if __name__ == "__main__":
    main()
