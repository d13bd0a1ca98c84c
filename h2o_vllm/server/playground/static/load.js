// SPDX-License-Identifier: Apache-2.0
// Sixteen requests at once, as one body: a browser opens six connections to a server, not sixteen.

import { ask } from "./api.js";
import { peakDuring } from "./gauges.js";
import { TEXT } from "./sample.js";

// Together 14,000 tokens in the end: more than the pool of deploy/quickstart, where budgets save time.
const REQUESTS = 16;
const MAX_TOKENS = 256;
const CHARACTERS = 2400; // some 620 tokens

const number = new Intl.NumberFormat("en");
const newest = {}; // result of each budget

/** Sends them with the server's own defaults but for the budget, and adds a row to the table. */
export async function send(model, budget, cache) {
  // Another first line for each: none reads the prompt of another from the prefix cache.
  const prompt = Array.from(
    { length: REQUESTS },
    (_, i) => `Copy ${crypto.randomUUID()}, page ${i + 1}.\n${TEXT.slice(0, CHARACTERS)}`,
  );
  const started = performance.now();
  const body = { model, prompt, max_tokens: MAX_TOKENS, ignore_eos: true, kv_budget: budget };
  const { result, peak } = await peakDuring(async () => (await ask("v1/completions", body)).json());
  const seconds = (performance.now() - started) / 1000;
  const speed = result.usage.completion_tokens / seconds;
  const row = document.createElement("tr");
  const cells = [
    budget,
    seconds.toFixed(1),
    speed.toFixed(0),
    result.kv_cache.tokens_seen,
    result.kv_cache.tokens_held,
    // Unknown if the requests ended before the first look.
    peak || "-",
    Math.floor((REQUESTS * cache.num_tokens) / result.kv_cache.tokens_held),
  ];
  for (const value of cells) row.insertCell().textContent = String(value);
  const table = document.getElementById("loads");
  table.tBodies[0].append(row);
  table.hidden = false;
  newest[budget] = { budget, speed, seen: result.kv_cache.tokens_seen };
  document.getElementById("load-note").textContent = explain(Object.values(newest), cache);
}

/** What the two newest results say, and why there is no gain where there is none. */
export function explain(results, cache) {
  const full = results.find((one) => one.budget === 1);
  const kept = results.find((one) => one.budget < 1);
  const pool = cache.num_tokens;
  const needed = (full ?? kept).seen;
  const need = `With all of their KV these requests need ${number.format(needed)} tokens of the ${number.format(pool)} in the pool`;
  const gain = full && kept ? `: ${(kept.speed / full.speed).toFixed(1)} times the tokens per second with the budget. ` : ". ";
  if (needed > pool)
    return `${need}${gain}With the budget more of them run at once; without it they wait for memory.`;
  return (
    `${need}${gain}All of them run at once either way, so a budget frees memory here and saves no time. ` +
    "It saves time where memory is short: start the server with a small pool, --num-gpu-blocks-override 260, and compare again."
  );
}
