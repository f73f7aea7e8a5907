// One answer of a request: what came, and when. Knows nothing of the page.

export class Run {
  /** `size`: positions of the canvas; `index`: of the choice that this run follows. */
  constructor(number, path, body, index, size) {
    Object.assign(this, { number, path, body, index, size });
    this.state = "waiting"; // -> running -> finished | stopped | failed
    this.commits = []; // as the server sends them, with `ms`
    this.texts = []; // {ms, text}: pieces of the answer
    this.steps = 0;
    this.offsets = []; // characters of the text before each token of the answer
    this.decoder = new TextDecoder();
    this.decoded = 0;
    this.ids = {};
    this.finishReason = this.error = this.usage = this.firstMs = this.totalMs = null;
  }

  begin() {
    this.state = "running";
    this.startedAt = new Date().toISOString();
    this.zero = performance.now();
  }

  get ms() {
    return performance.now() - this.zero;
  }

  /** Take in a chunk; the commits and the text that it had for this run. */
  accept(chunk) {
    const { id, model, created, system_fingerprint, usage, canvas } = chunk;
    this.ids = { id, model, created, system_fingerprint };
    this.usage = usage ?? this.usage; // of all answers of the request
    const ms = this.ms;
    const news = { commits: [], text: "" };
    if (canvas?.index === this.index) {
      news.commits = canvas.commits.map((commit) => ({ ...commit, ms }));
      for (const commit of news.commits) {
        this.commits.push(commit);
        this.steps = Math.max(this.steps, commit.step);
        this.size = Math.max(this.size, commit.position + 1);
      }
    }
    for (const choice of chunk.choices) {
      if (choice.index !== this.index) continue;
      this.finishReason = choice.finish_reason ?? this.finishReason;
      this.#count(choice.logprobs);
      const text = choice.delta ? choice.delta.content : choice.text;
      if (!text) continue;
      this.firstMs ??= ms;
      this.texts.push({ ms, text });
      news.text += text;
    }
    return news;
  }

  end(state, error = null) {
    this.state = state;
    this.error = error;
    this.totalMs = this.zero === undefined ? null : this.ms;
  }

  get ended() {
    return this.state !== "waiting" && this.state !== "running";
  }

  /** Tokens of the answer, without what follows its end. */
  get tokens() {
    return this.offsets.length;
  }

  get text() {
    return this.texts.map((piece) => piece.text).join("");
  }

  /** The text that was settled when `step` had ended: up to the first mask. */
  textAt(step) {
    const known = new Set(this.commits.filter((commit) => commit.step <= step).map((commit) => commit.position));
    let settled = 0;
    while (known.has(settled)) settled++;
    return settled < this.tokens ? [...this.text].slice(0, this.offsets[settled]).join("") : this.text;
  }

  /** Log-probabilities have an entry a token: no other part of a stream tells an answer's tokens and their places. */
  #count(logprobs) {
    this.offsets.push(...(logprobs?.text_offset ?? []));
    for (const { bytes } of logprobs?.content ?? []) {
      this.offsets.push(this.decoded);
      this.decoded += [...this.decoder.decode(new Uint8Array(bytes), { stream: true })].length;
    }
  }

  /** What an export holds. */
  toJSON() {
    const { error } = this;
    return {
      path: this.path,
      request: this.body,
      response: { ...this.ids, choice: this.index, finish_reason: this.finishReason, usage: this.usage },
      state: this.state,
      error: error && { message: error.message, param: error.param, code: error.code, status: error.status },
      started_at: this.startedAt ?? null,
      text: this.text,
      tokens: this.tokens,
      steps: this.steps,
      ms_to_first_text: this.firstMs,
      ms: this.totalMs,
      canvas_size: this.size,
      commits: this.commits,
      texts: this.texts,
    };
  }
}
