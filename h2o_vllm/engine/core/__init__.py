# SPDX-License-Identifier: Apache-2.0
"""What runs in the engine core: decides on evictions, from counts alone; refuses what cannot be served.

===================== ===========================================================================
``scheduler``         vLLM's scheduler with budgets; ships evictions and reports
``parallel_choices``  the reports of a request's choices (``n > 1``) travel together
``connector``         a KV connector sees only requests that keep all KV
``parent_watch``      the engine core ends when its server is gone
``support``           what we refuse at start-up, and why; ``version`` which vLLM. Workers ask, too
===================== ===========================================================================
"""
