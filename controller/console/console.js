"use strict";
// The console's page. controller/console/feed.py describes its data. Names from the fleet are inserted as text, never as markup.

const SILENT_MS = 12_000; // without even a beat: the connection is dead, whatever the browser reports
const HIDDEN_MS = 30_000; // a hidden page disconnects
const EVENTS_MAX = 300;
const ROWS = 200; // workers laid out at first, and added on each scroll to the end
const byId = (id) => document.getElementById(id);
const clock = (at) => (at ? at.slice(11, 19) : "");
const number = (value) => value.toLocaleString("en", { maximumFractionDigits: 1 });
const natural = new Intl.Collator("en", { numeric: true });
const percent = (share) => { // never rounds a share below 1 to 100 %
  const exact = share > 0 && (share < 0.1 || (share > 0.99 && share < 1));
  return `${exact ? (Math.floor(1000 * share) / 10).toFixed(1) : (100 * share).toFixed(0)} %`;
};

let offset = 0; // of the stream's clock, which the lanes use
let have = {}; // the sections by name
let hello = { colors: {}, token: "" };

function element(name, text = "", more = {}) {
  const made = Object.assign(document.createElement(name), more);
  if (text !== "") made.textContent = text;
  return made;
}

function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function mark(state) {
  const made = element("span", "", { className: "state" });
  made.style.background = hello.colors[state] ?? "transparent";
  return made;
}

// --- incoming data

function apply(changes) {
  for (const [section, rows] of Object.entries(changes)) {
    for (const [key, row] of Object.entries(rows)) {
      if (row === null) have[section].delete(key);
      else have[section].set(key, row);
    }
  }
}

function receive(message, whole) {
  offset = message.now - Date.now();
  if (whole) {
    have = Object.fromEntries(Object.entries(message.sections).map(([name, rows]) => [name, new Map(Object.entries(rows))]));
  } else {
    apply(message.sections);
  }
  draw(message.sections, whole);
  write(byId("at"), `as of ${clock(new Date(message.at).toISOString())} UTC, by ${hello.frontend}`);
  performance.clearMeasures("refresh"); // for measurements: from the snapshot's time to its drawing
  requestAnimationFrame(() => setTimeout(() => {
    performance.measure("refresh", { start: Math.max(0, message.at - performance.timeOrigin), end: performance.now() });
    document.documentElement.dataset.ready = "yes";
  }));
}

let source, heard, hidden;

function listen() {
  source?.close();
  const mine = source = new EventSource("console/events");
  const live = (text, lost) => {
    write(byId("live"), text);
    byId("live").className = lost ? "lost" : "";
  };
  const alive = () => {
    heard = Date.now();
    live("live", false);
  };
  source.addEventListener("hello", (event) => { hello = JSON.parse(event.data); alive(); });
  source.addEventListener("snapshot", (event) => { alive(); receive(JSON.parse(event.data), true); });
  source.addEventListener("changes", (event) => { alive(); receive(JSON.parse(event.data), false); });
  source.addEventListener("beat", alive);
  source.addEventListener("error", async () => {
    if (source !== mine) return;
    live("no connection to this frontend; reconnecting …", true);
    if (mine.readyState !== EventSource.CLOSED) return; // the browser reconnects by itself, but not after a refusal
    try {
      const answer = await fetch("console/events", { method: "HEAD" });
      if (!answer.ok) live(`this frontend answers ${answer.status}: it may have too many viewers`, true);
    } catch { /* already shown */ }
    setTimeout(() => { if (source === mine) listen(); }, 5000);
  });
  heard = Date.now();
}

setInterval(() => { if (source && Date.now() - heard > SILENT_MS) listen(); }, 3000);
document.addEventListener("visibilitychange", () => {
  clearTimeout(hidden);
  if (!document.hidden) { if (!source) listen(); }
  else hidden = setTimeout(() => { source?.close(); source = undefined; write(byId("live"), "paused while hidden"); }, HIDDEN_MS);
});

// --- drawing

function draw(changed, whole) {
  if (whole || changed.head) drawHead();
  if (whole || changed.models) drawModels();
  if (whole || changed.incidents) drawIncidents();
  drawLanes();
  if (whole) workers.begin();
  if (changed.workers || changed.streams) workers.change(changed.workers ?? {}, changed.streams ?? {});
  if (whole || changed.events) flow.show();
}

