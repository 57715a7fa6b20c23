/** The live picture of the engine: what is computed, what the caches hold and share, and whose memory it is. */

import { h, svg } from "./element.js";
import { formatBytes, formatCount, rates, Series, tokensInFlight, treeRectangles } from "./figures.js";
import { iconButton } from "./icons.js";
import { json } from "./server.js";

const EVERY_MS = 1000;
const SHOWN_SEQUENCES = 24;
const ROW = 10; // of the tree, in its own units

export function engineView(root, { openMenu }) {
  const place = h("div", { class: "page" });
  const heading = h("h1", { tabIndex: -1 }, "Engine");
  const devices = h("div", {});
  const models = h("div", { class: "engines" });
  const series = new Map();
  const stopper = new AbortController();
  let before = null;
  let timer = 0;
  place.append(models, devices);
  root.replaceChildren(
    h("header", { class: "head" }, iconButton("menu", "Menu", openMenu, { class: "menu" }), heading),
    h("div", { class: "view" }, place),
  );
  document.title = "Engine – Puna";
  heading.focus();
  look();

  async function look() {
    if (!document.hidden) {
      try {
        const picture = await json("api/engine", { signal: stopper.signal });
        devices.replaceChildren(memoryCard(picture));
        models.replaceChildren(...modelCards(picture));
        before = picture;
      } catch (error) {
        if (stopper.signal.aborted) return;
        models.replaceChildren(h("p", { class: "notice alarm" }, error.message));
      }
    }
    if (!stopper.signal.aborted) timer = setTimeout(look, EVERY_MS);
  }

  function modelCards(picture) {
    if (!picture.models.length)
      return [h("p", { class: "notice" }, "No model is loaded. One is when somebody asks it for something.")];
    return picture.models.map((model) => {
      const rate = rates(before, picture, model.name);
      const kept = series.get(model.name) ?? { steps: new Series(), tokens: new Series() };
      series.set(model.name, kept);
      if (rate) {
        kept.steps.add(rate.steps);
        if (rate.tokens !== null) kept.tokens.add(rate.tokens);
      }
      return modelCard(model, rate, kept);
    });
  }

  return () => {
    stopper.abort();
    clearTimeout(timer);
  };
}

function modelCard(model, rate, kept) {
  const { health, occupancy } = model;
  const lasts =
    model.seconds_left === null ? "stays loaded" : `leaves after ${Math.round(model.seconds_left)} s without a request`;
  const about = [
    model.engine === "compat" ? "libllama" : "",
    `${formatCount(model.context_length)} tokens of context`,
    `${model.parallel} requests at once`,
    lasts,
  ];
  return h(
    "article",
    { class: "engine", "aria-label": model.name },
    h(
      "header",
      {},
      h("h2", {}, model.name),
      h("span", { class: "tag" }, model.state),
      h("p", {}, about.filter(Boolean).join(" · ")),
    ),
    health?.status === "ready" ? gauges(health, occupancy, rate, kept) : h("p", { class: "notice" }, whyNot(model)),
    health && health.cache_cells > 0 && cells(health, occupancy),
    occupancy && occupancy.sequences.length > 0 && sequences(occupancy),
    occupancy && occupancy.prefixes.length > 0 && tree(occupancy),
    health && health.host_cache_bytes > 0 && attic(health, occupancy),
    occupancy && occupancy.n_left_out > 0 && h("p", { class: "notice" }, `${occupancy.n_left_out} more are not shown.`),
  );
}

function whyNot({ state, health }) {
  if (state !== "loading") return "It is too busy to say how it is.";
  return health?.progress ? `It is being loaded: ${Math.round(100 * health.progress)} %.` : "It is being loaded.";
}

function gauges(health, occupancy, rate, kept) {
  const gauge = (name, value, unit, line) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, value, unit ? h("small", {}, ` ${unit}`) : ""), line && spark(line));
  const inFlight = occupancy && gauge("In flight", formatCount(tokensInFlight(occupancy)), "tokens");
  return h(
    "dl",
    { class: "gauges" },
    gauge("Steps", rate ? formatCount(rate.steps) : "–", "per second", kept.steps),
    occupancy &&
      gauge("Computed", rate?.tokens != null ? formatCount(rate.tokens) : "–", "tokens per second", kept.tokens),
    gauge("Requests", String(health.active), health.waiting ? `and ${health.waiting} waiting` : "running"),
    inFlight,
  );
}

