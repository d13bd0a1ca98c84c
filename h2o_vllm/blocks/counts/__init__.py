# SPDX-License-Identifier: Apache-2.0
"""One request's blocks, from counts alone: when they are given back, how many, which. No vLLM, no device.

================== ==============================================================================
``budget``         how many tokens a request keeps
``schedule``       when blocks are freed and how many, by the prompt's bound and the budget
``split``          which blocks an eviction keeps and frees
``request_state``  base class of a request's state, and its report
``eviction_state`` which of its blocks live, when each is freed, and which the prefix cache may have
``settling``       when segments settle, how many blocks stay, their lineage
``settling_state`` which segments of a request have settled
``squeeze``        which elastic requests are squeezed
``drafts``         draft tokens of a request, and whether more of them pay
``report``         the ``kv_cache`` object of a response
``trace``          what each layer and KV head has lost
================== ==============================================================================
"""
