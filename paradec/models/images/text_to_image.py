"""Base of image models on transformers' classes: text prompts, and a backbone that reads embeddings."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paradec.core.checks import check_int, short_repr
from paradec.core.facts import ModelFacts
from paradec.core.query import Query
from paradec.models.cache_argument import cache_keyword
from paradec.models.images.base import ImageModel, ImageRequest, exact_prompts
from paradec.models.images.grid import Grid

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")


class TextToImageModel(ImageModel):
    """Base of the families that read text. A family implements `grid`, `_prompt` and `_unconditional`, sets
    `image_ids`, and may override the other methods.

    module: transformers' `...ForConditionalGeneration`. vocab_size: number of output ids.
    tokenizer: of the checkpoint; if None, prompts must be ids."""

    conditions = "prompts"
    image_ids: Sequence[int]

    def __init__(self, module: Any, vocab_size: int, tokenizer: Any = None, name: str | None = None):
        text = module.config.get_text_config()
        facts = ModelFacts(
            vocab_size=vocab_size,
            max_length=text.max_position_embeddings,
            prediction="shifted",
            topology="causal",
            name=name or type(module).__name__,
        )
        super().__init__(module.eval(), facts, tokenizer)
        levels = getattr(module.config.vq_config, "channel_multiplier", [1])
        self.scale = 2 ** (len(levels) - 1)
        """Pixels along one side of a code; 1 if the VQ has no levels."""

    # ---- for subclasses -------------------------------------------------------------------------------------------

    @property
    def _language_model(self) -> Any:
        return self.module.model.language_model

    def _prompt(self, text: str, grid: Grid) -> list[int]:
        """Ids of a prompt, up to the first token of the picture."""
        raise NotImplementedError

    def _unconditional(self, prompt: list[int], grid: Grid) -> list[int]:
        """The guidance branch's prompt for a request without a negative prompt."""
        raise NotImplementedError

    def _from_text_ids(self, ids: list[int]) -> list[int]:
        return ids

    def _embed(self, ids: Tensor, query: Query | None) -> Tensor:
        return self.module.get_input_embeddings()(ids)

    def head(self, hidden: Tensor) -> Tensor:
        return self.module.lm_head(hidden)

    def codebook(self) -> Tensor | None:
        return self._codes_of_ids(self.module.model.vqmodel.quantize.embedding.weight, self.image_ids)

    # ---- shared ---------------------------------------------------------------------------------------------------

    def request(self, conditions: Any, grid: Grid, num_images: int = 1, negative_prompt: Any = None) -> ImageRequest:
        """Make a request. conditions: one or several captions, or rows of the tokenizer's ids of complete prompts, up
        to the picture's first token. negative_prompt: of the same form, one for all or one for each."""
        rows = self._rows("prompts", conditions, grid)
        if negative_prompt is None:
            uncond_rows = [self._unconditional(row, grid) for row in rows]
        else:
            uncond_rows = self._rows("negative_prompt", negative_prompt, grid)
            uncond_rows = uncond_rows * len(rows) if len(uncond_rows) == 1 else uncond_rows
            if len(uncond_rows) != len(rows):
                raise ValueError(
                    f"negative_prompt has {len(uncond_rows)} entries for {len(rows)} prompts; give one, or one for each"
                )
        self._check_prompts(rows + uncond_rows, grid)
        batches = (rows, uncond_rows)
        prompts = ([self._from_text_ids(row) for row in batch for _ in range(num_images)] for batch in batches)
        return ImageRequest(self, *map(exact_prompts, prompts))

    def _check_prompts(self, rows: list[list[int]], grid: Grid) -> None:
        longest, max_length = max(map(len, rows)), self.facts.max_length
        if max_length is not None and longest + grid.length > max_length:
            raise ValueError(
                f"a prompt of {longest} tokens and a picture of {grid.length} are longer than {self.facts.name} allows "
                f"({max_length}); shorten the prompt, or give a smaller height or width"
            )

    def _check_length(self, grid: Grid, scale: int) -> Grid:
        """Return the grid. Raises ValueError if it is too long for the model. scale: pixels along a token's side."""
        max_length = self.facts.max_length
        if max_length is not None and grid.length >= max_length:
            raise ValueError(
                f"height={grid.height * scale}, width={grid.width * scale} takes {grid.length} tokens; "
                f"{self.facts.name} makes at most {max_length - 1}"
            )
        return grid

    def _rows(self, name: str, prompts: Any, grid: Grid) -> list[list[int]]:
        if hasattr(prompts, "tolist"):
            prompts = prompts.tolist()
        if isinstance(prompts, str) or not isinstance(prompts, Sequence) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        if not prompts:
            raise ValueError(f"{name} is empty; give at least one")
        rows = []
        for entry in prompts:
            if isinstance(entry, str):
                if self.tokenizer is None:
                    raise ValueError(f"{name} is text, and {self.facts.name} has no tokenizer; give ids")
                rows.append(self._prompt(entry, grid))
                continue
            entry = entry.tolist() if hasattr(entry, "tolist") else entry
            if not isinstance(entry, Sequence) or not len(entry):
                raise TypeError(f"{name} holds {short_repr(entry)}; give texts, or rows of token ids")
            for token in entry:
                check_int(f"a token id of {name}", token, low=0, high=self.text_config.vocab_size - 1)
            rows.append([int(token) for token in entry])
        return rows

    def _backbone(self, embeddings: Tensor, query: Query, mask: Tensor | None, cache: Any) -> Tensor:
        if mask is not None and self._language_model.config._attn_implementation == "eager":
            lowest = torch.finfo(embeddings.dtype).min
            mask = torch.zeros_like(mask, dtype=embeddings.dtype).masked_fill(~mask, lowest)
        return self._language_model(
            inputs_embeds=embeddings,
            attention_mask=mask,
            position_ids=self._positions(query),
            use_cache=cache is not None,
            **cache_keyword(self._language_model, cache),
        ).last_hidden_state

    def _positions(self, query: Query) -> Tensor:
        """The backbone's position ids for a call's columns, by default [R, Q]."""
        return query.positions

    def _codes_of_ids(self, table: Tensor, image_ids: Sequence[int]) -> Tensor:
        """[vocab_size, d]: row `image_ids[c]` is row c of `table` [codes, d]; other rows are NaN."""
        codes = table.new_full((self.facts.vocab_size, table.shape[1]), torch.nan)
        codes[torch.tensor(list(image_ids), device=table.device)] = table
        return codes


