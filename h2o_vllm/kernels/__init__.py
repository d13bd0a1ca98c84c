# SPDX-License-Identifier: Apache-2.0
"""HOW tokens are attended, scored, moved. Workers only; never imports vLLM.

* :mod:`~h2o_vllm.kernels.reference`, :mod:`~h2o_vllm.kernels.reference_paged`: the truth, in plain torch.
* :mod:`h2o_vllm.kernels.cpu`: C++, and what steps in without a compiler.
* :mod:`h2o_vllm.kernels.triton`: NVIDIA GPUs.
"""
