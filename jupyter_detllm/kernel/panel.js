// The panel of `%detllm show`. Data becomes text nodes and nothing else. What the
// buttons ask of the JupyterLab extension: docs/reference/frontend.md, "Widget and extension".

const BAD = new Set(["drift", "diverged", "error"]);
const GOOD = new Set(["match", "tokens_match"]);
const SIGNS = { match: "✓", tokens_match: "✓", drift: "≠", diverged: "≠", error: "!", recorded: "●" };
const HOW = {
  "detllm:stamp-all":
    "No JupyterLab extension answers here. Save, then in a terminal: jupyter detllm stamp NOTEBOOK",
  "detllm:accept-all":
    "No JupyterLab extension answers here. Save, then in a terminal: " +
    "jupyter detllm stamp --update all NOTEBOOK",
};
HOW["detllm:accept-cell"] = HOW["detllm:accept-all"];

function make(tag, text = "", attributes = {}) {
  const node = document.createElement(tag);
  node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

// Shapes as Python computed them, and nothing that is no shape.
const SHAPE = /^(polyline|line|circle|text)$/;
const DRAWN = /^((stroke|font|text)-\w+|stroke|fill|opacity|points|c?[xy]|[xy][12]|r)$/;

function drawn(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of attributes) node.setAttribute(name, value);
  if (tag === "text" || tag === "title") node.textContent = text;
  else if (text) node.append(drawn("title", [], text));
  return node;
}

