// The canvas: a cell a position, walked with the arrow keys.

const MARKS = { " ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥" };

/** A token's text with marks for what cannot be seen. */
export function visible(text) {
  return text.replace(/[ \n\r\t]/g, (c) => MARKS[c]).replace(/\p{Cc}/gu, (c) => `\\x${c.charCodeAt(0).toString(16)}`);
}

/** Colour a cell by confidence. (By property: the page's policy allows no style attributes.) */
export function colour(cell, confidence) {
  cell.style.setProperty("--p", confidence);
}

export function describe(position, commit) {
  if (!commit) return `position ${position}: masked`;
  const text = commit.text === "" ? "no text" : `“${visible(commit.text)}”`;
  const sure = commit.confidence.toFixed(3);
  return `position ${position}: ${text}, id ${commit.id}, confidence ${sure}, step ${commit.step}`;
}

let made = 0;

export class Canvas {
  /** `box`: the element to fill; `detail`: where the current position is told. */
  constructor(box, detail, size) {
    Object.assign(this, { box, detail, cells: [], commits: [], current: -1, step: Infinity, tokens: Infinity });
    this.name = `canvas${made++}`;
    this.grow(size);
    box.addEventListener("keydown", (event) => this.#key(event));
    box.addEventListener("focus", () => this.select(Math.max(this.current, 0), false));
    box.addEventListener("click", (event) => {
      const cell = event.target.closest(".cell");
      if (cell) this.select(this.cells.indexOf(cell));
    });
  }

  grow(size) {
    while (this.cells.length < size) {
      const cell = document.createElement("div");
      cell.id = `${this.name}-${this.cells.length}`;
      cell.setAttribute("role", "option");
      cell.setAttribute("aria-selected", "false");
      for (const part of ["token", "step"]) {
        const span = document.createElement("span");
        span.className = part;
        cell.append(span);
      }
      this.cells.push(cell);
      this.#draw(this.cells.length - 1);
      this.box.append(cell);
    }
  }

  commit(commit) {
    this.grow(commit.position + 1);
    this.commits[commit.position] = commit;
    this.#draw(commit.position);
  }

  /** Show the canvas as it was after a step. */
  showStep(step) {
    this.step = step;
    this.cells.forEach((_, position) => this.#draw(position));
  }

  /** Positions from `tokens` on are not part of the answer. */
  showEnd(tokens) {
    this.tokens = tokens;
    this.showStep(this.step);
  }

  select(position, scroll = true) {
    this.cells[this.current]?.setAttribute("aria-selected", "false");
    this.current = position;
    const cell = this.cells[position];
    if (!cell) return;
    cell.setAttribute("aria-selected", "true");
    if (scroll) cell.scrollIntoView({ block: "nearest" });
    this.box.setAttribute("aria-activedescendant", cell.id);
    this.detail.textContent = cell.title;
  }

  #draw(position) {
    const cell = this.cells[position];
    const commit = this.commits[position]?.step <= this.step ? this.commits[position] : null;
    const [token, step] = cell.children;
    cell.className = "cell";
    cell.classList.toggle("masked", !commit);
    cell.classList.toggle("special", commit?.text === "");
    cell.classList.toggle("beyond", Boolean(commit) && position >= this.tokens);
    cell.title = describe(position, commit);
    cell.setAttribute("aria-label", cell.title);
    token.textContent = commit ? visible(commit.text) || `⟨${commit.id}⟩` : "";
    step.textContent = commit ? commit.step : "";
    if (commit) colour(cell, commit.confidence);
    if (position === this.current) this.detail.textContent = cell.title;
  }

  #key(event) {
    const top = this.cells[0]?.offsetTop;
    const columns = Math.max(1, this.cells.filter((cell) => cell.offsetTop === top).length);
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    const last = this.cells.length - 1;
    const ends = { Home: 0, End: last };
    const to = event.key in moves ? this.current + moves[event.key] : ends[event.key];
    if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    if (to >= 0 && to <= last) this.select(to);
  }
}
