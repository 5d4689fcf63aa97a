"""transformers' own `generate` for DiffusionGemma, held to the conformance kit.

    cd examples && paradec verify --target verify_transformers:answer --group canvases
    python examples/verify_transformers.py           # the same

Its random numbers come from torch's generator, as the cases ask (`draws` is "torch").
"""

from __future__ import annotations

import argparse
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch


@lru_cache
def loaded(folder: str) -> Any:
    from transformers import DiffusionGemmaForBlockDiffusion
    from transformers.utils import logging

    logging.disable_progress_bar()
    return DiffusionGemmaForBlockDiffusion.from_pretrained(folder).eval()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What `paradec verify` calls: answers alone, since `generate` does not say what each step made final."""
    if request["method"] != "diffusion_gemma":
        raise NotImplementedError("DiffusionGemma alone")
    settings = dict(request["settings"])
    # canvases close early where their best tokens have not changed for so many steps; None: never
    settings["stability_threshold"] = 1 if settings.pop("early_stop") else None
    ids = torch.tensor(request["prompts"])
    torch.manual_seed(request["seed"])
    found = loaded(request["checkpoint"]).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=request["max_new_tokens"], **settings
    )
    return {"ids": found.sequences.tolist()}


def main() -> None:
    from paradec.tools.conformance import archive, report
    from paradec.tools.conformance.cases import cases
    from paradec.tools.conformance.run import DRAWS, TOLERANCE, Run, run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the archive of the cases; a checkout of paradec has them")
    parser.add_argument("--tiny", action="store_true", help="changes nothing: the model is tiny anyhow")
    with archive.opened(parser.parse_args().data) as data:
        chosen = cases(data, groups=["canvases"])
        into = Run("transformers", data.version, data.digest, TOLERANCE, DRAWS, {"group": "canvases"})
        print(report.text(run(answer, data, chosen, into)))


if __name__ == "__main__":
    main()
