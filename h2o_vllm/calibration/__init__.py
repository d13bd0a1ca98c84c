# SPDX-License-Identifier: Apache-2.0
"""What is learned of one model, once, so that policies need neither attention nor a second reading.

    features      what a token's key and value say of it, wherever it stands
    regression    least squares, from sums over tokens
    file          what was learned, on disk: for one model, refused for another

Plain torch, no vLLM. ``python -m h2o_vllm.calibrate`` learns; the rank ``predicted`` uses it. Source: Jegou
et al., "KVzap", arXiv 2601.07891, which predicts the same from a layer's input.
"""