function drawing({ width, height, alt, shapes }) {
  const box = { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": alt };
  const found = drawn("svg", Object.entries(box), "");
  for (const { tag, attributes, text } of list(shapes)) {
    const kept = Object.entries(attributes).filter(([name]) => DRAWN.test(name));
    if (SHAPE.test(tag)) found.append(drawn(tag, kept, text));
  }
  return found;
}

function list(value) {
  return Array.isArray(value) ? value : [];
}

function table(caption, head, rows) {
  const found = make("table", "", { "aria-label": caption });
  const line = make("tr");
  for (const title of head) line.append(make("th", title, { scope: "col" }));
  found.append(make("thead"), make("tbody"));
  found.tHead.append(line);
  found.tBodies[0].append(...rows);
  return found;
}

class Panel {
  constructor(model, el) {
    this.model = model;
    this.root = make("div", "", {
      class: "detllm-panel",
      role: "region",
      "aria-label": "detllm: fingerprint and stamped cells",
      // Keys belong to the panel's buttons, not to the notebook's commands.
      "data-lm-suppress-shortcuts": "true",
    });
    this.top = make("div");
    this.status = make("p", "", { role: "status" });
    this.cells = make("div");
    this.metrics = make("div");
    this.fields = make("div");
    this.opened = new Set();
    this.search = make("input", "", { type: "search", autocomplete: "off", spellcheck: "false" });
    this.search.addEventListener("input", () => this.filter());
    const label = make("label", "Filter ");
    label.append(this.search);
    this.count = make("span", "", { "aria-live": "polite" });
    const line = make("p");
    line.append(label, this.count);
    this.root.append(this.top, this.cells, this.status, this.metrics, line, this.fields);
    el.append(this.root);
    this.show();
  }

  data(key) {
    return (this.model.get("data") || {})[key];
  }

  // A button keeps its focus when the panel is redrawn.
  button(text, title, act) {
    const found = make("button", text, { type: "button", title, "aria-label": title });
    found.addEventListener("click", act);
    return found;
  }

  show() {
    const focused = this.root.contains(document.activeElement)
      ? document.activeElement.getAttribute("aria-label")
      : null;
    this.showTop();
    this.showCells();
    this.showMetrics();
    this.showFields();
    this.filter();
    const buttons = [...this.root.querySelectorAll("button")];
    if (focused) buttons.find((b) => b.getAttribute("aria-label") === focused)?.focus();
  }

  showTop() {
    const digest = make("p", "Fingerprint ");
    digest.append(
      make("code", this.data("digest")),
      " ",
      this.button("Copy", "Copy the fingerprint's digest", () => this.copy()),
      this.button("Refresh", "Read the kernel's state again", () =>
        this.model.send({ kind: "refresh" }),
      ),
    );
    this.top.replaceChildren(make("p", this.data("heading")), make("p", this.data("engine")), digest);
    this.lines("Self-test", "self_test", "none ran");
    this.lines("Too late, so not in force", "late", "nothing");
  }

  lines(title, key, otherwise) {
    const found = list(this.data(key));
    if (!found.length) {
      this.top.append(make("p", `${title}: ${otherwise}`));
      return;
    }
    const items = make("ul", "", { "aria-label": title });
    items.append(...found.map((text) => make("li", text)));
    this.top.append(make("h3", title), items);
  }

  showCells() {
    const cells = list(this.data("cells"));
    const parts = [make("h3", "Stamped cells of this kernel")];
    if (!cells.length) parts.push(make("p", "none yet"));
    else {
      const head = ["cell", "result when it ran", "tokens", "generations", "action"];
      parts.push(table("Stamped cells", head, cells.map((cell) => this.cellRow(cell))));
    }
    const buttons = make("p");
    const ask = (text, title, command) => this.button(text, title, () => this.command(command, {}));
    buttons.append(
      ask("Stamp new", "Make stamps of new and changed cells their references", "detllm:stamp-all"),
      ask("Accept all", "Make every present generation its cell's reference", "detllm:accept-all"),
    );
    this.cells.replaceChildren(...parts, buttons);
  }

  showMetrics() {
    const lines = list(this.data("metrics")).map((text) => make("p", text));
    if (lines.length) lines.unshift(make("h3", "Metrics of this run"));
    if (this.data("plot")) lines.push(drawing(this.data("plot")));
    this.metrics.replaceChildren(...lines);
  }

  cellRow(cell) {
    const row = make("tr");
    const state = String(cell.state);
    const kind = BAD.has(state) ? "detllm-bad" : GOOD.has(state) ? "detllm-good" : "";
    const sign = Object.hasOwn(SIGNS, state) ? SIGNS[state] : "○";
    const result = make("td");
    result.append(make("span", `${sign} `, { "aria-hidden": "true" }), make("span", cell.result));
    result.className = kind;
    const action = make("td");
    if (state !== "recorded" && state !== "match") {
      const title = `Make the present generation of ${cell.label} its reference`;
      const args = cell.cell_id ? { cellId: String(cell.cell_id) } : null;
      action.append(this.button("Accept", title, () => this.command("detllm:accept-cell", args)));
    }
    const digest = make("td");
    digest.append(make("code", cell.digest));
    row.append(make("td", cell.label), result, make("td", cell.tokens), digest, action);
    row.dataset.text = [cell.label, cell.state, cell.result, cell.digest].join(" ").toLowerCase();
    return row;
  }

  showFields() {
    const groups = new Map();
    for (const field of list(this.data("fields"))) {
      if (!groups.has(field.group)) groups.set(field.group, []);
      groups.get(field.group).push(field);
    }
    this.fields.replaceChildren();
    for (const [group, rows] of groups) {
      const fold = make("details");
      fold.dataset.group = group;
      const summary = make("summary", `${group} (${rows.length})`);
      summary.addEventListener("click", () => fold.open
        ? this.opened.delete(group)
        : this.opened.add(group));
      const head = ["field", "role", "value"];
      fold.append(summary, table(group, head, rows.map((row) => this.fieldRow(row))));
      this.fields.append(fold);
    }
  }

  fieldRow(field) {
    const row = make("tr");
    const value = make("td");
    value.append(make("code", field.value));
    row.append(make("td", field.name, { title: field.why }), make("td", field.role), value);
    row.dataset.text = [field.name, field.role, field.value].join(" ").toLowerCase();
    return row;
  }

  filter() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    const rows = [...this.root.querySelectorAll("tbody tr")];
    for (const row of rows) {
      row.hidden = !words.every((word) => row.dataset.text.includes(word));
      shown += row.hidden ? 0 : 1;
    }
    for (const fold of this.fields.children) {
      fold.hidden = !fold.querySelector("tbody tr:not([hidden])");
      fold.open = words.length > 0 || this.opened.has(fold.dataset.group);
    }
    this.count.textContent = words.length ? ` ${shown} of ${rows.length} rows` : "";
  }

  say(text) {
    this.status.textContent = text;
  }

  async copy() {
    const digest = String(this.data("digest"));
    try {
      await navigator.clipboard.writeText(digest);
      this.say("The digest was copied.");
    } catch {
      // Without a secure page there is no clipboard: it is selected instead.
      getSelection().selectAllChildren(this.top.querySelector("code"));
      this.say("The digest is selected: copy it with the keyboard.");
    }
  }

  ask(command, args, respond) {
    const detail = { version: 1, command, args, respond };
    const options = { bubbles: true, composed: true, cancelable: true, detail };
    return !this.root.dispatchEvent(new CustomEvent("detllm:command", options));
  }

  command(command, args) {
    // What is accepted is what stands here now: a later run of the cell is not.
    const shown = new Map(list(this.data("cells")).map((cell) => [cell.cell_id, cell.digest]));
    const respond = (result) => {
      this.say(String(result?.text ?? "done"));
      const ids = list(result?.cells).filter((id) => shown.has(id));
      if (ids.length) {
        this.model.send({ kind: "recorded", cells: ids.map((id) => [id, shown.get(id)]) });
      }
    };
    if (!this.ask("detllm:hello", {}, () => {})) this.say(HOW[command]);
    else if (!args) this.say("The kernel does not know that cell's id: run the cell, then refresh.");
    else if (!this.ask(command, args, respond)) this.say("The extension did not take it.");
  }
}

export default {
  render({ model, el }) {
    const panel = new Panel(model, el);
    const redraw = () => panel.show();
    model.on("change:data", redraw);
    return () => model.off("change:data", redraw);
  },
};
