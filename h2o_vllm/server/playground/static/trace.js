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
  const { layers, heads, tokens, number } = history;
  const held = new Float32Array(tokens);
  let pairs = 0;
  for (let layer = 0; layer < layers; layer++) {
    if (chosen.layer !== null && chosen.layer !== layer) continue;
    for (let head = 0; head < heads; head++) {
      if (chosen.head !== null && chosen.head !== head) continue;
      pairs++;
      const start = (layer * heads + head) * tokens;
      for (let at = 0; at < tokens; at++) {
        const gone = number[start + at];
        if (gone === 0 || gone > time) held[at]++;
      }
    }
  }
  return held.map((count) => count / pairs);
}
