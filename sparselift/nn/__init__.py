"""Drop-in modules over the fused kernels. Each works alone, without a plan."""

from __future__ import annotations

from .embedding import Embedding, EmbeddingBag
from .interaction import DotInteraction
from .table_batched import TableBatchedEmbeddingBags

__all__ = ["DotInteraction", "Embedding", "EmbeddingBag", "TableBatchedEmbeddingBags"]
