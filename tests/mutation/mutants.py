# SPDX-License-Identifier: Apache-2.0
"""Bugs to plant, each one that a user or a law would notice: at least one per law and per room.

``old`` has to occur exactly once below ``h2o_vllm``, or once in files whose path contains ``path``; so code
may move without the table noticing. No test may know a mutant's text.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MUTANTS", "Mutant"]


class Mutant(NamedTuple):
    """One bug.

    Attributes:
        name: begins with the law or the room it breaks.
        old, new: what is there, what takes its place.
        tests: files, or node ids, that should see it first; those that do not exist are passed over.
        path: part of the file's path, where ``old`` alone would not be unique.
    """

    name: str
    old: str
    new: str
    tests: tuple[str, ...]
    path: str = ""


BLOCKS = ("tests/engine/test_laws_blocks.py", "tests/engine/test_state_machine.py")
PROTECT = ("tests/blocks/test_eviction_state.py", "tests/engine/test_protect.py")
TOKENS = ("tests/engine/test_laws_tokens.py",)
ELASTIC = ("tests/blocks/test_squeeze.py", "tests/engine/test_elastic.py")
PREFILL = ("tests/blocks/test_schedule.py", "tests/engine/test_prefill.py")
CPU = ("tests/kernels/cpu/test_attend.py", "tests/kernels/test_attend.py")
SOFTMAX = ("tests/kernels/cpu/test_softmax.py",)
EVICT = ("tests/kernels/cpu/test_evict.py", "tests/kernels/test_evict.py")
SHARE = ("tests/kernels/cpu/test_lanes.py",)
LANES = ("tests/engine/test_lanes.py",)
FULL = ("tests/engine/test_full_kernel.py",)
TRITON = ("tests/kernels/test_triton.py",)
CUDA = ("tests/engine/test_cuda.py",)
PROTOCOL = ("tests/server/test_protocol.py",)

MUTANTS = (
    # The laws of the design, in their order.
    Mutant("law01-lossy-by-default", "kv_budget: float = 1.0", "kv_budget: float = 0.5", TOKENS),
    Mutant(
        "law01-our-kernel-serves-nobody-who-has-no-budget",
        "if not self.in_step or not (self.policies or self.full_kernel):",
        "if not self.in_step or not self.policies:",
        FULL,
    ),
    Mutant(
        "law01-our-kernel-skips-chunks-without-scores",
        "_scored_first(ours & (lens > 1), whole, rows.most)",
        "_scored_first(whole & (lens > 1), whole, rows.most)",
        FULL,
    ),
    Mutant(
        "law04-a-soft-cap-is-forgotten",
        "softmax = (self.logits_soft_cap, sinks)",
        "softmax = (0.0, sinks)",
        ("tests/families/test_law04_models.py",),
    ),
    Mutant(
        "law05-rows-without-scores-change-the-scores-of-others",
        "split.decode_scored,\n            *softmax",
        "None,\n            *softmax",
        FULL,
    ),
    Mutant(
        "law02-a-free-is-skipped",
        "self.block_pool.free_blocks(reversed(doomed))",
        "self.block_pool.free_blocks(reversed(doomed[1:]))",
        BLOCKS,
    ),
    Mutant(
        "law03-two-blocks-late",
        "seen = state.counts.num_computed_tokens\n",
        "seen = max(0, state.counts.num_computed_tokens - 2 * self.block_size)\n",
        BLOCKS,
    ),
    Mutant(
        "law04-a-recent-block-is-ranked",
        "until = self.schedule.recent_from(computed)",
        "until = self.schedule.recent_from(computed) + 1",
        ("tests/engine/test_law04_fidelity.py",),
    ),
    Mutant(
        "law05-a-replay-skips-evictions",
        "return (until if due is None else due) - computed",
        "return until - computed",
        BLOCKS,
    ),
    Mutant("law05-the-rest-gets-no-output", "output[index] = attended", "del index", TOKENS),
    Mutant(
        "law06-hits-pass-the-pin",
        "return min(known, tokens)",
        "return min(known, tokens + self.block_size)",
        PROTECT,
    ),
    Mutant(
        "law06-blocks-are-published-before-they-are-ranked",
        "self._next_index = self._untouched = self.pinned",
        "self._next_index = self.pinned\n        self._untouched = self.pinned + self.schedule.freed("
        "self.prompt_tokens, self.prompt_tokens)",
        PROTECT,
    ),
    Mutant(
        "law03-the-pin-is-a-block-short",
        "protect = math.ceil(int(budget.protect) / block_size)",
        "protect = int(budget.protect) // block_size",
        PROTECT,
    ),
    Mutant(
        "law07-one-block-too-many-is-published",
        "self._untouched = self.pinned + num_doomed",
        "self._untouched = self.pinned + num_doomed + 1",
        PROTECT,
    ),
    Mutant(
        "law08-a-bad-value-raises",
        "self._rejected[request.request_id] = str(error)\n            return self._full",
        "raise",
        BLOCKS,
    ),
    Mutant(
        "law09-somebody-elses-builder-will-do",
        "if len(found) != 1 or not isinstance(found[0][0], ours):",
        "if len(found) != 1:",
        ("tests/engine/test_law09_startup.py",),
    ),
    Mutant(
        "law10-the-plugin-takes-the-backend",
        "    register_spec()\n    if START_RECORD",
        "    register_spec()\n"
        "    from h2o_vllm.engine.cpu.attention import register_backend\n\n    register_backend()\n"
        "    if START_RECORD",
        ("tests/engine/test_law10_inert.py",),
    ),
    Mutant(
        "law11-every-rank-takes-itself-for-the-first",
        "return int(get_tensor_model_parallel_rank()) * total // ranks",
        "return 0 * total // ranks",
        ("tests/engine/test_first_kv_head.py", "tests/engine/test_modes.py"),
    ),
    Mutant(
        "law06-who-cannot-evict-is-one-token-off",
        "last = min(self.prompt_tokens + counts.max_tokens - 2, max_model_len - 1)",
        "last = min(self.prompt_tokens + counts.max_tokens - 3, max_model_len - 1)",
        BLOCKS,
    ),
    Mutant(
        "law05-a-delay-is-forgotten",
        "self.prompt_tokens + self.budget.delay",
        "self.prompt_tokens",
        ELASTIC,
    ),
    # Bounded prompts.
    Mutant(
        "law03-a-prompt-gives-back-a-step-late",
        "due = self.first + steps * self.step",
        "due = self.first + (steps + 1) * self.step",
        PREFILL,
    ),
    Mutant(
        "law05-chunks-pass-the-points-of-a-prompt",
        "return inside if inside <= limit else None",
        "return None",
        PREFILL,
    ),
    Mutant(
        "blocks-admission-counts-the-prompt",
        "held = max(state.peak_tokens(num_tokens), promised)",
        "held = num_tokens",
        PREFILL[1:],
    ),
    Mutant(
        "blocks-admission-forgets-what-is-promised",
        "asked += self._promised_blocks(request_id)",
        "asked += 0",
        PREFILL[1:],
    ),
    Mutant(
        "server-nobody-asks-whether-it-fits",
        "schedule.check_fits(pool, params.max_tokens, length)",
        "pass",
        ("tests/server/test_fitting.py",),
    ),
    # Elastic budgets.
    Mutant(
        "law05-a-victim-is-squeezed-twice",
        "if not (self.squeezable and self.repeated) or computed < earliest:",
        "if not (self.evicts and self.repeated) or computed < earliest:",
        ELASTIC,
    ),
    Mutant(
        "law05-a-squeeze-is-forgotten-with-a-preemption",
        "self._evict_from = self._next_due = computed",
        "self._next_due = computed",
        ELASTIC,
    ),
    Mutant(
        "law05-known-tokens-are-computed-after-a-squeeze",
        "earliest = max(self.schedule.earliest, self.counts.num_tokens - 1)",
        "earliest = self.schedule.earliest",
        ELASTIC,
    ),
    Mutant(
        "law05-no-hole-in-a-row-that-is-not-in-the-batch",
        "state.block_ids[group][index] = 0",
        "del index",
        ("tests/engine/test_elastic_tokens.py",),
    ),
    Mutant(
        "law06-a-shared-heavy-block-is-written",
        "if any(block.ref_cnt > 1 for block in behind):",
        "if False:",
        ELASTIC[1:],
    ),
    Mutant(
        "law06-a-prompt-loses-the-hit-it-came-for",
        "return wanted.isdisjoint(block.block_id for block in lost)",
        "return True",
        ELASTIC[1:],
    ),
    Mutant(
        "law07-the-block-behind-a-squeeze-stays-published",
        "return state.counts.num_computed_tokens // self.block_size",
        "return state.counts.num_computed_tokens // self.block_size + 1",
        ELASTIC[1:],
    ),
    Mutant(
        "law04-anybodys-scores-count-as-first-tokens",
        "if not policy.needs_scores:\n        # Blocks",
        "if False:\n        # Blocks",
        ("tests/engine/test_elastic_tokens.py",),
    ),
    Mutant(
        "blocks-squeezed-in-vain",
        "if gained < missing:\n        return []",
        "if not gained:\n        return []",
        ELASTIC,
    ),
    Mutant(
        "blocks-prompts-squeeze-where-they-should-queue",
        "if admitting and not self._rules.to_admit:",
        "if False:",
        ELASTIC[1:],
    ),
    Mutant(
        "blocks-the-watermark-is-forgotten",
        "needed += self._rules.watermark_blocks",
        "pass",
        ELASTIC[1:],
    ),
    # config
    Mutant(
        "config-no-upper-limit",
        "if not low <= value <= high or (low_open and value <= low):",
        "if not low <= value or (low_open and value <= low):",
        PROTOCOL,
    ),
    Mutant(
        "config-full-past-the-operators-limit",
        "if self.kv_budget_max < 1.0:",
        "if self.kv_budget_max < 0.0:",
        ("tests/reliability/test_security.py", *PROTOCOL),
    ),
    # policy
    Mutant(
        "policy-no-floor",
        "return min(rest, max(wanted, budget.floor))",
        "return min(rest, wanted)",
        ("tests/policy/test_budget.py",),
    ),
    Mutant(
        "policy-recent-begins-late",
        "(start + block_size // 2) // block_size",
        "(start + block_size - 1) // block_size",
        ("tests/policy/test_budget.py",),
    ),
    Mutant(
        "policy-window-loses-its-sinks",
        "stay = max(1, protected)",
        "stay = 0",
        ("tests/policy/test_policies.py",),
    ),
    Mutant(
        "policy-random-is-alike-in-all-heads",
        "+ heads[None, :, None])",
        "+ 0 * heads[None, :, None])",
        ("tests/policy/test_policies.py",),
    ),
    # blocks
    Mutant(
        "blocks-holes-survive-a-preemption",
        "self.holes = 0\n        self._evicted_at = None",
        "self._evicted_at = None",
        BLOCKS,
    ),
    Mutant(
        "blocks-a-wrong-hole",
        "holes=indices.doomed,",
        "holes=tuple(index + 1 for index in indices.doomed),",
        (*BLOCKS, *TOKENS),
    ),
    Mutant(
        "blocks-report-off-by-one",
        "seen = min(self.counts.num_computed_tokens, self.counts.num_tokens - 1)",
        "seen = min(self.counts.num_computed_tokens, self.counts.num_tokens)",
        ("tests/blocks/test_eviction_state.py", *BLOCKS),
    ),
    # kernels/cpu
    Mutant(
        "kernels-cpu-counts-a-sink-once-for-each-split",
        "total += sink(task, m, best);",
        "total += task.splits * sink(task, m, best);",
        SOFTMAX,
    ),
    Mutant(
        "kernels-cpu-caps-whole-vectors-only",
        "if (capped) cap(row, n);",
        "if (capped) cap(row, whole);",
        SOFTMAX,
    ),
    Mutant(
        "kernels-cpu-ranks-by-the-first-head",
        "* heads + head) * block + c % block",
        "* heads + 0) * block + c % block",
        EVICT,
    ),
    Mutant("kernels-cpu-ties-go-to-the-last", "<< 32 | ~candidate", "<< 32 | candidate", EVICT),
    Mutant(
        "kernels-cpu-only-the-last-rows-are-summed",
        "MOST ? vmax(load(sums + i), column) : load(sums + i) + column);",
        "MOST ? vmax(load(sums + i), column) : column);",
        CPU,
    ),
    Mutant(
        "kernels-cpu-splits-are-weighed-wrongly",
        "std::exp2(stat(s)[m] - best) * stat(s)[g + m];",
        "std::exp2(stat(s)[m] - best);",
        CPU,
    ),
    Mutant(
        "kernels-cpu-one-row-too-many-is-scored",
        "const bool scored = r < call.scored;",
        "const bool scored = r <= call.scored;",
        CPU,
    ),
    Mutant(
        "kernels-cpu-earlier-runs-keep-their-maximum",
        "before = sum[m] * factor;",
        "before = sum[m];",
        CPU,
    ),
    # kernels/triton
    Mutant(
        "kernels-triton-old-sums-are-not-rescaled",
        "total = total * shrink + tl.sum(prob, 1)",
        "total = total + tl.sum(prob, 1)",
        TRITON,
    ),
    Mutant(
        "kernels-triton-no-query-sees-itself",
        "position[None, :] <= (context + at + ahead)[:, None]",
        "position[None, :] < (context + at + ahead)[:, None]",
        TRITON,
    ),
    Mutant(
        "kernels-triton-the-last-segment-of-a-prompt-is-forgotten",
        "mask=due > at + ahead,",
        "mask=due > at + ahead + 1,",
        TRITON,
    ),
    Mutant(
        "kernels-triton-segments-begin-with-the-chunk",
        "at = (at // length + 1) * length",
        "at += length",
        TRITON,
    ),
    Mutant(
        "kernels-triton-half-of-the-cut-rows-are-not-finished",
        "return tl.where(tl.load(pieces) < 0, 0, tl.load(pieces + 7))",
        "return tl.where(tl.load(pieces) < 0, 0, tl.load(pieces + 7) // 2)",
        TRITON,
    ),
    Mutant(
        "kernels-triton-negative-scores-rank-first",
        "tl.where(bits < 0, ~bits, bits | -0x80000000)",
        "bits | -0x80000000",
        TRITON,
    ),
    Mutant(
        "kernels-triton-holes-count-as-tokens",
        "live = length - holes * BS",
        "live = length",
        (*TRITON, *CUDA),
    ),
    Mutant(
        "kernels-triton-protected-tokens-are-cleared",
        "tl.where(protected, old, 0.0)",
        "tl.zeros_like(old)",
        TRITON,
    ),
    Mutant(
        "kernels-triton-late-scores-are-called-early",
        "tl.where(protected, 0.0, old - late)",
        "tl.where(protected, 0.0, late)",
        TRITON,
    ),
    Mutant(
        "kernels-cpu-keys-of-any-length-count",
        "sum += load(k + d * block + t) * load(out + b * block + t)",
        "sum += load(k + d * block + t)",
        ("tests/kernels/cpu/test_rank.py",),
    ),
    Mutant(
        "engine-scores-are-never-split",
        "state.finish_step()",
        "pass",
        ("tests/engine/test_policies.py", *CUDA),
    ),
    Mutant(
        "engine-late-begins-a-query-early",
        "self.prompt_tokens - _LATE_QUERIES[self.codes]",
        "self.prompt_tokens - 1 - _LATE_QUERIES[self.codes]",
        CUDA,
    ),
    Mutant(
        "kernels-triton-equal-keys-have-one-rank",
        "(others > numbers) | ((others == numbers) & earlier)",
        "others > numbers",
        TRITON,
    ),
    Mutant(
        "kernels-triton-maxima-are-written-over-each-other",
        'tl.atomic_max(at, new.to(tl.int32, bitcast=True), mask=live & (new > old), sem="relaxed")',
        "tl.store(at, new.to(tl.int32, bitcast=True), mask=live & (new > old))",
        TRITON,
    ),
    Mutant(
        "kernels-triton-segments-of-maxima-wait-to-be-summed",
        "alone = maxima or not at",
        "alone = not at",
        TRITON,
    ),
    Mutant(
        "kernels-triton-decodes-of-maxima-are-summed",
        "count = tl.where((flag & RAISES) != 0, -parts, parts)",
        "count = parts",
        (*TRITON, *CUDA),
    ),
    Mutant(
        "kernels-triton-later-queries-raise-scores",
        'tl.where(visible, log, float("-inf"))',
        "log",
        TRITON,
    ),
    Mutant(
        "kernels-triton-pinned-tokens-fill-the-scratch",
        "left_out = tl.minimum(flag // (PINNED * TILE), tiles)",
        "left_out = tl.minimum(0, tiles)",
        TRITON,
    ),
    Mutant(
        "engine-nobody-knows-what-is-pinned-on-gpus",
        "self._pinned[slot] = params.pinned",
        "self._pinned[slot] = 0",
        CUDA,
    ),
    Mutant(
        "engine-prompts-of-maxima-are-not-scored-on-gpus",
        "(self._scores, batch.maxima),",
        "(self._scores, None),",
        CUDA,
    ),
    Mutant(
        "engine-flags-of-maxima-are-lost-on-gpus",
        "flags |= np.where(rows.most, MAXIMA, 0)",
        "flags |= 0",
        CUDA,
    ),
    Mutant(
        "kernels-triton-scores-of-others-protect",
        "stays = ((fresh < 0) & infinite) | ((fresh >= 0) & (fresh < protected))",
        "stays = infinite | ((fresh >= 0) & (fresh < protected))",
        TRITON,
    ),
    Mutant(
        "kernels-cpu-protected-tokens-have-no-lanes-first",
        "std::pair(std::max(0, head.stay - head.lanes * block)",
        "std::pair(std::max(0, 0 * head.stay)",
        SHARE,
    ),
    Mutant(
        "kernels-cpu-lanes-are-written-before-all-is-read",
        "scores[m] = layer.scores[moves[m].from];",
        "scores[m] = layer.scores[moves[m].from]; layer.scores[moves[m].to] = scores[m];",
        SHARE,
    ),
    Mutant(
        "kernels-cpu-heads-that-share-are-all-as-long-as-their-mean",
        "return call.lens[row] + (all.count - all.heavy) * call.block;",
        "return call.lens[row];",
        SHARE,
    ),
    # engine
    Mutant(
        "engine-a-preempted-request-keeps-its-lanes",
        "state.restart(scheduler_output.scheduled_cached_reqs.resumed_req_ids)",
        "pass",
        LANES,
    ),
    Mutant(
        "engine-unscored-rows-that-share-go-to-vllms-kernel",
        "unreadable[list(shared.heavy_blocks)] = True",
        "pass",
        LANES,
    ),
    Mutant(
        "engine-shared-blocks-stay-behind-the-pinned-ones",
        "_move_to_front(compacted[row], heavy)",
        "pass",
        LANES,
    ),
    Mutant(
        "engine-a-seed-draws-in-the-midst-of-its-prompt",
        "if discarded[row]}",
        "if False}",
        TOKENS,
    ),
    Mutant(
        "engine-old-scores-stay",
        "self.start_scores(policy, positions, slot_mapping, tokens)",
        "pass",
        ("tests/engine/test_law04_fidelity.py", *TOKENS),
    ),
    Mutant(
        "engine-policies-do-not-adjust-scores",
        "if adjusted:\n",
        "if False:\n",
        (*TOKENS, "tests/engine/test_policies.py", *CUDA),
    ),
    Mutant(
        "engine-cuda-prompts-are-scored-from-their-start",
        "scored = rows.scored_queries",
        "scored = rows.query_lens",
        CUDA,
    ),
    Mutant(
        "engine-cuda-a-prompt-beside-unscored-rows-is-not-scored",
        "if Variant.HOLES in captured and not rows.scored_queries.any():",
        "if Variant.HOLES in captured and not rows.decodes.any():",
        CUDA,
    ),
    Mutant(
        "engine-cuda-the-graph-of-unscored-rows-scores",
        "decodes = variant is not Variant.HOLES",
        "decodes = True",
        CUDA,
    ),
    Mutant(
        "engine-cuda-flags-of-the-last-step",
        "if self._flags_sent is None or not np.array_equal(flags, self._flags_sent):",
        "if self._flags_sent is None:",
        CUDA,
    ),
    Mutant(
        "engine-cuda-dummies-replay-the-last-graph",
        "state.step_variant.current = variant or Variant.STOCK",
        "pass",
        CUDA,
    ),
    Mutant(
        "engine-cuda-grids-of-what-was-seen",
        "self.policies.holes(common.req_idx) * self.block_size",
        "self.policies.holes(common.req_idx) * 0",
        CUDA,
    ),
    Mutant(
        "engine-cuda-holes-of-the-last-request",
        "self._holes[slot] = 0",
        "pass",
        CUDA,
    ),
    Mutant(
        "engine-cuda-compaction-is-not-checked-for-waiting",
        "@sync_checked\n    def",
        "def",
        CUDA,
    ),
    # metrics, models, plugin
    Mutant(
        "metrics-evictions-instead-of-blocks",
        "self._freed_blocks += len(eviction.holes)",
        "self._freed_blocks += 1",
        ("tests/metrics/test_meter.py",),
    ),
    Mutant(
        "metrics-counter-is-not-reset",
        "self._freed_blocks, self._budgets, self._eviction_seconds = 0, [], []",
        "self._budgets, self._eviction_seconds = [], []",
        ("tests/metrics/test_meter.py",),
    ),
    Mutant(
        "models-a-truncated-file-will-do",
        "(directory / name).stat().st_size == size",
        "(directory / name).stat().st_size <= size",
        ("tests/test_models.py",),
    ),
    Mutant(
        "models-the-one-who-waits-converts-again",
        "            if not _complete(directory):\n",
        "            if True:\n",
        ("tests/test_models.py",),
    ),
    Mutant(
        "plugin-vllms-own-block-size",
        'args["block_size"] = CPU_BLOCK_SIZE',
        "pass",
        TOKENS,
    ),
    # server
    Mutant(
        "server-get-needs-no-key",
        'scope["method"] == "OPTIONS"',
        'scope["method"] in ("OPTIONS", "GET")',
        ("tests/server/test_access.py",),
    ),
    Mutant(
        "server-a-field-may-be-given-twice", "if len(places) > 1:", "if len(places) > 2:", PROTOCOL
    ),
    Mutant(
        "server-streams-end-without-a-report",
        "if held and event.startswith(ENDS):",
        "if held and event in ENDS:",
        ("tests/server/test_report_injection.py",),
    ),
    Mutant(
        "server-any-prompt-is-taken-to-begin-with-the-system-part",
        "return length if length >= self.needed else None",
        "return len(self.tokens)",
        ("tests/server/test_system_prefix.py",),
    ),
    Mutant(
        "server-messages-end-without-a-report",
        'b"event: message_stop"',
        'b"event: message_end"',
        ("tests/server/test_report_injection.py",),
    ),
    Mutant(
        "server-one-choice-for-all",
        "{key: sum(report[key] for report in reports) for key in SUMMED}",
        "{key: reports[0][key] for key in SUMMED}",
        ("tests/server/test_report.py",),
    ),
    Mutant(
        "server-a-password-opens-everything",
        "return not (is_page(scope) and self",
        "return not (self",
        ("tests/server/test_playground.py",),
    ),
    Mutant(
        "server-a-trace-never-gives-its-place-back",
        "self._terms.slots.give_back()",
        "pass",
        ("tests/server/test_trace_limits.py",),
    ),
    # traces
    Mutant(
        "trace-ranks-by-other-tokens-scores",
        "scores[:, heavy + doomed]",
        "scores[:, doomed + heavy]",
        ("tests/engine/test_trace.py",),
    ),
    Mutant(
        "trace-a-preemption-goes-on-where-it-was",
        "first = ranked.begins in (None, eviction.fresh_from)",
        "first = ranked.begins is None",
        ("tests/engine/test_trace.py",),
    ),
    Mutant(
        "trace-joins-a-head-as-often-as-ranks-hold-it",
        "parts[:: self.ranks // self.distinct_ranks]",
        "parts[: self.distinct_ranks]",
        ("tests/engine/test_trace.py",),
    ),
)
