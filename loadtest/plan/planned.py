# SPDX-License-Identifier: Apache-2.0
"""What a plan's options come to: who serves, what is asked, and for how long it is simulated."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from loadtest.http.budgets import Mix
from loadtest.plan.calibration import Calibration, read_calibration
from loadtest.plan.fleet import Load, Server
from loadtest.plan.gpus import GPU, GPUS
from loadtest.plan.memory import pool_blocks
from loadtest.plan.roofline import Efficiency, Roofline
from loadtest.plan.scheduling import EngineSettings
from loadtest.plan.search import Objective
from loadtest.plan.settings import PlanSettings
from loadtest.plan.shapes import ModelShape, load_shape
from loadtest.plan.traffic import Traffic, load_traffic
from loadtest.plan.work import Work

__all__ = ["Plan", "PlanError"]

STOCK = "none"
"""The mix that vLLM itself serves, as :mod:`loadtest.http.budgets` writes it."""

_LARGE = 70 << 30
"""GPUs with more memory get larger batches by default, but for A100 (``EngineArgs``, vLLM 0.32)."""

TOGETHER = 64
"""Requests that a rough estimate takes to run at a time."""

ANSWERS = 8
"""A simulation lasts at least as long as so many answers after each other: the first ones warm it up, and the
last ones do not end in it."""


class PlanError(ValueError):
    """Options that do not go together."""


class Plan:
    """What the options come to.

    Raises:
        CalibrationError, MixError, PlanError, TrafficError: an option cannot be used; the message names it.
    """

    def __init__(self, settings: PlanSettings) -> None:
        self.settings = settings
        self.gpu: GPU = GPUS[settings.gpu]
        self.calibration: Calibration | None = None
        if settings.calibration:
            self.calibration = read_calibration(Path(settings.calibration))
        self.traffic: Traffic = load_traffic(settings.traffic)
        self.mixes = {text: Mix(text) for text in settings.mixes.split()}
        self.objective = Objective(settings.first_token, settings.percent)
        if not self.mixes:
            raise PlanError(f"--mixes: got {settings.mixes!r}, wanted at least one, such as none")
        fewest = 1 if self.calibration else settings.tensor_parallel
        if not settings.rate and min(settings.gpus, default=0) < fewest:
            raise PlanError(
                f"--gpus: got {', '.join(map(str, settings.gpus))}, wanted at least the {fewest} of a replica"
            )

    @property
    def cv(self) -> float:
        """Of the gaps between arrivals."""
        return self.settings.cv or self.traffic.cv

    @property
    def dollars(self) -> float:
        """Per hour of a GPU."""
        return self.settings.price or self.gpu.dollars

    @cached_property
    def shape(self) -> ModelShape:
        """Of the model."""
        return load_shape(self.settings.model)

    @cached_property
    def roofline(self) -> Roofline:
        """Step times where nothing was measured."""
        settings = self.settings
        efficiency = Efficiency(
            compute=settings.compute_efficiency,
            memory=settings.memory_efficiency,
            step_s=settings.step_ms / 1000,
        )
        return Roofline(self.shape, self.gpu, settings.tensor_parallel, efficiency=efficiency)

    def server(self, mix: str) -> Server:
        """Who serves one of :attr:`mixes`."""
        ours = mix != STOCK
        if self.calibration is not None:
            engine = self.calibration.engine(
                ours, self.settings.pool_tokens, self.settings.max_model_len
            )
            time = self.calibration.step_time(ours)
            return Server(mix, self._ours(engine), time, self.mixes[mix])
        return Server(
            mix, self._ours(self._gpu_engine(ours)), self.roofline, self.mixes[mix],
            self.settings.tensor_parallel,
        )  # fmt: skip

    def load(self, server: Server, rate: float, replicas: int) -> Load:
        """That of a fleet."""
        settings = self.settings
        seconds = max(settings.seconds, ANSWERS * self._mean_seconds(server)[1])
        requests = max(settings.requests, round(rate / replicas * seconds))
        return Load(
            rate, replicas, requests, self.cv, settings.routing, settings.sample, settings.seed
        )

    def guess_rate(self, server: Server) -> float:
        """Requests per second of a replica, roughly: by the work of a mean request, so many at a time."""
        prompt, answer = self._mean_seconds(server)
        return 1 / (prompt + answer / TOGETHER)

    def _mean_seconds(self, server: Server) -> tuple[float, float]:
        """Of the prompt and of the answer of a mean request, which :data:`TOGETHER` write at a time."""
        texts = self.traffic.texts(1000, server.settings.max_model_len, self.settings.seed)
        prompt = round(fmean(text.prompt for text in texts))
        output = round(fmean(text.output for text in texts))
        read = Work(prompt_tokens=prompt, pairs=prompt**2 // 2, outputs=1)
        context = TOGETHER * (prompt + output // 2)
        write = Work(decodes=TOGETHER, context=context, outputs=TOGETHER)
        seconds = server.step_time.seconds
        return seconds(read), output * seconds(write)

    def _ours(self, engine: EngineSettings) -> EngineSettings:
        options: dict[str, Any] = {"kv_min_tokens": self.settings.kv_min_tokens}
        return dataclasses.replace(engine, h2o=options) if engine.ours else engine

    def _gpu_engine(self, ours: bool) -> EngineSettings:
        settings = self.settings
        large = self.gpu.memory >= _LARGE and self.gpu.name != "a100"
        batched = settings.max_num_batched_tokens or (8192 if large else 2048)
        if settings.max_num_seqs > batched:
            raise PlanError(
                f"--max-num-seqs: got {settings.max_num_seqs}, wanted at most the {batched} of "
                "--max-num-batched-tokens"
            )
        blocks = pool_blocks(
            self.shape, self.gpu, settings.block_size, batched,
            tensor_parallel=settings.tensor_parallel, utilization=settings.gpu_memory_utilization,
            scored=ours,
        )  # fmt: skip
        if settings.pool_tokens:
            blocks = settings.pool_tokens // settings.block_size + 1
        return EngineSettings(
            ours=ours,
            num_blocks=blocks,
            block_size=settings.block_size,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs or min(batched, 1024 if large else 256),
            max_num_batched_tokens=batched,
            # vLLM's default on GPUs.
            pipelined=True,
        )
