# SPDX-License-Identifier: Apache-2.0
"""Asynchronous scheduling on CPU, where vLLM 0.32 switches it off: for the hunt, not for serving.

The model runner that vLLM's CPU worker inherits from can do it; what it lacks are CUDA's streams and events,
which have nothing to do here, where each step is computed when it is launched. The scheduler then plans a
step before it has seen the tokens of the one before, as on a GPU: the counts it decides by may be stale.
"""

from typing import Any


class _Nothing:
    """In the place of an event or a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def schedule_asynchronously() -> None:
    """Switch it on for the engines started from now on in this process."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.outputs import AsyncModelRunnerOutput
    from vllm.v1.worker import gpu_model_runner

    class Output(AsyncModelRunnerOutput):
        """As vLLM's ``AsyncGPUModelRunnerOutput``, for one token per request and step."""

        def __init__(
            self,
            model_runner_output: Any,
            sampled_token_ids: torch.Tensor,
            logprobs_tensors: Any,
            invalid_req_indices: list[int],
            **_: Any,
        ) -> None:
            self._output = model_runner_output
            self._invalid = invalid_req_indices
            self._logprobs = logprobs_tensors
            self.sampled_token_ids_cpu = sampled_token_ids.clone()
            self.async_copy_ready_event = _Nothing()

        def get_output(self) -> Any:
            """Tokens as lists, without those of requests that have gone."""
            tokens = self.sampled_token_ids_cpu.tolist()
            for index in self._invalid:
                tokens[index].clear()
            self._output.sampled_token_ids = tokens
            if self._logprobs is not None:
                self._output.logprobs = self._logprobs.tolists()
            return self._output

    platform = type(current_platform)
    check = platform.check_and_update_config

    def check_and_switch_on(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = staticmethod(check_and_switch_on)
    torch.cuda.Event = _Nothing  # type: ignore[assignment,misc]
    gpu_model_runner.AsyncGPUModelRunnerOutput = Output
