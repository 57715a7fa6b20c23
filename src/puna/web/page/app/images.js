/** Pictures that a person adds: from a file, dropped or pasted; as the API takes them. */

export const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
const MAX_BYTES = 32 << 20;

export function imagesIn(transfer) {
  return [...(transfer?.files ?? [])].filter((file) => file.type.startsWith("image/"));
}

/** {type, data (base64), name}. Errors: TypeError for what is no picture or too large. */
export async function readImage(file) {
  if (!TYPES.includes(file.type))
    throw new TypeError(`${file.name || "This file"} is no picture that models take (${file.type || "unknown type"}).`);
  if (file.size > MAX_BYTES) throw new TypeError(`${file.name || "This picture"} is larger than 32 MB.`);
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
  return { type: file.type, data: url.slice(url.indexOf(",") + 1), name: file.name };
}

export function imageUrl({ type, data }) {
  return TYPES.includes(type) ? `data:${type};base64,${data}` : "";
}
