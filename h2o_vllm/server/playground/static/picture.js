// SPDX-License-Identifier: Apache-2.0
// The heavy-hitter picture: tokens shaded by the heads that hold them, a slider over time.

import { counts, decode, seenAt, shares } from "./trace.js";

const element = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en");

let history = null;
let pieces = [];
let current = 0;

/** Shows a trace, at first the place of `words`. `texts` are the tokens of prompt and answer; the last has no KV. */
export function show(trace, texts, words) {
  history = decode(trace);
  pieces = texts;
  current = placeOf(words);
  fill("layer", history.layers);
  fill("head", history.heads);
  const time = element("time");
  time.max = history.evictedAt.length;
  time.value = time.max;
  const spans = Array.from({ length: history.tokens }, (_, at) => {
    const span = document.createElement("span");
    span.textContent = texts[at];
    span.dataset.position = at;
    return span;
  });
  element("tokens").replaceChildren(...spans);
  element("picture").hidden = false;
  element("no-picture").hidden = true;
  draw();
  const panel = element("tokens");
  panel.scrollTop = spans[current].offsetTop - panel.offsetTop - panel.clientHeight / 2;
}

/** The token in which `words` begin; the first one where they do not occur. */
function placeOf(words) {
  let rest = pieces.join("").indexOf(words);
  if (rest < 0) return 0;
  return pieces.findIndex((piece) => (rest -= piece.length) < 0);
}

/** Says why there is nothing to see. */
export function showNothing(reason) {
  history = null;
  element("picture").hidden = true;
  element("no-picture").hidden = false;
  element("no-picture").textContent = reason;
}

function fill(id, count) {
  const options = Array.from({ length: count }, (_, i) => new Option(String(i), String(i)));
  element(id).replaceChildren(new Option("all", ""), ...options);
}

function chosen() {
  const [layer, head] = ["layer", "head"].map((id) => element(id).value);
  return { layer: layer === "" ? null : Number(layer), head: head === "" ? null : Number(head) };
}

function draw() {
  if (!history) return;
  const time = Number(element("time").value);
  const seen = seenAt(history, time);
  const held = shares(history, time, chosen());
  [...element("tokens").children].forEach((span, at) => {
    span.className = `token ${at < seen ? shade(held[at]) : "future"}`;
    span.dataset.share = held[at].toFixed(4);
  });
  const evictions = history.evictedAt.length;
  const when = time === 0 ? "before any eviction" : `after eviction ${time} of ${evictions}`;
  element("time-value").textContent = `${when}, ${number.format(seen)} tokens seen`;
  const alive = held.subarray(0, seen);
  const everywhere = alive.filter((share) => share === 1).length;
  const nowhere = alive.filter((share) => share === 0).length;
  element("summary").textContent =
    `Of ${number.format(seen)} tokens each layer and head holds ${howMany(counts(history, time, chosen()))}, its own ` +
    `choice: ${number.format(everywhere)} are held by all, ${number.format(nowhere)} by none.`;
  describe();
}

/** Where heads share slots some hold more than others. */
function howMany(held) {
  const [least, most] = [Math.min(...held), Math.max(...held)].map((count) => number.format(count));
  if (least === most) return most;
  const mean = held.reduce((sum, count) => sum + count, 0) / held.length;
  return `${number.format(Math.round(mean))} on average (${least} to ${most})`;
}

/** The class of a token that this share of layers and heads holds. */
function shade(share) {
  return share === 0 ? "gone" : `k${Math.max(1, Math.round(share * 10))}`;
}

function describe() {
  const spans = element("tokens").children;
  for (const span of element("tokens").querySelectorAll(".current")) span.classList.remove("current");
  const span = spans[current];
  span.classList.add("current");
  const percent = Math.round(Number(span.dataset.share) * 100);
  const text = JSON.stringify(pieces[current]);
  element("token").textContent = span.classList.contains("future")
    ? `${current}: ${text}, not there yet.`
    : `${current}: ${text}, held by ${percent} %.`;
}

function move(to) {
  if (!history) return;
  current = Math.min(Math.max(to, 0), history.tokens - 1);
  describe();
}

/** Listens to the controls. */
export function connect() {
  for (const id of ["layer", "head", "time"]) element(id).addEventListener("input", draw);
  const tokens = element("tokens");
  // Not pointerover: scrolling with the keys must not move a pointer that lies still.
  tokens.addEventListener("pointermove", (event) => {
    const at = event.target.dataset.position;
    if (at !== undefined) move(Number(at));
  });
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 };
  tokens.addEventListener("keydown", (event) => {
    if (!(event.key in steps)) return;
    event.preventDefault();
    move(current + steps[event.key]);
    tokens.children[current].scrollIntoView({ block: "nearest" });
  });
}
