# SPDX-License-Identifier: Apache-2.0
"""Law 9: if any of our parts is not the one vLLM bound, start-up fails loudly. And what we refuse."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
)

from h2o_vllm.blocks.manager.spec import H2OAttentionSpec, evictable_spec
from h2o_vllm.engine.core.scheduler import H2OScheduler
from h2o_vllm.engine.cpu.attention import H2OMetadataBuilder
from h2o_vllm.engine.support.check import (
    VERSIONS,
    check_supported,
    check_vllm_version,
    config_of,
)
from h2o_vllm.engine.support.everywhere import SCHEDULER_CLS, is_our_scheduler
from h2o_vllm.engine.worker.binding import (
    check_evictable,
    evictable_group,
    leave_out_idle_windows,
)
from h2o_vllm.errors import ConfigError
from h2o_vllm.plugin import engine_args
from tests.engine.scheduling import HEADS, STATES, WINDOW, Rig

SPEC, PLAIN = (kind(block_size=16, **HEADS) for kind in (H2OAttentionSpec, FullAttentionSpec))


@pytest.fixture(scope="module")
def rig(model_dir: str) -> Rig:
    return Rig(model_dir, 20)


def set_path(root: object, path: str, value: object) -> None:
    *parents, last = path.split(".")
    for name in parents:
        root = getattr(root, name)
    object.__setattr__(root, last, value)


def test_law09_copies_of_a_head_rank_by_no_attention(rig: Rig) -> None:
    """More ranks than KV heads: each copy would see other queries, and keep other tokens."""
    config = copy.copy(rig.config)
    object.__setattr__(config, "parallel_config", copy.copy(config.parallel_config))
    set_path(config, "parallel_config.tensor_parallel_size", 4)
    evicts = {"kv_budget": 0.2}
    for served in ({}, evicts, {**evicts, "kv_policy": "later"}, {"kv_policy": "h2o"}):
        set_path(config, "additional_config", {"h2o": served})
        check_supported(config)
    reason = config_of(config).no_scores_reason
    assert "2 KV heads is on 2 of 4 tensor-parallel ranks" in reason
    for policy in ("snapkv", "text"):
        set_path(config, "additional_config", {"h2o": {**evicts, "kv_policy": policy}})
        with pytest.raises(ConfigError, match=r"--kv-policy: .* on 2 of 4 tensor-parallel ranks"):
            check_supported(config)


def test_stages_with_layers_of_several_kinds_are_refused(model_dir: str) -> None:
    Rig(model_dir, 20, stages=2)
    with pytest.raises(ConfigError, match="--pipeline-parallel-size above 1 for a model with wind"):
        Rig(model_dir, 40, stages=2, beside=(WINDOW,))


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        ((PLAIN,), "FullAttentionManager"),
        ((WINDOW, SPEC), "a SlidingWindowManager, which would publish KV"),
    ],
)
def test_a_scheduler_with_a_block_manager_that_is_not_ours_does_not_start(
    rig: Rig, specs: tuple[KVCacheSpec, ...], reason: str
) -> None:
    groups = [KVCacheGroupSpec([str(i)], one) for i, one in enumerate(specs)]
    config = KVCacheConfig(num_blocks=20, kv_cache_tensors=[], kv_cache_groups=groups)
    structured = rig.scheduler.structured_output_manager
    with pytest.raises(ConfigError, match=reason):
        H2OScheduler(rig.config, config, structured, block_size=16)


@pytest.mark.parametrize("installed", [(0, 31, 2), (0, 34, 0), (1, 0, 0)], ids=str)
def test_another_vllm_is_refused(
    installed: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.version.__version_tuple__", installed)
    with pytest.raises(ConfigError, match=r"supports vLLM >= 0\.32"):
        check_vllm_version("cpu")
    with pytest.raises(ConfigError, match=r"supports vLLM >= 0\.32"):
        engine_args()


def test_a_missing_calibration_is_noticed_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--kv-calibration .*none\.h2o: no such file"):
        engine_args(kv_calibration=str(tmp_path / "none.h2o"))


def test_cuda_accepts_one_version_more_than_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.version.__version_tuple__", (0, 33, 0))
    check_vllm_version("cuda")
    with pytest.raises(ConfigError, match=r"< 0\.33 on cpu"):
        check_vllm_version("cpu")


def test_sliding_windows_are_left_alone() -> None:
    assert type(evictable_spec(PLAIN)) is H2OAttentionSpec
    assert evictable_spec(PLAIN).page_size_bytes == PLAIN.page_size_bytes
    window = FullAttentionSpec(block_size=16, sliding_window=64, **HEADS)
    assert evictable_spec(window) is window


def test_a_model_of_which_nothing_can_be_evicted_is_refused_with_the_reason(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_evictable([WINDOW, SPEC])
    for kind, reason in (
        (WINDOW, "sliding windows of 40 tokens, which forget by themselves"),
        (STATES, "states, which forget by themselves"),
    ):
        with pytest.raises(ConfigError, match=reason):
            check_evictable([kind, kind])
    monkeypatch.setattr(type(rig.config.model_config), "is_attention_free", True)
    with pytest.raises(ConfigError, match="models without attention"):
        check_supported(rig.config)


@pytest.mark.parametrize(("window", "acts"), [(4095, True), (4096, False), (None, False)])
def test_windows_that_no_sequence_leaves_are_full_attention(
    rig: Rig, window: int | None, acts: bool
) -> None:
    model, cache = copy.copy(rig.config.model_config), copy.copy(rig.config.cache_config)
    text = SimpleNamespace(sliding_window=window)
    model.hf_text_config = cache.sliding_window = text
    config: Any = SimpleNamespace(model_config=model, cache_config=cache)
    leave_out_idle_windows(config)
    assert text.sliding_window == (window if acts else None)
    assert (cache.sliding_window is None) == (window == 4096)


@pytest.mark.parametrize("kind", [FullAttentionSpec, H2OAttentionSpec])
@pytest.mark.parametrize("other", ["sliding_window", "attention_chunk_size"])
def test_sliding_windows_in_the_blocks_of_full_attention_are_refused(
    kind: type[FullAttentionSpec], other: str
) -> None:
    """What --disable-hybrid-kv-cache-manager makes of both: one spec, of the first layer's class."""
    group = SimpleNamespace(kv_cache_spec=kind(block_size=16, **HEADS | {other: 64}))
    with pytest.raises(ConfigError, match="--disable-hybrid-kv-cache-manager"):
        evictable_group([(object.__new__(H2OMetadataBuilder), group)], H2OMetadataBuilder)


