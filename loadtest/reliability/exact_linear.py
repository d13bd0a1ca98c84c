# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose result does not depend on how many rows share a batch: for the hunt alone."""

from typing import Any


def exact_linear_layers() -> None:
    """Compute every linear layer in float64; the models loaded from now on, in this process."""
    import torch
    from vllm.model_executor.layers import utils

    def linear(x: Any, weight: Any, bias: Any = None) -> Any:
        wide = torch.nn.functional.linear(
            x.double(), weight, None if bias is None else bias.double()
        )
        return wide.to(x.dtype)

    def dispatch(layer: Any, *_: Any, **__: Any) -> None:
        # Widened once: the conversion would cost more than the product.
        wide = layer.weight.detach().double()
        layer.cpu_linear = lambda x, _, bias: linear(x, wide, bias)

    utils.dispatch_cpu_unquantized_gemm = dispatch
