# SPDX-License-Identifier: Apache-2.0
"""Laws 1 to 3 on a GPU for prompts with images whose tokens have several positions each (M-RoPE)."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import started
from tests.engine.outputs import report_of, tokens_of
from tests.families.image_models import picture, pictured, processors, save_image_model
from tests.gpu.engine.conftest import ENGINE, FLOOR, MODES

pytestmark = [pytest.mark.gpu, pytest.mark.e2e, pytest.mark.slow]

KINDS = ("qwen2_5_vl", "qwen3_vl")
IMAGES = pictured(300, (40, picture(1)), (60, picture(3, 252, 112)), (280, picture(2, 84, 168)))
"""An image that is evicted, and one among the recent tokens."""
SIZE = 64
"""The kernels' smallest head size."""


@pytest.mark.parametrize("mode", ["decode-graphs", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_images_are_evicted_as_words_are(kind: str, mode: str, tmp_path: Path) -> None:
    save_image_model(kind, str(tmp_path), head_size=SIZE)
    options: dict[str, Any] = {
        **ENGINE, **MODES[mode], "limit_mm_per_prompt": {"image": 3},
        # The default needs the package blake3, which a bare host lacks.
        "mm_hasher_algorithm": "sha256", "skip_mm_profiling": True, "jit_monitor_mode": "warn",
    }  # fmt: skip
    prompts, asked = [IMAGES.prompt] * 2, [{"kv_budget": 1.0}, {"kv_budget": 0.3}]
    with processors():
        with started(str(tmp_path), options, beside=True, stock=True) as engine:
            (stock,) = engine.generate(prompts[:1], max_tokens=60)
        with started(str(tmp_path), options, beside=True, kv_min_tokens=FLOOR) as engine:
            full, part = engine.generate(prompts, asked, max_tokens=60)
            assert engine.llm.reset_prefix_cache(), "a block has not come home"
    assert tokens_of(full) == tokens_of(stock)
    assert len(tokens_of(part)) == 60
    assert report_of(full)["blocks_freed"] == 0 < report_of(part)["blocks_freed"]
