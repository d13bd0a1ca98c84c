# SPDX-License-Identifier: Apache-2.0
"""vLLM adaptors: scheduler (engine core), worker and attention backend (worker processes).

===================== ===========================================================================
``scheduler``         vLLM's scheduler with budgets; ships evictions and reports
``siblings``          the reports of a request's choices (``n > 1``) travel together
``orphan``            the engine core ends when its server is gone
``start_record``      where a process that cannot start leaves its reason
``stacks``            where a process stands, for a server that waits for it
``quiet``             which of vLLM's lines about its start are not shown
``preload``           what a fork server imports for engines
``support``           what we refuse at start-up, and why; ``version`` which vLLM
``worker``            what a worker does beside vLLM's: compact, punch holes, bind every part
``binding``           law 9: the parts that vLLM bound are ours
``state``             a worker's scores, and what it knows of the requests that evict
``rows``              the rows of a batch: who evicts, whose queries are scored, which tokens are new
``attention``         who serves a batch: vLLM's attention, or it and ours
``eviction_scores``   asks a policy for new scores just before an eviction ranks by them
``timing``            how long evictions took, and how the engine core learns of it
``compat``            every private name of vLLM; ``cuda/compat`` those of its GPU runner
``cpu/`` · ``cuda/``   what differs: kernels, metadata builder, model runner, CUDA graphs
===================== ===========================================================================
"""
