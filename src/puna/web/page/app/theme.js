/** Light, dark, or as the system has it. */

const NEXT = { "": "light", light: "dark", dark: "" };
const NAMES = { "": "as the system", light: "light", dark: "dark" };

export function applyTheme(theme = localStorage.getItem("theme") ?? "") {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

/** Go on to the next; its name. */
export function nextTheme() {
  const theme = NEXT[localStorage.getItem("theme") ?? ""] ?? "";
  localStorage.setItem("theme", theme);
  applyTheme(theme);
  return NAMES[theme];
}
