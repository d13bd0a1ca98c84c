# SPDX-License-Identifier: Apache-2.0
"""Presets: names for policies, their uses and their ranks. Every process; imports nothing."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """A name that ``kv_policy`` accepts in place of ranks.

    Attributes:
        use: the purpose, as the help text shows it.
        ranks: the ranks that it stands for, joined by ``+``.
        calibrated: the ranks in an engine with a calibration.
        bounded: the ranks with a calibration, if prompts are bounded while they are computed or the engine
            collects no attention.
        unscored: the ranks without a calibration, if the engine collects no attention.
    """

    name: str
    use: str
    ranks: str
    calibrated: str = ""
    bounded: str = ""
    unscored: str = ""

    def ranks_for(self, *, calibrated: bool, bounded: bool, scored: bool) -> str:
        """The ranks in this engine; see :meth:`.Policy.parse`."""
        if not calibrated:
            return (not scored and self.unscored) or self.ranks
        return ((bounded or not scored) and self.bounded) or self.calibrated or self.ranks


PRESETS = (
    Preset(
        "auto",
        "any task",
        "value+end+key",
        calibrated="predicted+value+end+key",
        # Attention adds up: later queries of a long prompt would outweigh the prediction for its beginning.
        bounded="predicted+key",
        unscored="key",
    ),
    Preset("text", "to continue a text", "value"),
    Preset(
        "question",
        "to answer a question at the end of the prompt",
        "end+key",
        calibrated="predicted+end+key",
    ),
    Preset("later", "to answer questions that come later", "key", calibrated="predicted+key"),
    Preset("h2o", "H2O as published", "attention"),
    Preset("snapkv", "SnapKV as published", "end"),
    Preset("random", "long answers, at the least cost", "random"),
    Preset("window", "only the newest tokens", "window"),
)
"""A rank that cannot be joined with others is a preset of the same name."""
