/** Line icons on a grid of 24, and the buttons that show nothing else. */

import { h, svg } from "./element.js";

const PATHS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  chat: "M4 5h16v11H9l-5 4z",
  plus: "M12 5v14M5 12h14",
  models: "M12 3 4 7v10l8 4 8-4V7zM4 7l8 4 8-4M12 11v10",
  engine: "M3 13h4l3-8 4 14 3-6h4",
  theme: "M12 3v18a9 9 0 0 0 0-18zM12 3a9 9 0 0 0 0 18",
  key: "M14.5 9.5 20 4m-3 3 2 2M9 10a5 5 0 1 0 0 10 5 5 0 0 0 0-10z",
  share: "M12 15V4m0 0L8 8m4-4 4 4M5 13v6h14v-6",
  send: "M12 19V5m0 0-6 6m6-6 6 6",
  stop: "M7 7h10v10H7z",
  image: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15.5 9h.01",
  edit: "M4 20h4L19 9l-4-4L4 16z",
  again: "M19 12a7 7 0 1 1-2.2-5.1M19 4v4h-4",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  trash: "M5 7h14M10 7V4h4v3m-7 0 1 13h8l1-13",
  options:
    "M4 8h9m5 0h2M4 16h2m5 0h9M13 8a2.5 2.5 0 1 0 5 0 2.5 2.5 0 0 0-5 0zM6 16a2.5 2.5 0 1 0 5 0 2.5 2.5 0 0 0-5 0z",
  close: "M6 6l12 12M18 6 6 18",
  info: "M12 11v6m0-9.5h.01M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18z",
};

export function icon(name) {
  return svg("svg", { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("path", { d: PATHS[name] }));
}

export function iconButton(name, label, onclick, attributes = {}) {
  const { class: more = "", ...others } = attributes;
  return h(
    "button",
    { type: "button", class: `icon-button ${more}`, title: label, "aria-label": label, onclick, ...others },
    icon(name),
  );
}
