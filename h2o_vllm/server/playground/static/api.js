// SPDX-License-Identifier: Apache-2.0
// Requests to this server, and to no other. The key stays in this tab.

const root = new URL("../", location.href);
const STORED = "h2o-key";

/** What the server answered instead of what was asked for. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function useKey(key) {
  sessionStorage.setItem(STORED, key);
}

/** A response with status 200, else a ServerError. */
export async function ask(path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem(STORED);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const options = { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal };
  const response = await reached(fetch(new URL(path, root), options), "The server cannot be reached.");
  if (!response.ok) throw new ServerError(response.status, await reason(response));
  return response;
}

/** Browsers say of a lost connection what each likes to. */
function reached(promise, otherwise) {
  return promise.catch((error) => {
    throw error instanceof TypeError ? new Error(otherwise) : error;
  });
}

async function reason(response) {
  const text = await response.text();
  try {
    const { error, detail } = JSON.parse(text);
    return error?.message ?? error ?? detail ?? text;
  } catch {
    return text || response.statusText;
  }
}

/** The data of each server-sent event, parsed, until [DONE]. */
export async function* events(response) {
  const broken = "The connection broke off before the answer was complete.";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let partial = "";
  for (;;) {
    const { value, done } = await reached(reader.read(), broken);
    if (done) throw new Error(broken);
    const parts = (partial + value).split("\n\n");
    partial = parts.pop();
    for (const part of parts) {
      const data = part.startsWith("data: ") ? part.slice(6) : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}
