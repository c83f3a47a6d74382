// The state of the cluster, updated by the answers of `api/cluster`, and the nodes that match the filters.

const NAMES = new Intl.Collator("en", { numeric: true });

export class Store {
  version = "";
  nodes = new Map();
  order = [];
  pending = { total: 0, pods: [], whys: [], gangs: [], moreGangs: 0 };
  todo = 0;

  // Takes what is really used of the cards of these nodes, and returns whether anything has changed.
  takeUse(names, found) {
    let changed = false;
    for (const name of names) {
      const node = this.nodes.get(name);
      const key = JSON.stringify(found[name] ?? null);
      if (!node || (node.use?.key ?? "null") === key) continue;
      node.use = found[name] ? used(found[name], key) : null;
      changed = true;
    }
    return changed;
  }

  // Returns whether anything has changed.
  take(answer) {
    const changed = answer.whole || answer.nodes.length || answer.gone.length || answer.pending !== null;
    const before = this.nodes;
    if (answer.whole) this.nodes = new Map();
    for (const name of answer.gone) this.nodes.delete(name);
    let sorted = !answer.whole && !answer.gone.length;
    for (const node of answer.nodes) {
      sorted &&= this.nodes.has(node.name);
      this.nodes.set(node.name, prepared(node, before.get(node.name)));
    }
    if (!sorted) this.order = [...this.nodes.keys()].sort(NAMES.compare);
    if (answer.pending !== null) this.pending = answer.pending;
    this.version = answer.version;
    this.todo = answer.todo;
    return Boolean(changed);
  }

  totals() {
    const sum = { nodes: this.nodes.size, cards: 0, idle: 0, unhealthy: 0, pods: 0, core: [0, 0], memory: [0, 0] };
    for (const node of this.nodes.values()) {
      sum.pods += node.pods.length;
      for (const card of node.cards) {
        sum.cards += 1;
        sum.idle += card.state === "free";
        sum.unhealthy += card.state === "unhealthy";
        for (const what of ["core", "memory"]) card[what].forEach((amount, i) => (sum[what][i] += amount));
      }
    }
    return sum;
  }

  models() {
    return sortedSet([...this.nodes.values()].flatMap((node) => node.models));
  }

  dialects() {
    const held = [...this.nodes.values()].flatMap((node) => node.pods.map((pod) => pod.dialect));
    return sortedSet([...held, ...this.pending.pods.map((pod) => pod.dialect)]);
  }

  // Returns the nodes with the cards that match, in the order of their names: [{node, cards}].
  matching(filter) {
    const wanted = filter.search.trim().toLowerCase();
    const some = wanted || filter.model || filter.dialect || filter.state;
    const found = [];
    for (const name of this.order) {
      const node = this.nodes.get(name);
      const cards = some ? node.cards.filter((card) => matches(node, card, filter, wanted)) : node.cards;
      if (cards.length || !some) found.push({ node, cards });
    }
    return found;
  }

  // Returns the gangs whose name or waiting pods match. Gangs have no dialect, so the pods with the dialect decide.
  gangs(filter) {
    const wanted = filter.search.trim().toLowerCase();
    const shown = new Set(filter.dialect ? this.waiting(filter).map((pod) => pod.name) : []);
    return this.pending.gangs.filter(
      (gang) =>
        [gang.name, ...gang.pods].some((name) => name.toLowerCase().includes(wanted)) &&
        (!filter.dialect || gang.pods.some((pod) => shown.has(pod))),
    );
  }

  waiting(filter) {
    const wanted = filter.search.trim().toLowerCase();
    return this.pending.pods.filter(
      (pod) => pod.name.toLowerCase().includes(wanted) && (!filter.dialect || pod.dialect === filter.dialect),
    );
  }
}

function sortedSet(values) {
  return [...new Set(values)].filter(Boolean).sort(NAMES.compare);
}

function matches(node, card, filter, wanted) {
  return (
    (!filter.model || card.model === filter.model) &&
    (!filter.dialect || card.uses.some(([pod]) => node.pods[pod].dialect === filter.dialect)) &&
    (!filter.state || card.state === filter.state || card.kinds.includes(filter.state)) &&
    (!wanted || node.lower.includes(wanted) || card.lower.includes(wanted))
  );
}

const COLOURS = 12;

// A pod keeps its colour while it is on the node. A new pod gets the colour of its name, or the next free one.
function colours(pods, before) {
  const known = before ? new Map(before.pods.map((pod) => [pod.name, pod.colour])) : new Map();
  const taken = new Set(pods.filter((pod) => known.has(pod.name)).map((pod) => known.get(pod.name)));
  for (const pod of pods) {
    let colour = known.get(pod.name) ?? hash(pod.name) % COLOURS;
    if (!known.has(pod.name)) {
      for (let i = 0; i < COLOURS && taken.has(colour); i++) colour = (colour + 1) % COLOURS;
      taken.add(colour);
    }
    pod.colour = colour;
  }
}

function hash(text) {
  let value = 7;
  for (const letter of text) value = (value * 31 + letter.codePointAt(0)) >>> 0;
  return value;
}

// A card is [core, memory] by its index, and so is a pod by the index and its name; null stands for what is not measured.
function used({ unknown, problem, cards, pods }, key) {
  return {
    key,
    unknown: unknown ?? "",
    problem: problem ?? "",
    cards: new Map((cards ?? []).map(([index, ...amounts]) => [index, amounts])),
    pods: new Map((pods ?? []).map(([index, pod, ...amounts]) => [`${index} ${pod}`, amounts])),
  };
}

function prepared(node, before) {
  node.use = before?.use ?? null;
  colours(node.pods, before);
  node.lower = node.name.toLowerCase();
  node.models = [...new Set(node.cards.map((card) => card.model))];
  for (const card of node.cards) {
    card.state = stateOf(card);
    card.kinds = [card.cut && "cut", card.gpuid && "named"].filter(Boolean);
    const pods = card.uses.map(([pod]) => node.pods[pod].name);
    card.lower = [...pods, card.gpuid ?? ""].join("\n").toLowerCase();
  }
  return node;
}

function stateOf(card) {
  if (card.unhealthy) return "unhealthy";
  if (!card.uses.length) return "free";
  return card.core[0] >= card.core[1] || card.memory[0] >= card.memory[1] ? "full" : "partly";
}
