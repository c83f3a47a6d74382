// Polls for changes and updates the parts of the page.

import { Detail } from "./detail.js";
import { bytes, el, plural, say } from "./dom.js";
import { List } from "./list.js";
import { Store } from "./store.js";
import { Waiting } from "./waiting.js";

const PAUSE = 1000;
const SOON = 100;
const PATIENCE = 20000;
// The line of a request may have 4,094 letters.
const LONGEST = 3500;

const at = (id) => document.getElementById(id);
const store = new Store();
const detail = new Detail(at("detail"), at("detail-title"), at("detail-body"), at("close"), (name) => store.nodes.get(name)?.use);
const list = new List(at("list"), at("canvas"), (node, card) => detail.open(node, card));
at("detail").addEventListener("close", () => list.refocus());
const waiting = new Waiting(at("pods"));
const controls = ["search", "model", "dialect", "state"];

function filter() {
  return Object.fromEntries(controls.map((name) => [name, at(name).value]));
}

function show() {
  const rows = store.matching(filter());
  list.show(rows);
  const cards = rows.reduce((sum, row) => sum + row.cards.length, 0);
  say(at("found"), `${plural(rows.length, "node")}, ${plural(cards, "card")}`);
  at("none").hidden = rows.length > 0 || !store.nodes.size;
  waiting.show(store.waiting(filter()), store.gangs(filter()), store.pending);
  at("waiting-count").textContent = store.pending.total;
  at("show-waiting").textContent = `Waiting (${store.pending.total})`;
}

function showTotals() {
  const sum = store.totals();
  const share = ([used, all]) => (all ? `${Math.round((100 * used) / all)} %` : "–");
  at("totals").textContent = [
    plural(sum.nodes, "node"),
    plural(sum.cards, "card"),
    `${sum.idle.toLocaleString("en")} idle`,
    ...(sum.unhealthy ? [`${sum.unhealthy.toLocaleString("en")} unhealthy`] : []),
    plural(sum.pods, "pod"),
    `core ${share(sum.core)}`,
    `memory ${share(sum.memory)} of ${bytes(sum.memory[1])}`,
  ].join(" · ");
  for (const [name, values] of [["model", store.models()], ["dialect", store.dialects()]]) offer(at(name), values);
}

// The selected option stays, even if no card has that value any more.
function offer(select, values) {
  const known = [...select.options].slice(1).map((option) => option.value);
  const chosen = select.value;
  const wanted = chosen && !values.includes(chosen) ? [...values, chosen] : values;
  if (known.join("\n") === wanted.join("\n")) return;
  select.replaceChildren(select.options[0], ...wanted.map((value) => el("option", { value, textContent: value })));
  select.value = chosen;
}

function sayStatus(text, kind) {
  say(at("status"), text);
  at("status").dataset.kind = kind;
}

async function ask() {
  const query = new URLSearchParams({ since: store.version });
  const reply = await fetch(`api/cluster?${query}`, { signal: AbortSignal.timeout(PATIENCE) }).catch(silent);
  const answer = await reply.json();
  if (!reply.ok) throw new Error(answer.error);
  if (store.take(answer)) {
    showTotals();
    show();
    detail.changed(answer.whole ? null : new Set([...answer.nodes.map((node) => node.name), ...answer.gone]));
  }
  const toCome = store.todo ? `${plural(store.todo, "node")} to come` : "";
  sayStatus([answer.replica || "live", toCome].filter(Boolean).join(" · "), answer.replica ? "aside" : "live");
  heard = new Date();
}

// Only the nodes in the document are asked, so the cost does not grow with the cluster.
async function askUse() {
  const names = [];
  let query = "";
  for (const name of new Set([detail.place?.node, ...list.names()].filter(Boolean))) {
    if (query.length + name.length > LONGEST) break;
    names.push(name);
    query += `${query && "&"}node=${encodeURIComponent(name)}`;
  }
  if (!names.length) return;
  const reply = await fetch(`api/use?${query}`, { signal: AbortSignal.timeout(PATIENCE) }).catch(silent);
  if (reply.ok && store.takeUse(names, await reply.json())) {
    list.draw();
    detail.draw();
  }
}

function silent(error) {
  const why = error.name === "TimeoutError" ? "no answer in time" : "no answer; does the port-forward still run?";
  throw new Error(why, { cause: error });
}

function lost(error) {
  const since = heard ? ` since ${heard.toLocaleTimeString()}` : "";
  return `not up to date${since}: ${error.message}`;
}

let timer;
let heard = null;

async function poll() {
  clearTimeout(timer);
  try {
    await ask();
    await askUse();
  } catch (error) {
    sayStatus(lost(error), "lost");
  }
  if (!document.hidden) timer = setTimeout(poll, store.todo ? SOON : PAUSE);
}

function choose(view) {
  at("views").dataset.view = view;
  for (const name of ["cards", "waiting"]) at(`show-${name}`).setAttribute("aria-pressed", String(name === view));
}

let typed;
at("filters").addEventListener("submit", (event) => event.preventDefault());
at("filters").addEventListener("input", () => {
  clearTimeout(typed);
  typed = setTimeout(() => {
    at("list").scrollTop = 0;
    show();
  }, SOON);
});
at("show-cards").addEventListener("click", () => choose("cards"));
at("show-waiting").addEventListener("click", () => choose("waiting"));
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.target.closest("input, select, dialog")) return;
  event.preventDefault();
  at("search").focus();
});
document.addEventListener("visibilitychange", () => document.hidden || poll());
poll();
