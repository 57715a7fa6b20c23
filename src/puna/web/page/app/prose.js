/**
 * What a model writes, as elements: Markdown where the libraries are there, else plain text.
 *
 * A model's text is hostile until shown otherwise. HTML in it is shown as text, pictures become links (nothing is loaded from
 * elsewhere), and what the Markdown library makes goes through the sanitiser as well.
 */

import { h } from "./element.js";
import { iconButton } from "./icons.js";
import { announce } from "./announce.js";

const TAGS =
  "p br hr strong em del code pre blockquote ul ol li h1 h2 h3 h4 h5 h6 table thead tbody tr th td a span input".split(
    " ",
  );
const CLEAN = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["href", "title", "class", "start", "align", "type", "checked", "disabled"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: ["start", "align", "type", "checked", "disabled"], // no addresses: their values may be anything
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const MAX_HIGHLIGHTED = 50_000; // characters of one listing

let libraries = null;
let loading = null;

/** Whether Markdown will be shown from now on. */
export function loadLibraries() {
  loading ??= Promise.all([
    import("../libraries/marked.js"),
    import("../libraries/purify.js"),
    import("../libraries/highlight.js"),
  ])
    .then(([marked, purify, highlight]) => {
      libraries = { marked: parser(marked.Marked), purify: purify.default, highlight: highlight.default };
      return true;
    })
    .catch(() => false);
  return loading;
}

function parser(Marked) {
  const escaped = (text) =>
    text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
  return new Marked({
    gfm: true,
    renderer: {
      html: ({ text }) => escaped(text),
      image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    },
  });
}

/** Show *text* in *place*. What has not changed since the last time stays: selections, and time. */
export function renderProse(place, text) {
  place.classList.toggle("plain", !libraries);
  if (!libraries) {
    place.textContent = text;
    return;
  }
  const tokens = libraries.marked.lexer(text);
  const shown = place.blocks ?? [];
  if (!place.blocks) place.replaceChildren();
  const blocks = tokens.filter((token) => token.type !== "space");
  blocks.forEach((token, i) => {
    if (shown[i]?.raw === token.raw) return;
    const element = h("div", { class: "block" }, fragmentOf(token));
    if (shown[i]) shown[i].element.replaceWith(element);
    else place.append(element);
    shown[i] = { raw: token.raw, element };
  });
  for (const { element } of shown.splice(blocks.length)) element.remove();
  place.blocks = shown;
}

function fragmentOf(token) {
  const { marked, purify } = libraries;
  const fragment = purify.sanitize(marked.parser([token]), CLEAN);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const input of fragment.querySelectorAll("input")) {
    if (input.type !== "checkbox") {
      input.remove();
      continue;
    }
    input.disabled = true;
    input.ariaLabel = input.closest("li")?.textContent.trim() ?? "";
  }
  for (const table of fragment.querySelectorAll("table")) {
    const scroller = h("div", { class: "table", tabIndex: 0, role: "region", "aria-label": "Table" });
    table.replaceWith(scroller);
    scroller.append(table);
  }
  for (const pre of fragment.querySelectorAll("pre"))
    pre.replaceWith(listing(pre.textContent.replace(/\n$/, ""), languageOf(pre)));
  return fragment;
}

function languageOf(pre) {
  return /language-([\w+#.-]+)/.exec(pre.firstElementChild?.className ?? "")?.[1] ?? "";
}

function listing(text, language) {
  const code = h("code", {}, coloured(text, language));
  const copy = iconButton("copy", "Copy this code", () => copyText(text, "Code copied"), { class: "small" });
  return h(
    "div",
    { class: "listing" },
    h("div", {}, h("span", {}, language || "text"), copy),
    h("pre", { tabIndex: 0 }, code),
  );
}

function coloured(text, language) {
  const { highlight, purify } = libraries;
  if (!highlight.getLanguage(language) || text.length > MAX_HIGHLIGHTED) return text;
  const { value } = highlight.highlight(text, { language, ignoreIllegals: true });
  return purify.sanitize(value, { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true });
}

export async function copyText(text, said) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyBySelection(text); // without TLS there is no clipboard but this one
  }
  announce(said);
}

function copyBySelection(text) {
  const place = h("textarea", { class: "unseen", value: text });
  document.body.append(place);
  place.select();
  document.execCommand("copy");
  place.remove();
}
