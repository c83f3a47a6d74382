// The document contains only the visible nodes; for the others only their heights are known.

import { columnsOf, heightOf, section, SIZES } from "./cards.js";

const BEYOND = 400;

export class List {
  rows = [];
  tops = [0];
  columns = [];
  made = new Map();
  active = null;

  constructor(scroller, canvas, open) {
    Object.assign(this, { scroller, canvas, open });
    scroller.addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.lay()).observe(canvas);
    canvas.addEventListener("click", (event) => this.opened(event.target.closest(".tile")));
    canvas.addEventListener("focusin", (event) => this.activate(placeOf(event.target)));
    canvas.addEventListener("keydown", (event) => this.moved(event));
  }

  show(rows) {
    this.rows = rows;
    this.lay();
  }

  lay() {
    this.columns = this.rows.map((row) => columnsOf(row.node, this.canvas.clientWidth));
    this.tops = [0];
    for (const [i, row] of this.rows.entries()) this.tops.push(this.tops[i] + heightOf(row, this.columns[i]));
    this.canvas.style.height = `${this.tops.at(-1)}px`;
    this.draw();
  }

  draw() {
    const from = this.scroller.scrollTop - BEYOND;
    const to = this.scroller.scrollTop + this.scroller.clientHeight + BEYOND;
    const wanted = new Map();
    for (let i = this.rowAt(from); i < this.rows.length && this.tops[i] < to; i++) wanted.set(this.rows[i].node.name, i);
    // The node with the focus stays in the document, even if it is scrolled out of view.
    if (this.hasFocus()) {
      const at = this.rows.findIndex((row) => row.node.name === this.active.node);
      if (at >= 0) wanted.set(this.active.node, at);
    }
    for (const [name, { element }] of this.made) {
      if (!wanted.has(name)) {
        element.remove();
        this.made.delete(name);
      }
    }
    // Inserted from the last to the first, so that screen readers read them in order.
    let next = null;
    for (const i of [...wanted.values()].sort((a, b) => b - a)) next = this.put(i, next);
    this.canvas.dataset.drawn = this.made.size;
    this.letOneBeTabbedTo();
  }

  put(i, next) {
    const row = this.rows[i];
    const key = `${this.columns[i]} ${row.cards.map((card) => card.index)}`;
    let made = this.made.get(row.node.name);
    if (!made || made.node !== row.node || made.key !== key || made.use !== row.node.use) {
      const element = section(row, this.columns[i]);
      const focused = made?.element.contains(document.activeElement);
      if (made) made.element.replaceWith(element);
      else this.canvas.insertBefore(element, next);
      made = { element, key, node: row.node, use: row.node.use };
      this.made.set(row.node.name, made);
      if (focused) this.tile(this.active)?.focus({ preventScroll: true });
    }
    made.element.style.transform = `translateY(${this.tops[i]}px)`;
    return made.element;
  }

  // The nodes in the document, of which the page asks what is used.
  names() {
    return [...this.made.values()].filter(({ node }) => node.cards.length).map(({ node }) => node.name);
  }

  rowAt(y) {
    let low = 0;
    let high = this.rows.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.tops[middle + 1] < y) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  hasFocus() {
    return this.active !== null && this.canvas.contains(document.activeElement);
  }

  tile({ node, card }) {
    return this.made.get(node)?.element.querySelector(`.tile[data-card="${card}"]`) ?? null;
  }

  activate(place) {
    if (!place) return;
    if (this.active) this.tile(this.active)?.setAttribute("tabindex", "-1");
    this.active = place;
    this.tile(place)?.setAttribute("tabindex", "0");
  }

  letOneBeTabbedTo() {
    if (!this.active || !this.tile(this.active)) {
      const name = this.rows[this.rowAt(this.scroller.scrollTop)]?.node.name;
      this.activate(placeOf(this.made.get(name)?.element.querySelector(".tile") ?? null));
    } else this.tile(this.active).tabIndex = 0;
  }

  opened(tile) {
    const place = placeOf(tile);
    this.activate(place);
    if (place) this.open(place.node, place.card);
  }

  // After a dialog the focus returns to the tile, even if the tile was created again meanwhile.
  refocus() {
    if (this.active) this.tile(this.active)?.focus({ preventScroll: true });
  }

  moved(event) {
    if (!this.active) return;
    const row = this.rows.findIndex((found) => found.node.name === this.active.node);
    const at = this.rows[row]?.cards.findIndex((card) => card.index === this.active.card) ?? -1;
    const columns = this.columns[row] ?? 1;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
    const ends = { Home: 0, End: this.rows.length - 1 };
    if (!(event.key in steps || event.key in ends)) return;
    event.preventDefault();
    const place = event.key in ends ? this.card(ends[event.key], 0) : this.neighbor(row, at, event.key, steps[event.key]);
    if (place) this.focus(place);
  }

  // Return the card `step` cards further; beyond this node's cards, the nearest card of the next or previous node.
  neighbor(row, at, key, step) {
    const cards = this.rows[row]?.cards ?? [];
    if (at + step >= 0 && at + step < cards.length) return this.card(row, at + step);
    const onward = Math.sign(step);
    let next = row + onward;
    while (this.rows[next] && !this.rows[next].cards.length) next += onward;
    if (!this.rows[next]) return null;
    const last = this.rows[next].cards.length - 1;
    if (key === "ArrowRight") return this.card(next, 0);
    if (key === "ArrowLeft") return this.card(next, last);
    const column = at % this.columns[row];
    const first = onward > 0 ? 0 : last - (last % this.columns[next]);
    return this.card(next, Math.min(last, first + column));
  }

  card(row, at) {
    const found = this.rows[row];
    return found?.cards[at] ? { row, node: found.node.name, card: found.cards[at].index, at } : null;
  }

  focus({ row, node, card, at }) {
    const top = this.tops[row] + SIZES.head + Math.floor(at / this.columns[row]) * (SIZES.tile + SIZES.gap);
    const { scrollTop, clientHeight } = this.scroller;
    if (top < scrollTop + SIZES.head) this.scroller.scrollTop = top - SIZES.head;
    else if (top + SIZES.tile > scrollTop + clientHeight) this.scroller.scrollTop = top + SIZES.tile + SIZES.end - clientHeight;
    this.activate({ node, card });
    this.draw();
    this.tile({ node, card })?.focus({ preventScroll: true });
  }
}

function placeOf(element) {
  const tile = element?.closest(".tile");
  return tile ? { node: tile.closest("section").dataset.node, card: Number(tile.dataset.card) } : null;
}
