# SPDX-License-Identifier: Apache-2.0
"""Names for policies: what each is for, and which ranks it stands for. Every process; imports nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """A name that ``kv_policy`` takes in the place of ranks.

    Attributes:
        use: what it is for. ranks: what it stands for.
        calibrated: what it stands for in an engine with a calibration.
        bounded: the same, where prompts are bounded while they are computed or their attention is not known.
        unscored: what it stands for without a calibration where attention is not known.
    """

    name: str
    use: str
    ranks: str
    calibrated: str = ""
    bounded: str = ""
    unscored: str = ""

    def ranks_for(self, *, calibrated: bool, bounded: bool, scored: bool) -> str:
        """What it stands for here; see :meth:`.Policy.parse`."""
        if not calibrated:
            return (not scored and self.unscored) or self.ranks
        return ((bounded or not scored) and self.bounded) or self.calibrated or self.ranks


PRESETS = (
    Preset(
        "auto",
        "anything; the default",
        "value+end+key",
        calibrated="predicted+value+end+key",
        # Attention adds up: the queries of a long prompt's rest outweigh what was predicted of its beginning.
        bounded="predicted+key",
        unscored="key",
    ),
    Preset("text", "a text that goes on", "value"),
    Preset("question", "a question at the prompt's end", "end+key", calibrated="predicted+end+key"),
    Preset("later", "questions that come later", "key", calibrated="predicted+key"),
    Preset("h2o", "H2O as published", "attention"),
    Preset("snapkv", "SnapKV as published", "end"),
    Preset("random", "long answers, at least cost", "random"),
    Preset("window", "the least work", "window"),
)
"""Ranks that join no other are presets of their own name."""
