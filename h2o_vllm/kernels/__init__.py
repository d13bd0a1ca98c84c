# SPDX-License-Identifier: Apache-2.0
"""HOW tokens are attended, scored, moved. Workers only; never imports vLLM.

* :mod:`~h2o_vllm.kernels.reference`: the truth, in plain torch and float64, for any memory layout.
* :mod:`h2o_vllm.kernels.cpu`: C++, and plain torch where there is no C++.
* :mod:`h2o_vllm.kernels.triton`: NVIDIA GPUs.
"""
