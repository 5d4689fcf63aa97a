"""ProteinMPNN's relatives: LigandMPNN, which sees the atoms around a protein, and the models of membrane proteins.

Dauparas et al., "Atomic context-conditioned protein sequence design using LigandMPNN" (Nature Methods 2025), and the
public code (`ligandmpnn`). Names of parameters are those of the published weights. Decoders are ProteinMPNN's
(`paradec.models.proteins.network`); what is known of a residue before any letter differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, normalize

from paradec.models.proteins.network import BASES, Features, Layer, ProteinMPNN, bases, parts, with_cb
from paradec.models.proteins.structure import ELEMENTS, MEMBRANE, Structure

KINDS, GROUPS, PERIODS = 120, 19, 8
"""Elements, groups and periods that an atom's kind is told by, 0 of each included."""
KIND_WIDTH, ANGLES = 64, 4
FRAME = ("N", "CA", "C", "O", "CB")
"""Atoms of a residue whose distances to an atom around it are known."""
UNSEEN = ("H", "MO")
"""Elements that are no context. The public code leaves out molybdenum too, whose symbol it spells otherwise."""
PERIOD_ENDS = tuple(accumulate((2, 8, 8, 18, 18, 32, 32)))


class LigandMPNN(ProteinMPNN):
    """A network whose encoder also reads, for each residue, the atoms around it that are nearest to its CB.

    Args:
        width, layers, neighbours: as for ProteinMPNN.
        atoms: how many of them.
    """

    def __init__(self, width: int = 128, layers: tuple[int, int] = (3, 3), neighbours: int = 32, atoms: int = 25):
        super().__init__(width, layers, neighbours)
        self.atoms = atoms
        self.features: LigandFeatures = LigandFeatures(width)
        self.W_v, self.W_c = nn.Linear(width, width), nn.Linear(width, width)
        self.W_nodes_y, self.W_edges_y = nn.Linear(width, width), nn.Linear(width, width)
        self.V_C, self.V_C_norm = nn.Linear(width, width, bias=False), nn.LayerNorm(width)
        self.context_encoder_layers = nn.ModuleList([Layer(width, 3) for _ in range(2)])
        self.y_context_encoder_layers = nn.ModuleList([Layer(width, 2) for _ in range(2)])

    def after(self, structure: Structure, nodes: Tensor, complete: Tensor) -> Tensor:
        """Nodes with what the atoms add to them. An incomplete residue has what no atom changes."""
        found = []
        pairs = zip(self.context_encoder_layers, self.y_context_encoder_layers, strict=True)
        layers = cast("list[tuple[Layer, Layer]]", list(pairs))
        for some, around in self.features.around(structure, self.atoms, nodes):
            own, mask = self.W_c(nodes[some]), complete[some].unsqueeze(-1)
            pairs_of_atoms, atoms, edges = (
                self.W_edges_y(around.pairs),
                self.W_nodes_y(around.atoms),
                self.W_v(around.edges),
            )
            for layer, layer_of_atoms in layers:
                atoms = _heard(layer_of_atoms, atoms, pairs_of_atoms)
                own = _heard(layer, own, torch.cat((edges, atoms), -1)) * mask
            found.append(own)
        return nodes + self.V_C_norm(self.V_C(torch.cat(found)))


class Around(NamedTuple):
    """The `M` atoms around each of `R` residues."""

    edges: Tensor
    """[R, M, D]: the residue and the atom."""
    pairs: Tensor
    """[R, M, M, D]: two of the atoms."""
    atoms: Tensor
    """[R, M, D]: the atom alone."""


class LigandFeatures(Features):
    """ProteinMPNN's, and what is known of the atoms around a residue: their elements, distances and directions."""

    def __init__(self, width: int):
        super().__init__(width)
        kinds = KINDS + GROUPS + PERIODS
        self.type_linear = nn.Linear(kinds, KIND_WIDTH)
        self.node_project_down = nn.Linear(len(FRAME) * BASES + KIND_WIDTH + ANGLES, width)
        self.y_nodes, self.y_edges = nn.Linear(kinds, width, bias=False), nn.Linear(BASES, width, bias=False)
        self.norm_nodes, self.norm_y_nodes, self.norm_y_edges = (nn.LayerNorm(width) for _ in range(3))

    def around(self, structure: Structure, count: int, like: Tensor) -> Iterator[tuple[slice, Around]]:
        """The nearest atoms, `count` or as many as there are, of some residues after the others.

        Args:
            like: of the dtype of what is made.
        """
        wide, device = torch.promote_types(like.dtype, torch.float32), like.device
        seen = [number for number, element in enumerate(structure.elements) if element not in UNSEEN]
        assert structure.atoms is not None  # a structure fills it in
        at = structure.atoms[seen].to(device, wide)
        kind = torch.tensor([_kind(structure.elements[number]) for number in seen], dtype=torch.int64, device=device)
        kind = kind.reshape(-1, 3)
        typed = _of_kinds(self.type_linear, kind)
        alone = self.norm_y_nodes(_of_kinds(self.y_nodes, kind))
        own = with_cb(structure, device, wide)
        frame = torch.stack([own[name] for name in FRAME], 1)  # [L, 5, 3]
        nearest = (frame[:, -1, None] - at).square().sum(-1).topk(min(count, len(at)), 1, largest=False).indices
        for some in parts(frame):
            near = nearest[some]
            there, here = at[near], frame[some]  # [R, M, 3], [R, 5, 3]
            apart = (here[:, None] - there[:, :, None]).square().sum(-1)  # [R, M, 5]
            known = (bases(apart).flatten(2).to(like.dtype), typed[near], _directions(here, there).to(like.dtype))
            between = (there[:, :, None] - there[:, None]).square().sum(-1)
            yield (
                some,
                Around(
                    edges=self.norm_nodes(self.node_project_down(torch.cat(known, -1))),
                    pairs=self.norm_y_edges(self.y_edges(bases(between).to(like.dtype))),
                    atoms=alone[near],
                ),
            )


