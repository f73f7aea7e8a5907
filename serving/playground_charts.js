// Small charts of what /metrics tells, a point a second while the page can be seen.

import { getText } from "./playground_stream.js";

const POINTS = 60;
const WIDTH = 60;
const HEIGHT = 24;

/** Values of a Prometheus page, summed over labels. */
export function parse(page) {
  const sums = {};
  for (const line of page.split("\n")) {
    const found = /^(\w+)(?:\{.*\})? (\S+)$/.exec(line);
    if (found) sums[found[1]] = (sums[found[1]] ?? 0) + Number(found[2]);
  }
  return sums;
}

class Chart {
  constructor(figure) {
    this.figure = figure;
    this.values = []; // null: nothing to tell for that second
  }

  add(value, text, most) {
    this.values = [...this.values, value].slice(-POINTS);
    this.figure.querySelector("b").textContent = text;
    const top = most ?? Math.max(...this.values.filter((v) => v !== null), 0);
    const x = (i) => (((i + POINTS - this.values.length) * WIDTH) / (POINTS - 1)).toFixed(2);
    const y = (v) => (HEIGHT - 1 - (top ? (v / top) * (HEIGHT - 3) : 0)).toFixed(2);
    let line = "";
    let area = "";
    let from = -1; // where the present stretch without gaps began
    this.values.forEach((v, i) => {
      if (v === null) return;
      if (i === 0 || this.values[i - 1] === null) from = i;
      line += `${from === i ? "M" : "L"}${x(i)} ${y(v)}`;
      const last = i + 1 === this.values.length || this.values[i + 1] === null;
      if (from === i) area += `M${x(i)} ${HEIGHT}`;
      area += `L${x(i)} ${y(v)}`;
      if (last) {
        area += `L${x(i)} ${HEIGHT}Z`;
        if (from === i) line += "h0.4"; // a lone second is a dot
      }
    });
    this.figure.querySelector(".line").setAttribute("d", line);
    this.figure.querySelector(".area").setAttribute("d", area);
  }
}

/** Follow /metrics in the figures of `box`. */
export function follow(box) {
  const slots = new Chart(box.querySelector('[data-chart="slots"]'));
  const step = new Chart(box.querySelector('[data-chart="step"]'));
  let before = null;

  async function look() {
    let now;
    try {
      now = parse(await getText("metrics"));
    } catch {
      before = null;
      slots.add(null, "no answer");
      step.add(null, "no answer");
      return;
    }
    if (now.jdllm_slots) {
      const used = Math.round(now.jdllm_slots_used_ratio * now.jdllm_slots);
      const waiting = now.jdllm_requests_waiting ? `, ${now.jdllm_requests_waiting} waiting` : "";
      slots.add(used, `${used} of ${now.jdllm_slots}${waiting}`, now.jdllm_slots);
    }
    const count = (now.jdllm_step_seconds_count ?? 0) - (before?.jdllm_step_seconds_count ?? 0);
    const sum = (now.jdllm_step_seconds_sum ?? 0) - (before?.jdllm_step_seconds_sum ?? 0);
    // Below zero: the server has started again.
    const ms = before && count > 0 && sum >= 0 ? (1000 * sum) / count : null;
    step.add(ms, ms === null ? "idle" : `${ms.toPrecision(3)} ms`);
    before = now;
  }

  let timer = null;
  async function turn() {
    await look();
    timer = document.hidden ? null : setTimeout(turn, 1000);
  }
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && timer === null) {
      before = null;
      timer = setTimeout(turn, 0);
    }
  });
  turn();
}
