// A node and its cards as elements. The heights are fixed: list.js places nodes without measuring them.

import { bytes, el, percent, plural, usedBytes, usedPercent } from "./dom.js";

export const SIZES = { head: 34, line: 22, tile: 98, gap: 8, end: 14, narrowest: 165, widest: 320 };

// The cards fill the width, in rows of equal length.
export function columnsOf(node, width) {
  const room = Math.max(1, Math.floor((width + SIZES.gap) / (SIZES.narrowest + SIZES.gap)));
  const rows = Math.ceil(node.cards.length / room);
  return Math.max(1, Math.ceil(node.cards.length / rows) || 1);
}

export function heightOf({ node, cards }, columns) {
  const lines = (node.note ? 1 : 0) + (node.others ? 1 : 0);
  return SIZES.head + lines * SIZES.line + Math.ceil(cards.length / columns) * (SIZES.tile + SIZES.gap) + SIZES.end;
}

export function section({ node, cards }, columns) {
  const tiles = el("div", { className: "tiles", role: "list" }, ...cards.map((card) => tile(node, card)));
  tiles.style.gridTemplateColumns = `repeat(${columns}, minmax(0, ${SIZES.widest}px))`;
  return el(
    "section",
    { "aria-label": `node ${node.name}`, data: { node: node.name } },
    el("h2", { className: "node" }, el("span", { className: "name", textContent: node.name }), ...about(node, cards)),
    node.note ? el("p", { className: "line note", textContent: node.note, title: node.note }) : null,
    tiles,
    node.others ? others(node) : null,
  );
}

function about(node, cards) {
  const shown = cards.length === node.cards.length ? "" : `${cards.length} of `;
  const text = [`${shown}${plural(node.cards.length, "card")}`, ...node.models].join(" · ");
  const badges = node.nvidia ? [el("span", { className: "badge", textContent: "NVIDIA's plugin" })] : [];
  const { unknown, problem } = node.use ?? {};
  const textContent = unknown ? "use unknown" : "use per pod unknown";
  if (unknown || problem) badges.push(el("span", { className: "badge", textContent, title: `${textContent}: ${unknown || problem}` }));
  return [el("span", { className: "about", textContent: text }), ...badges];
}

// Returns [core, memory] of a card, or of a pod on it; undefined if nothing is known of the node's use.
function useOf(node, card) {
  return node.use && !node.use.unknown ? node.use.cards.get(card.index) ?? [null, null] : undefined;
}

function useOfPod(node, card, pod) {
  return node.use && !node.use.unknown ? node.use.pods.get(`${card.index} ${pod.name}`) ?? [null, null] : undefined;
}

function tile(node, card) {
  const over = card.core[0] > card.core[1] || card.memory[0] > card.memory[1];
  const button = el(
    "button",
    {
      type: "button",
      className: "tile",
      tabIndex: -1,
      "aria-label": describe(node, card),
      data: { card: card.index, state: card.state },
    },
    head(node, card, over),
    bar(node, card, "core", 1),
    card.slices ? sliced(node, card) : bar(node, card, "memory", 2),
    names(node, card),
  );
  return el("div", { role: "listitem" }, button);
}

function head(node, card, over) {
  const badges = [card.cut?.toUpperCase(), card.gpuid].filter(Boolean);
  const said = { unhealthy: "✗ unhealthy", free: "idle" }[card.state] ?? amounts(node, card);
  return el(
    "span",
    { className: "head" },
    el("b", { textContent: card.index }),
    ...badges.map((text) => el("span", { className: "badge", textContent: text, title: text })),
    el("span", { className: over ? "used over" : "used", textContent: said }),
  );
}

function amounts(node, card) {
  const [core, memory] = useOf(node, card) ?? [];
  return `${usedPercent(core, card.core[0])} · ${usedBytes(memory, card.memory[0])}`;
}

function bar(node, card, what, at) {
  const all = Math.max(card[what][1], card[what][0], 1);
  const parts = card.uses.map((use) => {
    const pod = node.pods[use[0]];
    return part(pod, use[at], all, useOfPod(node, card, pod)?.[at - 1]);
  });
  return el("span", { className: `bar ${what}` }, ...parts.filter(Boolean));
}

