# SPDX-License-Identifier: Apache-2.0
"""What each device is measured with: its engines' variants, its settings and its table of workloads."""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from h2o_vllm.config.keys import CONFIG_KEY
from h2o_vllm.plugin import CPU_EXECUTOR
from loadtest.common.texts import documentation
from loadtest.engine.workloads import Chat, Setting, Workload

STOCK_CPU_BLOCK_SIZE = 128
"""vLLM's default on CPU."""

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
"""As vLLM's documents have it; four tokens are drafted at most."""
_DRAFTING = {name: {"speculative_config": NGRAM} for name in ("stock-ngram", "h2o-ngram")}

_FIFTH = {"kv_budget": 0.2}
_BARE = {**_FIFTH, "kv_protect": 0}
"""For prompts that are short, also where lengths are scaled: else they are kept whole."""
_SETTLES = {**_FIFTH, "kv_settle_tokens": 512, "kv_policy": "later"}
_ENDLESS = {"kv_budget_tokens": 512, "kv_prefill_tokens": 512, "kv_protect": 0}


_SHAPES = (
    (16, 512, 32),
    (16, 512, 512),
    (16, 512, 1024),
    (24, 2048, 2048),
    (64, 2048, 2048),
    (4, 5000, 5000),
)
"""Requests, prompt and answer in the tables of arXiv 2306.14048."""
_PAPER = tuple(
    Workload(
        f"paper-{count}-{prompt}-{answer}",
        "a shape of the paper's tables",
        count,
        prompt,
        answer,
        (_BARE,),
    )
    for count, prompt, answer in _SHAPES
)


def _by_name(*workloads: Workload) -> dict[str, Workload]:
    return {workload.name: workload for workload in workloads}


