// SPDX-License-Identifier: Apache-2.0
// One streamed answer of a chat, with what the server reports of it.

import { ask, events } from "./api.js";

const ENOUGH = 16; // tokens; the speed of fewer is that of whatever else runs

/**
 * Asks for an answer.
 *
 * @param body model, messages and max_tokens, and the budget fields.
 * @param onText is given each new piece of the answer.
 * @returns text; tokenIds of prompt and answer, of which the prompt has `prompt`; report, the kv_cache object;
 *   firstAfter, seconds to the first token; perSecond, of tokens after the first. Both are null where there are too
 *   few tokens.
 */
export async function answer(body, onText, signal) {
  const stream = {
    stream: true,
    stream_options: { include_usage: true },
    temperature: 0,
    return_token_ids: true,
  };
  const started = performance.now();
  const response = await ask("v1/chat/completions", { ...body, ...stream }, signal);
  const result = { text: "", tokenIds: [], prompt: 0, report: null, firstAfter: null, perSecond: null };
  let [answered, first, last] = [0, null, null];
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    result.report = event.kv_cache ?? result.report;
    if (event.prompt_token_ids) {
      result.tokenIds.push(...event.prompt_token_ids);
      result.prompt = event.prompt_token_ids.length;
    }
    const choice = event.choices?.[0];
    if (choice?.token_ids) result.tokenIds.push(...choice.token_ids);
    answered += choice?.token_ids?.length ?? 0;
    const piece = choice?.delta?.content;
    if (!piece) continue;
    last = performance.now();
    first ??= last;
    result.text += piece;
    onText(piece);
  }
  if (first !== null) result.firstAfter = (first - started) / 1000;
  if (answered >= ENOUGH && last > first) result.perSecond = ((answered - 1) * 1000) / (last - first);
  return result;
}