function drawHead() {
  const head = Object.fromEntries(have.head);
  write(byId("headline"), head.headline.text);
  byId("headline").className = `headline ${head.headline.level}`;
  const figures = {
    "serving capacity": percent(head.share),
    "streams": number(head.streams),
    "answers/s": number(head.answers),
    "tokens/s": number(head.tokens),
    "first token": head.ttft_ms < 0 ? "–" : `${number(head.ttft_ms)} ms`,
    "rejected/s": number(head.refused),
    "migrated in 5 min": number(head.moved),
    "events": number(head.seq),
  };
  const list = byId("figures");
  if (!list.children.length) {
    for (const name of Object.keys(figures)) {
      const one = element("div");
      one.append(element("dt", name), element("dd"));
      list.append(one);
    }
  }
  Object.values(figures).forEach((text, n) => write(list.children[n].lastChild, text));
  const legend = byId("legend"), shown = JSON.stringify(head.states);
  if (legend.dataset.shown === shown) return;
  legend.dataset.shown = shown;
  legend.replaceChildren(...Object.entries(head.states).map(([state, count]) => {
    const button = element("button", "", { type: "button", title: `show workers in state ${state}` });
    button.append(mark(state), `${count} ${state}`);
    button.addEventListener("click", () => { byId("find").value = byId("find").value === state ? "" : state; workers.filter(); });
    return button;
  }));
}

function meter(share, low) {
  const made = element("span", "", { className: low ? "meter low" : "meter" }), bar = element("i");
  made.setAttribute("aria-hidden", "true");
  bar.style.width = `${Math.min(100, 100 * share)}%`;
  made.append(bar);
  return made;
}

function drawModels() {
  byId("models").tBodies[0].replaceChildren(...[...have.models].sort(([a], [b]) => (a < b ? -1 : 1)).map(([name, one]) => {
    const row = element("tr"), share = element("td"), carries = element("td");
    const part = one.share ?? 0;
    share.append(meter(part, part < 0.5), percent(part));
    if (one.promised_rps === undefined || one.promised_rps === null) carries.textContent = "no objective";
    else {
      const ratio = (one.capacity_rps ?? 0) / one.promised_rps;
      carries.append(meter(ratio, ratio < 1), `${number(one.capacity_rps ?? 0)} of ${number(one.promised_rps)} requests/s`);
    }
    const spares = one.spares ? `, ${one.spares} spare${one.spares === 1 ? "" : "s"}` : "";
    const level = one.level ? `level ${one.level}: ${one.given_up ?? ""}` : "none";
    row.append(element("th", name, { scope: "row" }), element("td", `${one.serving} of ${one.workers}${spares}`), share, carries,
      element("td", level), ...[one.answers, one.tokens].map((value) => element("td", number(value ?? 0))),
      element("td", one.ttft_ms === undefined || one.ttft_ms === null ? "–" : `${number(one.ttft_ms)} ms`),
      ...[one.refused, one.streams].map((value) => element("td", number(value ?? 0))));
    return row;
  }));
}

// --- the lanes

const OVER_MS = 600_000, LEAST_MS = 60_000, TICKS_MAX = 6; // a young fleet shows its whole life
const LANE = 20, NAME = 90, RIGHT = 20, SHARE = 46;

function shape(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== "") made.textContent = text;
  return made;
}

