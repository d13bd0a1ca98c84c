// SPDX-License-Identifier: Apache-2.0
// Live gauges, read from /metrics while the page is visible.

import { ask } from "./api.js";
import { list } from "./report.js";

const WINDOW = 60; // seconds that the chart shows
const BUSY = 500, IDLE = 2000; // milliseconds between two readings

let cache = { num_blocks: 0, block_size: 1 };
let readings = [];
let peak = 0;
let busy = 0;

/** Begins to read. `config` is the server's, from /plugins/h2o/config. */
export function start(config) {
  cache = config.kv_cache;
  const look = async () => {
    if (!document.hidden) await read();
    setTimeout(look, busy ? BUSY : IDLE);
  };
  look();
}

/** Runs `work` and returns its result with the most blocks that were in use meanwhile. */
export async function peakDuring(work) {
  if (!busy++) peak = 0;
  // The next regular reading may be seconds away.
  const timer = setInterval(read, BUSY / 2);
  try {
    return { result: await work(), peak };
  } finally {
    clearInterval(timer);
    busy--;
  }
}

async function read() {
  const dl = document.getElementById("gauges");
  let sums;
  try {
    sums = samples(await (await ask("metrics")).text());
  } catch (error) {
    return list(dl, [["metrics", error.message]]);
  }
  const at = performance.now() / 1000;
  const used = Math.round(sums("vllm:kv_cache_usage_perc") * cache.num_blocks);
  const full = Math.ceil(sums("h2o:kv_tokens_full") / cache.block_size);
  const generated = sums("vllm:generation_tokens_total");
  readings = [...readings.filter((one) => one.at > at - WINDOW), { at, used, full, generated }];
  peak = Math.max(peak, used);
  const before = readings.find((one) => one.at > at - 3 * (busy ? BUSY : IDLE) / 1000) ?? readings[0];
  const seconds = at - before.at;
  list(dl, [
    ["blocks in use", used],
    ["full KV would need", full],
    ["blocks in the pool", cache.num_blocks],
    ["running", sums("vllm:num_requests_running")],
    ["waiting", sums("vllm:num_requests_waiting")],
    ["tokens/s", seconds > 0 ? ((generated - before.generated) / seconds).toFixed(0) : "-"],
  ]);
  draw(at);
}

/** The sum of a metric over its labels, from Prometheus' text. */
export function samples(text) {
  const sums = new Map();
  for (const line of text.split("\n")) {
    const [, name, value] = line.match(/^([a-z0-9_:]+)(?:\{.*\})? (\S+)/i) ?? [];
    if (name) sums.set(name, (sums.get(name) ?? 0) + Number(value));
  }
  return (name) => sums.get(name) ?? 0;
}

function draw(now) {
  const svg = document.getElementById("chart");
  const { width, height } = svg.viewBox.baseVal;
  const most = Math.max(1, ...readings.map((one) => Math.max(one.used, one.full)));
  const line = (kind) => {
    const polyline = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    polyline.setAttribute("class", kind);
    const points = readings.map((one) => {
      const x = width * (1 - (now - one.at) / WINDOW);
      return `${x.toFixed(2)},${(height - 2 - ((height - 4) * one[kind]) / most).toFixed(2)}`;
    });
    polyline.setAttribute("points", points.join(" "));
    return polyline;
  };
  svg.replaceChildren(line("full"), line("used"));
}
