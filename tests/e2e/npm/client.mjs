// Asks a server with the official npm client and prints what came of it as one JSON object: node client.mjs URL MODEL
import { pathToFileURL } from 'node:url'

const [url, model, client] = process.argv.slice(2)
const { Ollama } = await import(pathToFileURL(client))
const ollama = new Ollama({ host: url })
const messages = [{ role: 'user', content: 'Hi' }]
const options = { temperature: 0, num_predict: 12, num_ctx: 256, ignore_eos: true }
const found = {}

const whole = await ollama.chat({ model, messages, options })
found.chat = { text: whole.message.content, role: whole.message.role, done: whole.done, count: whole.eval_count }

found.streamed = ''
for await (const part of await ollama.chat({ model, messages, options, stream: true })) {
  found.streamed += part.message.content
  found.last = part.done
}

const generated = await ollama.generate({ model, prompt: 'once', options })
found.generate = { text: generated.response, context: generated.context.length, reason: generated.done_reason }

const schema = { type: 'object', properties: { n: { enum: [1, 2] } }, required: ['n'], additionalProperties: false }
const structured = await ollama.chat({ model, messages, options: { num_ctx: 256 }, format: schema })
found.structured = JSON.parse(structured.message.content)

found.models = (await ollama.list()).models.map((listed) => listed.name)
found.running = (await ollama.ps()).models.map((running) => running.name)
const shown = await ollama.show({ model })
found.show = { family: shown.details.family, capabilities: shown.capabilities }

await ollama.copy({ source: model, destination: 'copied' })
found.copied = (await ollama.list()).models.map((listed) => listed.name)
await ollama.delete({ model: 'copied' })
found.deleted = (await ollama.list()).models.map((listed) => listed.name)

const embedder = process.argv[5]
const vectors = await ollama.embed({ model: embedder, input: ['hello', 'world'] })
found.embed = { n: vectors.embeddings.length, width: vectors.embeddings[0].length }

for (const [name, ask] of Object.entries({
  missing: () => ollama.chat({ model: 'nope', messages }),
  wrong: () => ollama.chat({ model, messages, format: { type: 'dog' } }),
})) {
  try {
    await ask()
  } catch (error) {
    found[name] = { status: error.status_code, text: error.message }
  }
}

// An answer without end, left in its middle.
const endless = await ollama.generate({ model, prompt: 'once', options: { num_predict: -1, ignore_eos: true }, stream: true })
try {
  for await (const part of endless) {
    if (!found.aborted) {
      found.aborted = true
      endless.abort()
    }
  }
} catch (error) {
  found.abort = error.name
}
console.log(JSON.stringify(found))
