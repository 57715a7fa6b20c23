/** Questions that are answered before anything else goes on. */

import { h } from "./element.js";

/** True when the person chose the action; Escape and Cancel are no. */
export function ask({ title, content = [], action, alarm = false, cancel = "Cancel", wide = false }) {
  return new Promise((resolve) => {
    const heading = h("h2", { id: "dialog-title" }, title);
    const buttons = h(
      "div",
      { class: "row end" },
      cancel && h("button", { type: "button", class: "button", onclick: () => dialog.close("") }, cancel),
      h("button", { type: "submit", class: `button ${alarm ? "alarm" : "primary"}` }, action),
    );
    const form = h("form", { method: "dialog" }, heading, ...content, buttons);
    const dialog = h("dialog", { class: wide ? "wide" : "", "aria-labelledby": "dialog-title" }, form);
    form.addEventListener("submit", (event) => {
      event.preventDefault(); // the page's policy lets no form go anywhere
      dialog.close("yes");
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

export function confirm(title, text, action) {
  return ask({ title, content: [h("p", {}, text)], action, alarm: true });
}

export function show(title, content, { wide = true } = {}) {
  return ask({ title, content, action: "Close", cancel: "", wide });
}
