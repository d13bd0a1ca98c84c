# SPDX-License-Identifier: Apache-2.0
"""The independent references of law 4, written from the papers. They import nothing of h2o_vllm."""
