# SPDX-License-Identifier: Apache-2.0
"""``python -m h2o_vllm.calibrate``: write a calibration for the rank ``predicted``. Takes minutes on a CPU.

    texts         the default texts
    run           an engine reads each text twice, and learns from the attention of the second reading

:mod:`h2o_vllm.calibration` has the regression and the file format.
"""