function spark(line) {
  return svg(
    "svg",
    { viewBox: "0 0 100 20", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("polyline", { class: "trace", points: line.points() }),
  );
}

function bar(label, parts, total) {
  const share = (n) => (total > 0 ? n / total : 0);
  return h(
    "div",
    { class: "bar", role: "img", "aria-label": label },
    parts.filter(([, n]) => n > 0).map(([kind, n]) => h("i", { class: kind, share: share(n) })),
  );
}

function legend(parts) {
  return h(
    "p",
    { class: "key" },
    parts.map(([kind, text]) => h("span", {}, h("i", { class: kind }), text)),
  );
}

function cells(health, occupancy) {
  const { cache_cells: total, cache_used: used } = health;
  const running = Math.min(used, occupancy ? tokensInFlight(occupancy) : 0);
  const parts = [
    ["running", running],
    ["kept", used - running],
  ];
  return h(
    "section",
    {},
    h("h3", {}, "Cells of the cache"),
    bar(`${used} of ${total} cells are used`, parts, total),
    legend([
      ["running", `${formatCount(running)} of running requests`],
      ["kept", `${formatCount(used - running)} kept for later`],
      ["", `${formatCount(total - used)} free`],
    ]),
  );
}

function sequences({ sequences: all }) {
  const shown = all.slice(0, SHOWN_SEQUENCES);
  const longest = Math.max(1, ...shown.map((s) => s.tokens));
  const items = shown.map((s) => {
    const kind = s.state === "idle" ? "kept" : s.state;
    const text = wordsFor(s);
    return h("li", {}, h("span", {}, `#${s.sequence}`), bar(text, [[kind, s.tokens]], longest), h("span", {}, text));
  });
  return h("section", {}, h("h3", {}, `Sequences (${all.length})`), h("ol", { class: "sequences" }, items));
}

function wordsFor({ state, tokens, prompt, generated }) {
  if (state === "idle") return `${tokens} tokens kept`;
  const done = tokens < prompt ? `${tokens} of ${prompt} read` : `${prompt} read, ${generated} written`;
  return state === "paused" ? `${done}, gave way` : done;
}

function tree(occupancy) {
  const { rectangles, rows, tokens } = treeRectangles(occupancy);
  const shared = rectangles.filter((r) => r.sequences > 1);
  const spared = shared.reduce((sum, r) => sum + (r.end - r.begin) * (r.sequences - 1), 0);
  const drawn = rectangles.map(({ begin, end, top, height, sequences: n, isRunning }) =>
    svg(
      "rect",
      {
        x: begin,
        y: top * ROW,
        width: end - begin,
        height: height * ROW,
        class: n > 1 ? "shared" : isRunning ? "running" : "kept",
      },
      svg(
        "title",
        {},
        document.createTextNode(`tokens ${begin} to ${end}: ${n === 1 ? "one sequence" : `${n} sequences`}`),
      ),
    ),
  );
  const label = `${rectangles.length} prefixes, of which ${shared.length} are shared`;
  const picture = svg(
    "svg",
    {
      class: "tree",
      viewBox: `0 0 ${Math.max(1, tokens)} ${rows * ROW}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": label,
    },
    drawn,
  );
  picture.style.setProperty("height", `${Math.min(20, Math.max(2, rows * 0.75))}rem`);
  return h(
    "section",
    {},
    h("h3", {}, "Prefixes, from the first token on the left"),
    picture,
    legend([
      ["paused", `shared: ${formatCount(spared)} tokens that are not computed twice`],
      ["running", "running"],
      ["kept", "kept"],
    ]),
  );
}

function attic(health, occupancy) {
  const entries = occupancy?.host_cache ?? [];
  const largest = Math.max(1, ...entries.map((e) => e.tokens));
  const columns = entries.map((e) =>
    h("i", { share: e.tokens / largest, title: `${e.tokens} tokens, ${formatBytes(e.bytes)}` }),
  );
  const text = `${health.host_cache_entries} prefixes that lost their place in the cache, ${formatBytes(health.host_cache_bytes)} of the host's memory`;
  return h(
    "section",
    {},
    h("h3", {}, "Host cache"),
    entries.length > 0 && h("div", { class: "attic", role: "img", "aria-label": text }, columns),
    h("p", { class: "key" }, text),
  );
}

function memoryCard({ devices, models, waiting }) {
  const sections = devices.map((device) => {
    const isHost = device.name === "host";
    const own = models.flatMap((m) => m.memory).filter((m) => (isHost ? !m.is_gpu : m.device === device.name));
    const sum = (part) => own.reduce((total, m) => total + m[part], 0);
    const beside = isHost ? models.reduce((total, m) => total + m.host_memory, 0) : 0;
    const used = Math.max(0, device.total - device.free);
    const [weights, cache, graph] = [sum("weights") + beside, sum("cache"), sum("graph")];
    const other = Math.max(0, used - weights - cache - graph);
    const parts = [
      ["weights", weights],
      ["cache", cache],
      ["graph", graph],
      ["other", other],
    ];
    const texts = [
      ["weights", `weights ${formatBytes(weights)}`],
      ["cache", `cache ${formatBytes(cache)}`],
      ["graph", `working memory ${formatBytes(graph)}`],
      ["other", `others ${formatBytes(other)}`],
      ["", `free ${formatBytes(device.free)}`],
    ];
    const title = isHost ? "Memory of this machine" : `${device.name}: ${device.description}`;
    return h(
      "section",
      {},
      h("h3", {}, `${title}, ${formatBytes(device.total)}`),
      bar(`${formatBytes(used)} of ${formatBytes(device.total)} used`, parts, device.total),
      legend(texts),
    );
  });
  return h(
    "article",
    { class: "engine", "aria-label": "Memory" },
    ...sections,
    waiting > 0 && h("p", { class: "notice" }, `${waiting} requests wait for their model.`),
  );
}
