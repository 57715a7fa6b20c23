/** Where conversations are kept: in this browser (IndexedDB), and nowhere else. */

const STORE = "conversations";
let opened = null;

function database() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("puna", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

async function run(mode, work) {
  const store = (await database()).transaction(STORE, mode).objectStore(STORE);
  return new Promise((resolve, reject) => {
    const request = work(store);
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

const changes = new EventTarget();
const otherPages = channel(); // of this browser, which keep the same chats

function channel() {
  try {
    const opened = new BroadcastChannel("puna-shelf");
    opened.onmessage = ({ data }) => {
      changes.dispatchEvent(new Event("change"));
      changes.dispatchEvent(new CustomEvent("elsewhere", { detail: data }));
    };
    return opened;
  } catch {
    return null; // a browser that is told to keep nothing
  }
}

export function onShelfChange(listener) {
  changes.addEventListener("change", listener);
}

/** *listener(id)*: another page has changed the conversation. Returns what ends that. */
export function onChangeElsewhere(listener) {
  const hear = (event) => listener(event.detail);
  changes.addEventListener("elsewhere", hear);
  return () => changes.removeEventListener("elsewhere", hear);
}

function changed(id) {
  changes.dispatchEvent(new Event("change"));
  otherPages?.postMessage(id);
}

export function getConversation(id) {
  return run("readonly", (store) => store.get(id));
}

/** Changed last first. */
export async function allConversations() {
  const found = await run("readonly", (store) => store.getAll());
  return found.sort((a, b) => b.changed - a.changed);
}

export async function keep(conversation) {
  await run("readwrite", (store) => store.put(structuredClone(conversation)));
  changed(conversation.id);
}

export async function discard(id) {
  await run("readwrite", (store) => store.delete(id));
  changed(id);
}

export async function discardAll() {
  await run("readwrite", (store) => store.clear());
  changed(null);
}
