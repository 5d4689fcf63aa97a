"""Block-sparse attention over lists of key blocks, one list per head and block of queries.

Wang et al., "SparseD: Sparse Attention for Diffusion Language Models", arXiv 2509.24014. Attention is bidirectional; a
block is `block_size` neighbouring positions, the last one of a row may be shorter. Three steps:

1. `block_means`: the mean attention probability of each tile of a block of queries and a block of keys. One pass over
the keys finds their log-sum-exp (unless a dense step returned it), a second one sums probabilities tile by tile.
2. `select_blocks`: which key blocks each query block keeps, as a `BlockIndex` (`lists.py`).
3. `sparse_attention`: softmax attention over those alone.

The first and the last have a Triton kernel (`triton.py`) and a PyTorch path (`portable.py`); the last also PyTorch's
flex_attention (`flex.py`). All are held to `reference.py`, which alone holds whole tensors of queries x keys.

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
