/** From bytes as they come to values: one JSON value a line. */

export async function* jsonLines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      const lines = (rest + (value ?? "")).split("\n");
      rest = done ? "" : lines.pop();
      for (const line of lines) if (line.trim()) yield JSON.parse(line);
      if (done) return;
    }
  } finally {
    await reader.cancel().catch(() => {}); // who stops reading ends the server's work
  }
}
