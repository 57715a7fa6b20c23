/** The API key, where the server asks for one: kept for this tab, or in this browser if the person says so. */

import { ask } from "./dialog.js";
import { h } from "./element.js";
import { recall, remember } from "./preferences.js";

const NAME = "api-key";
let ofThisPage = ""; // where the browser keeps nothing

export function keyHeaders() {
  const key = ofThisPage || tab()?.getItem(NAME) || recall(NAME);
  return key ? { authorization: `Bearer ${key}` } : {};
}

export function hasKey() {
  return "authorization" in keyHeaders();
}

export function forgetKey() {
  ofThisPage = "";
  tab()?.removeItem(NAME);
  remember(NAME, "");
}

function tab() {
  try {
    return sessionStorage;
  } catch {
    return null;
  }
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
  ofThisPage = input.value.trim();
  if (keeps.checked) remember(NAME, ofThisPage);
  else tab()?.setItem(NAME, ofThisPage);
  return true;
}
