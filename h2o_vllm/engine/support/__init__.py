# SPDX-License-Identifier: Apache-2.0
"""The configurations and requests that an engine supports, as rows of refusals. Any process.

================= ===============================================================================
``check``         all rows in order, the check at start, our configuration with its limits
``refusal``       the class of a row
``everywhere``    rows for all devices
``devices``       rows for CPUs, rows for GPUs
``drafts``        rows for speculative decoding, on CPUs
``exact``         rows for exact requests, on CPUs; their drafter, and what it gets of a request
``page``          writes the rows into SUPPORT.md
``architectures`` the architectures that are refused by name, and the kinds with faults on CPUs
``drafting``      the served methods of speculative decoding, and the slots of a drafter
``heads``         number of KV heads in the evictable layers
``version``       the supported versions of vLLM
================= ===============================================================================
"""
