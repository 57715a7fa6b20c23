/** What a person has chosen, kept in this browser; where it keeps nothing, for as long as the page is open. */

const forNow = new Map();

export function recall(name) {
  try {
    return localStorage.getItem(name) ?? forNow.get(name) ?? "";
  } catch {
    return forNow.get(name) ?? "";
  }
}

export function remember(name, value) {
  forNow.set(name, value);
  try {
    localStorage.setItem(name, value);
  } catch {
    // a browser that is told to keep nothing
  }
}
