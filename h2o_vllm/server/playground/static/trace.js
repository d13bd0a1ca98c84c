// SPDX-License-Identifier: Apache-2.0
// What a trace says. Functions of plain values: no page, no server.

/**
 * The history of a kv_cache.trace: with which eviction each position went, for each layer and KV head.
 *
 * number[(layer * heads + head) * tokens + position] counts evictions from 1; 0 is held.
 */
export function decode(trace) {
  const { layers, kv_heads: heads, evicted_at: evictedAt, kept } = trace;
  const tokens = kept.length;
  const number = new Uint16Array(layers * heads * tokens);
  trace.lost.flat().forEach((runs, pair) => {
    let at = pair * tokens;
    for (let i = 0; i < runs.length; i += 2) {
      number.fill(runs[i], at, at + runs[i + 1]);
      at += runs[i + 1];
    }
  });
  return { layers, heads, tokens, evictedAt, number };
}

/** How many tokens there are between eviction `time` and the next one; 0 is before all of them. */
export function seenAt(history, time) {
  return history.evictedAt[time] ?? history.tokens;
}

/**
 * For each position the share of the chosen layers and heads that hold it after eviction `time`.
 *
 * @param chosen { layer, head }, numbers; null is all of them.
 */
export function shares(history, time, chosen) {
  const { tokens, number } = history;
  const held = new Float32Array(tokens);
  const starts = startsOf(history, chosen);
  for (const start of starts)
    for (let at = 0; at < tokens; at++) if (isHeld(number[start + at], time)) held[at]++;
  return held.map((count) => count / starts.length);
}

/** How many of the tokens seen by then each of the chosen layers and heads holds after eviction `time`. */
export function counts(history, time, chosen) {
  const seen = seenAt(history, time);
  return startsOf(history, chosen).map(
    (start) => history.number.subarray(start, start + seen).filter((gone) => isHeld(gone, time)).length,
  );
}

function isHeld(gone, time) {
  return gone === 0 || gone > time;
}

/** Where the numbers of each chosen layer and head begin. */
function startsOf({ layers, heads, tokens }, chosen) {
  const starts = [];
  for (let layer = 0; layer < layers; layer++)
    for (let head = 0; head < heads; head++)
      if ((chosen.layer ?? layer) === layer && (chosen.head ?? head) === head)
        starts.push((layer * heads + head) * tokens);
  return starts;
}
