/** Where a message is written: text, and pictures by button, drop and paste. Enter sends, Escape stops. */

import { announce } from "./announce.js";
import { h } from "./element.js";
import { iconButton } from "./icons.js";
import { imagesIn, readImage, TYPES } from "./images.js";
import { pictureList } from "./message.js";

/** *send(text, images)* and *stop()*; *editLast()* is asked for with the arrow up in an empty field. */
export function composer({ send, stop, editLast }) {
  let images = [];
  let isBusy = false;
  const area = h("textarea", {
    id: "message",
    rows: 1,
    placeholder: "Ask anything",
    "aria-label": "Message",
    "aria-describedby": "composer-hint",
    enterKeyHint: "send",
  });
  const pictures = h("div", {});
  const file = h("input", {
    type: "file",
    accept: TYPES.join(","),
    multiple: true,
    hidden: true,
    onchange: () => add([...file.files]),
  });
  const sendButton = iconButton("send", "Send", null, { type: "submit", class: "primary" });
  const stopButton = iconButton("stop", "Stop", () => stop(), { class: "primary", hidden: true });
  const hint = h("span", { class: "hint", id: "composer-hint" }, "Enter sends, Shift + Enter begins a new line");
  const form = h(
    "form",
    {},
    pictures,
    area,
    file,
    h(
      "div",
      { class: "tools" },
      iconButton("image", "Add pictures", () => file.click()),
      hint,
      stopButton,
      sendButton,
    ),
  );

  async function add(files) {
    file.value = "";
    for (const one of files) {
      try {
        images.push(await readImage(one));
        announce("Picture added");
      } catch (error) {
        announce(error.message);
        hint.textContent = error.message;
      }
    }
    showPictures();
  }

  function showPictures() {
    const remove = (i) =>
      iconButton("close", "Remove this picture", () => {
        images.splice(i, 1);
        showPictures();
        area.focus();
      });
    pictures.replaceChildren(...(images.length ? [pictureList(images, remove)] : []));
  }

  function submit() {
    const text = area.value.trim();
    if (isBusy || (!text && !images.length)) return;
    const given = images;
    images = [];
    area.value = "";
    showPictures();
    send(text, given);
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    } else if (event.key === "ArrowUp" && !area.value && !isBusy) {
      event.preventDefault();
      editLast();
    }
  });
  area.addEventListener("paste", (event) => {
    const found = imagesIn(event.clipboardData);
    if (!found.length) return;
    event.preventDefault();
    add(found);
  });
  const dragged = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  const root = h("div", { class: "composer" }, form);

  return {
    root,
    focus: () => area.focus(),
    /** Pictures may be dropped anywhere in this element. */
    takeDropsIn(element) {
      element.addEventListener("dragover", (event) => {
        if (!dragged(event)) return;
        event.preventDefault();
        form.classList.add("drop");
      });
      element.addEventListener("dragleave", () => form.classList.remove("drop"));
      element.addEventListener("drop", (event) => {
        if (!dragged(event)) return;
        event.preventDefault();
        form.classList.remove("drop");
        add([...event.dataTransfer.files]);
      });
    },
    setBusy(busy) {
      const hadFocus = document.activeElement === sendButton || document.activeElement === stopButton;
      isBusy = busy;
      sendButton.hidden = busy;
      stopButton.hidden = !busy;
      if (hadFocus) (busy ? stopButton : sendButton).focus();
    },
  };
}
