// The page's modules that know no page: started by test_modules.py with node's own test runner.

import assert from "node:assert/strict";
import { test } from "node:test";

const APP = new URL("../../../src/puna/web/page/app/", import.meta.url);
const { jsonLines } = await import(new URL("lines.js", APP));
const conversation = await import(new URL("conversation.js", APP));
const figures = await import(new URL("figures.js", APP));

function bodyOf(...chunks) {
  return new ReadableStream({
    start(controller) {
      for (const chunk of chunks) controller.enqueue(chunk);
      controller.close();
    },
  });
}

async function linesOf(...chunks) {
  const found = [];
  for await (const value of jsonLines(bodyOf(...chunks))) found.push(value);
  return found;
}

test("lines are whole however the bytes come", async () => {
  const bytes = new TextEncoder().encode('{"a": "é"}\n\n{"b": 2}\n{"c": 3}');
  const cuts = [...Array(bytes.length + 1).keys()];
  for (const cut of cuts) {
    assert.deepEqual(await linesOf(bytes.slice(0, cut), bytes.slice(cut)), [{ a: "é" }, { b: 2 }, { c: 3 }]);
  }
  assert.deepEqual(await linesOf(...[...bytes].map((byte) => Uint8Array.of(byte))), [{ a: "é" }, { b: 2 }, { c: 3 }]);
});

test("who stops reading ends the stream", async () => {
  let isCancelled = false;
  const body = new ReadableStream({
    start: (controller) => controller.enqueue(new TextEncoder().encode("1\n2\n")),
    cancel: () => {
      isCancelled = true;
    },
  });
  for await (const value of jsonLines(body)) if (value === 1) break;
  assert.ok(isCancelled);
});

function chatOf(...contents) {
  const chat = conversation.emptyConversation("tiny");
  contents.forEach((content, i) => chat.messages.push({ role: i % 2 ? "assistant" : "user", content }));
  return chat;
}

test("what is said again in other words ends what came after", () => {
  const chat = chatOf("a", "b", "c", "d");
  conversation.say(chat, "A", [{ type: "image/png", data: "x" }], 0);
  assert.deepEqual(chat.messages, [{ role: "user", content: "A", images: [{ type: "image/png", data: "x" }] }]);
});

test("an answer takes the place of the one before", () => {
  const chat = chatOf("a", "b");
  const message = conversation.beginAnswer(chat, 1);
  assert.deepEqual(chat.messages, [
    { role: "user", content: "a" },
    { role: "assistant", content: "" },
  ]);
  assert.equal(chat.messages[1], message);
});

test("parts become a message, and the time of thinking is counted", () => {
  const message = { role: "assistant", content: "" };
  conversation.addPart(message, { message: { thinking: "hm" } }, 1000);
  conversation.addPart(message, { message: { thinking: "m" } }, 2000);
  conversation.addPart(message, { message: { content: "So" } }, 3500);
  conversation.addPart(message, { message: { tool_calls: [{ function: { name: "f" } }] } }, 3600);
  conversation.addPart(
    message,
    { done: true, done_reason: "stop", eval_count: 10, eval_duration: 2e9, prompt_eval_count: 9, cached_count: 4 },
    4000,
  );
  assert.equal(message.thinking, "hmm");
  assert.equal(message.thinkingSeconds, 2.5);
  assert.equal(message.thinkingSince, undefined);
  assert.equal(message.content, "So");
  assert.equal(message.tool_calls.length, 1);
  assert.deepEqual(message.stats, { tokens: 10, perSecond: 5, prompt: 9, cached: 4, reason: "stop", warnings: [] });
});

test("a request has what the server knows, and nothing of the page", () => {
  const chat = chatOf("a", "b");
  chat.settings = { system: "Be brief.", think: "off", temperature: 0, tools: [{ type: "function" }] };
  chat.messages[1].stats = { tokens: 3 };
  chat.messages.push({ role: "assistant", content: "", error: "it failed" });
  conversation.giveResult(chat, "f", "42");
  assert.deepEqual(conversation.requestOf(chat), {
    model: "tiny",
    messages: [
      { role: "system", content: "Be brief." },
      { role: "user", content: "a" },
      { role: "assistant", content: "b" },
      { role: "tool", content: "42", tool_name: "f" },
    ],
    stream: true,
    think: false,
    tools: [{ type: "function" }],
    options: { temperature: 0 },
  });
});

test("titles are short and never empty", () => {
  assert.equal(conversation.titleOf(chatOf()), "New chat");
  assert.equal(conversation.titleOf(chatOf("  a\n b ")), "a b");
  assert.equal(conversation.titleOf(chatOf("x".repeat(100))).length, 60);
});

