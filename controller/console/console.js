"use strict";
// The console's page. What flows to it: see controller/console/feed.py. Whatever was named by somebody is text, never markup.

const SILENT_MS = 12_000; // without even a beat: the connection is dead, whatever the browser believes
const HIDDEN_MS = 30_000; // a page that nobody sees lets go
const EVENTS_MAX = 300;
const ROWS = 200; // workers that are laid out, and so many more each time that somebody scrolls on
const byId = (id) => document.getElementById(id);
const clock = (at) => (at ? at.slice(11, 19) : "");
const number = (value) => value.toLocaleString("en", { maximumFractionDigits: 1 });
const natural = new Intl.Collator("en", { numeric: true });
const percent = (share) => { // what is not quite all is never said to be
  const exact = share > 0 && (share < 0.1 || (share > 0.99 && share < 1));
  return `${exact ? (Math.floor(1000 * share) / 10).toFixed(1) : (100 * share).toFixed(0)} %`;
};

let offset = 0; // of the stream's clock, which the lanes are by
let have = {}; // the sections, by name
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

// --- what flows in

function apply(changes) {
  for (const [section, rows] of Object.entries(changes)) {
    for (const [key, row] of Object.entries(rows)) {
      if (row === null) have[section].delete(key);
      else have[section].set(key, row);
    }
  }
}

