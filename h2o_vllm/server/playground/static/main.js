// SPDX-License-Identifier: Apache-2.0
// The page: reads the controls, asks both sides, shows what comes.

import { ask, ServerError, useKey } from "./api.js";
import { answer } from "./chat.js";
import { connect as connectPicture, show, showNothing } from "./picture.js";
import { showReport } from "./report.js";
import { CODE, CODE_QUESTION, FACT, QUESTION, TEXT } from "./sample.js";

const element = (id) => document.getElementById(id);
const MAX_FULL = 1;

let config = null;
let chats = { kept: [], full: [] };
let running = null;

async function begin() {
  try {
    config = await (await ask("plugins/h2o/config")).json();
  } catch (error) {
    element("key-form").hidden = error.status !== 401;
    element("server").textContent = "";
    return complain(error.status === 401 ? new Error("This server wants its API key.") : error);
  }
  element("key-form").hidden = true;
  complain(null);
  const { defaults, limits, versions } = config;
  element("server").textContent =
    `${config.models[0]}, vLLM ${versions.vllm}, blocks of ${config.kv_cache.block_size} tokens. ` +
    `No budget falls below ${limits.kv_min_tokens} tokens. ` +
    (defaults.kv_delay ? `Nothing is evicted within the first ${defaults.kv_delay} tokens of an answer (kv_delay).` : "");
  element("policy").replaceChildren(
    new Option(`this server's: ${defaults.kv_policy}`, ""),
    ...limits.kv_policies.map((name) => new Option(name)),
  );
  element("budget").min = Math.max(0.05, limits.kv_budget_min);
  element("budget").max = limits.kv_budget_max;
  element("budget").value = defaults.kv_budget < 1 ? defaults.kv_budget : 0.2;
  element("delay").value = defaults.kv_delay;
  element("delay").max = limits.kv_delay_max;
  element("settle").value = defaults.kv_settle_tokens;
  element("settle").disabled = limits.no_settling_reason !== "";
  element("settle-note").textContent = limits.no_settling_reason && `0 on this server: ${limits.no_settling_reason}`;
  if (limits.kv_budget_max < MAX_FULL)
    say("full", "note", `This server keeps at most ${limits.kv_budget_max}: there is no full KV to compare with.`);
  if (!limits.kv_trace)
    showNothing("This server cannot show which tokens are kept: it does not trace. Servers on CPUs do, " +
      "and keep the same tokens; see --kv-trace.");
  showBudget();
}

/** The fields of the side with the budget. */
function fields() {
  const protect = element("protect").value;
  const recent = element("recent").valueAsNumber;
  const settle = Number(element("settle").value);
  const asked = {
    kv_budget: element("budget").valueAsNumber,
    // Left empty it is the server's, which depends on the other fields.
    ...(element("policy").value ? { kv_policy: element("policy").value } : {}),
    ...(protect ? { kv_protect: protect === "0" ? 0 : protect } : {}),
    kv_settle_tokens: settle,
  };
  // Nothing else has an effect on segments that settle, and they have no trace.
  if (settle) return asked;
  return {
    ...asked,
    // Left empty it is the server's, which depends on the policy.
    ...(Number.isNaN(recent) ? {} : { kv_recent: recent }),
    kv_delay: element("delay").valueAsNumber,
    // What a budget keeps is to be seen, also where there is memory for all.
    kv_elastic: false,
    ...(config.limits.kv_trace ? { kv_trace: true } : {}),
  };
}

async function askBoth(question) {
  if (running || !config) return;
  const text = element("text").value.trim();
  const content = chats.kept.length || !text ? question : `${text}\n\n${question}`;
  const sides = { kept: fields() };
  if (config.limits.kv_budget_max >= MAX_FULL) sides.full = { kv_budget: 1, kv_protect: 0 };
  running = new AbortController();
  setBusy(true);
  complain(null);
  const asked = Object.entries(sides).map(([side, budget]) => {
    say(side, "user", question);
    return askOne(side, content, budget);
  });
  const failed = (await Promise.allSettled(asked)).filter((one) => one.status === "rejected");
  const reason = failed.map((one) => one.reason).find((error) => error.name !== "AbortError");
  if (reason) complain(reason);
  running = null;
  setBusy(false);
}

