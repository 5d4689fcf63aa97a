"""Block-sparse attention over lists of key blocks, one list per head and query block.

Wang et al., "SparseD: Sparse Attention for Diffusion Language Models", arXiv 2509.24014. Attention is bidirectional. A
block has `block_size` neighbouring positions; a row's last block may have fewer.

1. `block_means`: mean attention probability of each tile (a query block by a key block).
2. `select_blocks`: the key blocks selected for each query block, as a `BlockIndex` (`lists.py`).
3. `sparse_attention`: softmax attention over the selected blocks alone.

`block_means` and `sparse_attention` each have a Triton kernel (`triton.py`) and a PyTorch path (`portable.py`);
`sparse_attention` also has PyTorch's flex_attention (`flex.py`). `reference.py` is the oracle.

Shapes: `B` rows, `H` heads, `G` key/value heads, `Q` queries, `K` keys, `D` head dimension, `n` blocks. A key's index
is its position. Products accumulate in float32 (float64 for float64 inputs)."""

from paradec.kernels import interpreting
from paradec.kernels.block_sparse.api import BACKENDS, block_means, choose_backend, sparse_attention
from paradec.kernels.block_sparse.lists import BlockIndex, QueryTiles, budget, generation_block, select_blocks

__all__ = [
    "BACKENDS",
    "BlockIndex",
    "QueryTiles",
    "block_means",
    "budget",
    "generation_block",
    "interpreting",
    "choose_backend",
    "select_blocks",
    "sparse_attention",
]
