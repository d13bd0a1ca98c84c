// SPDX-License-Identifier: Apache-2.0
// Sixteen requests at once, as one body: a browser opens six connections to a server, not sixteen.

import { ask } from "./api.js";
import { peakDuring } from "./gauges.js";
import { TEXT } from "./sample.js";

const REQUESTS = 16;
const MAX_TOKENS = 128;
const CHARACTERS = 2400; // some 500 tokens

/** Sends them and adds a row to the table. `blocks` are those of the pool. */
export async function send(model, budget, blocks) {
  // Another first line for each: none reads the prompt of another from the prefix cache.
  const prompt = Array.from(
    { length: REQUESTS },
    (_, i) => `Copy ${crypto.randomUUID()}, page ${i + 1}.\n${TEXT.slice(0, CHARACTERS)}`,
  );
  const started = performance.now();
  const budgets = { kv_budget: budget, kv_elastic: false, kv_protect: 0, kv_delay: 0 };
  const body = { model, prompt, max_tokens: MAX_TOKENS, ignore_eos: true, ...budgets };
  const { result, peak } = await peakDuring(async () => (await ask("v1/completions", body)).json());
  const seconds = (performance.now() - started) / 1000;
  const row = document.createElement("tr");
  const cells = [
    budget,
    seconds.toFixed(1),
    (result.usage.completion_tokens / seconds).toFixed(0),
    result.kv_cache.tokens_seen,
    result.kv_cache.tokens_held,
    // Over before anybody looked: not known.
    peak || "-",
    peak ? Math.floor((REQUESTS * blocks) / peak) : "-",
  ];
  for (const value of cells) row.insertCell().textContent = String(value);
  const table = document.getElementById("loads");
  table.tBodies[0].append(row);
  table.hidden = false;
}
