"""`model=hf`: any decoder of `transformers` that its architecture allows to be trained here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from runner.hub.shapes import HubShapes, refusals, shapes_of
from runner.hub.source import ALLOWED, read_config, refuse_without_weights

if TYPE_CHECKING:
    from runner.hub.network import HubNetwork


@dataclass(frozen=True, kw_only=True)
class Hub:
    """A decoder from a config, or from a config and its weights.

    path: folder with `config.json` (and `*.safetensors`), or a name on the hub, where there is a
        network or a filled cache. revision: of a name: commit, tag or branch.
    random_init: initial weights as the architecture draws them, from the seed, instead of stored
        ones. dropout: put in the place of every dropout of the config; None keeps the config's.
    init: folder of a run whose final weights replace these; None for these.
    """

    path: str | None = None
    revision: str | None = None
    random_init: bool = False
    dropout: float | None = 0.0
    init: str | None = None

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError(f"path: given nothing; allowed: {ALLOWED}")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: given {self.dropout}; allowed: from 0 to below 1, or null")
        if not self.random_init:
            refuse_without_weights(self.path)
        against = list(refusals(self.config))
        if against:
            kind = self.config["model_type"]
            raise ValueError(
                f"path: given {self.path} ({kind}) with {'; '.join(against)}; "
                "allowed: a decoder without these"
            )
        _ = self.shapes

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The model's own config, as its JSON says."""
        assert self.path is not None
        return read_config(self.path, self.revision)

    @cached_property
    def shapes(self) -> HubShapes:
        """Shapes from the config; parameters are counted by the library when they are asked for."""

        def counts() -> tuple[int, int]:
            from runner.hub.loading import counted

            return counted(self)

        return shapes_of(self.config, counts)

    def describe(self) -> HubShapes:
        """Shapes, without building anything."""
        return self.shapes

    def build(self, seed: int) -> HubNetwork:
        """The network on the CPU in fp32, proved against the library's own logits. The global
        random state stays as it is. Raises UserError for what its architecture does not allow."""
        from runner.hub.loading import built

        return built(self, seed)
