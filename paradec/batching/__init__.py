"""Batches that stay full: `Batch`, and `generate_many` over it."""

from paradec.batching.batch import Batch, BatchClosed, Cancelled, Ticket, refusal

__all__ = ["Batch", "BatchClosed", "Cancelled", "Ticket", "refusal"]
