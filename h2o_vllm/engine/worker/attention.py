# SPDX-License-Identifier: Apache-2.0
"""The part of our attention that both devices share: which kernels serve a batch. Worker process."""

from typing import Any, ClassVar, NamedTuple

import torch
from vllm.v1.attention.backend import AttentionImpl
from vllm.v1.kv_cache_interface import AttentionSpec

from h2o_vllm.blocks.manager.spec import evictable_spec
from h2o_vllm.engine.worker.state import WorkerState
from h2o_vllm.errors import ConfigError


class AttentionCall(NamedTuple):
    """What vLLM hands to an attention layer, its metadata aside.

    Attributes:
        query: [T, H, D]. key, value: [T, KH, D], in the cache already.
        kv_cache: the layer's, in the backend's layout.
        output: [T, H, D], to be written. output_scale, output_block_scale: for a quantised output.
    """

    layer: Any
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_cache: torch.Tensor
    output: torch.Tensor
    output_scale: torch.Tensor | None = None
    output_block_scale: torch.Tensor | None = None


class ScoringBackend:
    """Stands before one of vLLM's backends in the line of bases."""

    impl_cls: ClassVar[type[AttentionImpl[Any]]]
    builder_cls: ClassVar[type]

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl[Any]]:
        """Our attention."""
        return cls.impl_cls

    @classmethod
    def get_builder_cls(cls) -> Any:
        """Our metadata builder."""
        return cls.builder_cls

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Make full attention evictable. vLLM's base repacks KV with scales per token, which is refused."""
        return evictable_spec(spec)


class ScoringImpl(AttentionImpl[Any]):
    """Stands before one of vLLM's implementations in the line of bases. Stock until :meth:`bind`.

    ``scale``, ``head_size`` and what :meth:`bind` reads are the base's.
    """

    stock: ClassVar[type]
    """The implementation of vLLM's that serves whatever is not scored."""
    scored_metadata: ClassVar[type]
    """What our builder gives for a batch with scored rows; any other metadata is for ``stock``."""

    scale: float
    logits_soft_cap: float
    """0: none."""
    sinks: torch.Tensor | None
    """[H] of this rank, or ``None``: logits that belong to no key and join the softmax's denominator."""
    head_size: int
    _state: Any = None
    _layer: int
    _scores: torch.Tensor
    """Of the KV that this layer reads, [N, KH, BS], float32."""

    def bind(self, state: WorkerState, layer: int) -> None:
        """Take the worker's state.

        Args:
            layer: index among the evictable layers that hold KV: of this one, or of the one whose KV it
                reads. The score of a key is a sum over all layers that read it, as it is over query heads.

        Raises:
            ConfigError: this layer's attention is of a kind our kernels do not compute.
        """
        unscorable: Any = self
        if unscorable.alibi_slopes is not None:
            raise ConfigError("h2o_vllm cannot score attention with ALiBi")
        self._state, self._layer = state, layer
        self._scores = state.scores[layer]

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As the base class; also adds the scored rows' probabilities to the scores."""
        scales = (output_scale, output_block_scale)
        call = AttentionCall(layer, query, key, value, kv_cache, output, *scales)
        if isinstance(attn_metadata, self.scored_metadata):
            self.attend(call, attn_metadata)
        else:
            self.attend_stock(call, attn_metadata)
        return output

    def attend(self, call: AttentionCall, batch: Any) -> None:
        """Attend for a batch with scored rows, of which ``batch`` is the metadata."""
        raise NotImplementedError

    def attend_stock(self, call: AttentionCall, metadata: Any) -> None:
        """Stock attention."""
        *given, output, scale, block_scale = call
        super().forward(*given, metadata, output, scale, block_scale)
