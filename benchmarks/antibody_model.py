"""AntiBERTy, a masked language model of antibody sequences, out of the `antiberty` wheel.

Ruffolo, Gray and Sulam, "Deciphering antibody affinity maturation with language models and weakly supervised learning",
arXiv 2112.07782. The wheel (MIT licence) holds 26M parameters, trained on 558M natural antibody sequences, and code for
an older transformers. Only its data files are read here: no code of the package is imported, and the pickled weights
are unpickled as tensors alone.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from paradec.core.checks import shown
from paradec.models.adapter import Model
from paradec.models.checkpoint import CheckpointError, check_dtypes, format_problems
from paradec.models.wrapping import wrap

WEIGHTS = "AntiBERTy_md_smooth"
"""The folder of `antiberty/trained_models` that holds config.json and pytorch_model.bin; vocab.txt is beside it."""
NOT_THE_LANGUAGE_MODEL = ("bert.embeddings.position_ids", "bert.pooler.", "cls.species.", "cls.chain.", "cls.graft.")
"""Weights of the classification heads, and a buffer that is made anew."""


def load_antiberty(path: str | os.PathLike[str] | None = None) -> Model:
    """Load AntiBERTy as a model that samplers can decode with.

    The vocabulary has 25 tokens: [PAD], [UNK], [CLS], [SEP], [MASK] and the 20 amino acids. The model was trained on
    `[CLS] residues [SEP]`, one token per residue: `model.tokenizer("E V Q L")["input_ids"]` gives that. It sees up to
    512 positions, predicts in place and has no end token (lengths are the user's choice).

    Args:
        path: a folder laid out as the wheel's `trained_models`; None finds the installed package's.

    Returns:
        A `Model` around transformers' `BertForMaskedLM`, float32, on the CPU.

    Raises:
        ModuleNotFoundError: the package is not installed; the message says how to install it.
        CheckpointError (a ValueError): a file is missing, corrupt, or does not fit the others.
    """
    from transformers import BertConfig, BertForMaskedLM, BertTokenizer

    if path is not None and (not isinstance(path, (str, os.PathLike)) or not os.path.isdir(path)):
        raise CheckpointError(f"path={shown(path)} must be a folder laid out as antiberty's trained_models")
    folder = _installed() if path is None else Path(path)
    config, vocabulary, weights = (
        folder / name for name in (f"{WEIGHTS}/config.json", "vocab.txt", f"{WEIGHTS}/pytorch_model.bin")
    )
    for file in (config, vocabulary, weights):
        if not file.is_file():
            raise CheckpointError(f"{str(folder)!r} has no {file.relative_to(folder)}")
    try:
        settings = json.loads(config.read_text(encoding="utf-8"))
        stored = torch.load(weights, map_location="cpu", weights_only=True)
        module = BertForMaskedLM(BertConfig(**{key: settings[key] for key in settings if not key.startswith("_")}))
    except (OSError, ValueError, TypeError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
        raise CheckpointError(f"AntiBERTy in {str(folder)!r} cannot be read: {reason}") from error
    kept = {name: value for name, value in stored.items() if not name.startswith(NOT_THE_LANGUAGE_MODEL)}
    needed = module.state_dict()
    wrong = {
        "missing": [name for name in needed if name not in kept],
        "unexpected": [name for name in kept if name not in needed],
        "mismatched": [name for name in kept if name in needed and kept[name].shape != needed[name].shape],
    }
    if any(wrong.values()):
        raise CheckpointError(
            f"the weights of AntiBERTy in {str(folder)!r} do not fit its config.json: {format_problems(wrong)}"
        )
    check_dtypes(str(weights), {name: kept[name].dtype for name in needed if needed[name].is_floating_point()})
    module.load_state_dict(kept)
    tokenizer: Any = BertTokenizer(vocab=str(vocabulary), do_lower_case=False)
    if len(tokenizer) != module.config.vocab_size:
        raise CheckpointError(
            f"vocab.txt in {str(folder)!r} has {len(tokenizer)} tokens; config.json says {module.config.vocab_size}"
        )
    return wrap(module.eval(), tokenizer=tokenizer, pad_token_id=tokenizer.pad_token_id)


def _installed() -> Path:
    """The installed package's data folder, found without importing the package."""
    try:
        package = importlib.metadata.distribution("antiberty")
    except importlib.metadata.PackageNotFoundError as error:
        raise ModuleNotFoundError('AntiBERTy is not installed: pip install -e ".[bench]" in the checkout') from error
    return Path(str(package.locate_file("antiberty/trained_models")))
