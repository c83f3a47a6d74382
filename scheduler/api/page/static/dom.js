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

export function bytes(amount) {
  const gib = amount / GIB;
  if (gib >= 1024) return `${(gib / 1024).toFixed(1)} TiB`;
  return amount && gib < 1 ? `${Math.round(gib * 1024)} MiB` : `${gib % 1 ? gib.toFixed(1) : gib} GiB`;
}

export function plural(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}
