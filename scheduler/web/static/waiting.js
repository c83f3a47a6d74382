// The pods that wait, each with what is in its way.

import { el, plural } from "./dom.js";

const FIRST = 3;

export function draw(list, pods, pending) {
  const open = new Set([...list.querySelectorAll("details[open]")].map((element) => element.closest("li").dataset.pod));
  const rows = pods.map((pod) => row(pod, pending.whys[pod.why], open.has(pod.name)));
  const hidden = pending.total - pending.pods.length;
  if (hidden > 0) rows.push(el("li", { className: "more", textContent: `and ${plural(hidden, "further pod")}` }));
  if (!rows.length) rows.push(el("li", { className: "more", textContent: pending.total ? "None matches." : "None." }));
  list.replaceChildren(...rows);
}

function row(pod, why, open) {
  const beside = [
    pod.created && `since ${new Date(pod.created).toLocaleString()}`,
    pod.node && `on ${pod.node}`,
    pod.nominated && `nominated to ${pod.nominated}`,
    pod.wishes,
  ].filter(Boolean);
  return el(
    "li",
    { data: { pod: pod.name } },
    el("b", { textContent: pod.name }),
    pod.dialect ? el("span", { className: "badge", textContent: pod.dialect }) : null,
    el("p", { className: "asks", textContent: pod.asks }),
    beside.length ? el("p", { className: "about", textContent: beside.join(" · ") }) : null,
    ...(why ? reasons(why, open) : [el("p", { className: "about", textContent: "why is being worked out…" })]),
  );
}

function reasons(why, open) {
  const rows = why.reasons.map(reason);
  const found = el("ul", { className: "reasons" }, ...rows.slice(0, FIRST));
  const more = rows.length > FIRST ? further(rows.slice(FIRST), open) : null;
  if (why.of === undefined) return [found];
  const of = `${why.fits.toLocaleString("en")} of ${plural(why.of, "node")}`;
  const text = why.fits
    ? `Its share is free on ${of}: it waits for its scheduler, or for something else than cards.`
    : `Its share is free on ${of}.`;
  const recut = why.recut ? ` On ${plural(why.recut, "node")} it fits once the cards are cut anew.` : "";
  const at = new Date(why.at * 1000).toLocaleTimeString();
  return [el("p", { textContent: text + recut }, el("span", { className: "about", textContent: ` ${at}` })), found, more];
}

function reason({ text, nodes, examples }) {
  const names = examples.join(", ");
  const where = nodes > examples.length ? `${plural(nodes, "node")}${names && ` (${names}, …)`}` : names;
  return el("li", { title: text }, where ? el("span", { className: "about", textContent: `${where}: ` }) : null, text);
}

function further(rows, open) {
  const summary = el("summary", { textContent: `${plural(rows.length, "further reason")}` });
  return el("details", { open }, summary, el("ul", { className: "reasons" }, ...rows));
}