def test_our_scheduler_is_known_by_its_name_and_so_is_what_builds_on_it() -> None:
    class Mine(H2OScheduler):
        """An operator's."""

    path = f"{H2OScheduler.__module__}.{H2OScheduler.__qualname__}"
    assert path == SCHEDULER_CLS
    assert is_our_scheduler(H2OScheduler) and is_our_scheduler(Mine)
    assert not any(is_our_scheduler(base) for base in H2OScheduler.__bases__)


@pytest.mark.parametrize(
    ("device", "ranks", "reason"),
    [
        *((device, *case) for device in VERSIONS for case in ((1, ""), (2, "tensor parallelism"))),
        ("cuda", 1, "with drafts on GPUs"),
    ],
)
def test_law09_an_engine_that_cannot_share_says_so(device: str, ranks: int, reason: str) -> None:
    """To its scheduler and its server, and at start-up if sharing is its default."""
    drafting = reason.startswith("with drafts")

    def engine(**options: Any) -> Any:
        return SimpleNamespace(
            additional_config={"h2o": options},
            device_config=SimpleNamespace(device_type=device),
            parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
            speculative_config=object() if drafting else None,
            model_config=SimpleNamespace(
                model_arch_config=[], hf_text_config=None, get_total_num_kv_heads=lambda: 2
            ),
        )

    config = config_of(engine())
    assert reason in config.equal_heads_reason
    assert bool(config.equal_heads_reason) is bool(reason)
    for cannot in (config.no_settling_reason, config.no_scores_reason):
        assert cannot == (config.equal_heads_reason if drafting else "")
    if drafting:
        assert config.applied["kv_policy"] == "key"
        for options in ({"kv_policy": "h2o", "kv_budget": 0.2}, {"kv_settle_tokens": 512}):
            with pytest.raises(ConfigError, match=f"--kv-.*{reason}"):
                config_of(engine(**options))
    assert config.shared_heads_slow is (device == "cuda")
    if reason:
        with pytest.raises(ConfigError, match=f"--kv-heads: .*{reason}"):
            config_of(engine(kv_heads="shared"))
    else:
        assert config_of(engine(kv_heads="shared")).kv_heads == "shared"
