/**
 * Answers that are being written. Each goes on while another page is shown, and is kept as it grows: whoever comes back, or
 * loads the page anew, finds what there is.
 */

import { addPart, beginAnswer, endThinking, requestOf } from "./conversation.js";
import { stream } from "./server.js";
import { keep } from "./shelf.js";

const KEPT_EVERY_MS = 1000;
const running = new Map(); // by the conversation's id

/** The answer that is being written in a conversation, if one is. */
export function runningAnswer(id) {
  return running.get(id);
}

/** Ends it; what was written stays. */
export async function stopAnswer(id) {
  const answer = running.get(id);
  answer?.stopper.abort();
  await answer?.ended;
}

export function stopAllAnswers() {
  return Promise.all([...running.keys()].map(stopAnswer));
}

/**
 * Ask for the next answer of a conversation, in the place of its message *at* if that is given.
 *
 * Of what is returned, ``message`` grows, ``onpart`` is called whenever it has, and ``ended`` is fulfilled once all is kept.
 */
export function startAnswer(conversation, at) {
  if (at !== undefined) conversation.messages.splice(at);
  const request = requestOf(conversation);
  const message = beginAnswer(conversation);
  const answer = { conversation, message, stopper: new AbortController(), onpart: null };
  running.set(conversation.id, answer);
  answer.ended = write(answer, request);
  return answer;
}

async function write(answer, request) {
  const { conversation, message, stopper } = answer;
  await store(conversation, message);
  let keptAt = performance.now();
  try {
    for await (const part of stream("api/chat", { method: "POST", body: request, signal: stopper.signal })) {
      const now = performance.now();
      addPart(message, part, now);
      answer.onpart?.();
      if (now - keptAt > KEPT_EVERY_MS) {
        keptAt = now;
        await store(conversation, message);
      }
    }
    if (!message.stats) throw new Error("The answer broke off before its end.");
  } catch (error) {
    if (stopper.signal.aborted) message.stopped = true;
    else message.error = error.message;
  } finally {
    endThinking(message, performance.now());
    running.delete(conversation.id);
    await store(conversation, message);
  }
}

async function store(conversation, message) {
  conversation.changed = Date.now();
  try {
    await keep(conversation);
  } catch (error) {
    message.error ??= `This chat could not be kept in the browser: ${error.message}`;
  }
}
