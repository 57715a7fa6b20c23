/** Starts the page, and shows what its address names: a chat, the models, the engine. */

import { chatView } from "./chat.js";
import { engineView } from "./engine.js";
import { modelsView } from "./models.js";
import { sidebar } from "./sidebar.js";
import { applyTheme } from "./theme.js";

applyTheme();
const main = document.getElementById("main");
const drawer = document.getElementById("sidebar");
const veil = document.getElementById("veil");
const isPhone = matchMedia("(max-width: 48rem)");
const mark = sidebar(drawer);
let leave = () => {};
let shown = null;

function setMenu(open) {
  drawer.classList.toggle("open", open);
  veil.hidden = !open;
  drawer.inert = isPhone.matches && !open;
  main.inert = isPhone.matches && open;
  if (open) drawer.querySelector("a")?.focus();
}

veil.addEventListener("click", () => setMenu(false));
drawer.addEventListener("click", (event) => {
  if (event.target.closest("a")) {
    setMenu(false);
    if (event.target.closest("a").getAttribute("href") === (location.hash || "#/")) route(); // there already: begin again
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && drawer.classList.contains("open")) setMenu(false);
});
isPhone.addEventListener("change", () => setMenu(false));

async function route() {
  const [, page, id] = location.hash.split("/");
  const address = location.hash;
  if (shown === address && page === "chat") return; // a chat that has just got its address
  leave();
  shown = address;
  mark(address);
  const around = {
    openMenu: () => setMenu(true),
    moved: (chat) => {
      shown = `#/chat/${chat}`;
      history.replaceState(null, "", shown);
      mark(shown);
    },
  };
  const views = { models: modelsView, engine: engineView };
  const left = await (views[page] ?? chatView)(main, { id: page === "chat" ? id : undefined, ...around });
  if (shown === address || shown?.startsWith("#/chat/")) leave = left;
  else left();
}

addEventListener("hashchange", route);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names what is shown
  main.focus();
});
setMenu(false);
route();
