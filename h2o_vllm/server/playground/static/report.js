// SPDX-License-Identifier: Apache-2.0
// Names and values in a list; what stands under an answer.

const number = new Intl.NumberFormat("en");

/** Replaces a dl's rows by [name, value] pairs. */
export function list(dl, rows) {
  dl.replaceChildren(
    ...rows.map(([name, value]) => {
      const [row, dt, dd] = ["div", "dt", "dd"].map((tag) => document.createElement(tag));
      dt.textContent = name;
      dd.textContent = typeof value === "number" ? number.format(value) : value;
      row.append(dt, dd);
      return row;
    }),
  );
}

/** What the server says of an answer. */
export function showReport(dl, { report, perSecond }) {
  if (!report) return list(dl, [["report", "none"]]);
  list(dl, [
    ["tokens seen", report.tokens_seen],
    ["held", report.tokens_held],
    ["evicted", report.tokens_evicted],
    ["blocks at the end", Math.ceil(report.tokens_held / report.block_size)],
    ["most blocks", report.peak_blocks],
    ["read from the cache", report.tokens_cached],
    ["tokens/s", perSecond === null ? "-" : perSecond.toFixed(1)],
    ["lossless", report.squeezed_at === null ? "yes" : "no"],
  ]);
}
