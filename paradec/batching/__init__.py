"""Batches whose free rows go to waiting prompts: `Batch`, and `generate_many`, which uses it."""

from paradec.batching.batch import Batch
from paradec.batching.slots import REFUSED, BatchClosed, Cancelled, Ticket, why_unsupported

__all__ = ["REFUSED", "Batch", "BatchClosed", "Cancelled", "Ticket", "why_unsupported"]
