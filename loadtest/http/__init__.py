# SPDX-License-Identifier: Apache-2.0
"""Load over HTTP: Locust, its client, comparison and report."""
