# SPDX-License-Identifier: Apache-2.0
"""Models whose layers read the KV of an earlier layer (Gemma 3n, Gemma 4 E). In all processes of ours.

The layer that holds the KV is ranked and compacted, once. The others attend to what is left of it. A key's
score is the attention that it gets from all of them, as it is from all query heads: what any of them gets of
a key is lost with the key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from h2o_vllm.engine.core.drafting import asks_for_exact, drafter_has_kv

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["sharing_refusals"]


def sharing_refusals(config: VllmConfig) -> list[tuple[bool, str]]:
    """What is refused of such models: whether it is asked for, and the reason.

    All of it is refused beside windows as well, which each Gemma 3n and Gemma 4 E has.
    """
    shares = getattr(config.model_config.hf_text_config, "num_kv_shared_layers", 0) > 0
    return [
        (shares and asked, f"{what} where layers share KV: not tested with evictions")
        for what, asked in (
            ("drafters with KV of their own", drafter_has_kv(config)),
            ("--kv-exact and --kv-exact-drafts", asks_for_exact(config)),
            (
                "--pipeline-parallel-size above 1",
                config.parallel_config.pipeline_parallel_size > 1,
            ),
        )
    ]
