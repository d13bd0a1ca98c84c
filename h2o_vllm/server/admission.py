# SPDX-License-Identifier: Apache-2.0
"""Wraps ``generate`` of the process's engine client, where prompts have tokens. API-server process.

No class of vLLM's is changed.

Before the call: ``kv_protect`` words become numbers, and a request that the engine cannot serve becomes a
400, before a streamed answer begins. After it: the scheduler's reports are taken off the outputs
(``kv_transfer_params``, which vLLM writes into no streamed chunk) and kept for the HTTP response.
"""

import functools
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.renderers.inputs.preprocess import extract_prompt_components

from h2o_vllm.blocks.counts.schedule import OtherGroup
from h2o_vllm.blocks.counts.settling import schedule_of
from h2o_vllm.blocks.counts.trace import check_traceable
from h2o_vllm.config.keys import CONFIG_KEY, REPORT_KEY
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.request_fields import ROLE_WORDS
from h2o_vllm.config.resolve import for_prompt, resolve
from h2o_vllm.engine.support.drafts import drafts_of_step
from h2o_vllm.errors import BudgetError, ConfigError
from h2o_vllm.server.protocol import Admission
from h2o_vllm.server.report import Reports
from h2o_vllm.server.system_prefix import NO_ROLES, SystemPrefix

PROTECT, TRACE = "kv_protect", "kv_trace"


@dataclass
class HTTPRequest:
    """One HTTP request, which may be several calls of the engine.

    Attributes:
        reports: the engine's reports.
        admitted: what its body asks for; ``None`` until it is read.
        system: the protected beginning of each chat, if ``kv_protect`` is a role word.
    """

    reports: Reports = field(default_factory=Reports)
    admitted: Admission | None = None
    system: list[SystemPrefix] = field(default_factory=list)
    _calls: int = 0

    def next_system(self) -> SystemPrefix:
        """The system part of the next call; further calls reuse the last one."""
        call, self._calls = self._calls, self._calls + 1
        return self.system[min(call, len(self.system) - 1)] if self.system else NO_ROLES


_current: ContextVar[HTTPRequest | None] = ContextVar("h2o_vllm_request", default=None)


@contextmanager
def http_request() -> Iterator[HTTPRequest]:
    """Engine calls within this block, and in tasks started in it, belong to the yielded request."""
    request = HTTPRequest()
    token = _current.set(request)
    try:
        yield request
    finally:
        _current.reset(token)


async def other_groups(engine_client: Any, engine: VllmConfig) -> tuple[OtherGroup, ...]:
    """Blocks that layers without eviction take for one request, from the workers of all engines.

    Raises:
        ConfigError: an engine has other options than this server.
    """
    options = engine.additional_config.get(CONFIG_KEY, {})
    try:
        first_rank, *_ = await engine_client.collective_rpc("other_groups", args=(options,))
    except Exception as error:  # noqa: BLE001 - the client raises no other class
        # vLLM carries a worker's error as text.
        raise ConfigError(str(error)) from None
    return tuple(OtherGroup(*group) for group in first_rank)


def attention_block_size(engine: VllmConfig) -> int:
    """Tokens per block of full attention. vLLM's ``block_size`` is the smallest of all groups."""
    cache = engine.cache_config
    return getattr(cache, "effective_attention_block_size", None) or cache.block_size