def order_ids(codes: dict[int, int], size: int, name: str) -> tuple[int, ...]:
    """Convert {code: id} to ids in the order of the codebook. Raises ValueError for a code without an id."""
    missing = [code for code in range(size) if code not in codes]
    if missing:
        raise ValueError(f"{name} has no token for code {missing[0]} of {size}")
    return tuple(codes[code] for code in range(size))


def load_pretrained(
    source: str | os.PathLike[str], architecture: str, dtype: Any, revision: str | None, unused: str | None = None
) -> tuple[Any, Any]:
    """Read (module, tokenizer) of transformers' class `architecture` from a folder or hub repository with safetensors.
    Raises CheckpointError for a checkpoint that cannot be read, or weights that are missing or of a wrong dtype.

    unused: a pattern of the names of weights that are not used, and so may be missing."""
    import transformers

    from paradec.models.checkpoint import (
        COUNTERS,
        CheckpointError,
        check_stored_dtypes,
        checkpoint_errors,
        fetch,
        format_problems,
        read_json,
    )

    name = os.fspath(source)
    check_stored_dtypes(name, read_json(name, "config.json", revision), revision)
    options = {} if revision is None else {"revision": revision}
    error_types = (OSError, ValueError, RuntimeError, KeyError)
    with checkpoint_errors(f"{name!r} cannot be read as a {architecture}", *error_types):
        module, info = getattr(transformers, architecture).from_pretrained(
            source, dtype=dtype or "auto", use_safetensors=True, output_loading_info=True, **options
        )
    # transformers initialises missing weights at random
    missing = [key for key in info["missing_keys"] if not (key.endswith(COUNTERS) or unused and re.match(unused, key))]
    if missing:
        raise CheckpointError(
            f"the weights of {name!r} do not fit config.json: {format_problems({'missing': missing})}"
        )
    if not any(fetch(name, file, revision) for file in VOCABULARIES):
        return module, None  # transformers might build a tokenizer without a vocabulary
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError):
        tokenizer = None
    return module, tokenizer
