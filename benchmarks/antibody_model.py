"""AntiBERTy, a masked language model of antibody sequences, from the `antiberty` wheel.

Ruffolo, Gray and Sulam, "Deciphering antibody affinity maturation with language models and weakly supervised learning",
arXiv 2112.07782. The wheel (MIT licence) contains 26M parameters, trained on 558M natural antibody sequences, and code
for an older transformers. This file reads only the wheel's data files: none of its code is imported, and unpickling
is restricted to tensors.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch

from paradec.models.adapter import Model
from paradec.models.wrapping import wrap

NOT_THE_LANGUAGE_MODEL = ("bert.embeddings.position_ids", "bert.pooler.", "cls.species.", "cls.chain.", "cls.graft.")
"""Weights of the classification heads, and a buffer that transformers creates itself."""


def load_antiberty() -> Model:
    """Load AntiBERTy as a `Model` around transformers' `BertForMaskedLM`, float32, on the CPU.

    The vocabulary has 25 tokens: [PAD], [UNK], [CLS], [SEP], [MASK] and the 20 amino acids. The model was trained on
    `[CLS] residues [SEP]`, one token per residue, as `model.tokenizer("E V Q L")["input_ids"]` returns. It has up to
    512 positions, logits i predict token i, and there is no end token: the user chooses the length.

    Raises:
        ModuleNotFoundError: the package is not installed; the message says how to install it.
        RuntimeError: the weights do not fit their configuration.
    """
    from transformers import BertConfig, BertForMaskedLM, BertTokenizer

    try:
        package = importlib.metadata.distribution("antiberty")
    except importlib.metadata.PackageNotFoundError as error:
        raise ModuleNotFoundError('AntiBERTy is not installed: pip install -e ".[bench]" in the checkout') from error
    folder = Path(str(package.locate_file("antiberty/trained_models")))
    settings = json.loads((folder / "AntiBERTy_md_smooth" / "config.json").read_text(encoding="utf-8"))
    module = BertForMaskedLM(BertConfig(**{key: settings[key] for key in settings if not key.startswith("_")}))
    weights = torch.load(folder / "AntiBERTy_md_smooth" / "pytorch_model.bin", map_location="cpu", weights_only=True)
    module.load_state_dict({k: v for k, v in weights.items() if not k.startswith(NOT_THE_LANGUAGE_MODEL)})
    tokenizer: Any = BertTokenizer(vocab=str(folder / "vocab.txt"), do_lower_case=False)
    return wrap(module.eval(), tokenizer=tokenizer, pad_token_id=tokenizer.pad_token_id)