class MembraneMPNN(ProteinMPNN):
    """A network whose residues have a label: buried in a membrane, at its interface, or neither; or one that says
    whether the protein is a transmembrane one (`paradec.models.proteins.structure.MEMBRANE`). Without labels all are
    0."""

    def __init__(self, width: int = 128, layers: tuple[int, int] = (3, 3), neighbours: int = 48):
        super().__init__(width, layers, neighbours)
        self.features: MembraneFeatures = MembraneFeatures(width)
        self.W_v = nn.Linear(width, width)

    def before(self, structure: Structure, like: Tensor) -> Tensor:
        labels = (0,) * len(structure) if structure.membrane is None else structure.membrane
        found = self.features.node_embedding.weight.T[torch.tensor(labels, device=like.device)]
        return cast(Tensor, self.W_v(self.features.norm_nodes(found)))


class MembraneFeatures(Features):
    """ProteinMPNN's, and the labels'."""

    def __init__(self, width: int):
        super().__init__(width)
        self.node_embedding = nn.Linear(len(MEMBRANE), width, bias=False)
        self.norm_nodes = nn.LayerNorm(width)


def _heard(layer: Layer, own: Tensor, messages: Tensor) -> Tensor:
    """What a layer makes of own [..., D] and of messages [..., M, n D], n as many parts as it reads beside own."""
    width = own.shape[-1]
    first, rest = layer.W1.weight.split((width, messages.shape[-1]), 1)
    found = gelu(linear(messages, rest) + linear(own, first, layer.W1.bias).unsqueeze(-2))
    sums = gelu(layer.W2(found)).sum(-2)
    # the last product is linear, so that messages are added up before it
    return layer.added(own, sums @ layer.W3.weight.T + messages.shape[-2] * layer.W3.bias)


def _kind(element: str) -> tuple[int, int, int]:
    """Number, group and period of an element in the periodic table; lanthanides and actinides are of group 3."""
    number = ELEMENTS.index(element) + 1
    period = next(index for index, end in enumerate(PERIOD_ENDS) if number <= end)
    start, end = (0, *PERIOD_ENDS)[period] + 1, PERIOD_ENDS[period]
    left, right = number - start + 1, number - end + 18
    has_d, has_f = end - start + 1 >= 18, end - start + 1 == 32
    if left <= 2 and number != end:
        group = left
    elif has_f and left <= 17:
        group = 3
    elif has_d or right > 12:
        group = right
    else:
        group = left
    return number, group, period + 1


def _of_kinds(layer: nn.Linear, kind: Tensor) -> Tensor:
    """A product with three ones a row, at kind [A, 3]."""
    columns = layer.weight.T[kind + torch.tensor((0, KINDS, KINDS + GROUPS), device=kind.device)].sum(1)
    return columns if layer.bias is None else columns + layer.bias


def _directions(frame: Tensor, there: Tensor) -> Tensor:
    """[R, M, 4]: angles of atoms [R, M, 3] in the frame of a residue's N, CA and C [R, 5, 3]: cosine and sine about the
    third axis, sine and cosine away from it."""
    origin = frame[:, 1]
    first = normalize(frame[:, 0] - origin, dim=-1)
    other = frame[:, 2] - origin
    second = normalize(other - first * (first * other).sum(-1, keepdim=True), dim=-1)
    axes = torch.stack((first, second, torch.linalg.cross(first, second)), -1)
    x, y, z = ((there - origin[:, None]) @ axes).unbind(-1)
    flat, far = (x.square() + y.square() + 1e-8).sqrt(), torch.stack((x, y, z), -1).norm(dim=-1) + 1e-8
    return torch.stack((x / flat, y / flat, flat / far, z / far), -1)