function part(pod, held, all, used) {
  if (!held) return null;
  const kinds = [pod.reserved && "reserved", pod.unsure && "unsure"].filter(Boolean);
  const className = ["part", `c${pod.colour}`, ...kinds].join(" ");
  return el("i", { className, style: { width: `${(held / all) * 100}%` } }, rest(held, used));
}

// Covers the part of a share that is not used, or all of it if its use is not measured.
function rest(held, used) {
  if (used === undefined) return null;
  if (used === null) return el("b", { className: "rest unmeasured" });
  if (used > held) return el("b", { className: "over" });
  return el("b", { className: "rest", style: { width: `${(1 - used / held) * 100}%` } });
}

// Slices are drawn at their position on the card; a free slice is only an outline.
function sliced(node, card) {
  const parts = card.slices.map(([name, left, width, user]) => {
    const pod = user >= 0 ? node.pods[user] : null;
    const className = pod ? `slice c${pod.colour}` : "slice";
    const title = `${name}: ${pod ? pod.name : "free"}`;
    const style = { left: `${left / 10}%`, width: `${width / 10}%` };
    return el("i", { className, title, style }, pod ? rest(heldBy(card, user), useOfPod(node, card, pod)?.[1]) : null, name);
  });
  return el("span", { className: "bar memory slices" }, ...parts);
}

// Returns the memory that a pod holds of all its slices of a card. Its use is divided among them alike.
function heldBy(card, user) {
  return card.uses.filter(([pod]) => pod === user).reduce((sum, use) => sum + use[2], 0);
}

function names(node, card) {
  const pods = [...new Set(card.uses.map(([pod]) => pod))].map((pod) => node.pods[pod]);
  const shown = pods.slice(0, 2).map((pod) =>
    el(
      "span",
      { className: "pod", title: titleOf(node, card, pod) },
      el("i", { className: `dot c${pod.colour}` }),
      `${mark(pod)}${pod.name.slice(pod.name.indexOf("/") + 1)}`,
    ),
  );
  if (pods.length > 2) shown.push(el("span", { className: "more", textContent: `+${pods.length - 2}` }));
  return el("span", { className: "names" }, ...shown);
}

function titleOf(node, card, pod) {
  const used = useOfPod(node, card, pod);
  if (!used) return pod.name;
  const held = card.uses.filter((use) => node.pods[use[0]] === pod);
  const [core, memory] = [1, 2].map((at) => held.reduce((sum, use) => sum + use[at], 0));
  return `${pod.name}: ${usedPercent(used[0], core)}, ${usedBytes(used[1], memory)} (used/held)`;
}

function mark(pod) {
  if (pod.keeps) return "⚓ ";
  return pod.unsure ? "? " : "";
}

function describe(node, card) {
  const pods = [...new Set(card.uses.map(([pod]) => node.pods[pod].name))];
  const slices = card.slices ? `, ${plural(card.slices.length, "slice")}` : "";
  const what = { unhealthy: "unhealthy, ", free: "idle, " }[card.state] ?? "";
  const amounts = `core ${percent(card.core[0])}, memory ${bytes(card.memory[0])} of ${bytes(card.memory[1])}`;
  const [core, memory] = useOf(node, card) ?? [null, null];
  const used = core === null && memory === null ? "" : `, used ${said(core, percent)} and ${said(memory, bytes)}`;
  const name = card.gpuid ? `, GPUID ${card.gpuid}` : "";
  return `${node.name} card ${card.index}, ${what}${amounts}${used}${slices}${name}${pods.length ? `: ${pods.join(", ")}` : ""}`;
}

function said(amount, text) {
  return amount === null ? "unknown" : text(amount);
}

function others(node) {
  const text = node.others.map((device) => {
    const health = device.unhealthy ? " unhealthy" : "";
    const pods = device.uses.map(([pod]) => node.pods[pod].name).join(", ");
    return `${device.type} ${device.index}${health} ${percent(device.core[0])}${pods && ` (${pods})`}`;
  });
  return el("p", { className: "line", textContent: text.join(" · "), title: text.join("\n") });
}
