# SPDX-License-Identifier: Apache-2.0
"""The ladder without an engine keeps what the engine keeps."""

from __future__ import annotations

import pytest
import torch

from loadtest.quality.ladder.forcing import Forcing
from loadtest.quality.ladder.keep import Rung
from loadtest.quality.ladder.likelihood import force
from loadtest.quality.ladder.model import LadderModel
from loadtest.quality.ladder.reading import read_prompt
from tests.engine.conftest import BLOCK_SIZE, Engine
from tests.engine.test_policies import watch

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize(("policy", "recent"), [("h2o", 0.5), ("snapkv", 0.25)])
def test_kept_sets_are_the_engines(
    engine: Engine, model_dir: str, text_tokens: list[int], policy: str, recent: float
) -> None:
    assert engine.llm.reset_prefix_cache()
    prompt = text_tokens[300:830]
    asked = {"kv_budget": 0.2, "kv_policy": policy, "kv_recent": recent}
    ours = watch(engine, prompt, asked)
    model = LadderModel(model_dir, torch.float32)
    (read,) = read_prompt(model, [prompt])
    stage = Forcing(read, [Rung((policy,), recent=recent)], 0.2, BLOCK_SIZE)
    force(model, stage, 1, ours["tokens"])
    differing = total = 0
    for layer, keys in enumerate(ours["keys"]):
        computed = torch.cat([read.layers[layer].keys, stage.own[layer].keys[0]], 1)
        for head, alive in enumerate(stage.alive[layer][0]):
            distance = torch.cdist(
                keys[head], computed[head], compute_mode="donot_use_mm_for_euclid_dist"
            )
            nearest, position = distance.min(dim=1)
            assert nearest.max() < 4e-3
            mine = set(alive.nonzero().flatten().tolist())
            differing += len(set(position.tolist()) ^ mine)
            total += len(mine)
    # Rounding may swap a pair at the border of some head.
    assert differing <= total / 1000, (differing, total)
