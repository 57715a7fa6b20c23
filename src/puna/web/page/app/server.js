/** Requests to the server that this page came from, and what it says when it refuses. */

import { askForKey, keyHeaders } from "./key.js";
import { jsonLines } from "./lines.js";

export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** *path* is relative: behind a proxy the server may not be at the root. */
async function respond(path, { method = "GET", body, signal } = {}) {
  let response;
  try {
    response = await fetch(path, {
      method,
      signal,
      headers: { ...keyHeaders(), ...(body === undefined ? {} : { "content-type": "application/json" }) },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ServerError("The server cannot be reached.");
  }
  if (response.ok) return response;
  const text = await response.text();
  let said = text;
  try {
    said = JSON.parse(text).error ?? text;
  } catch {
    // not every refusal is JSON
  }
  if (response.status === 401 && (await askForKey("This server asks for one of its API keys."))) {
    return respond(path, { method, body, signal });
  }
  throw new ServerError(String(said || `${response.status} ${response.statusText}`), response.status);
}

export async function json(path, options) {
  const text = await (await respond(path, options)).text();
  return text ? JSON.parse(text) : null;
}

/** The values of a streamed answer; a line that is an error is thrown. */
export async function* stream(path, options) {
  const response = await respond(path, options);
  try {
    for await (const line of jsonLines(response.body)) {
      if (line.error) throw new ServerError(String(line.error));
      yield line;
    }
  } catch (error) {
    if (error instanceof ServerError || options?.signal?.aborted) throw error;
    throw new ServerError("The connection to the server broke off.");
  }
}