function drawLanes() {
  const svg = byId("lanes"), end = Date.now() + offset;
  const first = Math.min(...[...have.lanes.values(), have.share.get("steps") ?? []].map((steps) => steps[0]?.[0] ?? end));
  const over = Math.min(OVER_MS, Math.max(LEAST_MS, end - first)), begin = end - over;
  const every = [10_000, 30_000, 60_000, 120_000].find((one) => over / one <= TICKS_MAX) ?? 120_000;
  const names = [...have.lanes.keys()].sort(natural.compare), width = svg.clientWidth || 1000;
  const x = (at) => NAME + (Math.min(Math.max(at, begin), end) - begin) / over * (width - NAME - RIGHT);
  const lower = names.length * LANE + 6, height = lower + SHARE + 20, drawn = [];
  byId("no-lanes").hidden = names.length > 0;
  for (let tick = Math.ceil(begin / every) * every; tick < end; tick += every) {
    drawn.push(shape("line", { x1: x(tick), x2: x(tick), y1: 0, y2: lower + SHARE }),
      shape("text", { x: x(tick), y: height - 8, class: "axis", "text-anchor": "middle" }, clock(new Date(tick).toISOString())));
  }
  names.forEach((name, n) => {
    const steps = have.lanes.get(name), label = shape("text", { x: 0, y: n * LANE + LANE / 2 }, name.length > 12 ? `${name.slice(0, 11)}…` : name);
    steps.forEach(([at, state], m) => {
      const until = m + 1 < steps.length ? steps[m + 1][0] : end;
      if (until <= begin) return;
      const bar = shape("rect", { x: x(at), y: n * LANE + 3, width: Math.max(1, x(until) - x(at)), height: LANE - 6, fill: hello.colors[state] ?? "none" });
      bar.append(shape("title", {}, `${name}: ${state} from ${clock(new Date(at).toISOString())}`));
      drawn.push(bar);
    });
    drawn.push(label);
  });
  const steps = have.share.get("steps") ?? [], high = (share) => lower + SHARE - share * (SHARE - 6);
  if (steps.length) {
    const path = steps.map(([at, share], n) => {
      const until = n + 1 < steps.length ? steps[n + 1][0] : end;
      return until <= begin ? "" : `L${x(at)} ${high(share)}L${x(until)} ${high(share)}`;
    }).join("");
    drawn.push(shape("path", { d: `M${x(steps[0][0])} ${lower + SHARE}${path}L${x(end)} ${lower + SHARE}Z` }),
      shape("text", { x: 0, y: lower + SHARE / 2 }, `${percent(steps.at(-1)[1])} serving`));
  }
  const states = new Set(names.flatMap((name) => have.lanes.get(name).map(([, state]) => state))), legend = byId("colours");
  const shown = Object.keys(hello.colors).filter((state) => states.has(state));
  if (legend.dataset.shown !== shown.join()) {
    legend.dataset.shown = shown.join();
    legend.replaceChildren(...shown.map((state) => {
      const one = element("span");
      one.append(mark(state), state);
      return one;
    }));
  }
  svg.setAttribute("height", height);
  svg.replaceChildren(...drawn);
}

function drawIncidents() {
  const key = ([, one]) => `${one.closed ? 0 : 1} ${one.closed || one.opened}`;
  const sorted = [...have.incidents].sort((a, b) => (key(a) < key(b) ? 1 : -1));
  byId("no-incidents").hidden = sorted.length > 0;
  byId("incidents").parentElement.hidden = !sorted.length;
  byId("incidents").tBodies[0].replaceChildren(...sorted.map(([id, one]) => {
    const row = element("tr"), report = element("td");
    const where = `console/report?incident=${encodeURIComponent(id)}`;
    report.append(element("a", id, { href: where, target: "_blank", rel: "noopener" }));
    row.append(element("th", one.subject, { scope: "row" }), element("td", one.symptom),
      element("td", clock(one.opened), { title: one.opened ?? "" }), element("td", one.closed ? clock(one.closed) : "open", { title: one.closed ?? "" }),
      element("td", one.outcome ?? ""), report);
    return row;
  }));
}

// --- the workers: one row each; only changed cells are updated