async function askOne(side, content, budget) {
  element(`${side}-title`).textContent =
    side === "full" ? "Full KV" : `kv_budget ${budget.kv_budget}, ${budget.kv_policy ?? config.defaults.kv_policy}`;
  const line = say(side, "assistant", "");
  const messages = [...chats[side], { role: "user", content }];
  const body = {
    model: config.models[0],
    messages,
    // Left empty it would be all that the model can.
    max_tokens: Number(element("max-tokens").value || element("max-tokens").defaultValue),
    ...budget,
  };
  const log = line.parentElement;
  const onText = (piece) => {
    line.append(piece);
    log.scrollTop = log.scrollHeight;
  };
  let result;
  try {
    result = await traceIfPossible(body, (one) => answer(one, onText, running.signal));
  } catch (error) {
    if (!line.textContent) line.remove();
    say(side, "note", "Not answered to the end; the chat goes on without this question.");
    throw error;
  }
  chats[side] = [...messages, { role: "assistant", content: result.text }];
  showReport(element(`${side}-side`), result);
  say(side, "turn", cost(result));
  if (content.includes(FACT) && content.endsWith(CODE_QUESTION)) say(side, "note", verdict(result));
  if (budget.kv_settle_tokens)
    showNothing("Segments that settle have no trace: with kv_settle_tokens 0 the page shows which tokens are kept.");
  if (result.report?.trace) {
    const ids = { token_ids: result.tokenIds };
    const { pieces } = await (await ask("h2o/pieces", ids, running.signal)).json();
    show(result.report.trace, pieces, FACT);
  }
}

/** What a turn of the chat had to compute. */
function cost({ report, prompt, firstAfter }) {
  const after = firstAfter === null ? "" : `; first token after ${firstAfter.toFixed(2)} s`;
  return `Read from the cache: ${report?.tokens_cached ?? 0} of the prompt's ${prompt} tokens${after}.`;
}

/** What came of the hidden code. */
function verdict({ text, report }) {
  if (text.includes(CODE)) return `The code is ${CODE}: found.`;
  if (!report?.tokens_evicted) return `The code is ${CODE}: not found.`;
  return `The code is ${CODE}: not found. Try a longer kv_delay, kv_policy snapkv, kv_protect the prompt or a larger budget.`;
}

/** An answer does not fail because its trace is refused, as it is too long. */
async function traceIfPossible(body, work) {
  try {
    return await work(body);
  } catch (error) {
    if (!(error instanceof ServerError) || !error.message.startsWith("kv_trace")) throw error;
    showNothing(`No trace of this answer: ${error.message}.`);
    const { kv_trace: _, ...untraced } = body;
    return work(untraced);
  }
}

function say(side, role, text) {
  const line = document.createElement("p");
  line.className = role;
  line.textContent = text;
  element(`${side}-side`).querySelector(".log").append(line);
  return line;
}

function complain(error) {
  element("problem").hidden = !error;
  if (!error) return;
  const status = error instanceof ServerError ? ` (HTTP ${error.status})` : "";
  element("problem").textContent = `${error.message}${status}`;
}

function setBusy(busy) {
  for (const id of ["ask", "find", "clear"]) element(id).disabled = busy;
  element("stop").disabled = !busy;
}

function clear() {
  chats = { kept: [], full: [] };
  for (const side of ["kept", "full"]) {
    element(`${side}-side`).querySelector(".log").replaceChildren();
    element(`${side}-side`).querySelector("dl").replaceChildren();
    element(`${side}-side`).querySelector(".held").hidden = true;
  }
}

function showBudget() {
  element("budget-value").textContent = `${Math.round(element("budget").valueAsNumber * 100)} %`;
}

element("budget").addEventListener("input", showBudget);
element("ask-form").addEventListener("submit", (event) => {
  event.preventDefault();
  askBoth(element("question").value);
});
element("find").addEventListener("click", () => {
  clear();
  element("text").value ||= TEXT;
  element("question").value = CODE_QUESTION;
  askBoth(CODE_QUESTION);
});
element("stop").addEventListener("click", () => running?.abort());
element("clear").addEventListener("click", clear);
element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(element("key").value);
  begin();
});
element("text").value = TEXT;
element("question").value = QUESTION;
connectPicture();
begin();
