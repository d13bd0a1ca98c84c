# SPDX-License-Identifier: Apache-2.0
"""What is measured, one file each."""

from loadtest.quality.measures.base import Measure, Metric, Sample
from loadtest.quality.measures.code import Code
from loadtest.quality.measures.nll import NLL
from loadtest.quality.measures.own import Own
from loadtest.quality.measures.reasoning import Reasoning
from loadtest.quality.measures.retrieval import Retrieval
from loadtest.quality.measures.ruler import Ruler
from loadtest.quality.measures.turns import Turns

__all__ = ["MEASURES", "Measure", "Metric", "Sample"]

MEASURES: dict[str, Measure] = {
    measure.name: measure
    for measure in (NLL(), Own(), Retrieval(), Ruler(), Reasoning(), Code(), Turns())
}
"""By name, in the order of tables."""