function take(told, whole) {
  offset = told.now - Date.now();
  if (whole) {
    have = Object.fromEntries(Object.entries(told.sections).map(([name, rows]) => [name, new Map(Object.entries(rows))]));
  } else {
    apply(told.sections);
  }
  draw(told.sections, whole);
  write(byId("at"), `as of ${clock(new Date(told.at).toISOString())} UTC, by ${hello.frontend}`);
  performance.clearMeasures("refresh"); // for whoever measures: from the picture's taking to its being drawn
  requestAnimationFrame(() => setTimeout(() => {
    performance.measure("refresh", { start: Math.max(0, told.at - performance.timeOrigin), end: performance.now() });
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
  source.addEventListener("snapshot", (event) => { alive(); take(JSON.parse(event.data), true); });
  source.addEventListener("changes", (event) => { alive(); take(JSON.parse(event.data), false); });
  source.addEventListener("beat", alive);
  source.addEventListener("error", async () => {
    if (source !== mine) return;
    live("no connection to this frontend; trying again …", true);
    if (mine.readyState !== EventSource.CLOSED) return; // the browser tries again by itself, but not after a refusal
    try {
      const answer = await fetch("console/events", { method: "HEAD" });
      if (!answer.ok) live(`this frontend answers ${answer.status}: too many may be looking`, true);
    } catch { /* it is said already */ }
    setTimeout(() => { if (source === mine) listen(); }, 5000);
  });
  heard = Date.now();
}

setInterval(() => { if (source && Date.now() - heard > SILENT_MS) listen(); }, 3000);
document.addEventListener("visibilitychange", () => {
  clearTimeout(hidden);
  if (!document.hidden) { if (!source) listen(); }
  else hidden = setTimeout(() => { source?.close(); source = undefined; write(byId("live"), "asleep"); }, HIDDEN_MS);
});

// --- what is drawn

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
    "of the fleet serves": percent(head.share),
    "streams": number(head.streams),
    "answers/s": number(head.answers),
    "tokens/s": number(head.tokens),
    "first token": head.ttft_ms < 0 ? "–" : `${number(head.ttft_ms)} ms`,
    "refused/s": number(head.refused),
    "moved in 5 min": number(head.moved),
    "events so far": number(head.seq),
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
  const legend = byId("legend"), told = JSON.stringify(head.states);
  if (legend.dataset.told === told) return;
  legend.dataset.told = told;
  legend.replaceChildren(...Object.entries(head.states).map(([state, count]) => {
    const button = element("button", "", { type: "button", title: `show those that are ${state}` });
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
    if (one.promised_rps === undefined || one.promised_rps === null) carries.textContent = "nothing is promised";
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

const OVER_MS = 600_000, LEAST_MS = 60_000, TICKS_MAX = 6; // of a fleet that has only begun, as much as there is
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
      shape("text", { x: 0, y: lower + SHARE / 2 }, `${percent(steps.at(-1)[1])} serves`));
  }
  const states = new Set(names.flatMap((name) => have.lanes.get(name).map(([, state]) => state))), legend = byId("colours");
  const told = Object.keys(hello.colors).filter((state) => states.has(state));
  if (legend.dataset.told !== told.join()) {
    legend.dataset.told = told.join();
    legend.replaceChildren(...told.map((state) => {
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

// --- the workers: a row each, of which only what has changed is touched

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
    const place = row.place ? `serves in the place of ${row.place}` : "";
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
    write(byId("found"), words.length ? `${found} of ${this.rows.size}` : `${this.rows.size} in all`);
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
const ACTS = { drain: "Drain", resume: "Resume", move: "Move its streams elsewhere", restart: "Restart" };

function showWorker(name) {
  const row = have.workers.get(name);
  shownWorker = name;
  write(byId("worker-name"), name);
  const facts = row === undefined ? { state: "gone" } : {
    "state": `${row.state}${row.spare ? ", a spare" : ""}`, "weight": String(row.weight ?? 0), "breaker": row.breaker,
    "streams": workers.streams(name), "why": row.why, "last canary": row.canary && `${row.canary} at ${row.canary_at}, ${row.canary_ms ?? 0} ms`,
    "in the place of": row.place, "incident": row.incident, "model": row.model, "engine": row.engine, "host": row.host, "here since": row.since,
  };
  const told = Object.entries(facts).filter(([, text]) => text).flatMap(([what, text]) => [element("dt", what), element("dd", text)]);
  byId("worker-facts").replaceChildren(...told);
  const acts = byId("acts"), made = `${hello.token ? "may" : "may not"} ${name}`;
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
    hint.append("This console only shows. To act from here start the fleet with ", element("code", "--console-actions"), ", or type ",
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
    const said = await answer.json();
    done.textContent = said.says ?? `Not done: ${said.error}`;
  } catch (error) {
    done.textContent = `Nobody answered: ${error.message}. The events below tell whether it was done.`;
  } finally {
    buttons.forEach((one) => { one.disabled = false; });
  }
}

// --- what happens

const flow = {
  nodes: new Map(),
  paused: false,

  show() {
    const words = byId("words").value.toLowerCase().split(/\s+/).filter(Boolean), filter = words.join(" ");
    if (this.paused) { write(byId("told"), "paused"); return; }
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
    write(byId("told"), filter ? `${shown} of the last ${have.events.size}` : `the last ${have.events.size}`);
  },
};
byId("words").addEventListener("input", () => flow.show());
byId("pause").addEventListener("click", () => {
  flow.paused = !flow.paused;
  byId("pause").setAttribute("aria-pressed", String(flow.paused));
  byId("pause").textContent = flow.paused ? "Go on" : "Pause";
  flow.show();
});

// --- a request's story

byId("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const id = byId("request").value.trim(), story = byId("story");
  if (!id) return;
  story.textContent = `Asking the journal for ${id} …`;
  try {
    const answer = await fetch(`console/request?id=${encodeURIComponent(id)}`);
    const told = await answer.json();
    if (byId("request").value.trim() !== id) return;
    if (told.error) story.textContent = told.error;
    else tell(story, told);
  } catch (error) {
    story.textContent = `It cannot be asked for: ${error.message}`;
  }
});

function tell(story, told) {
  const box = element("div", "", { className: "story" }), list = element("ol", "", { className: "causes" });
  const says = told.now.length && !told.events.length ? [`request ${told.request}`] : told.says; // the journal knows nothing yet
  for (const line of [...says, ...told.now]) box.append(element("p", line));
  for (const one of told.events) {
    const item = element("li"), when = element("span", `${one.at.slice(0, 10)} ${one.at.slice(11, 23)} `, { className: "clock" });
    item.append(when, one.text);
    list.append(item);
  }
  if (told.events.length) box.append(list);
  story.replaceChildren(box);
}

listen();
