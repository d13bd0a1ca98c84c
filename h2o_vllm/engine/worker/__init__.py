# SPDX-License-Identifier: Apache-2.0
"""What workers on both devices have in common; the rest is in ``engine/cpu`` and ``engine/cuda``.

===================== ===========================================================================
``worker``            what a worker does beside vLLM's: compact, punch holes, bind every part
``binding``           law 9: the parts that vLLM bound are ours
``state``             a worker's scores, and what it knows of the requests that evict
``rows``              the rows of a batch: which evict, which queries are scored, which tokens are new
``attention``         which attention serves a batch: vLLM's, or it and ours
``rescoring``         gives tokens their scores just before an eviction ranks them first
===================== ===========================================================================
"""