const workers = {
  rows: new Map(),
  sorted: [],
  room: ROWS,

  begin() {
    this.rows.clear();
    byId("workers").tBodies[0].replaceChildren();
    this.change(Object.fromEntries(have.workers), {});
  },

  change(changed, streams) {
    let moved = false;
    for (const [name, row] of Object.entries(changed)) {
      if (row === null) {
        this.rows.get(name)?.node.remove();
        moved = this.rows.delete(name) || moved;
        continue;
      }
      const known = this.rows.get(name) ?? this.made(name);
      moved ||= known.urgency !== row.urgency;
      known.urgency = row.urgency;
      this.fill(known, name, row);
    }
    for (const name of Object.keys(streams)) {
      const known = this.rows.get(name);
      if (known) write(known.cells[3], this.streams(name));
    }
    if (moved) this.order();
    if (Object.keys(changed).length) this.filter();
    if (byId("worker").open && (shownWorker in changed || shownWorker in streams)) showWorker(shownWorker);
  },

  made(name) {
    const node = element("tr"), head = element("th", "", { scope: "row", title: name });
    const button = element("button", name, { type: "button" });
    button.addEventListener("click", () => { byId("done").textContent = ""; showWorker(name); byId("worker").showModal(); });
    head.append(button);
    const cells = Array.from({ length: 7 }, () => element("td"));
    const state = element("span");
    cells[0].append(mark(""), state);
    node.append(head, ...cells);
    const made = { node, cells, state, urgency: NaN, text: "", shown: "" };
    this.rows.set(name, made);
    return made;
  },

  fill(known, name, row) {
    if (known.shown !== row.state) {
      known.shown = row.state;
      known.cells[0].firstChild.style.background = hello.colors[row.state] ?? "transparent";
      write(known.state, row.state);
    }
    const canary = row.canary ? `${row.canary} ${clock(row.canary_at)}${row.canary_ms ? `, ${row.canary_ms} ms` : ""}` : "–";
    const place = row.place ? `replaces ${row.place}` : "";
    const why = [row.why, place].filter(Boolean).join("; ");
    const texts = [row.spare ? "spare" : String(row.weight ?? 0), row.breaker || "–", this.streams(name), row.model ?? "", canary, why];
    texts.forEach((text, n) => write(known.cells[n + 1], text));
    if (known.cells[6].title !== why) known.cells[6].title = why;
    known.text = [name, row.state, row.model, row.host, row.engine, row.breaker, canary, why].join(" ").toLowerCase();
  },

  streams(name) {
    const count = have.streams.get(name) ?? -1;
    return count < 0 ? "–" : String(count);
  },

  order() {
    const sorted = [...this.rows].sort(([a, one], [b, other]) => one.urgency - other.urgency || natural.compare(a, b));
    const body = byId("workers").tBodies[0];
    this.sorted = sorted.map(([, one]) => one);
    let at = body.firstChild;
    for (const { node } of this.sorted) {
      if (at === node) at = at.nextSibling;
      else body.insertBefore(node, at);
    }
  },

  filter() {
    const words = byId("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    for (const one of this.sorted) {
      const fits = words.every((word) => one.text.includes(word));
      found += fits;
      const shown = fits && found <= this.room;
      if (one.node.hidden === shown) one.node.hidden = !shown;
    }
    byId("more").hidden = found <= this.room;
    write(byId("more"), `Show ${Math.min(ROWS, found - this.room)} more`);
    write(byId("found"), words.length ? `${found} of ${this.rows.size}` : `${this.rows.size} in total`);
  },
};
const showMore = () => { workers.room += ROWS; workers.filter(); };
byId("find").addEventListener("input", () => { workers.room = ROWS; workers.filter(); });
byId("more").addEventListener("click", showMore);
byId("more").parentElement.addEventListener("scroll", ({ target }) => {
  if (!byId("more").hidden && target.scrollTop + target.clientHeight > target.scrollHeight - target.clientHeight) showMore();
});

// --- one worker

let shownWorker = "";
const ACTS = { drain: "Drain", resume: "Resume", move: "Move its streams", restart: "Restart" };

function showWorker(name) {
  const row = have.workers.get(name);
  shownWorker = name;
  write(byId("worker-name"), name);
  const facts = row === undefined ? { state: "gone" } : {
    "state": `${row.state}${row.spare ? ", a spare" : ""}`, "weight": String(row.weight ?? 0), "breaker": row.breaker,
    "streams": workers.streams(name), "reason": row.why, "last canary": row.canary && `${row.canary} at ${row.canary_at}, ${row.canary_ms ?? 0} ms`,
    "replaces": row.place, "incident": row.incident, "model": row.model, "engine": row.engine, "host": row.host, "joined": row.since,
  };
  const items = Object.entries(facts).filter(([, text]) => text).flatMap(([what, text]) => [element("dt", what), element("dd", text)]);
  byId("worker-facts").replaceChildren(...items);
  const acts = byId("acts"), made = `${hello.token ? "allowed" : "not allowed"} ${name}`;
  if (acts.dataset.made === made) return;
  acts.dataset.made = made;
  if (hello.token) {
    acts.replaceChildren(...Object.entries(ACTS).map(([verb, text]) => {
      const button = element("button", text, { type: "button" });
      button.addEventListener("click", () => act(verb, name, text));
      return button;
    }));
  } else {
    const hint = element("p", "", { className: "hint" });
    hint.append("This console is read-only. To enable actions, start the fleet with ", element("code", "--console-actions"), ", or run ",
      element("code", `holdfast drain ${name}`), ".");
    acts.replaceChildren(hint);
  }
}

