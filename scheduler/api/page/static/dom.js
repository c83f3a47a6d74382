// All elements are created here. Data of the cluster becomes text in them, never HTML.

export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("aria-") || name === "role") made.setAttribute(name, value);
    else if (name === "data") Object.assign(made.dataset, value);
    else if (name === "style") Object.assign(made.style, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

// An unchanged text is not written, so that screen readers do not repeat it.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const GIB = 2 ** 30;

export function percent(milli) {
  return `${milli % 10 ? (milli / 10).toFixed(1) : milli / 10} %`;
}

// Amounts such as "12/50 %" and "1.5/8 GiB": what is used, and what is held. Undefined says that nothing is known of use.
export function usedPercent(used, held) {
  return used === undefined ? percent(held) : `${used === null ? "?" : Math.round(used / 10)}/${percent(held)}`;
}

export function usedBytes(used, held) {
  if (used === undefined) return bytes(held);
  const size = GIB * (held >= 1024 * GIB ? 1024 : held && held < GIB ? 1 / 1024 : 1);
  const [own, all] = [used, held].map((amount) => (amount === null ? "?" : short(amount / size)));
  return `${own}/${all} ${size === GIB ? "GiB" : size > GIB ? "TiB" : "MiB"}`;
}

function short(number) {
  if (number > 0 && number < 0.05) return "<0.1";
  return number >= 9.95 ? number.toFixed() : number.toFixed(1).replace(".0", "");
}

export function bytes(amount) {
  const gib = amount / GIB;
  if (gib >= 1024) return `${(gib / 1024).toFixed(1)} TiB`;
  return amount && gib < 1 ? `${Math.round(gib * 1024)} MiB` : `${gib % 1 ? gib.toFixed(1) : gib} GiB`;
}

export function plural(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}