def install(
    engine_client: Any,
    engine: VllmConfig,
    config: H2OConfig,
    count_refusal: Callable[[str], None],
    others: Sequence[OtherGroup] = (),
) -> None:
    """Wrap ``engine_client.generate``, on this object only.

    Args:
        others: from :func:`other_groups`.

    Raises:
        TypeError: the object has no ``generate``.
    """
    generate = getattr(engine_client, "generate", None)
    if not callable(generate):
        raise TypeError(f"{type(engine_client).__name__} has no generate() to take reports from")
    checks = AdmissionChecks(engine, config, others)

    @functools.wraps(generate)
    def admitting(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        # Read here, not while iterating: vLLM may iterate in another task.
        request = _current.get()
        try:
            checks.admit(prompt, sampling_params, request)
        except BudgetError as error:
            count_refusal("value")
            raise VLLMValidationError(str(error), parameter=error.parameter) from None
        reports = request.reports if request is not None else Reports()
        begin = functools.partial(generate, prompt, sampling_params, *args, **kwargs)
        answer = _answer(begin, reports, reports.open_call())
        return _session(answer) if isinstance(prompt, AsyncGenerator) else answer

    engine_client.generate = admitting


class AdmissionChecks:
    """Checks of each call before it goes to the engine."""

    def __init__(self, engine: VllmConfig, config: H2OConfig, others: Sequence[OtherGroup]) -> None:
        self._config, self._other_groups = config, others
        self._model, cache = engine.model_config, engine.cache_config
        self._drafts = drafts_of_step(engine)
        bounds = () if config.kv_exact else ("kv_settle_tokens", "kv_prefill_tokens")
        self._whole_prompts = {name: 0 for name in bounds if getattr(config, name)}
        self._block_size = attention_block_size(engine)
        # vLLM sums them over the data-parallel engines, of which each keeps a block for itself.
        blocks = cache.num_gpu_blocks or 0
        self._pool = blocks // engine.parallel_config.data_parallel_size - 1
        # A pool that holds a request of the model's length holds any prompt.
        longest = self._model.max_model_len
        room = self._pool - sum(group.needed(longest) for group in others)
        self._is_small = room * self._block_size < longest - 1

    def admit(self, prompt: Any, params: Any, request: HTTPRequest | None) -> None:
        """Check a call, and replace words by numbers.

        Raises:
            BudgetError: the engine cannot serve it.
        """
        if isinstance(prompt, AsyncGenerator):
            # A session, whose prompt comes in parts: it evicts nothing, and the scheduler checks its size.
            return
        tokens, length = self._measured(prompt)
        admitted = request.admitted if request is not None else None
        if admitted is not None and not admitted.reported:
            # No prompt bounds where a route takes no fields, nor in a beam search, whose steps are prompts.
            params.extra_args = {**(params.extra_args or {}), **self._whole_prompts}
        if request is None or admitted is None or admitted.budget is None or not admitted.reported:
            asked = params.extra_args if isinstance(params.extra_args, Mapping) else {}
            budget, named = resolve(self._config, asked), asked.get(PROTECT) is not None
        else:
            budget, named = admitted.budget, admitted.names_protect
            if budget.protect in ROLE_WORDS:
                number = self._protected(request, admitted, tokens)
                params.extra_args = {**(params.extra_args or {}), PROTECT: number}
                budget = replace(budget, protect=number)
        budget = for_prompt(self._config, budget, length, named=named)
        if budget.trace:
            self._check_trace(params, tokens)
        if self._is_small or budget.settle:
            schedule = schedule_of(budget, self._block_size, length)
            longest = self._model.max_model_len
            more = (self._other_groups, *self._drafts)
            schedule.check_fits(self._pool, params.max_tokens, longest, *more)

    def _protected(
        self, request: HTTPRequest, admitted: Admission, tokens: list[int] | None
    ) -> int:
        """Number of first tokens that a role word of ``kv_protect`` protects.

        Raises:
            BudgetError: the request itself names the word, and the part is missing or too long.
        """
        assert admitted.budget is not None
        word, prefix = admitted.budget.protect, request.next_system()
        limit, length = self._config.protect_limit, len(prefix.tokens)
        if admitted.names_protect and admitted.budget.evicts:
            if prefix.failure is not None:
                raise prefix.error(str(word))
            if limit is not None and length > limit:
                accepted = f"at most {limit} tokens here (what it protects has {length})"
                raise BudgetError(PROTECT, word, accepted)
        number = 0 if tokens is None else prefix.length_in(tokens)
        return number if limit is None else min(number, limit)

    def _measured(self, prompt: Any) -> tuple[list[int] | None, int]:
        """Token ids of a prompt (``None`` for embeddings) and its length."""
        found = extract_prompt_components(self._model, prompt)
        known = found.token_ids if found.token_ids is not None else found.embeds
        if known is None:
            raise BudgetError("prompt", "a text", "tokens or embeddings when it gets to the engine")
        return found.token_ids, len(known)

    def _check_trace(self, params: Any, tokens: list[int] | None) -> None:
        if params.n != 1:
            accepted = f"left out of requests with n above 1 (here {params.n})"
            raise BudgetError(TRACE, True, accepted)
        if tokens is None:
            raise BudgetError(TRACE, True, "left out of requests whose prompt is no tokens")
        longest = min(len(tokens) + params.max_tokens, self._model.max_model_len)
        check_traceable(longest, stops=bool(params.stop))


async def _answer(
    begin: Callable[[], AsyncGenerator[Any, None]], reports: Reports, call: int
) -> AsyncGenerator[Any, None]:
    """The outputs of one call of ``generate``, without our reports."""
    async with aclosing(begin()) as outputs:
        async for output in outputs:
            params = output.kv_transfer_params
            if params and (by_index := params.get(REPORT_KEY)) is not None:
                reports.record(call, by_index)
                output.kv_transfer_params = None
            yield output


async def _session(outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """The outputs of a session. After an error vLLM itself would wait for the next part of the prompt.

    Raises:
        VLLMValidationError: a part outgrew the pool or the model.
    """
    async with aclosing(outputs):
        async for output in outputs:
            for choice in output.outputs:
                if choice.finish_reason == "error":
                    raise VLLMValidationError(str(choice.stop_reason), parameter="prompt")
            yield output
