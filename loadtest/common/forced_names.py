# SPDX-License-Identifier: Apache-2.0
"""What :mod:`.forced` is called, for HTTP clients: imports nothing, least of all vLLM."""

FORCED_FIELD = "forced_token_ids"
"""Key of ``SamplingParams.extra_args``, or of ``vllm_xargs`` in a request: the first tokens of the output."""

PROCESSOR = "loadtest.common.forced:ForcedTokens"
"""For the engine argument ``logits_processors``."""
