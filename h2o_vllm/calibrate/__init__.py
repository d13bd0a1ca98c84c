# SPDX-License-Identifier: Apache-2.0
"""``python -m h2o_vllm.calibrate``: learn a model for the rank ``predicted``. Minutes, once, on a CPU.

    texts         what is read, unless the user names other texts
    run           an engine reads each twice, and learns from the attention of the second reading

What is learned, and how it is kept: :mod:`h2o_vllm.calibration`.
"""
