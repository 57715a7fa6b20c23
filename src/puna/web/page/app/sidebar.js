/** Where one can go: a new chat, those that were kept, the models, the engine; and what belongs to the page as a whole. */

import { announce } from "./announce.js";
import { runningAnswer, stopAllAnswers, stopAnswer } from "./answers.js";
import { download } from "./chat.js";
import { conversationsFrom, titleOf } from "./conversation.js";
import { ask, confirm, show } from "./dialog.js";
import { h } from "./element.js";
import { icon, iconButton } from "./icons.js";
import { askForKey, forgetKey, hasKey } from "./key.js";
import { allConversations, discard, discardAll, keep, onShelfChange } from "./shelf.js";
import { nextTheme } from "./theme.js";

const DAY_MS = 24 * 3600 * 1000;

/** *root* has the name of the page already: it is painted before any module is there. Returns ``mark(hash)``, which shows where one is. */
export function sidebar(root) {
  const history = h("nav", { class: "history", "aria-label": "Chats" });
  let here = location.hash;
  root.append(
    h(
      "nav",
      { "aria-label": "Pages" },
      link("#/", "plus", "New chat"),
      link("#/models", "models", "Models"),
      link("#/engine", "engine", "Engine"),
    ),
    history,
    h(
      "footer",
      {},
      iconButton("theme", "Light or dark", () => announce(`Colours: ${nextTheme()}`)),
      iconButton("key", "API key", changeKey),
      iconButton("share", "Save or load all chats", saveAll),
    ),
  );
  onShelfChange(draw);
  draw();

  function mark(hash) {
    here = hash || "#/";
    for (const a of root.querySelectorAll(".nav-link")) {
      if (a.getAttribute("href") === here) a.setAttribute("aria-current", "page");
      else a.removeAttribute("aria-current");
    }
  }

  async function draw() {
    let conversations;
    try {
      conversations = await allConversations();
    } catch {
      history.replaceChildren(h("p", { class: "notice" }, "This browser keeps no chats."));
      return;
    }
    const groups = Map.groupBy(conversations, (c) => dayOf(c.changed));
    const sections = [...groups].map(([day, those]) =>
      h("section", {}, h("h2", {}, day), h("ul", {}, those.map(item))),
    );
    history.replaceChildren(...sections);
    mark(here);
  }

  function item(conversation) {
    const title = titleOf(conversation);
    const isLive = Boolean(runningAnswer(conversation.id));
    return h(
      "li",
      {},
      h(
        "a",
        { class: "nav-link", href: `#/chat/${conversation.id}` },
        h("span", {}, title),
        isLive && h("i", { title: "is being answered" }),
      ),
      iconButton("trash", `Delete “${title}”`, () => remove(conversation, title), { class: "small" }),
    );
  }

  async function remove(conversation, title) {
    if (!(await confirm("Delete this chat?", `“${title}” will be gone from this browser.`, "Delete"))) return;
    await stopAnswer(conversation.id);
    await discard(conversation.id).catch(() => {});
    if (here === `#/chat/${conversation.id}`) location.hash = "#/";
  }

  return mark;
}

function link(href, name, text) {
  return h("a", { class: "nav-link", href }, icon(name), h("span", {}, text));
}

function dayOf(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return "Today";
  if (time >= today - DAY_MS) return "Yesterday";
  if (time >= today - 7 * DAY_MS) return "This week";
  return new Date(time).toLocaleDateString(undefined, { month: "long", year: "numeric" });
}

async function changeKey() {
  if (
    hasKey() &&
    (await ask({
      title: "API key",
      content: [h("p", {}, "This browser sends a key with its requests.")],
      action: "Forget it",
      alarm: true,
    }))
  )
    forgetKey();
  else if (!hasKey()) await askForKey("Where the server asks for a key, this one is sent.");
}

async function saveAll() {
  const conversations = await allConversations().catch(() => null);
  if (!conversations) return show("All chats", [h("p", {}, "This browser keeps no chats.")], { wide: false });
  const file = h("input", { type: "file", accept: ".json,application/json" });
  const save = h(
    "button",
    {
      type: "button",
      class: "button",
      onclick: () => download("chats.json", JSON.stringify({ conversations }, null, 1), "application/json"),
    },
    `Save ${conversations.length} chats`,
  );
  const clear = h("button", { type: "button", class: "button alarm", onclick: clearAll }, "Delete all");
  const decided = await ask({
    title: "All chats",
    content: [
      h("p", {}, "They are kept in this browser only."),
      h("div", { class: "row" }, save, clear),
      h("label", { class: "field" }, h("span", {}, "Load chats from a file"), file),
    ],
    action: "Load",
  });
  if (!decided || !file.files.length) return;
  try {
    const found = conversationsFrom(JSON.parse(await file.files[0].text()));
    for (const conversation of found) await keep(conversation);
    announce(`${found.length} chats loaded`);
  } catch (error) {
    await show("They could not be loaded", [h("p", {}, error.message)], { wide: false });
  }
}

async function clearAll() {
  if (!(await confirm("Delete all chats?", "They will be gone from this browser.", "Delete all"))) return;
  await stopAllAnswers();
  await discardAll();
  location.hash = "#/";
}
