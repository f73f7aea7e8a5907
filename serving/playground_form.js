// The form: inputs for the settings that the chosen decoder reads, and the request that they make.

const $ = (id) => document.getElementById(id);

export class Form {
  constructor() {
    this.about = null; // /playground.json
    this.given = {}; // decoder -> setting -> what was put in
    this.touched = false; // whether max_tokens is the user's
    $("decoder").addEventListener("change", () => this.#showSettings());
    $("model").addEventListener("change", () => this.#showModel());
    $("max_tokens").addEventListener("input", () => (this.touched = true));
    $("settings").addEventListener("input", (event) => {
      this.given[$("decoder").value] ??= {};
      this.given[$("decoder").value][event.target.dataset.param] = event.target.value;
    });
    for (const radio of document.getElementsByName("mode")) {
      radio.addEventListener("change", () => ($("system-field").hidden = this.mode !== "chat"));
    }
  }

  get mode() {
    return document.querySelector('[name="mode"]:checked').value;
  }

  get decoder() {
    return $("decoder").value;
  }

  /** The decoders that are ticked for a comparison. */
  get compared() {
    return [...$("compared").querySelectorAll(":checked")].map((box) => box.value);
  }

  setModels(names) {
    $("model").replaceChildren(...names.map((name) => new Option(name)));
    if (this.about) this.#showModel();
  }

  /** What the server tells of its decoders. */
  setAbout(about) {
    this.about = about;
    const names = Object.keys(about.decoders);
    $("decoder").replaceChildren(...names.map((name) => new Option(name)));
    $("compared").replaceChildren(
      ...names.map((name) => {
        const label = document.createElement("label");
        const box = document.createElement("input");
        Object.assign(box, { type: "checkbox", value: name, checked: true });
        label.append(box, ` ${name}`);
        return label;
      }),
    );
    $("max_tokens").placeholder = `up to ${about.max_length}`;
    this.#showModel();
  }

  /** The body for a decoder. */
  body(decoder) {
    const prompt = $("prompt").value;
    const user = { role: "user", content: prompt };
    const system = $("system").value ? [{ role: "system", content: $("system").value }] : [];
    const chat = this.mode === "chat";
    return {
      model: $("model").value,
      ...(chat ? { messages: [...system, user] } : { prompt }),
      max_tokens: Number($("max_tokens").value),
      n: Number($("n").value),
      decoder,
      ...this.settings(decoder),
      stream: true,
      canvas: true,
      stream_options: { include_usage: true },
      logprobs: chat ? true : 0,
    };
  }

  /** The settings that were given for a decoder. */
  settings(decoder) {
    const found = {};
    for (const name of this.about.decoders[decoder]) {
      const text = this.given[decoder]?.[name] ?? "";
      if (text === "") continue;
      const { kind } = this.about.settings[name];
      found[name] = kind === "flag" ? text === "true" : kind === "choice" ? text : Number(text);
    }
    return found;
  }

  /** Mark the input of a field that the server refused. */
  markWrong(param) {
    for (const input of $("form").querySelectorAll("[data-param]")) {
      if (input.dataset.param === param) input.setAttribute("aria-invalid", "true");
    }
  }

  clearWrong() {
    for (const input of $("form").querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
  }

  #defaults() {
    return this.about.models[$("model").value] ?? {};
  }

  #showModel() {
    const defaults = this.#defaults();
    const name = defaults.decoder ?? this.about.decoder;
    if (name in this.about.decoders) $("decoder").value = name;
    // By default half of the canvas is left to the prompt.
    const most = Math.max(1, Math.floor(this.about.max_length / 2));
    if (!this.touched) $("max_tokens").value = Math.min(defaults.max_tokens ?? this.about.max_tokens, most);
    this.#showSettings();
  }

  #showSettings() {
    const decoder = this.decoder;
    $("of").textContent = decoder;
    const names = this.about.decoders[decoder] ?? [];
    $("settings").replaceChildren(...names.map((name) => this.#field(decoder, name, this.about.settings[name])));
  }

  #field(decoder, name, setting) {
    const label = document.createElement("label");
    const title = document.createElement("span");
    label.className = "field";
    label.title = setting.hint;
    // A long name may break behind its underscores.
    title.append(...name.split("_").flatMap((word, i) => (i ? ["_", document.createElement("wbr"), word] : [word])));
    const standard = this.#defaults()[name] ?? setting.default;
    let input;
    if (setting.kind === "flag" || setting.kind === "choice") {
      input = document.createElement("select");
      const choices = setting.choices ?? ["true", "false"];
      input.append(new Option(standard === null ? "default" : `${standard} (default)`, ""));
      input.append(...choices.map((choice) => new Option(choice)));
    } else {
      input = document.createElement("input");
      input.type = "number";
      input.step = setting.kind === "whole" ? "1" : "any";
      input.placeholder = name === "seed" ? "random" : standard === null ? "default" : String(standard);
    }
    input.dataset.param = name;
    input.value = this.given[decoder]?.[name] ?? "";
    label.append(title, input);
    return label;
  }
}