class Suite(ABC):
    """What a device is measured with.

    Attributes:
        variants: what serves, baselines first.
        own: those of them that are h2o_vllm.
        asking: those of these whose requests ask for something.
        named: those that are measured where they are named, with which engine arguments.
        instead: what some of them ask for in place of a workload's fields.
        side_by_side: whether the engines of a setting live side by side, one working at a time; otherwise
            each is started anew and has the device to itself.
        usual: what is measured where no workload is named.
        together: whether those are also started at once, and not each when it is first wanted.
    """

    variants: ClassVar[tuple[str, ...]]
    own: ClassVar[tuple[str, ...]] = ("h2o",)
    asking: ClassVar[tuple[str, ...]] = ("h2o",)
    named: ClassVar[Mapping[str, dict[str, Any]]] = {}
    instead: ClassVar[Mapping[str, dict[str, Any]]] = {}
    side_by_side: ClassVar[bool]
    together: ClassVar[bool] = False
    settings: ClassVar[Mapping[str, Setting]]
    usual: ClassVar[Sequence[str]]
    workloads: ClassVar[Mapping[str, Workload]]

    @abstractmethod
    def engine_options(self, setting: Setting, variant: str) -> dict[str, Any]:
        """Engine arguments of a variant, our switch not included."""

    @abstractmethod
    def text(self, engine: Any, length: int) -> list[int]:
        """At least ``length`` token ids, of which prompts are stretches."""

    def chats(self, workload: Workload, engine: Any) -> list[Chat]:
        """The requests of a workload: stretches of one text."""
        lengths, own = workload.prompt_lengths(), workload.prompt_tokens - workload.shared
        # What each takes behind its shared beginning.
        most = (
            max(lengths)
            + (workload.turns - 1) * own
            + (workload.output_tokens if workload.forced else 0)
        )
        tokens = self.text(engine, workload.requests * most)
        last_start = len(tokens) - most
        chats = []
        for number, length in enumerate(lengths):
            at = number * last_start // workload.requests
            prompt = [*tokens[: workload.shared], *tokens[at + workload.shared : at + length]]
            prompt = prompt[: length // workload.repeats] * workload.repeats
            at += length
            later = [tokens[at + own * turn :][:own] for turn in range(workload.turns - 1)]
            forced = tokens[at : at + workload.output_tokens] if workload.forced else []
            chats.append(Chat(prompt, later, forced, workload.asked(number)))
        return chats

    def has_budgets(self, variant: str) -> bool:
        """Whether a variant's requests ask for theirs."""
        return variant in self.asking

    def asked(self, variant: str, fields: dict[str, Any] | None) -> dict[str, Any] | None:
        """What a variant's request asks for where its workload has ``fields``."""
        return self.instead.get(variant, fields) if self.has_budgets(variant) else None

    def to_measure(self, names: Sequence[str], variant: str) -> list[str]:
        """The workloads to run: without budgets, equal traffic is measured once, and what fits at all."""
        if self.has_budgets(variant):
            return list(names)
        names = [name for name in names if not self.settings[self.workloads[name].setting].config]
        found = {self.workloads[name].traffic: name for name in reversed(names)}
        return [name for name in names if name in found.values()]


class CPUSuite(Suite):
    """The embedded model on real English."""

    variants = (
        "stock",
        "stock-same-flags",
        "stock-ngram",
        "full-kernel",
        "h2o",
        "h2o-ngram",
        "exact",
    )
    """vLLM with its defaults, with exactly our flags, with drafts beside these; full KV on our kernel; ours
    with budgets, with drafts beside them, and with exact requests, verified on our kernel as well."""
    own = ("full-kernel", "h2o", "h2o-ngram", "exact")
    asking = ("h2o", "h2o-ngram", "exact")
    named: ClassVar = _DRAFTING | {
        "exact": {
            "additional_config": {CONFIG_KEY: {"kv_full_kernel": "h2o", "kv_exact_drafts": 4}}
        },
    }
    instead: ClassVar = {"exact": {"kv_exact": True}}
    side_by_side = True
    usual = ("tight", "mixed", "ample", "idle", "long-0.2")
    settings: ClassVar = {
        "tight": Setting(1700, pool_tokens=6400),
        "ample": Setting(7000),
        "long-tight": Setting(7000, pool_tokens=12_800),
        "forced": Setting(1700, pool_tokens=6400, forces=True),
        "chats": Setting(2400),
        "chats-tight": Setting(2400, pool_tokens=3200),
        "agents": Setting(8192),
        "agents-tight": Setting(8192, pool_tokens=12_800),
        # For a model of more than the embedded one's 8,192 positions.
        "agents-16k": Setting(17_408),
        "agents-16k-tight": Setting(17_408, pool_tokens=20_480),
        "endless": Setting(8192, 1024, config=_ENDLESS),
        "8k": Setting(8192),
    }
    workloads: ClassVar = _by_name(
        Workload("tight", "pool of 200 blocks, budget 0.2", 32, 1000, 512, (_FIFTH,), "tight"),
        Workload("mixed", "half full, half 0.2, tight pool", 32, 1000, 512, (None, _FIFTH), "tight"),
        Workload("ample", "no memory pressure, budget 0.2", 16, 1000, 512, (_FIFTH,)),
        Workload("idle", "no request has a budget", 16, 1000, 512, (None,)),
        Workload("long-0.2", "6,000-token prompts, budget 0.2", 4, 6000, 256, (_FIFTH,)),
        Workload("long-0.1", "6,000-token prompts, budget 0.1", 4, 6000, 256, ({"kv_budget": 0.1},)),
        Workload("bounded", "6,000-token prompts, budget 0.2, 1,024 in prefill, pool of two prompts",
                 16, 6000, 256, ({**_FIFTH, "kv_prefill_tokens": 1024},), "long-tight"),
        Workload("fixed-16", "texts that are forced, pool of four, budget 0.2", 16, 1000, 512, (_FIFTH,),
                 "forced", forced=True),
        *(Workload(f"elastic-{n}", f"{n} texts that are forced, pool of four, elastic", n, 1000, 512,
                   ({**_BARE, "kv_elastic": True},), "forced", forced=True) for n in (4, 16, 32)),
        *(row for pool in ("", "-tight") for row in (
            Workload(f"system{pool}", "24 requests share a system prompt, protected", 24, 1700, 256,
                     ({**_FIFTH, "kv_protect": 1500},), f"chats{pool}", shared=1500),
            Workload(f"chats{pool}", "8 chats of 6 turns, prompts protected", 8, 420, 160,
                     ({**_FIFTH, "kv_protect": "prompt"},), f"chats{pool}", shared=300, turns=6),
            Workload(f"forgotten{pool}", "the same chats, nothing protected", 8, 420, 160,
                     (_BARE,), f"chats{pool}", shared=300, turns=6),
            Workload(f"settled{pool}", "the same chats, what is older than 512 tokens settles", 8, 420, 160,
                     (_SETTLES,), f"chats{pool}", shared=300, turns=6),
        )),
        *(Workload(f"{name}{pool}", f"4 agents of 40 turns, {what}", 4, 640, 48, (fields,), f"agents{pool}",
                   shared=500, turns=40) for pool in ("", "-tight") for name, what, fields in (
            ("agents", "what is older than 1,024 tokens settles", {**_SETTLES, "kv_settle_tokens": 1024}),
            ("agents-forgotten", "budget 0.2", _FIFTH),
        )),
        *(Workload(f"agents-16k{pool}", "2 agents of 10 turns, what is older than 1,024 tokens settles", 2,
                   2140, 48, ({**_SETTLES, "kv_settle_tokens": 1024},), f"agents-16k{pool}",
                   shared=500, turns=10) for pool in ("", "-tight")),
        Workload("document", "32 questions to 6,000 tokens, which settle", 32, 6048, 64,
                 ({**_SETTLES, "kv_settle_tokens": 1024},), "agents-tight", shared=6000),
        Workload("answers", "8 answers to one question, prompt protected", 1, 1000, 512,
                 ({**_FIFTH, "kv_protect": "prompt"},), "chats", answers=8, temperature=0.8),
        Workload("quiet", "short requests, no other process computes", 16, 256, 256, (_BARE,)),
        Workload("busy", "the same, another process keeps a core busy", 16, 256, 256, (_BARE,), busy=1),
        Workload("one", "one request, sampled: nothing repeats itself", 1, 1000, 256, (_FIFTH,),
                 temperature=1.0),
        *(Workload(f"{name}-again", f"{n} requests, greedy, each prompt repeats itself", n, 1000, 256,
                   (_FIFTH,), repeats=5) for n, name in ((1, "one"), (4, "four"), (16, "sixteen"))),
        *(Workload(f"8k-{n}{again}", f"{n} x 7,000 tokens{repeats}, budget 0.2", n, 7000, 128, (_FIFTH,),
                   "8k", repeats=5 if again else 1)
          for n in (1, 4, 16) for again, repeats in (("", ""), ("-again", " that repeat"))),
        Workload("endless", "one request, 8 times longer than the pool", 1, 4000, 4192, (None,), "endless"),
        *_PAPER[:5],
    )  # fmt: skip

    def engine_options(self, setting: Setting, variant: str) -> dict[str, Any]:
        """Blocks of 32 tokens but for stock's defaults."""
        stock = variant == "stock"
        block_size = STOCK_CPU_BLOCK_SIZE if stock else 32
        options: dict[str, Any] = {
            **({} if stock else {"distributed_executor_backend": CPU_EXECUTOR}),
            "dtype": "bfloat16",
            "block_size": block_size,
            "kv_cache_memory_bytes": 4 << 30,
            "seed": 0,
        }
        if setting.config:
            # No step computes more of a prompt than the pool has room for.
            options["max_num_batched_tokens"] = 256
        if variant == "full-kernel":
            options["additional_config"] = {CONFIG_KEY: {"kv_full_kernel": "h2o"}}
        return options | setting.options(block_size) | self.named.get(variant, {})

    def text(self, engine: Any, length: int) -> list[int]:
        """Python's own documentation; it is longer than any ``length``."""
        del length
        # Not through the tokenizer's length check: the text is longer than any model's context.
        tokens: list[int] = engine.get_tokenizer().encode(documentation(), verbose=False)
        return tokens


class CUDASuite(Suite):
    """The workloads of the CPU scaled up, on a 7-8B-shaped model and random tokens."""

    variants = ("stock", "stock-ngram", "h2o", "h2o-ngram")
    """We change none of vLLM's defaults on GPUs: stock with our flags is stock."""
    own = asking = ("h2o", "h2o-ngram")
    named: ClassVar = _DRAFTING
    side_by_side = False
    usual = ("2k-tight", "8k-tight", "2k-mixed", "2k-ample", "2k-idle")
    settings: ClassVar = {
        # The KV-bound regime: about 42 requests of 2k + 1k, 14 of 8k + 1k. The same length for all, so that
        # one engine can serve several workloads.
        "tight": Setting(10_240, pool_tokens=131_072),
        "ample": Setting(10_240),
        # Room for 3.6 requests of 32k + 1k, and for two of 128k + 1k.
        "32k": Setting(40_960, pool_tokens=131_072),
        "128k": Setting(131_072, pool_tokens=262_144),
    }
    workloads: ClassVar = _by_name(
        Workload("2k-tight", "KV-bound, budget 0.2", 128, 2048, 1024, (_FIFTH,), "tight"),
        Workload("2k-tight-256", "KV-bound, twice as many, budget 0.2", 256, 2048, 1024, (_FIFTH,),
                 "tight"),
        Workload("2k-fits", "as many as the pool holds, budget 0.2", 32, 2048, 1024, (_FIFTH,), "tight"),
        Workload("8k-fits", "as many as the pool holds, budget 0.2", 12, 8192, 1024, (_FIFTH,), "tight"),
        Workload("8k-tight", "KV-bound, budget 0.2", 96, 8192, 1024, (_FIFTH,), "tight"),
        Workload("2k-mixed", "half full, half 0.2", 256, 2048, 1024, (None, _FIFTH), "tight"),
        Workload("2k-ample", "no memory pressure, budget 0.2", 64, 2048, 1024, (_FIFTH,)),
        Workload("8k-ample", "no memory pressure, budget 0.2", 32, 8192, 1024, (_FIFTH,)),
        Workload("2k-128", "the whole pool, budget 0.2", 128, 2048, 1024, (_FIFTH,)),
        Workload("2k-256", "the whole pool, budget 0.2", 256, 2048, 1024, (_FIFTH,)),
        Workload("8k-64", "the whole pool, budget 0.2", 64, 8192, 1024, (_FIFTH,)),
        Workload("2k-idle", "no request has a budget", 64, 2048, 1024, (None,)),
        Workload("8k-prompts", "prompts and their first eviction alone", 32, 8192, 32, (_FIFTH,)),
        Workload("short", "short prompts and answers, many at once", 1024, 256, 256, (_BARE,)),
        Workload("reasoning", "as Random Attention has it: 2,048 tokens beside the prompt", 32, 1024, 8192,
                 ({"kv_budget_tokens": 2048, "kv_policy": "random"},)),
        Workload("32k-tight", "KV-bound, budget 0.2", 16, 32_768, 1024, (_FIFTH,), "32k"),
        Workload("128k-tight", "KV-bound, budget 0.2", 6, 117_000, 1024, (_FIFTH,), "128k"),
        Workload("128k-among", "32 short requests, among which one of 128k tokens comes in",
                 33, 1024, 1024, (_FIFTH,), "128k", long=(1, 130_000)),
        *_PAPER,
    )  # fmt: skip

    def engine_options(self, setting: Setting, variant: str) -> dict[str, Any]:
        """The same but for drafts; blocks of 16 tokens are vLLM's default and ours (``--block-size``)."""
        options: dict[str, Any] = {
            "dtype": "bfloat16",
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_num_seqs": 256,
            "seed": 0,
        }
        return options | setting.options(16) | self.named.get(variant, {})

    def text(self, engine: Any, length: int) -> list[int]:
        """Random tokens."""
        rng = random.Random(0)
        vocabulary = engine.vllm_config.model_config.get_vocab_size()
        return [rng.randrange(3, vocabulary) for _ in range(length)]


class SharedCUDASuite(CUDASuite):
    """The same by engines that start together and share the device."""

    side_by_side = True
    together = True

    def engine_options(self, setting: Setting, variant: str) -> dict[str, Any]:
        """Less than half of the device each, and KV memory of a given size."""
        return super().engine_options(setting, variant) | {
            "gpu_memory_utilization": 0.45,
            # Otherwise vLLM measures what is free, and that changes while the other starts. Where a setting
            # has a pool, its number of blocks decides.
            "kv_cache_memory_bytes": 40 << 30,
        }


SUITES: dict[str, Suite] = {"cpu": CPUSuite(), "cuda": CUDASuite()}
"""By device."""


def suite_of(device: str, *, shared: bool = False) -> Suite:
    """The suite of a device; ``shared``: by engines that start together, on a GPU."""
    return SharedCUDASuite() if shared else SUITES[device]
