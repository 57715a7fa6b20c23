/** The API key, where the server asks for one: kept for this tab, or in this browser if the person says so. */

import { ask } from "./dialog.js";
import { h } from "./element.js";

const NAME = "api-key";

export function keyHeaders() {
  const key = sessionStorage.getItem(NAME) ?? localStorage.getItem(NAME);
  return key ? { authorization: `Bearer ${key}` } : {};
}

export function hasKey() {
  return "authorization" in keyHeaders();
}

export function forgetKey() {
  sessionStorage.removeItem(NAME);
  localStorage.removeItem(NAME);
}

let asking = null;

/** Whether the person gave one; those who ask at once get the same answer. */
export function askForKey(why) {
  asking ??= question(why).finally(() => {
    asking = null;
  });
  return asking;
}

async function question(why) {
  const input = h("input", {
    type: "password",
    name: "key",
    required: true,
    autocomplete: "current-password",
    spellcheck: false,
  });
  const keeps = h("input", { type: "checkbox", name: "keep" });
  const given = await ask({
    title: "API key",
    content: [
      h("p", {}, why),
      h("label", { class: "field" }, h("span", {}, "Key"), input),
      h("label", { class: "row" }, keeps, "Keep it in this browser"),
    ],
    action: "Use this key",
  });
  if (!given) return false;
  forgetKey();
  (keeps.checked ? localStorage : sessionStorage).setItem(NAME, input.value.trim());
  return true;
}
