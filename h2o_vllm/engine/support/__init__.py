# SPDX-License-Identifier: Apache-2.0
"""What an engine supports: rows of refusals, and what follows for requests. Any process.

================= ===============================================================================
``check``         all rows in their order, the check of a start, our configuration with its limits
``refusal``       what a row is
``everywhere``    rows of all devices
``devices``       rows of CPUs, rows of GPUs
``drafts``        rows of speculative decoding and of exact requests, on CPUs
``page``          writes the rows into SUPPORT.md
``architectures`` the architectures that are refused by name, and the kinds with faults on CPUs
``drafting``      which methods of speculative decoding are served, and what a drafter takes
``heads``         KV heads of the evictable layers
``version``       the supported versions of vLLM
================= ===============================================================================
"""
