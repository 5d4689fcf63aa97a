"""Block-sparse attention over lists of key blocks, one list per head and block of queries, and how the lists are found.

Wang et al., "SparseD: Sparse Attention for Diffusion Language Models", arXiv 2509.24014. Attention is bidirectional; a
block is `block_size` neighbouring positions, the last one of a row may be shorter. Three steps:

1. `block_means`: how much each block of queries attends to each block of keys, the mean of the probabilities in that
   tile. Softmax rows are never kept: one pass over the keys finds their log-sum-exp (a dense step that returns it saves
   that pass), a second one sums probabilities tile by tile.
2. `select_blocks`: which key blocks each query block keeps, as a `BlockIndex` (`lists.py`).
3. `sparse_attention`: softmax attention over those alone.

The first and the last have a Triton kernel for NVIDIA GPUs (`triton.py`) and a path of plain PyTorch operations for
all else (`portable.py`); the last can be had from PyTorch's flex_attention as well (`flex.py`). All are held to
`reference.py`; but for that, nothing here holds a tensor of queries x keys for more than a few blocks of queries.

Shapes: `B` rows, `H` heads, `G` key/value heads (H a multiple of it), `Q` queries, `K` keys, `D` head dimension, `n`
blocks. A key's index is its position. Products are accumulated in float32 (float64 for float64 inputs).
"""

from paradec.kernels import interpreting
from paradec.kernels.block_sparse.api import BACKENDS, block_means, runs_on, sparse_attention
from paradec.kernels.block_sparse.lists import BlockIndex, QueryTiles, budget, generation_block, select_blocks

__all__ = [
    "BACKENDS",
    "BlockIndex",
    "QueryTiles",
    "block_means",
    "budget",
    "generation_block",
    "interpreting",
    "runs_on",
    "select_blocks",
    "sparse_attention",
]
