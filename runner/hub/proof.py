"""Proof, on a few random tokens, that a hub network computes what its library computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from models.attention import Attention
from models.documents import Documents
from runner.hub.network import SEAM, HubNetwork

LENGTHS = (7, 5)
"""Documents that the proof is made on."""
TOLERANCE = 1e-4
"""Largest difference, relative to the largest logit."""


class Counting:
    """An attention that counts how often it is asked."""

    def __init__(self, inner: Attention) -> None:
        self.inner = inner
        self.calls = 0

    def plan(self, segments: Any, like: Tensor) -> Any:
        """The inner one's."""
        return self.inner.plan(segments, like)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Any, dropout_p: float) -> Tensor:
        """The inner one's, counted."""
        self.calls += 1
        return self.inner.attend(q, k, v, plan, dropout_p)


@torch.no_grad()
def disagreement(network: HubNetwork, model: Any) -> str | None:
    """Why `network` is not what the library's `model` is, or None.

    Its logits must be those of the library's own plain attention, every layer must have asked the
    seam once, and documents that share a row must be as if alone.
    """
    model.eval()
    lengths = [min(n, network.description.positions) for n in LENGTHS]
    vocab = network.description.vocab
    documents = [torch.randint(vocab, (1, length)) for length in lengths]
    counting = network.attention = Counting(network.attention)
    try:
        own = [logits(network, ids) for ids in documents]
    except Exception as error:  # what its layers cannot do without is told by name
        return f"layers that cannot run so ({type(error).__name__}: {error})"
    finally:
        network.attention = counting.inner
    layers, calls = network.description.layers, counting.calls // len(documents)
    if calls != layers:
        return f"{calls} of {layers} layers attend through the library"
    theirs = reference(network, model, documents)
    gap = max(difference(a, b) for a, b in zip(own, theirs, strict=True))
    if not gap <= TOLERANCE:
        return f"logits that differ from the library's by {gap:.2g} of the largest"
    return shared_row(network, documents, own)


def reference(network: HubNetwork, model: Any, documents: list[Tensor]) -> list[Tensor]:
    """Logits of the library's own plain attention."""
    model.set_attn_implementation("eager")
    try:
        return [model(input_ids=ids, use_cache=False).logits[0] for ids in documents]
    finally:
        model.set_attn_implementation(SEAM)


def shared_row(network: HubNetwork, documents: list[Tensor], alone: list[Tensor]) -> str | None:
    """Why documents that share a row are not as if alone, or None."""
    if not network.takes_positions:
        return None
    lengths = [ids.shape[1] for ids in documents]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    row = logits(network, torch.cat(documents, dim=1), positions, Documents(lengths))
    gap = difference(row, torch.cat(alone))
    if gap <= TOLERANCE:
        return None
    return f"documents of one row that differ by {gap:.2g} from the same alone"


def logits(network: HubNetwork, *inputs: Any) -> Tensor:
    """(length, vocab) of one row."""
    return network.hidden(*inputs)[0] @ network.head_weight.T


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest of `b`."""
    return float((a - b).abs().max() / b.abs().max())
