# SPDX-License-Identifier: Apache-2.0
"""Code of the engine core: decides on evictions, from counts alone.

===================== ===========================================================================
``scheduler``         vLLM's scheduler with budgets; sends evictions and reports
``parallel_choices``  collects the reports of a request's choices (``n > 1``)
``rejections``        ends requests that can never be served
``parent_watch``      ends the engine core when its server is gone
===================== ===========================================================================
"""
