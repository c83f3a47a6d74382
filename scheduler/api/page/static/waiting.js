// The list of waiting gangs and pods, each with its reasons. Unchanged rows stay in the document, so that they keep the focus.

import { el, plural } from "./dom.js";

const FIRST = 3;

export class Waiting {
  made = new Map();

  constructor(list) {
    this.list = list;
  }

  show(pods, gangs, pending) {
    const before = this.made;
    this.made = new Map();
    for (const gang of gangs) {
      const id = `gang ${this.made.size} ${gang.name}`;
      this.made.set(id, madeGang(gang, before.get(id)));
    }
    for (const pod of pods) {
      let id = pod.name;
      while (this.made.has(id)) id += " ";
      this.made.set(id, made(pod, pending.whys[pod.why], before.get(id)));
    }
    const rows = [...this.made.values()].map((row) => row.element);
    if (pending.moreGangs) {
      rows.splice(gangs.length, 0, el("li", { className: "more", textContent: `and ${plural(pending.moreGangs, "further gang")}` }));
    }
    const hidden = pending.total - pending.pods.length;
    if (hidden > 0) rows.push(el("li", { className: "more", textContent: `and ${plural(hidden, "further pod")}` }));
    if (!rows.length) rows.push(el("li", { className: "more", textContent: pending.total ? "None matches." : "None." }));
    place(this.list, rows);
  }
}

function made(pod, why, before) {
  const { at, ...said } = why ?? {};
  const key = JSON.stringify([pod, said]);
  const row = before?.key === key ? before : { key, element: drawn(pod, why, before?.element) };
  const time = row.element.querySelector(".at");
  if (time) time.textContent = ` ${new Date(at * 1000).toLocaleTimeString()}`;
  return row;
}

function madeGang(gang, before) {
  const key = JSON.stringify(gang);
  return before?.key === key ? before : { key, element: gangRow(gang) };
}

function gangRow(gang) {
  const at = gang.at ? ` ${new Date(gang.at * 1000).toLocaleTimeString()}` : "";
  return el(
    "li",
    { data: { gang: gang.name } },
    el("b", { textContent: gang.name }),
    el("span", { className: "badge", textContent: "gang" }),
    el("p", { textContent: gang.text }, el("span", { className: "about at", textContent: at })),
  );
}

function drawn(pod, why, before) {
  const element = row(pod, why, Boolean(before?.querySelector("details[open]")));
  const focused = before?.contains(document.activeElement);
  before?.replaceWith(element);
  if (focused) element.querySelector("summary")?.focus({ preventScroll: true });
  return element;
}

// Rows that are in place are not moved, since a row that is moved loses the focus.
function place(list, rows) {
  const wanted = new Set(rows);
  for (const child of [...list.children]) if (!wanted.has(child)) child.remove();
  for (const [i, row] of rows.entries()) {
    if (list.children[i] !== row) list.insertBefore(row, list.children[i] ?? null);
  }
}

function row(pod, why, open) {
  const facts = [
    pod.created && `since ${new Date(pod.created).toLocaleString()}`,
    pod.node && `on ${pod.node}`,
    pod.gang && `in gang ${pod.gang}`,
    pod.nominated && `nominated to ${pod.nominated}`,
    pod.wishes,
  ].filter(Boolean);
  return el(
    "li",
    { data: { pod: pod.name } },
    el("b", { textContent: pod.name }),
    pod.dialect ? el("span", { className: "badge", textContent: pod.dialect }) : null,
    pod.gated ? el("span", { className: "badge", textContent: "gated" }) : null,
    el("p", { className: "asks", textContent: pod.asks }),
    facts.length ? el("p", { className: "about", textContent: facts.join(" · ") }) : null,
    ...(why ? reasons(pod, why, open) : [el("p", { className: "about", textContent: "finding out why…" })]),
  );
}

function reasons(pod, why, open) {
  const rows = why.reasons.map(reason);
  const found = el("ul", { className: "reasons" }, ...rows.slice(0, FIRST));
  const more = rows.length > FIRST ? further(rows.slice(FIRST), open) : null;
  if (why.of === undefined) return [found];
  const of = `${why.fits.toLocaleString("en")} of ${plural(why.of, "node")}`;
  const text = why.fits
    ? `Its share is free on ${of}: it waits for its scheduler,${pod.gang ? " its gang," : ""} or for something else than cards.`
    : `Its share is free on ${of}.`;
  const recut = why.recut ? ` On ${plural(why.recut, "node")} it fits once the cards are partitioned again.` : "";
  return [el("p", { textContent: text + recut }, el("span", { className: "about at" })), found, more];
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
