# SPDX-License-Identifier: Apache-2.0
"""Bugs that break a law, in the laws' order."""

from tests.mutation.mutant import BLOCKS, ELASTIC, TOKENS, Mutant

__all__ = ["MUTANTS"]

DOOMED = ("tests/blocks/test_eviction_state.py", "tests/engine/test_doomed_hits.py")
PROTECT = ("tests/blocks/test_eviction_state.py", "tests/engine/test_protect.py")
FULL = ("tests/engine/test_full_kernel.py",)

DRAFTS = ("tests/engine/test_law12_drafts.py",)
EXACT = ("tests/engine/test_exact.py",)
READS = (
    "tests/engine/test_law12_drafters.py::test_law12_what_a_drafter_reads_is_what_its_own_layers_wrote",
)

SHARED = ("tests/engine/test_portion.py", "tests/engine/test_law11_ranks.py")

MUTANTS = (
    Mutant(
        "law01-lossy-by-default",
        "kv_budget: float = setting(\n        1.0,",
        "kv_budget: float = setting(\n        0.5,",
        FULL,
    ),
    Mutant(
        "law01-our-kernel-serves-nobody-who-has-no-budget",
        "if not self.in_step or not (self.evicting or self.full_kernel or len(self.views)):",
        "if not self.in_step or not (self.evicting or len(self.views)):",
        FULL,
    ),
    Mutant(
        "law01-our-kernel-skips-chunks-without-scores",
        "_scored_first(chosen & (lens > 1), whole)",
        "_scored_first(whole & (lens > 1), whole)",
        FULL,
    ),
    Mutant(
        "law04-a-soft-cap-is-forgotten",
        "softmax = (self.logits_soft_cap, sinks)",
        "softmax = (0.0, sinks)",
        ("tests/families/test_law04_models.py",),
    ),
    Mutant(
        "law04-readers-add-to-the-scores-of-another-layer",
        "owners[target].append(name)",
        "owners[min(owners)].append(name)",
        ("tests/families/test_shared_kv.py",),
    ),
    Mutant(
        "calibrations-learn-from-the-last-reader-alone",
        "most = most.maximum(largest_attention(query, key, softmax, self._text))",
        "most = largest_attention(query, key, softmax, self._text)",
        ("tests/calibration/test_learner.py",),
    ),
    Mutant(
        "law05-rows-without-scores-change-the-scores-of-others",
        "split.decode_scored,\n            *softmax",
        "None,\n            *softmax",
        FULL,
    ),
    Mutant(
        "law02-a-free-is-skipped",
        "self.loads.free(request_id, doomed[::-1])",
        "self.loads.free(request_id, doomed[:0:-1])",
        BLOCKS,
    ),
    Mutant(
        "law02-a-block-is-freed-twice",
        "table[index] = self.block_pool.null_block",
        "pass",
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
        "law04-tokens-of-one-rank-tie",
        "given = in_order * (1 - place * BEHIND)",
        "given = in_order",
        ("tests/policy/test_joined_ranks.py", "tests/engine/test_lanes.py"),
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
        "min(known, self._readable * self.block_size)",
        "min(known, (self._readable + 1) * self.block_size)",
        PROTECT,
    ),
    Mutant(
        "law06-hits-pass-what-the-first-eviction-frees",
        "return self.pinned + self.schedule.freed(due, self._evict_from)",
        "return self.pinned + self.schedule.freed(due, self._evict_from) + 1",
        DOOMED,
    ),
    Mutant(
        "law06-what-needs-no-scores-is-published-late",
        "self._untouched = self._readable",
        "self._untouched = self.pinned",
        DOOMED,
    ),
    Mutant(
        "law06-blocks-are-published-before-they-are-ranked",
        "self._untouched = self._readable",
        "self._untouched = self.pinned + self.schedule.freed(self.prompt_tokens, self.prompt_tokens)",
        PROTECT,
    ),
    Mutant(
        "law03-the-pin-is-a-block-short",
        "math.ceil(int(budget.protect) / block_size)",
        "int(budget.protect) // block_size",
        PROTECT,
    ),
    Mutant(
        "law07-one-block-too-many-is-published",
        "self._untouched = self.pinned + len(indices.doomed)",
        "self._untouched = self.pinned + len(indices.doomed) + 1",
        PROTECT,
    ),
    Mutant(
        "law07-other-layers-publish-behind-an-eviction",
        "if state is None or not state.holes:",
        "if request:",
        ("tests/engine/test_ghost.py",),
    ),
    Mutant(
        "law08-a-bad-value-raises",
        "self._rejections.add(request.request_id, str(error))\n            return self._full",
        "raise",
        BLOCKS,
    ),
    Mutant(
        "law08-a-session-outgrows-the-pool",
        "self._check_fits(session, self._full)",
        "pass",
        ("tests/engine/test_sessions.py",),
    ),
    Mutant(
        "law09-somebody-elses-builder-will-do",
        "if len(found) != 1 or not isinstance(found[0][0], ours):",
        "if len(found) != 1:",
        ("tests/engine/test_law09_workers.py",),
    ),
    Mutant(
        "law10-the-plugin-takes-the-backend",
        "    register_specs()\n    if os.environ.get(START_RECORD)",
        "    register_specs()\n"
        "    from h2o_vllm.engine.cpu.attention import register_backend\n\n    register_backend()\n"
        "    if os.environ.get(START_RECORD)",
        ("tests/engine/test_law10_inert.py",),
    ),
    Mutant(
        "law11-every-rank-takes-itself-for-the-first",
        "first_head=rank * heads // ranks,",
        "first_head=0 * heads // ranks,",
        SHARED,
    ),
    Mutant(
        "law11-every-stage-takes-itself-for-the-first",
        "first_layer=sum(counts[:stage]),",
        "first_layer=0,",
        SHARED,
    ),
    Mutant(
        "law11-a-stage-weighs-by-the-first-layers",
        "of_layers = self.traits, self.weights[layers]",
        "of_layers = self.traits, self.weights[: len(self.weights[layers])]",
        ("tests/engine/test_predicting.py", "tests/engine/test_law11_ranks.py"),
    ),
    Mutant(
        "law11-copies-of-a-head-add-to-a-prediction-twice",
        "if adds_up and not first_holder:",
        "if not adds_up and not first_holder:",
        ("tests/engine/test_predicting.py", "tests/kernels/triton/test_predict.py"),
    ),
    Mutant(
        "law11-copies-of-a-head-rank-by-their-own-queries",
        "if because and policy.needs_scores:",
        "if because and not policy.moves_tokens:",
        ("tests/server/test_field_rules.py", "tests/engine/test_law09_startup.py"),
    ),
    Mutant(
        "law11-a-step-is-planned-with-a-token-that-the-first-stage-does-not-know",
        "super(AsyncScheduler, self)._update_after_schedule(scheduler_output)",
        "super()._update_after_schedule(scheduler_output)",
        ("tests/engine/test_laws_blocks.py",),
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
    Mutant(
        "law12-a-rejected-draft-stays-in-the-scores",
        "certain = known > self.positions",
        "certain = known >= 0",
        DRAFTS,
    ),
    Mutant(
        "law12-an-accepted-draft-is-forgotten",
        "later.confirm(computed)",
        "later.confirm({})",
        DRAFTS,
    ),
    Mutant(
        "law12-drafts-are-added-too-early",
        "np.where(later, NEVER, rows.first_scored[origin])",
        "rows.first_scored[origin]",
        DRAFTS,
    ),
    Mutant(
        "law12-drafts-attend-to-what-follows-them",
        "seq_lens=live.seq_lens[index] - torch.from_numpy(self.behind)",
        "seq_lens=live.seq_lens[index]",
        DRAFTS,
    ),
    Mutant(
        "law12-drafts-cross-an-eviction",
        "if num_tokens <= 1 or (begin",
        "if num_tokens <= 1 or computed >= self.counts.num_tokens - 1 or (begin",
        ("tests/engine/test_drafts.py", *DRAFTS),
    ),
    Mutant(
        "law12-drafts-cross-what-a-squeeze-makes-due",
        "            begin = computed\n",
        "            return num_tokens\n",
        ("tests/engine/test_drafts.py", *BLOCKS),
    ),
    Mutant(
        "law13-what-drafts-attend-to-is-a-budget",
        "return asked and not self.exact",
        "return asked",
        EXACT,
    ),
    Mutant(
        "law13-a-draft-is-written-behind-the-table",
        "* state.block_size - lens + 1",
        "* state.block_size - lens + 9",
        EXACT,
    ),
    Mutant(
        "law13-a-draft-overwrites-a-token",
        "places = lens - 1",
        "places = lens - 2",
        EXACT,
    ),
    Mutant(
        "law13-a-view-has-the-least-attended-pages",
        ".topk(count, dim=1)",
        ".topk(count, dim=1, largest=False)",
        EXACT,
    ),
    Mutant(
        "law12-padding-counts-as-drafts",
        "for name, tokens in drafts.items() if max(tokens) < 0]",
        "for name, tokens in drafts.items() if max(tokens) < -1]",
        ("tests/engine/test_drafts.py",),
    ),
    Mutant(
        "law12-the-last-token-counts-as-accepted",
        "state.drafts.verified(len(drafts), max(0, len(sampled) - 1))",
        "state.drafts.verified(len(drafts), len(sampled))",
        DRAFTS,
    ),
    Mutant(
        "law12-drafts-that-do-not-pay-go-on",
        "self._rest = 0 if self._average >= LEAST else RESTS",
        "self._rest = 0",
        ("tests/engine/test_drafts.py",),
    ),
    Mutant(
        "law12-a-drafter-reads-null-blocks",
        "common = compact_tables(common, evicting, self.block_size)",
        "common = compact_tables(common, evicting & False, self.block_size)",
        READS,
    ),
    Mutant(
        "law12-a-drafter-is-ranked",
        "[name for name in group.layer_names if name not in drafter]",
        "list(group.layer_names)",
        ("tests/engine/test_law09_drafting.py",),
    ),
    Mutant(
        "law12-a-drafters-tokens-have-scores",
        "for name in ours.keys() - drafter)",
        "for name in ours)",
        ("tests/engine/cuda/test_support.py::test_scores_take_their_share_of_the_memory",),
    ),
    Mutant(
        "law12-a-drafter-reads-what-others-left-in-a-settled-segment",
        "kv_cache[into] = kv_cache[newest]",
        "kv_cache[into] = kv_cache[into]",
        READS,
    ),
    Mutant(
        "law08-no-room-for-a-drafters-slots",
        "min(needed + math.ceil(ahead / self.block_size), longest)",
        "min(needed, longest)",
        ("tests/blocks/test_schedule.py", "tests/engine/test_drafts.py"),
    ),
)
