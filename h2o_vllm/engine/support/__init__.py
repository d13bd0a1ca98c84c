# SPDX-License-Identifier: Apache-2.0
"""The configurations and requests that an engine supports, as rows of refusals. Any process.

================= ===============================================================================
``check``         all rows in order, the check at start, our configuration with its limits
``refusal``       the class of a row; questions that rows ask of a configuration
``everywhere``    rows for all devices
``devices``       rows for CPUs, rows for GPUs
``drafts``        speculative decoding and exact requests: what is served, rows
``architectures`` the architectures that are refused by name, and the kinds with faults on CPUs
================= ===============================================================================
"""
