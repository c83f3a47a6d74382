// The details of one card, read when it is opened and again when its node changes.

import { bytes, el, percent } from "./dom.js";

export class Detail {
  constructor(dialog, title, body, close) {
    Object.assign(this, { dialog, title, body, place: null });
    close.addEventListener("click", () => dialog.close());
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    dialog.addEventListener("close", () => (this.place = null));
  }

  async open(node, card) {
    this.place = { node, card };
    this.title.textContent = `${node}, card ${card}`;
    this.body.replaceChildren(el("p", { textContent: "reading…" }));
    if (!this.dialog.open) this.dialog.showModal();
    await this.read();
  }

  async read() {
    const place = (this.place = { ...this.place });
    const { node, card } = place;
    let parts;
    try {
      const reply = await fetch(`api/nodes/${encodeURIComponent(node)}`);
      const found = await reply.json();
      if (!reply.ok) throw new Error(found.error);
      const own = found.cards.find((row) => row.index === card && !row.type);
      parts = own ? shown(own, found.note) : [el("p", { textContent: "The node does not have this card any more." })];
    } catch (error) {
      parts = [el("p", { className: "note", textContent: `cannot read the node: ${error.message}` })];
    }
    if (this.place === place) this.body.replaceChildren(...parts);
  }

  changed(names) {
    if (this.place && (names === null || names.has(this.place.node))) this.read();
  }
}

function shown(card, note) {
  const facts = {
    model: card.model,
    UUID: card.uuid,
    health: card.healthy ? "healthy" : "unhealthy: nothing new is placed on it",
    core: `${card.core.used} of ${card.core.total} %`,
    memory: `${bytes(card.memory.used)} of ${bytes(card.memory.total)}`,
    GPUID: card.gpuid,
    "given out in": card.cut && `slices (${card.cut.toUpperCase()})`,
    "NUMA node": card.numa,
    node: note,
  };
  const rows = Object.entries(facts).filter(([, value]) => value !== null && value !== "" && value !== undefined);
  return [
    el("dl", {}, ...rows.flatMap(([name, value]) => [el("dt", { textContent: name }), el("dd", { textContent: value })])),
    ...(card.slices.length ? [table("Slices", ["profile", "start", "holder"], card.slices.map(slice))] : []),
    card.uses.length
      ? table("Pods", ["pod", "containers", "dialect", "core", "memory", ""], card.uses.map(use))
      : el("p", { className: "about", textContent: "No pod holds a share of it." }),
  ];
}

function slice({ profile, start, holder }) {
  return [profile, start ?? "", holder ?? "free"];
}

function use(row) {
  const said = [
    row.keeps && `keeps the card for GPUID ${row.keeps}`,
    row.reserved && "reserved, not bound yet",
    !row.certain && "on which cards it is, is not known",
    row.wishes,
  ];
  const amounts = row.core || row.memory ? [percent(row.core), bytes(row.memory)] : ["", ""];
  return [row.pod, row.containers.join(", "), row.dialect, ...amounts, said.filter(Boolean).join("; ")];
}

function table(caption, names, rows) {
  const head = el("tr", {}, ...names.map((name) => el("th", { scope: "col", textContent: name })));
  const body = rows.map((cells) => el("tr", {}, ...cells.map((cell) => el("td", { textContent: cell }))));
  const made = el("table", {}, el("caption", { textContent: caption }), el("thead", {}, head), el("tbody", {}, ...body));
  return el("div", { className: "wide" }, made);
}
