/** Numbers of the engine made ready to be shown: rates between two looks, and the tree of prefixes as rectangles. */

const UNITS = ["B", "KB", "MB", "GB", "TB"];

export function formatBytes(bytes) {
  let value = bytes;
  let unit = 0;
  while (value >= 1000 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value < 10 && unit ? value.toFixed(1) : Math.round(value)} ${UNITS[unit]}`;
}

export function formatCount(value) {
  if (value < 1000) return value < 10 && value % 1 ? value.toFixed(1) : String(Math.round(value));
  return value < 1e6 ? `${(value / 1e3).toFixed(value < 1e4 ? 1 : 0)}k` : `${(value / 1e6).toFixed(1)}M`;
}

/** Steps and tokens per second of a model between two pictures; null where that cannot be said, as after a reload. */
export function rates(before, after, name) {
  const [a, b] = [before, after].map((picture) => picture?.models.find((model) => model.name === name));
  const seconds = after && before ? after.now - before.now : 0;
  if (!a?.health || !b?.health || seconds <= 0 || b.health.steps < a.health.steps) return null;
  const tokens = a.occupancy && b.occupancy ? (b.occupancy.computed - a.occupancy.computed) / seconds : null;
  return { steps: (b.health.steps - a.health.steps) / seconds, tokens };
}

/** Tokens of sequences that requests are running in. */
export function tokensInFlight(occupancy) {
  return occupancy.sequences.filter((s) => s.state !== "idle").reduce((sum, s) => sum + s.tokens, 0);
}

/**
 * Prefixes as rectangles: from begin to end in tokens, and from *top* over *height* rows; each leaf is a row, and what is
 * shared lies over the rows of all who share it.
 */
export function treeRectangles({ prefixes, sequences }) {
  const children = new Map();
  prefixes.forEach(({ parent }, place) => children.set(parent, [...(children.get(parent) ?? []), place]));
  const running = new Set(sequences.filter((s) => s.state === "running").map((s) => s.node));
  const rectangles = [];
  let rows = 0;

  function place(node) {
    const top = rows;
    let isRunning = running.has(node);
    for (const child of children.get(node) ?? []) isRunning = place(child) || isRunning;
    if (rows === top) rows += 1;
    const { begin, end, sequences: n } = prefixes[node];
    rectangles.push({ begin, end, top, height: rows - top, sequences: n, isRunning });
    return isRunning;
  }

  for (const root of children.get(-1) ?? []) place(root);
  return { rectangles, rows, tokens: Math.max(0, ...prefixes.map(({ end }) => end)) };
}

/** The last so many values of a series, and points of a line through them in a box of 100 by 20. */
export class Series {
  constructor(most = 60) {
    this.most = most;
    this.values = [];
  }

  add(value) {
    this.values = [...this.values, value].slice(-this.most);
  }

  points() {
    const top = Math.max(1e-9, ...this.values);
    const step = 100 / (this.most - 1);
    const first = this.most - this.values.length;
    return this.values
      .map((value, i) => `${((first + i) * step).toFixed(1)},${(19 - (18 * value) / top).toFixed(1)}`)
      .join(" ");
  }
}
