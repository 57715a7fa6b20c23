/** Elements from plain calls: h("button", { class: "x", onclick }, "text", child). Text is text, never markup. */

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) set(element, name, value);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

function set(element, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
  else if (name === "share")
    element.style.setProperty("--share", String(value)); // an attribute would be an inline style
  else if (name in element) element[name] = value;
  else element.setAttribute(name, value === true ? "" : String(value));
}

const SVG = "http://www.w3.org/2000/svg";

/** The same for pictures. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children.flat());
  return element;
}
