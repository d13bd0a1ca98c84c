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

/** What the server says of an answer, below it: in one line, and in full. */
export function showReport(side, { report, firstAfter, perSecond }) {
  const [dl, held] = ["dl", ".held"].map((selector) => side.querySelector(selector));
  held.hidden = !report;
  if (!report) return list(dl, [["report", "none"]]);
  const reason = report.nothing_evicted_reason;
  const [bar, part] = ["span", "span"].map((tag) => document.createElement(tag));
  bar.className = "bar";
  part.style.width = `${(100 * report.tokens_held) / report.tokens_seen}%`;
  bar.append(part);
  const counts = [report.tokens_held, report.tokens_seen].map((count) => number.format(count));
  const why = reason ? `. Nothing was evicted: ${reason}.` : "";
  held.replaceChildren(`Holds the KV of ${counts[0]} of ${counts[1]} tokens${why}`, bar);
  list(dl, [
    ["tokens seen", report.tokens_seen],
    ["held", report.tokens_held],
    ["evicted", report.tokens_evicted],
    ["blocks at the end", Math.ceil(report.tokens_held / report.block_size)],
    ["most blocks", report.peak_blocks],
    ["read from the cache", report.tokens_cached],
    ["settled", report.tokens_settled],
    ["first token, s", firstAfter === null ? "-" : firstAfter.toFixed(2)],
    ["tokens/s", perSecond === null ? "-" : perSecond.toFixed(1)],
    ["lossless", report.squeezed_at === null ? "yes" : "no"],
  ]);
}
