// SPDX-License-Identifier: Apache-2.0
// The heat map: layers x positions, each cell the share of heads that hold the token.

import { seenAt, shares } from "./trace.js";

/** Draws the state after eviction `time`; `head` null is all of them. One pixel a cell, stretched by CSS. */
export function drawHeat(canvas, history, time, head) {
  const { layers, tokens } = history;
  canvas.width = tokens;
  canvas.height = layers;
  const [none, all] = ["--heat-none", "--heat-all"].map((name) =>
    getComputedStyle(canvas).getPropertyValue(name).trim().split(/\s+/).map(Number),
  );
  const context = canvas.getContext("2d");
  const image = context.createImageData(tokens, layers);
  const seen = seenAt(history, time);
  for (let layer = 0; layer < layers; layer++) {
    const held = shares(history, time, { layer, head });
    for (let at = 0; at < seen; at++) {
      const cell = (layer * tokens + at) * 4;
      for (let i = 0; i < 3; i++) image.data[cell + i] = none[i] + (all[i] - none[i]) * held[at];
      image.data[cell + 3] = 255;
    }
  }
  context.putImageData(image, 0, 0);
}