async function act(verb, worker, text) {
  if (!confirm(`${text}: ${worker}?`)) return;
  const done = byId("done"), buttons = byId("acts").querySelectorAll("button");
  done.textContent = `${verb} ${worker} …`;
  buttons.forEach((one) => { one.disabled = true; });
  try {
    const answer = await fetch("console/act", {
      method: "POST", headers: { "Content-Type": "application/json", "X-Holdfast-Console": hello.token },
      body: JSON.stringify({ verb, worker }),
    });
    const result = await answer.json();
    done.textContent = result.says ?? `Not done: ${result.error}`;
  } catch (error) {
    done.textContent = `No answer: ${error.message}. The events below show whether it was done.`;
  } finally {
    buttons.forEach((one) => { one.disabled = false; });
  }
}

// --- the events

const flow = {
  nodes: new Map(),
  paused: false,

  show() {
    const words = byId("words").value.toLowerCase().split(/\s+/).filter(Boolean), filter = words.join(" ");
    if (this.paused) { write(byId("event-count"), "paused"); return; }
    const body = byId("events").tBodies[0];
    for (const [seq, node] of this.nodes) {
      if (!have.events.has(seq)) { node.remove(); this.nodes.delete(seq); }
    }
    const fits = (one) => words.every((word) => `${one.kind} ${one.text}`.toLowerCase().includes(word));
    let shown = 0;
    for (const [seq, one] of [...have.events].sort(([a], [b]) => Number(a) - Number(b)).slice(-EVENTS_MAX)) {
      let node = this.nodes.get(seq);
      if (!node) {
        node = element("tr");
        node.append(element("td", one.at.slice(11, 23), { title: one.at }), element("td", one.kind), element("td"));
        this.nodes.set(seq, node);
        body.prepend(node);
      }
      write(node.cells[2], one.times > 1 ? `${one.text} (and ${one.times - 1} more like it)` : one.text);
      const found = fits(one);
      shown += found;
      if (node.hidden === found) node.hidden = !found;
    }
    write(byId("event-count"), filter ? `${shown} of the last ${have.events.size}` : `the last ${have.events.size}`);
  },
};
byId("words").addEventListener("input", () => flow.show());
byId("pause").addEventListener("click", () => {
  flow.paused = !flow.paused;
  byId("pause").setAttribute("aria-pressed", String(flow.paused));
  byId("pause").textContent = flow.paused ? "Resume" : "Pause";
  flow.show();
});

// --- the history of a request

byId("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const id = byId("request").value.trim(), story = byId("story");
  if (!id) return;
  story.textContent = `Reading the journal for ${id} …`;
  try {
    const answer = await fetch(`console/request?id=${encodeURIComponent(id)}`);
    const history = await answer.json();
    if (byId("request").value.trim() !== id) return;
    if (history.error) story.textContent = history.error;
    else showHistory(story, history);
  } catch (error) {
    story.textContent = `Cannot load it: ${error.message}`;
  }
});

function showHistory(story, history) {
  const box = element("div", "", { className: "story" }), list = element("ol", "", { className: "causes" });
  const says = history.now.length && !history.events.length ? [`request ${history.request}`] : history.says; // the journal has no event of it yet
  for (const line of [...says, ...history.now]) box.append(element("p", line));
  for (const one of history.events) {
    const item = element("li"), when = element("span", `${one.at.slice(0, 10)} ${one.at.slice(11, 23)} `, { className: "clock" });
    item.append(when, one.text);
    list.append(item);
  }
  if (history.events.length) box.append(list);
  story.replaceChildren(box);
}

listen();