test("a file of chats is read, and one that is none is refused", () => {
  const chat = chatOf("a", "b");
  const [read] = conversation.conversationsFrom(JSON.parse(JSON.stringify({ conversations: [chat] })));
  assert.deepEqual(read.messages, chat.messages);
  assert.notEqual(read.id, chat.id);
  assert.equal(read.changed, chat.changed);
  for (const value of [
    null,
    1,
    "x",
    {},
    [{}],
    { conversations: [{ messages: [{ role: "root", content: "x" }] }] },
    [{ messages: [{ role: "user" }] }],
  ]) {
    assert.throws(() => conversation.conversationsFrom(value), TypeError);
  }
});

test("of a message in a file only what is known is taken", () => {
  const strange = {
    role: "user",
    content: "a",
    images: "x",
    tool_calls: [null, { function: {} }],
    thinking: 5,
    onclick: "hacked()",
    stats: 1,
  };
  const [read] = conversation.conversationsFrom([{ messages: [strange], settings: "x", model: 5 }]);
  assert.deepEqual(read.messages, [{ role: "user", content: "a" }]);
  assert.deepEqual([read.settings, read.model], [{}, "5"]);
});

test("a model is asked again when all its calls have results", () => {
  const chat = conversation.emptyConversation("m");
  conversation.say(chat, "a");
  conversation.beginAnswer(chat).tool_calls = [{ function: { name: "f" } }, { function: { name: "g" } }];
  const open = () => conversation.openCalls(chat, 1).map((call) => call.function.name);
  assert.deepEqual(open(), ["f", "g"]);
  conversation.giveResult(chat, "f", "1");
  assert.deepEqual(open(), ["g"]);
  conversation.giveResult(chat, "g", "2");
  assert.deepEqual(open(), []);
  conversation.beginAnswer(chat);
  assert.deepEqual([open(), conversation.openCalls(chat, 0)], [[], []]);
});

test("conversations are told apart where a browser makes no numbers for that", () => {
  assert.equal(new Set([1, 2, 3].map(() => conversation.emptyConversation().id)).size, 3);
  assert.match(conversation.emptyConversation().id, /^[0-9a-f]{32}$/);
});

test("bytes and counts are short", () => {
  assert.deepEqual([0, 999, 1500, 84e6, 1.1e12].map(figures.formatBytes), [
    "0 B",
    "999 B",
    "1.5 KB",
    "84 MB",
    "1.1 TB",
  ]);
  assert.deepEqual([0, 3.25, 12.6, 1800, 52000, 1.2e6].map(figures.formatCount), [
    "0",
    "3.3",
    "13",
    "1.8k",
    "52k",
    "1.2M",
  ]);
});

function pictureOf(now, steps, computed) {
  return { now, models: [{ name: "m", health: { steps }, occupancy: { computed } }] };
}

test("rates are between two looks, and none where a model was loaded anew", () => {
  assert.deepEqual(figures.rates(pictureOf(1, 10, 100), pictureOf(3, 30, 500), "m"), { steps: 10, tokens: 200 });
  assert.equal(figures.rates(pictureOf(1, 10, 100), pictureOf(3, 5, 50), "m"), null);
  assert.equal(figures.rates(null, pictureOf(3, 5, 50), "m"), null);
  assert.equal(figures.rates(pictureOf(1, 10, 100), pictureOf(3, 30, 500), "n"), null);
});

test("what is shared lies over all who share it", () => {
  const prefixes = [
    { parent: -1, begin: 0, end: 50, sequences: 1 },
    { parent: -1, begin: 0, end: 100, sequences: 3 },
    { parent: 1, begin: 100, end: 180, sequences: 2 },
    { parent: 1, begin: 100, end: 110, sequences: 1 },
    { parent: 2, begin: 180, end: 200, sequences: 1 },
    { parent: 2, begin: 180, end: 190, sequences: 1 },
  ];
  const { rectangles, rows, tokens } = figures.treeRectangles({
    prefixes,
    sequences: [
      { node: 4, state: "running" },
      { node: 3, state: "idle" },
    ],
  });
  assert.equal(rows, 4);
  assert.equal(tokens, 200);
  const of = (begin, end) => rectangles.find((r) => r.begin === begin && r.end === end);
  assert.deepEqual(
    [of(0, 50), of(0, 100), of(100, 180), of(100, 110)].map((r) => [r.top, r.height]),
    [
      [0, 1],
      [1, 3],
      [1, 2],
      [3, 1],
    ],
  );
  assert.deepEqual(
    [of(0, 50), of(0, 100), of(180, 200), of(180, 190)].map((r) => r.isRunning),
    [false, true, true, false],
  );
});

test("a series keeps its last values and stays in its box", () => {
  const series = new figures.Series(3);
  for (const value of [9, 1, 2, 4]) series.add(value);
  assert.deepEqual(series.values, [1, 2, 4]);
  assert.equal(series.points(), "0.0,14.5 50.0,10.0 100.0,1.0");
});

test("tokens in flight are those of requests that run", () => {
  const sequences = [
    { state: "running", tokens: 5 },
    { state: "idle", tokens: 50 },
    { state: "paused", tokens: 2 },
  ];
  assert.equal(figures.tokensInFlight({ sequences }), 7);
});
