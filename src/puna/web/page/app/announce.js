/** What happens is said to those who do not see it, in few words. */

const MOST = 300;

export function announce(text) {
  const place = document.getElementById("status");
  place.textContent = "";
  requestAnimationFrame(() => {
    place.textContent = text.length > MOST ? `${text.slice(0, MOST)}…` : text;
  });
}
