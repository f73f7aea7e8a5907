// The playground: puts form, runs and charts together.

import { colour } from "./playground_canvas.js";
import { Card } from "./playground_card.js";
import { follow } from "./playground_charts.js";
import { Form } from "./playground_form.js";
import { Run } from "./playground_run.js";
import { getJson, ServerError, setKey, stream } from "./playground_stream.js";

const $ = (id) => document.getElementById(id);
const PATHS = { chat: "v1/chat/completions", completion: "v1/completions" };

// Browsers open six connections to a server; one is left for everything else. What waits here has not begun.
const MOST_OPEN = 5;
const waiting = [];
let open = 0;

const form = new Form();
const cards = new Set();
let number = 0;

function say(text) {
  $("status").textContent = text;
}

function askForKey() {
  const shown = !$("key-field").hidden;
  $("key-field").hidden = false;
  say(shown ? "The API key is missing or wrong." : "The server asks for an API key.");
  $("key").focus();
}

/** Send a request for each of the decoders; a card for each of its answers. */
function runAll(decoders) {
  if (!$("form").reportValidity() || !form.about) return;
  form.clearWrong();
  const path = PATHS[form.mode];
  const seed = Math.floor(Math.random() * 2 ** 32); // one for all, so that the decoders differ in nothing else
  const fresh = decoders.flatMap((decoder) => {
    const settings = { seed, ...form.settings(decoder) };
    return begin(path, { ...form.body(decoder), ...settings }, settings);
  });
  $("cards").prepend(...fresh.map((card) => card.root));
  next();
  const what = decoders.length > 1 ? `${decoders.length} requests` : `run ${number}`;
  say(`Started ${what}.`);
}

/** Queue a request; the cards of its answers. */
function begin(path, body, settings) {
  number++;
  const abort = new AbortController();
  const told = Object.entries(settings).map(([name, value]) => `${name} ${value}`);
  const mine = [];
  for (let index = 0; index < body.n; index++) {
    const title = `Run ${number}${body.n > 1 ? `.${index + 1}` : ""}: ${body.decoder}`;
    const run = new Run(number, path, body, index, body.max_tokens);
    const card = new Card(run, title, [body.model, `max_tokens ${body.max_tokens}`, ...told].join(" · "), {
      stop: () => abort.abort(),
      remove: () => remove(card),
    });
    card.abort = abort;
    mine.push(card);
    cards.add(card);
  }
  const job = () => exchange(path, body, abort, mine);
  abort.signal.addEventListener("abort", () => {
    const at = waiting.indexOf(job);
    if (at < 0) return;
    waiting.splice(at, 1);
    endAll(mine, "stopped");
  });
  waiting.push(job);
  return mine;
}

function next() {
  while (open < MOST_OPEN && waiting.length) {
    open++;
    waiting.shift()().finally(() => {
      open--;
      next();
    });
  }
  refreshButtons();
}

async function exchange(path, body, abort, mine) {
  for (const { run } of mine) run.begin();
  for (const card of mine) card.refresh();
  try {
    await stream(path, body, abort.signal, (chunk) => {
      for (const card of mine) card.accept(chunk);
    });
    endAll(mine, "finished");
  } catch (error) {
    if (abort.signal.aborted) return endAll(mine, "stopped");
    const refused = mine.every((card) => !card.run.steps); // one card says it for all answers
    if (refused) for (const card of mine.splice(1)) discard(card);
    endAll(mine, "failed", error);
    if (error instanceof ServerError && error.status === 401) askForKey();
    if (error.param) form.markWrong(error.param);
  }
}

function endAll(mine, state, error = null) {
  for (const card of mine) {
    card.run.end(state, error);
    card.end();
    const { title, run } = card;
    const numbers = `${run.tokens} tokens in ${run.steps} steps`;
    say(`${title} ${state}${error ? `: ${error.message}` : state === "finished" ? `, ${numbers}` : ""}.`);
  }
  refreshButtons();
}

function discard(card) {
  cards.delete(card);
  card.root.remove();
}

function remove(card) {
  const heir = card.root.nextElementSibling ?? card.root.previousElementSibling;
  const alone = [...cards].every((other) => other === card || other.abort !== card.abort);
  if (alone && !card.run.ended) card.abort.abort();
  discard(card);
  (heir?.querySelector(".remove") ?? $("run")).focus();
  refreshButtons();
}

function refreshButtons() {
  const all = [...cards];
  $("stop").disabled = !all.some((card) => !card.run.ended);
  $("clear").disabled = !all.some((card) => card.run.ended);
}

/** Ask the server what it serves, until it is ready. */
async function connect() {
  try {
    const about = await getJson("playground.json");
    const known = Boolean(form.about);
    if (about.family && !known) form.setAbout(about);
    if (!$("model").options.length) form.setModels((await getJson("v1/models")).data.map((model) => model.id));
    const size = about.family ? `${about.family} model, ${about.slots} slots of ${about.max_length} positions` : "";
    $("about").textContent = [about.not_ready, size].filter(Boolean).join("; ");
    if (about.not_ready) setTimeout(connect, 1000);
  } catch (error) {
    if (error instanceof ServerError && error.status === 401) return askForKey();
    $("about").textContent = `no answer from the server: ${error.message}`;
    setTimeout(connect, 3000);
  }
}

function showTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  runAll([form.decoder]);
});
$("compare").addEventListener("click", () => runAll(form.compared));
$("stop").addEventListener("click", () => {
  for (const card of cards) if (!card.run.ended) card.abort.abort();
});
$("clear").addEventListener("click", () => {
  for (const card of [...cards]) if (card.run.ended) remove(card);
  $("run").focus();
});
$("key").addEventListener("change", () => {
  setKey($("key").value);
  if (!$("model").options.length) connect();
});
$("theme").addEventListener("click", () => {
  const themes = ["auto", "light", "dark"];
  showTheme(themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % themes.length]);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  setKey($("key").value);
  $("form").requestSubmit();
});

showTheme("auto");
for (const cell of document.querySelectorAll("[data-confidence]")) colour(cell, cell.dataset.confidence);
follow($("charts"));
connect();
