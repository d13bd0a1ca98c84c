# SPDX-License-Identifier: Apache-2.0
"""Bugs in vLLM's adaptors, CPU and GPU, and in traces."""

from tests.mutation.mutant import CUDA, TOKENS, Mutant

__all__ = ["MUTANTS"]

LANES = ("tests/engine/test_lanes.py",)
CONNECTOR = ("tests/engine/test_connector.py",)
APART = ("tests/engine/test_kept_files.py", "tests/engine/test_handover.py")
ROLES = ("tests/engine/test_connector_roles.py",)
LOST = ("tests/engine/test_lost_loads.py",)
LATE = ("tests/engine/test_late_transfers.py",)
FOLDER = ("tests/engine/test_kv_folder.py", "tests/engine/test_kv_folder_size.py")
PREDICTING = ("tests/engine/test_predicting.py",)

MUTANTS = (
    Mutant(
        "engine-who-can-evict-saves-its-whole-prompt",
        "        return Share(pinned, pinned)",
        "        return Share(pinned, EVERYTHING)",
        (*CONNECTOR, *ROLES, *LATE),
    ),
    Mutant(
        "engine-a-connector-loads-its-cap-behind-a-hit",
        "return (0, False) if limited and num_computed_tokens else found",
        "return found",
        ROLES,
    ),
    Mutant(
        "engine-a-prompt-is-saved-with-its-first-chunk",
        "elif save is not None and until >= len(save.tokens):",
        "elif save is not None:",
        CONNECTOR,
    ),
    Mutant(
        "engine-half-a-file-counts-as-whole",
        "if size != 8 + length + end or",
        "if",
        ("tests/engine/test_kv_folder.py",),
    ),
    Mutant(
        "engine-a-report-counts-an-eviction-after-the-end",
        "not state.evicts or state.counts.is_finished():",
        "not state.evicts:",
        CONNECTOR,
    ),
    Mutant(
        "engine-a-hit-hides-a-longer-file",
        "readable = 0 if self.connector.held_outside(request) > readable else readable",
        "pass",
        CONNECTOR,
    ),
    Mutant(
        "engine-a-producer-evicts",
        "    if config.kv_evicts_not_because and not (",
        "    if False and not (",
        (*CONNECTOR, *ROLES),
    ),
    Mutant(
        "apart-other-fields-find-what-was-kept",
        '"budget": _values(state.budget),',
        "",
        APART,
    ),
    Mutant(
        "apart-a-file-need-not-say-what-it-is",
        "not isinstance(said, dict) or said.get(ABOUT_KEY) != about:",
        "not isinstance(said, dict):",
        APART,
    ),
    Mutant("apart-what-is-kept-is-published", "if self.received:", "if False:", APART),
    Mutant(
        "apart-what-is-kept-is-ranked-again",
        "eviction = replace(eviction, doomed_blocks=())",
        "pass",
        APART,
    ),
    Mutant(
        "apart-the-last-token-stays-as-it-was-computed-here",
        "kv_cache[blocks] = pages",
        "kv_cache[blocks[:-1]] = pages[:-1]",
        APART,
    ),
    Mutant(
        "apart-a-prefill-server-evicts-of-its-own-answers",
        "if computes_for_others(self.vllm_config) and request.max_tokens > 1:",
        "if False:",
        APART,
    ),
    Mutant(
        "apart-the-first-answer-is-sampled-from-nothing",
        'logits.copy_(tensors["logits"])',
        "pass",
        APART,
    ),
    Mutant(
        "apart-lanes-are-not-checked",
        "or int(owners.max()) >= heads:",
        "or False:",
        APART,
    ),
    Mutant(
        "apart-a-lost-file-is-not-reported",
        "lost.extend(one.table)",
        "pass",
        APART,
    ),
    Mutant(
        "apart-scores-of-former-owners-stay",
        "state.planes[:, :, list(load.blocks)] = 0",
        "pass",
        APART,
    ),
    Mutant(
        "apart-blocks-that-may-be-lost-go-to-others",
        "self._held[request_id] += blocks",
        "self._pool.free_blocks(blocks)",
        LOST,
    ),
    Mutant(
        "apart-what-may-be-lost-is-published",
        "num_tokens = 0 if loads else state.publishable_tokens(num_tokens)",
        "num_tokens = state.publishable_tokens(num_tokens)",
        LOST,
    ),
    Mutant(
        "apart-who-was-not-admitted-loads-for-ever",
        "for name in self._may_load - self._to_load:",
        "for name in ():",
        LOST,
    ),
    Mutant(
        "apart-a-file-that-lost-its-bytes-is-whole",
        "if written is not None and written != _sum(tensors):",
        "if False:",
        FOLDER,
    ),
    Mutant(
        "apart-what-cannot-be-stored-ends-the-engine",
        "            save_prompt(save, self._caches())\n        except LOST as error:",
        "            save_prompt(save, self._caches())\n        except KeyError as error:",
        APART,
    ),
    Mutant(
        "apart-a-bound-deletes-files-of-others",
        "if path.is_symlink() or NAME.fullmatch(path.name) is None:",
        "if path.is_symlink():",
        FOLDER,
    ),
    Mutant(
        "apart-late-queries-are-loaded-over",
        "return Share(max(pinned, state.policy.first_scored(state.prompt_tokens)), 0)",
        "return Share(max(pinned, state.prompt_tokens), 0)",
        APART,
    ),
    Mutant(
        "engine-scores-are-never-split",
        "state.finish_step()",
        "pass",
        ("tests/engine/test_policies.py", *CUDA),
    ),
    Mutant(
        "engine-late-begins-a-query-early",
        "return max(0, prompt_tokens - END_QUERIES) if apart",
        "return max(0, prompt_tokens - 1 - END_QUERIES) if apart",
        ("tests/policy/test_policy.py", *CUDA),
    ),
    Mutant(
        "engine-cuda-unscored-rows-that-share-go-to-vllms-kernel",
        "rows.decodes if shared is None else rows.decodes | shared",
        "rows.decodes",
        CUDA,
    ),
    Mutant(
        "engine-cuda-a-second-eviction-rescores-own-lanes",
        "rescore_of(one, self._lanes_slot(one), self.first_head)",
        "rescore_of(one, -1, self.first_head)",
        CUDA,
    ),
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
        "engine-a-trace-takes-every-lane-for-its-own-heads",
        "recorder.record(eviction, self.scores, self._owners(eviction))",
        "recorder.record(eviction, self.scores)",
        ("tests/engine/test_trace.py", *LANES),
    ),
    Mutant(
        "engine-a-seed-draws-in-the-midst-of-its-prompt",
        "if discarded[row]}",
        "if False}",
        TOKENS,
    ),
    Mutant(
        "engine-old-scores-stay",
        "self._reset(scores, slot_mapping[places])",
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
        "engine-nobody-knows-what-is-pinned-on-gpus",
        "self._pinned[slot] = params.pinned",
        "self._pinned[slot] = 0",
        CUDA,
    ),
    Mutant(
        "engine-cuda-prompts-are-scored-from-their-start",
        "counts = rows.scored_queries",
        "counts = rows.query_lens",
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
        "self.step_variant.current = variant_of(",
        "self.step_variant.current = self.step_variant.current if rows is None else variant_of(",
        CUDA,
    ),
    Mutant(
        "engine-cuda-grids-of-what-was-seen",
        "self.policies.holes(common.req_idx) * self.block_size",
        "self.policies.holes(common.req_idx) * 0",
        CUDA,
    ),
    Mutant(
        "engine-cuda-shared-lanes-of-the-last-request",
        "self._holes[slot], self._shared[slot] = params.holes, 0",
        "self._holes[slot] = params.holes",
        CUDA,
    ),
    Mutant(
        "engine-cuda-compaction-is-not-checked-for-waiting",
        "@sync_checked\n    def",
        "def",
        CUDA,
    ),
    Mutant(
        "engine-predicts-neighbours-as-halves",
        "(*given, interleaved=interleaved)",
        "(*given, interleaved=False)",
        PREDICTING,
        "engine/cpu/predicting.py",
    ),
    Mutant(
        "calibration-learns-from-the-first-token",
        "known, wanted, keys = known[:, 1:], wanted[:, 1:], keys[:, 1:]",
        "pass",
        ("tests/calibration/test_learner.py",),
    ),
    Mutant(
        "trace-ranks-by-other-tokens-scores",
        "scores[:, blocks], owners)",
        "scores[:, blocks[::-1]], owners)",
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
