# SPDX-License-Identifier: Apache-2.0
"""Calibrations: predict, from a token's key and value, how much attention the token will get.

    features      features of a key and a value that do not depend on the position
    regression    least squares, from sums over tokens
    learner       collects examples while a model repeats texts
    file          a calibration on disk, for one model

Plain torch, no vLLM. ``python -m h2o_vllm.calibrate`` learns; the rank ``predicted`` uses it. Source: Jegou
et al., "KVzap", arXiv 2601.07891, which predicts the same from a layer's input.
"""
