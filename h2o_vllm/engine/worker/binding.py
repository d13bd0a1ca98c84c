# SPDX-License-Identifier: Apache-2.0
"""Law 9 in the workers: every part that vLLM bound is ours, or nothing starts. Worker process."""

from collections.abc import Iterable, Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

from h2o_vllm.blocks.manager.spec import H2OAttentionSpec, score_bytes_per_block
from h2o_vllm.errors import ConfigError


def leave_out_idle_windows(config: VllmConfig) -> None:
    """Make layers whose window no sequence leaves what they are: full attention. Before the model is built.

    It is what ``--disable-sliding-window`` does (``ModelConfig.__post_init__``, 0.32), where it changes no
    token. Some models (Phi-4-mini) have windows as long as the model.
    """
    model, text = config.model_config, config.model_config.hf_text_config
    window = getattr(text, "sliding_window", None)
    if isinstance(window, int) and window >= model.max_model_len:
        model.disable_sliding_window, text.sliding_window = True, None
        config.cache_config.sliding_window = None


def check_evictable(specs: Iterable[KVCacheSpec]) -> None:
    """Check that there is something to evict in a model of these layers.

    Raises:
        ConfigError: nothing is. vLLM frees what leaves a window by itself.
    """
    kinds = list(specs)
    if any(isinstance(spec, FullAttentionSpec) for spec in kinds):
        return
    windows = {spec.sliding_window for spec in kinds if isinstance(spec, SlidingWindowSpec)}
    spans = (
        f"sliding windows of {', '.join(map(str, sorted(windows)))} tokens" if windows else "states"
    )
    raise ConfigError(
        f"h2o_vllm has nothing to evict from this model: all its layers have {spans}, which forget by "
        "themselves. Serve it with: vllm serve"
    )


def check_drafter(
    specs: Mapping[str, KVCacheSpec], drafter: frozenset[str], *, has_kv: bool
) -> None:
    """Check that a drafter's layers can lie in the blocks of the layers that are evicted.

    Args:
        specs: of all layers, by name. drafter: the names of the drafter's layers.
        has_kv: whether the method of speculative decoding has such layers.

    Raises:
        ConfigError: they cannot; or vLLM has them elsewhere, and they would be taken for the model's.
    """
    if has_kv != bool(drafter & specs.keys()):
        raise ConfigError(
            "h2o_vllm did not find the KV of the drafter where vLLM 0.32 has it; refusing to start"
        )
    others = {
        type(spec).__name__ for spec in specs.values() if not isinstance(spec, H2OAttentionSpec)
    }
    if drafter and others:
        raise ConfigError(
            "h2o_vllm cannot work with a drafter that holds KV where layers of several kinds need blocks of "
            f"their own (vLLM keeps {', '.join(sorted(others))}): a drafter shares the blocks of full "
            "attention, in the model and in the drafter. Leave --speculative-config out, or use ngram"
        )


def memory_less_scores(
    available: int, specs: Mapping[str, KVCacheSpec], drafter: frozenset[str] = frozenset()
) -> int:
    """The part of ``available`` bytes that is left for KV once every block has its scores.

    Sliding-window layers do not count: their blocks lie in the same memory as ours, and have scores as well.
    The layers of a ``drafter`` have KV in every block, and no scores.

    Args:
        specs: of all layers, by name. drafter: the names of the drafter's layers.

    Raises:
        ConfigError: there is nothing to evict from.
    """
    ours = {name: spec for name, spec in specs.items() if isinstance(spec, H2OAttentionSpec)}
    if not ours:
        kinds = sorted({type(spec).__name__ for spec in specs.values()})
        raise ConfigError(
            "h2o_vllm evicts from layers of full attention, and this model has none that is served by our "
            f"backend: vLLM keeps {', '.join(kinds) or 'no KV'}"
        )
    kv_bytes = sum(spec.page_size_bytes for spec in ours.values())
    score_bytes = sum(score_bytes_per_block(ours[name]) for name in ours.keys() - drafter)
    return available * kv_bytes // (kv_bytes + score_bytes)


def evictable_group(
    builders: Iterable[tuple[Any, Any]], ours: type, drafter: frozenset[str] = frozenset()
) -> tuple[Any, Any, list[str]]:
    """The one metadata builder of evictable layers, its ``AttentionGroup``, and the names of these layers.

    Args:
        builders: all of the runner's builders, each with its group.
        ours: the class it must have.
        drafter: names of layers that are not evicted, and may be in that group.

    Raises:
        ConfigError: there is none, there are several, or it is not ours; or its blocks are those of
            sliding-window layers as well.
    """
    builders = list(builders)
    for _, group in builders:
        spec = group.kv_cache_spec
        if isinstance(spec, FullAttentionSpec) and (
            spec.sliding_window is not None or spec.attention_chunk_size is not None
        ):
            raise ConfigError(
                "h2o_vllm cannot evict where layers with a sliding window or attention chunks share "
                "the blocks of full attention: leave --disable-hybrid-kv-cache-manager out"
            )
    found = [
        pair
        for pair in builders
        if isinstance(pair[1].kv_cache_spec, H2OAttentionSpec)
        and not drafter.issuperset(pair[1].layer_names)
    ]
    if len(found) != 1 or not isinstance(found[0][0], ours):
        names = ", ".join(type(builder).__name__ for builder, _ in found) or "none"
        raise ConfigError(
            f"h2o_vllm needs one group of evictable layers with its own metadata builder, "
            f"vLLM built: {names}. Evictions would silently not happen; refusing to start."
        )
    builder, group = found[0]
    return builder, group, [name for name in group.layer_names if name not in drafter]


def evictable_layer(layers: Mapping[str, Any], name: str, num_blocks: int, ours: type) -> Any:
    """The attention layer ``name``, whose KV lies in ``num_blocks`` blocks.

    Raises:
        ConfigError: its implementation is not of class ``ours``, or its blocks are not vLLM's.
    """
    layer = layers[name]
    if not isinstance(layer.impl, ours):
        raise ConfigError(
            f"layer {name} is served by {type(layer.impl).__name__}, not by our attention"
        )
    if layer.kv_cache.dim() != 4 or layer.kv_cache.shape[0] != num_blocks:
        raise ConfigError(
            f"layer {name} has KV of shape {tuple(layer.kv_cache.shape)} for {num_blocks} "
            "blocks: vLLM splits or packs blocks, which compaction does not follow. Choose a "
            "--block-size that is a multiple of 32"
        )
    return layer


def kv_owners(layers: Mapping[str, Any], names: Iterable[str]) -> dict[str, list[str]]:
    """The evictable layers that hold KV, in order, each with the layers that read its KV and hold none.

    Args:
        layers: vLLM's, by name. names: of the evictable ones, in the order of the model.

    Raises:
        ConfigError: a layer reads through a window what all others see: it would see other tokens than its
            newest ones once some are evicted.
    """
    owners: dict[str, list[str]] = {}
    for name in names:
        target = getattr(layers[name], "kv_sharing_target_layer_name", None)
        if target is None:
            owners[name] = []
            continue
        if layers[name].sliding_window is not None or target not in owners:
            raise ConfigError(
                f"h2o_vllm cannot evict what layer {name} reads through a sliding window, or from a layer "
                f"that it does not evict from: KV of layer {target}"
            )
        owners[target].append(name)
    return owners
