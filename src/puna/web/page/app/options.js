/** How a conversation is to be answered: system prompt, thinking, tools, sampling. */

import { ask } from "./dialog.js";
import { h } from "./element.js";
import { recall, remember } from "./preferences.js";

const NUMBERS = [
  ["temperature", "Temperature", "0 to 2; 0 always takes the likeliest token", { min: 0, max: 2, step: 0.05 }],
  ["top_p", "Top p", "of the likeliest tokens, those that make up this share", { min: 0, max: 1, step: 0.01 }],
  ["top_k", "Top k", "so many of the likeliest tokens", { min: 0, step: 1 }],
  ["min_p", "Min p", "as likely as this share of the likeliest, at least", { min: 0, max: 1, step: 0.01 }],
  ["repeat_penalty", "Repeat penalty", "above 1: less of what was said", { min: 0, step: 0.05 }],
  ["seed", "Seed", "the same one, the same answer", { step: 1 }],
  ["num_predict", "Longest answer", "in tokens", { min: 1, step: 1 }],
  ["num_ctx", "Context", "tokens of prompt and answer together", { min: 16, step: 1 }],
];
const THINK = [
  ["", "As the model does"],
  ["on", "On"],
  ["off", "Off"],
  ["low", "Low"],
  ["medium", "Medium"],
  ["high", "High"],
];
const NAME = "settings";

export function settingsForNewChats() {
  try {
    return JSON.parse(recall(NAME) || "{}");
  } catch {
    return {};
  }
}

/** The settings as the person leaves them; null when nothing was decided. */
export async function askSettings(settings) {
  const system = h("textarea", {
    name: "system",
    rows: 4,
    value: settings.system ?? "",
    placeholder: "The model's own",
  });
  const think = h(
    "select",
    { name: "think" },
    THINK.map(([value, text]) => h("option", { value, selected: value === (settings.think ?? "") }, text)),
  );
  const numbers = NUMBERS.map(([name, label, hint, bounds]) => {
    const input = h("input", {
      type: "number",
      name,
      value: settings[name] ?? "",
      placeholder: "the model's own",
      title: hint,
      ...bounds,
    });
    return { name, input, field: h("label", { class: "field" }, h("span", {}, label), input, h("small", {}, hint)) };
  });
  const tools = h("textarea", {
    name: "tools",
    class: "code",
    rows: 4,
    spellcheck: false,
    value: settings.tools ? JSON.stringify(settings.tools, null, 2) : "",
    placeholder: '[{"type": "function", "function": {"name": …}}]',
    oninput: () => tools.setCustomValidity(toolsFault(tools.value)),
  });
  const keeps = h("input", { type: "checkbox", name: "keep" });
  const grid = h(
    "div",
    { class: "number-grid" },
    numbers.map(({ field }) => field),
  );
  const decided = await ask({
    title: "How to answer",
    content: [
      h("label", { class: "field" }, h("span", {}, "System prompt"), system),
      h("label", { class: "field" }, h("span", {}, "Thinking"), think),
      grid,
      h(
        "label",
        { class: "field" },
        h("span", {}, "Tools"),
        tools,
        h("small", {}, "Functions that the model may call, as JSON. You answer in their place."),
      ),
      h("label", { class: "row" }, keeps, "Also for new chats"),
    ],
    action: "Done",
  });
  if (!decided) return null;
  const found = {};
  if (system.value.trim()) found.system = system.value;
  if (think.value) found.think = think.value;
  if (tools.value.trim()) found.tools = JSON.parse(tools.value);
  for (const { name, input } of numbers) if (input.value !== "") found[name] = Number(input.value);
  if (keeps.checked) remember(NAME, JSON.stringify(found));
  return found;
}

/** Why the text is no list of tools; empty where it is one. */
export function toolsFault(text) {
  if (!text.trim()) return "";
  try {
    return Array.isArray(JSON.parse(text)) ? "" : "A list of tools, in square brackets.";
  } catch (error) {
    return `No JSON: ${error.message}`;
  }
}
