// The details of one card, read when it is opened and again when its node changes.

import { bytes, el, percent, usedBytes, usedPercent } from "./dom.js";

export class Detail {
  // useOf returns what is used of a node's cards (store.js), or a false value.
  constructor(dialog, title, body, close, useOf) {
    Object.assign(this, { dialog, title, body, useOf, place: null, found: null });
    close.addEventListener("click", () => dialog.close());
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    dialog.addEventListener("close", () => (this.place = null));
  }

  async open(node, card) {
    this.place = { node, card };
    this.found = null;
    this.title.textContent = `${node}, card ${card}`;
    this.body.replaceChildren(el("p", { textContent: "reading…" }));
    if (!this.dialog.open) this.dialog.showModal();
    await this.read();
  }

  async read() {
    const place = (this.place = { ...this.place });
    const { node, card } = place;
    let found = null;
    let parts;
    try {
      const reply = await fetch(`api/nodes/${encodeURIComponent(node)}`);
      found = await reply.json();
      if (!reply.ok) throw new Error(found.error);
    } catch (error) {
      found = null;
      parts = [el("p", { className: "note", textContent: `cannot read the node: ${error.message}` })];
    }
    if (this.place !== place) return;
    this.found = found;
    if (found) this.draw();
    else this.body.replaceChildren(...parts);
  }

  // Draws what was read last again, with what is used now.
  draw() {
    if (!this.place || !this.found) return;
    const { node, card } = this.place;
    const own = this.found.cards.find((row) => row.index === card && !row.type);
    const gone = el("p", { textContent: "The node does not have this card any more." });
    this.body.replaceChildren(...(own ? shown(own, this.found.note, this.useOf(node)) : [gone]));
  }

  changed(names) {
    if (this.place && (names === null || names.has(this.place.node))) this.read();
  }
}

function shown(card, note, use) {
  const [core, memory] = (use && !use.unknown && use.cards.get(card.index)) || [null, null];
  const facts = {
    model: card.model,
    UUID: card.uuid,
    health: card.healthy ? "healthy" : "unhealthy: nothing new is placed on it",
    core: `${card.core.used} of ${card.core.total} %`,
    memory: `${bytes(card.memory.used)} of ${bytes(card.memory.total)}`,
    "use per pod": use?.problem && `unknown: ${use.problem}`,
    "really used": use && (use.unknown ? `unknown: ${use.unknown}` : inUse(core, memory)),
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
      ? table("Pods", columns(use), card.uses.map((row) => podRow(row, card.index, use)))
      : el("p", { className: "about", textContent: "No pod holds a share of it." }),
  ];
}

function slice({ profile, start, holder }) {
  return [profile, start ?? "", holder ?? "free"];
}

function inUse(core, memory) {
  if (core === null && memory === null) return "not measured";
  return [core === null ? "" : `${percent(core)} of the SMs`, memory === null ? "" : bytes(memory)].filter(Boolean).join(", ");
}

function columns(use) {
  const note = use && !use.unknown ? " used/held" : "";
  return ["pod", "containers", "dialect", `core${note}`, `memory${note}`, ""];
}

function podRow(row, index, use) {
  const [core, memory] = use && !use.unknown ? use.pods.get(`${index} ${row.pod}`) ?? [null, null] : [];
  const said = [
    row.keeps && `keeps the card for GPUID ${row.keeps}`,
    row.reserved && "reserved, not bound yet",
    !row.certain && "on which cards it is, is not known",
    row.wishes,
  ];
  const amounts = row.core || row.memory ? [usedPercent(core, row.core), usedBytes(memory, row.memory)] : ["", ""];
  return [row.pod, row.containers.join(", "), row.dialect, ...amounts, said.filter(Boolean).join("; ")];
}

function table(caption, names, rows) {
  const head = el("tr", {}, ...names.map((name) => el("th", { scope: "col", textContent: name })));
  const body = rows.map((cells) => el("tr", {}, ...cells.map((cell) => el("td", { textContent: cell }))));
  const made = el("table", {}, el("caption", { textContent: caption }), el("thead", {}, head), el("tbody", {}, ...body));
  return el("div", { className: "wide" }, made);
}
