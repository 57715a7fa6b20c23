/** One message as it is shown: what was said and thought, pictures, calls, and what can be done with it. */

import { h } from "./element.js";
import { iconButton } from "./icons.js";
import { imageUrl } from "./images.js";
import { copyText, renderProse } from "./prose.js";

/**
 * *does*: what the buttons do: edit(text), again(), result(name, text); those that are not there have no button. *awaited* is
 * the call whose result is to be given next.
 * The element has a method ``update`` for a message that grows.
 */
export function messageElement(message, does = {}) {
  const element = h("li", { class: `message ${message.role}` });
  const parts = message.role === "assistant" ? answerParts(message, does) : givenParts(message, does, element);
  element.append(...parts.elements);
  element.update = (isLive) => parts.update?.(isLive);
  parts.update?.(false);
  return element;
}

function givenParts(message, does, element) {
  const name = h(
    "span",
    { class: "unseen" },
    message.role === "tool" ? `Result of ${message.tool_name}:` : "You said:",
  );
  const pictures = message.images?.length ? pictureList(message.images) : null;
  const text = message.role === "tool" ? `${message.tool_name}: ${message.content}` : message.content;
  const said = message.content ? h("div", { class: "said" }, name, text) : null;
  const actions = h(
    "div",
    { class: "actions" },
    iconButton("copy", "Copy", () => copyText(message.content, "Message copied"), { class: "small" }),
    does.edit &&
      iconButton("edit", "Edit and ask again", () => startEditing(element, message, does.edit), {
        class: "small edit",
      }),
  );
  return { elements: [pictures, said, actions].filter(Boolean) };
}

export function pictureList(images, more = () => null) {
  return h(
    "ul",
    { class: "pictures" },
    images.map((image, i) =>
      h("li", {}, h("img", { src: imageUrl(image), alt: image.name || `Picture ${i + 1}` }), more(i)),
    ),
  );
}

function startEditing(element, message, edit) {
  const before = [...element.children];
  const back = () => {
    element.replaceChildren(...before);
    element.querySelector(".edit")?.focus();
  };
  const area = h("textarea", {
    rows: Math.min(12, message.content.split("\n").length + 1),
    value: message.content,
    "aria-label": "Your message",
  });
  const form = h(
    "form",
    {},
    area,
    h(
      "div",
      { class: "row end" },
      h("button", { type: "button", class: "button", onclick: back }, "Cancel"),
      h("button", { class: "button primary" }, "Ask again"),
    ),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (area.value.trim()) edit(area.value);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      back();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  element.replaceChildren(form);
  area.focus();
}

function answerParts(message, does) {
  const name = h("span", { class: "unseen" }, "The model said:");
  const thought = h("div", { class: "thought" });
  const summary = h("summary", {}, "");
  const thinking = h("details", { class: "aside thinking", hidden: true }, summary, thought);
  const prose = h("div", { class: "prose" });
  const calls = h("div", { class: "calls" });
  const notice = h("p", { class: "notice alarm", hidden: true });
  const meta = h("span", { class: "meta" });
  const actions = h(
    "div",
    { class: "actions" },
    meta,
    iconButton("copy", "Copy", () => copyText(message.content, "Answer copied"), { class: "small" }),
    does.again && iconButton("again", "Answer again", does.again, { class: "small again" }),
  );
  let nCalls = 0;

  function update(isLive) {
    thinking.hidden = !message.thinking;
    thinking.classList.toggle("live", isLive && message.thinkingSince !== undefined);
    summary.textContent = message.thinkingSince === undefined ? thoughtFor(message.thinkingSeconds) : "Thinking";
    if (thought.textContent !== (message.thinking ?? "")) thought.textContent = message.thinking ?? "";
    renderProse(prose, message.content);
    prose.classList.toggle("waiting", isLive && !message.content);
    for (const call of (message.tool_calls ?? []).slice(nCalls))
      calls.append(callElement(call, !isLive && call === does.awaited ? does.result : null));
    nCalls = isLive ? (message.tool_calls?.length ?? 0) : nCalls;
    notice.hidden = !message.error;
    notice.textContent = message.error ?? "";
    meta.textContent = metaOf(message);
    actions.hidden = isLive;
  }

  return { elements: [name, thinking, prose, calls, notice, actions], update };
}

function thoughtFor(seconds) {
  if (!seconds) return "Thoughts";
  return seconds < 1 ? "Thought for a moment" : `Thought for ${Math.round(seconds)} s`;
}

function callElement(call, result) {
  const { name = "", arguments: given = {} } = call.function ?? {};
  const text = JSON.stringify(given, null, 2);
  const element = h(
    "details",
    { class: "aside call", open: Boolean(result) },
    h("summary", {}, "Calls ", h("code", {}, name)),
    h("div", {}, h("pre", {}, text)),
  );
  if (result) {
    const area = h("textarea", {
      class: "code",
      rows: 2,
      placeholder: `What ${name} returns`,
      "aria-label": `What ${name} returns`,
      required: true,
    });
    const form = h(
      "form",
      {},
      area,
      h("div", { class: "row end" }, h("button", { class: "button" }, "Give this result")),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      result(name, area.value);
    });
    element.append(form);
  }
  return element;
}

function metaOf({ stats, stopped }) {
  const parts = [];
  if (stopped) parts.push("stopped");
  if (stats) {
    parts.push(`${stats.tokens} tokens`);
    if (stats.perSecond)
      parts.push(`${stats.perSecond < 10 ? stats.perSecond.toFixed(1) : Math.round(stats.perSecond)} per second`);
    if (stats.cached) parts.push(`${stats.cached} of ${stats.prompt} prompt tokens reused`);
    if (stats.reason === "length") parts.push("cut off at the limit");
    parts.push(...stats.warnings);
  }
  return parts.join(" · ");
}
