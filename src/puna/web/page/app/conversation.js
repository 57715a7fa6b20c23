/**
 * A conversation as data: what was said, and what the server is asked. Knows neither the page nor the network.
 *
 * messages: {role, content, thinking?, images?, tool_calls?, tool_name?, error?, stopped?, stats?}
 */

export function emptyConversation(model = "", settings = {}) {
  return { id: newId(), title: "", model, settings, messages: [], changed: Date.now() };
}

/** Browsers have no randomUUID where the page came without TLS from another machine. */
function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = conversation.messages.find((message) => message.role === "user");
  const text = (first?.content ?? "").replace(/\s+/g, " ").trim();
  if (!text) return first?.images?.length ? "A picture" : "New chat";
  return text.length > 60 ? `${text.slice(0, 59)}…` : text;
}

/** The person says something, or says it again in other words: then all that came after it goes. */
export function say(conversation, content, images = [], at = conversation.messages.length) {
  conversation.messages.splice(at);
  conversation.messages.push({ role: "user", content, ...(images.length ? { images } : {}) });
}

/** The calls of the message at *at* whose results are still to come, in their order; none where anything else was said since. */
export function openCalls(conversation, at) {
  const since = conversation.messages.slice(at + 1);
  if (since.some((message) => message.role !== "tool")) return [];
  return (conversation.messages[at].tool_calls ?? []).slice(since.length);
}

/** What a tool came back with. */
export function giveResult(conversation, name, content) {
  conversation.messages.push({ role: "tool", tool_name: name, content });
}

/** An answer begins, in the place of the one at *at* if there was one. */
export function beginAnswer(conversation, at = conversation.messages.length) {
  conversation.messages.splice(at);
  const message = { role: "assistant", content: "" };
  conversation.messages.push(message);
  return message;
}

/** A line of the server's answer is added to a message. */
export function addPart(message, part, now) {
  const { content = "", thinking = "", tool_calls = [] } = part.message ?? {};
  if (thinking) {
    message.thinkingSince ??= now;
    message.thinking = (message.thinking ?? "") + thinking;
  }
  if (content || tool_calls.length || part.done) endThinking(message, now);
  message.content += content;
  if (tool_calls.length) message.tool_calls = [...(message.tool_calls ?? []), ...tool_calls];
  if (part.done) message.stats = statsOf(part);
}

/** However it ended: what counts the time of thinking is no part of what is kept. */
export function endThinking(message, now) {
  if (message.thinkingSince === undefined) return;
  message.thinkingSeconds = (message.thinkingSeconds ?? 0) + (now - message.thinkingSince) / 1000;
  delete message.thinkingSince;
}

function statsOf(part) {
  const seconds = (part.eval_duration ?? 0) / 1e9;
  return {
    tokens: part.eval_count ?? 0,
    perSecond: seconds > 0 ? (part.eval_count ?? 0) / seconds : 0,
    prompt: part.prompt_eval_count ?? 0,
    cached: part.cached_count ?? 0,
    reason: part.done_reason ?? "",
    warnings: part.warnings ?? [],
  };
}

/** What the server is asked for the next answer. Answers that failed with nothing said are left out. */
export function requestOf(conversation) {
  const { system, think, tools, ...options } = conversation.settings;
  const said = conversation.messages.filter((m) => m.role !== "assistant" || m.content || m.thinking || m.tool_calls);
  return {
    model: conversation.model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...said.map(wireMessage)],
    stream: true,
    ...(think === undefined || think === "" ? {} : { think: THINK[think] ?? think }),
    ...(tools?.length ? { tools } : {}),
    ...(Object.keys(options).length ? { options } : {}),
  };
}

const THINK = { on: true, off: false };

function wireMessage({ role, content, thinking, images, tool_calls, tool_name }) {
  return {
    role,
    content,
    ...(thinking ? { thinking } : {}),
    ...(images?.length ? { images: images.map((image) => image.data) } : {}),
    ...(tool_calls?.length ? { tool_calls } : {}),
    ...(tool_name ? { tool_name } : {}),
  };
}

const ROLES = new Set(["user", "assistant", "tool", "system"]);

/** Conversations from a file that may hold anything. Errors: TypeError. */
export function conversationsFrom(value) {
  const list = Array.isArray(value?.conversations) ? value.conversations : Array.isArray(value) ? value : [value];
  return list.map((item) => {
    if (!Array.isArray(item?.messages)) throw new TypeError("This file holds no conversations.");
    const messages = item.messages.map(messageFrom);
    const fresh = emptyConversation(
      String(item.model ?? ""),
      typeof item.settings === "object" && item.settings ? item.settings : {},
    );
    return { ...fresh, title: String(item.title ?? ""), messages, changed: Number(item.changed) || Date.now() };
  });
}

/** What is known of a message, and nothing else of what a file may say. */
function messageFrom(value) {
  if (!ROLES.has(value?.role) || typeof value.content !== "string")
    throw new TypeError("A message in this file cannot be read.");
  const message = { role: value.role, content: value.content };
  if (typeof value.thinking === "string") message.thinking = value.thinking;
  if (typeof value.tool_name === "string") message.tool_name = value.tool_name;
  const images = listOf(value.images).filter(({ type, data }) => typeof type === "string" && typeof data === "string");
  const calls = listOf(value.tool_calls).filter((call) => typeof call.function?.name === "string");
  return { ...message, ...(images.length ? { images } : {}), ...(calls.length ? { tool_calls: calls } : {}) };
}

function listOf(value) {
  return Array.isArray(value) ? value.filter((item) => item && typeof item === "object") : [];
}

/** For people: what was said, as Markdown. */
export function asMarkdown(conversation) {
  const names = { user: "You", assistant: conversation.model || "Model", tool: "Tool", system: "System" };
  const parts = conversation.messages.map((message) => `## ${names[message.role]}\n\n${message.content}`);
  return [`# ${titleOf(conversation)}`, ...parts].join("\n\n") + "\n";
}
