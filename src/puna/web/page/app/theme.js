/** Light, dark, or as the system has it. */

import { recall, remember } from "./preferences.js";

const NEXT = { "": "light", light: "dark", dark: "" };
const NAMES = { "": "as the system", light: "light", dark: "dark" };

export function applyTheme(theme = recall("theme")) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

/** Go on to the next; its name. */
export function nextTheme() {
  const theme = NEXT[recall("theme")] ?? "";
  remember("theme", theme);
  applyTheme(theme);
  return NAMES[theme];
}
