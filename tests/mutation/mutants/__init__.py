# SPDX-License-Identifier: Apache-2.0
"""Bugs to plant, each one that a user or a law would notice: at least one per law and per room."""

from tests.mutation.mutants import blocks, engine, evictions, kernels, laws, server, settled

__all__ = ["MUTANTS"]

MUTANTS = (
    *laws.MUTANTS,
    *evictions.MUTANTS,
    *blocks.MUTANTS,
    *settled.MUTANTS,
    *kernels.MUTANTS,
    *engine.MUTANTS,
    *server.MUTANTS,
)
