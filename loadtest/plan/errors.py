# SPDX-License-Identifier: Apache-2.0
"""What a plan can be refused for: every one of these messages names the option."""

from __future__ import annotations

from h2o_vllm.errors import H2OError
from loadtest.http.budgets import MixError
from loadtest.plan.calibration import CalibrationError
from loadtest.plan.lengths import TrafficError
from loadtest.plan.planned import PlanError
from loadtest.plan.replica import PoolError
from loadtest.plan.shapes import ShapeError

__all__ = ["PLAN_ERRORS"]

PLAN_ERRORS = (CalibrationError, H2OError, MixError, PlanError, PoolError, ShapeError, TrafficError)
