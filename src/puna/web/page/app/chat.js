/** The view of one conversation: what was said, as it grows, and what can be done with it. */

import { announce } from "./announce.js";
import { runningAnswer, startAnswer, stopAnswer } from "./answers.js";
import { composer } from "./composer.js";
import { asMarkdown, emptyConversation, giveResult, openCalls, say, titleOf } from "./conversation.js";
import { confirm } from "./dialog.js";
import { h } from "./element.js";
import { icon, iconButton } from "./icons.js";
import { messageElement } from "./message.js";
import { askSettings, settingsForNewChats } from "./options.js";
import { recall, remember } from "./preferences.js";
import { loadLibraries } from "./prose.js";
import { json } from "./server.js";
import { discard, getConversation, keep, onChangeElsewhere } from "./shelf.js";

const MODEL = "model";
const ASKED_EVERY_MS = 2000; // a server that is not there yet
const DRAWN_EVERY_MS = 40; // at most: a fast model writes more often than anyone reads

/** *id*: of a kept conversation; without one it begins with the first message. Returns what ends the view. */
export async function chatView(root, { id, openMenu, moved }) {
  const conversation =
    runningAnswer(id)?.conversation ??
    ((id && (await getConversation(id).catch(() => null))) || emptyConversation(recall(MODEL), settingsForNewChats()));

  const model = h("select", { class: "model", "aria-label": "Model", onchange: () => chooseModel(model.value) });
  const list = h("ol", {});
  const welcome = h(
    "div",
    { class: "welcome" },
    h("h1", {}, "What is on your mind?"),
    h("p", {}, "Everything stays between this browser and your server."),
  );
  const log = h("div", { class: "log", role: "region", "aria-label": "Conversation", tabIndex: 0 }, welcome, list);
  const unreached = h("li", { class: "notice alarm" });
  const writer = composer({ send, stop: () => stopAnswer(conversation.id), editLast });
  const view = h(
    "div",
    { class: "chat" },
    h(
      "header",
      { class: "head" },
      iconButton("menu", "Menu", openMenu, { class: "menu" }),
      model,
      h("span", { class: "spring" }),
      iconButton("options", "How to answer", changeSettings),
      iconButton("share", "Save as a file", saveAsFile),
      iconButton("trash", "Delete this chat", remove),
    ),
    log,
    writer.root,
  );
  view.addEventListener("keydown", (event) => {
    if (event.key === "Escape") stopAnswer(conversation.id);
  });
  writer.takeDropsIn(view);
  root.replaceChildren(view);
  drawAll();
  writer.focus();
  fillModels();
  if (runningAnswer(conversation.id)) follow(runningAnswer(conversation.id));
  loadLibraries().then((loaded) => loaded && !runningAnswer(conversation.id) && drawAll());

  async function fillModels() {
    let models;
    try {
      ({ models } = await json("api/tags"));
    } catch (error) {
      if (!list.contains(unreached)) list.append(unreached);
      unreached.textContent = error.message;
      if (!error.status) setTimeout(() => view.isConnected && fillModels(), ASKED_EVERY_MS);
      return;
    }
    unreached.remove();
    const chats = models.filter((m) => !m.capabilities || m.capabilities.includes("completion"));
    const names = chats.map((m) => m.name);
    if (conversation.model && !names.includes(conversation.model)) names.unshift(conversation.model);
    model.replaceChildren(
      ...names.map((name) => h("option", { value: name, selected: name === conversation.model }, name)),
    );
    if (!names.length) {
      model.replaceChildren(h("option", { value: "" }, "No model yet"));
      welcome.replaceChildren(
        h("h1", {}, "No model yet"),
        h("p", {}, "Get one first, then come back."),
        h("p", {}, h("a", { class: "button primary", href: "#/models" }, icon("models"), "Models")),
      );
    }
    conversation.model = model.value;
  }

  function chooseModel(name) {
    conversation.model = name;
    remember(MODEL, name);
    if (conversation.messages.length) store();
  }

  function fail(error) {
    list.append(h("li", { class: "notice alarm" }, error.message));
  }

  function drawAll() {
    welcome.hidden = conversation.messages.length > 0;
    document.title = conversation.messages.length ? `${titleOf(conversation)} – Puna` : "Puna";
    list.replaceChildren(...conversation.messages.map(elementOf));
    log.scrollTop = log.scrollHeight;
  }

  function elementOf(message, at) {
    return messageElement(message, {
      edit: message.role === "user" && ((text) => edit(at, text)),
      again: message.role === "assistant" && (() => answer(at)),
      result: (name, text) => result(at, name, text),
      awaited: openCalls(conversation, at)[0],
    });
  }

  function send(text, images) {
    say(conversation, text, images);
    answer();
  }

  async function edit(at, text) {
    await stopAnswer(conversation.id);
    say(conversation, text, conversation.messages[at]?.images, at);
    answer();
  }

  function editLast() {
    [...list.querySelectorAll(".message.user .edit")].at(-1)?.click();
  }

  function result(at, name, text) {
    giveResult(conversation, name, text);
    if (!openCalls(conversation, at).length) return answer();
    drawAll(); // the model is asked when it has all of them
    list.querySelector(".call textarea")?.focus();
    return store();
  }

  async function answer(at) {
    await stopAnswer(conversation.id);
    const started = startAnswer(conversation, at);
    drawAll();
    follow(started);
    moved(conversation.id);
    announce("The model is answering");
  }

  /** Show an answer as it grows, here or from where it was begun before. */
  function follow(running) {
    const { message } = running;
    const element = list.lastElementChild;
    const draw = paced(() => {
      const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
      element.update(true);
      if (isAtEnd) log.scrollTop = log.scrollHeight;
    });
    running.onpart = draw;
    writer.setBusy(true);
    element.update(true);
    running.ended.then(() => {
      draw.end();
      if (!view.isConnected) return;
      const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 160;
      element.replaceWith(elementOf(message, conversation.messages.length - 1));
      if (isAtEnd) log.scrollTop = log.scrollHeight;
      writer.setBusy(false);
      announce(message.error ?? (message.stopped ? "Stopped" : `Answer: ${message.content}`));
    });
  }

  async function store() {
    conversation.changed = Date.now();
    try {
      await keep(conversation);
    } catch (error) {
      fail(new Error(`This chat could not be kept in the browser: ${error.message}`));
    }
  }

  async function changeSettings() {
    const settings = await askSettings(conversation.settings);
    if (!settings) return;
    conversation.settings = settings;
    if (conversation.messages.length) await store();
  }

  function saveAsFile() {
    download(
      `${
        titleOf(conversation)
          .replace(/[^\p{L}\p{N} _-]/gu, "")
          .trim() || "chat"
      }.md`,
      asMarkdown(conversation),
      "text/markdown",
    );
  }

  async function remove() {
    if (
      !conversation.messages.length ||
      !(await confirm("Delete this chat?", `“${titleOf(conversation)}” will be gone from this browser.`, "Delete"))
    )
      return;
    await stopAnswer(conversation.id);
    await discard(conversation.id).catch(() => {}); // a browser that keeps nothing has nothing to forget
    location.hash = "#/";
  }

  /** Another page of this browser went on with the same chat. */
  const endFollowing = onChangeElsewhere(async (changed) => {
    const kept = changed === conversation.id && (await getConversation(changed).catch(() => null));
    if (!kept || runningAnswer(conversation.id)) return;
    Object.assign(conversation, kept);
    model.value = conversation.model;
    const isWriting = document.activeElement?.tagName === "TEXTAREA" && list.contains(document.activeElement);
    if (!isWriting) drawAll();
  });

  return () => {
    endFollowing();
    const running = runningAnswer(conversation.id);
    if (running) running.onpart = null; // it goes on, and nobody looks
  };
}

/** Calls *draw* at most every so often, and not while nobody sees it. */
function paced(draw) {
  let timer = 0;
  const later = () => {
    timer ||= setTimeout(() => {
      timer = 0;
      draw();
    }, DRAWN_EVERY_MS);
  };
  later.end = () => clearTimeout(timer);
  return later;
}

export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = h("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
