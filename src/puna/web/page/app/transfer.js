/** Work on models that takes a while, as a line with a bar: pulls and creations. */

import { announce } from "./announce.js";
import { h } from "./element.js";
import { formatBytes } from "./figures.js";
import { iconButton } from "./icons.js";
import { stream } from "./server.js";

/** Shows a stream of progress in *list* until it ends. Whether it went well. */
export async function follow(list, title, path, body) {
  const stopper = new AbortController();
  const said = h("p", {}, "begins");
  const bar = h("progress", { max: 1, "aria-label": title });
  const close = iconButton(
    "close",
    `Stop: ${title}`,
    () => (stopper.signal.aborted || isOver ? line.remove() : stopper.abort()),
    { class: "small" },
  );
  const line = h("li", {}, h("div", {}, h("h3", {}, title), said), close, bar);
  let isOver = false;
  list.append(line);
  announce(title);
  try {
    let last = {};
    for await (const part of stream(path, { method: "POST", body, signal: stopper.signal })) {
      last = part;
      said.textContent = describe(part);
      if (part.total) bar.value = (part.completed ?? 0) / part.total;
      else bar.removeAttribute("value");
    }
    if (last.status !== "success") throw new Error("It ended before it was done.");
    line.remove();
    announce(`${title}: done`);
    return true;
  } catch (error) {
    said.textContent = stopper.signal.aborted ? "stopped" : error.message;
    said.classList.toggle("failed", !stopper.signal.aborted);
    bar.remove();
    announce(`${title}: ${said.textContent}`);
    return false;
  } finally {
    isOver = true;
  }
}

function describe({ status = "", completed = 0, total = 0 }) {
  const short = status.replace(/sha256:([0-9a-f]{12})[0-9a-f]+/, "$1");
  return total ? `${short} · ${formatBytes(completed)} of ${formatBytes(total)}` : short;
}
