// A card: one run, its canvas, its text, its numbers.

import { Canvas } from "./playground_canvas.js";

const seconds = (ms) => (ms === null ? "–" : ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);

const PLAY_MS = 3000; // a whole replay, but no step is shown for less than 30 or more than 400
const paceOf = (steps) => Math.min(400, Math.max(30, PLAY_MS / steps));

export class Card {
  /** `title` and `asked`: what it is called and what was asked; `on`: {stop, remove}. */
  constructor(run, title, asked, on) {
    this.run = run;
    this.root = document.getElementById("card").content.firstElementChild.cloneNode(true);
    this.find("h2").textContent = this.title = title;
    this.find(".asked").textContent = asked;
    this.root.setAttribute("aria-label", title);
    this.canvas = new Canvas(this.find(".canvas"), this.find(".detail"), run.size);
    this.find(".canvas").setAttribute("aria-label", `Canvas of ${title}`);
    this.text = document.createTextNode("");
    this.find(".text").append(this.text);
    this.find(".text").setAttribute("aria-label", `Text of ${title}`);
    for (const name of ["stop", "export", "remove"]) {
      this.find(`.${name}`).setAttribute("aria-label", `${this.find(`.${name}`).textContent}: ${title}`);
    }
    this.find(".stop").addEventListener("click", on.stop);
    this.find(".export").addEventListener("click", () => this.#export());
    this.find(".remove").addEventListener("click", on.remove);
    this.slider = this.find(".replay input");
    this.slider.addEventListener("input", () => this.#replay(Number(this.slider.value)));
    this.find(".play").addEventListener("click", () => this.#play());
    this.refresh();
  }

  find(selector) {
    return this.root.querySelector(selector);
  }

  /** A chunk of the stream. */
  accept(chunk) {
    const { commits, text } = this.run.accept(chunk);
    for (const commit of commits) this.canvas.commit(commit);
    if (text) this.text.appendData(text);
    if (commits.length || text || chunk.usage) this.refresh();
  }

  /** The run has ended, one way or another. */
  end() {
    const { run } = this;
    if (run.state === "finished") this.canvas.showEnd(run.tokens);
    if (run.error) this.#showError(run.error);
    this.find(".stop").hidden = true;
    this.find(".stats").hidden = this.find(".views").hidden = run.state === "failed" && !run.steps;
    if (run.steps) {
      this.find(".replay").hidden = false;
      this.slider.max = this.slider.value = run.steps;
      this.#replay(run.steps);
    }
    this.refresh();
  }

  refresh() {
    const { run } = this;
    const reason = run.state === "finished" ? `: ${run.finishReason}` : "";
    this.root.dataset.state = run.state;
    this.find(".state").textContent = run.state + reason;
    const stats = {
      tokens: run.tokens,
      steps: run.steps,
      rate: run.steps ? (run.tokens / run.steps).toFixed(2) : "–",
      first: seconds(run.firstMs),
      total: seconds(run.totalMs),
    };
    for (const [name, value] of Object.entries(stats)) this.find(`[data-stat="${name}"]`).textContent = value;
  }

  #showError(error) {
    const box = this.find(".error");
    const parts = [];
    if (error.param) {
      const param = document.createElement("code");
      param.textContent = error.param;
      parts.push(param, " ");
    }
    // The server begins a message about a field with its name.
    const begins = error.param && error.message.startsWith(`${error.param}: `);
    parts.push(begins ? error.message.slice(error.param.length + 2) : error.message);
    const extra = [error.status, error.code, error.retryAfter && `try again in ${error.retryAfter} s`].filter(Boolean);
    if (extra.length) parts.push(` (${extra.join(", ")})`);
    box.replaceChildren(...parts);
    box.hidden = false;
  }

  #replay(step) {
    const { run } = this;
    this.canvas.showStep(step);
    this.text.data = step < run.steps ? run.textAt(step) : run.text;
    this.find("output").textContent = `${step} of ${run.steps}`;
  }

  #play() {
    clearInterval(this.playing);
    let step = 0;
    const show = () => {
      this.slider.value = step;
      this.#replay(step);
      if (step++ >= this.run.steps) clearInterval(this.playing);
    };
    show();
    this.playing = setInterval(show, paceOf(this.run.steps));
  }

  #export() {
    const text = JSON.stringify(this.run, null, 1);
    const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    const link = document.createElement("a");
    link.href = url;
    link.download = `jdllm-${this.title.replace(/[^\w.-]+/g, "-").toLowerCase()}.json`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }
}
