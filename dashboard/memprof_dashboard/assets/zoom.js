"use strict";
// Zooms the timeline without the server: columns of the whole recording (zoom.py) are fetched once, and drawn for any
// range at once, from a pyramid of their fullest. The server's names and labels of that range follow after a pause.

(function () {
  const MOST = 512; // columns drawn
  const PAUSE_MS = 250; // without another zoom, after which the server gets the range
  const NARROWEST = 4; // operators; the server draws no fewer
  const BYTES = { B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, PiB: 2 ** 50, EiB: 2 ** 60 };
  let held = null; // the columns of the recording that is shown, once they are there
  let key = ""; // what they are of
  let shown = {}; // the view that the server drew last
  let drawn = {}; // the data drawn here, and the server's before them
  let waiting = 0;
  let count = 0;
  const hidden = new Set(); // areas, by their names

  const timeline = () => document.querySelector("#timeline .js-plotly-plot");
  const isTimed = (graph) => !!graph?.layout?.xaxis?.title?.text?.includes("time");
  const numbers = (values) => values?._inputArray ?? values;

  function unpack(bytes) {
    const length = new DataView(bytes).getUint32(0, true);
    const found = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length)));
    let at = 4 + length;
    const take = (Kind, size) => {
      const values = new Kind(bytes, at, size);
      at += values.byteLength;
      return values;
    };
    found.total = take(Float64Array, found.count);
    const lowest = take(Float64Array, found.count);
    found.clock = found.hasClock && take(Float64Array, found.count + 1);
    found.found = found.hasFound && take(Float64Array, found.count);
    found.alive = found.areas.map(() => take(Float32Array, found.count));
    found.phase = take(Uint8Array, found.count);
    found.levels = [{ best: Int32Array.from(found.total, (_, place) => place), lowest }];
    while (found.levels.at(-1).best.length > 1) { found.levels.push(above(found.levels.at(-1), found.total)); }
    return found;
  }

  // The next level of the pyramid: of each two columns the fuller, the first of equals, and the least of both.
  function above(level, total) {
    const size = Math.ceil(level.best.length / 2);
    const made = { best: new Int32Array(size), lowest: new Float64Array(size) };
    for (let place = 0; place < size; place += 1) {
      const one = level.best[2 * place], other = level.best[2 * place + 1] ?? one;
      made.best[place] = total[other] > total[one] ? other : one;
      made.lowest[place] = Math.min(level.lowest[2 * place], level.lowest[2 * place + 1] ?? Infinity);
    }
    return made;
  }

  // Cuts a range of columns into at most MOST of a level; those that the range cuts are looked through.
  function pick(first, end) {
    let step = 1, height = 0;
    while ((end - first) / step > MOST) { step *= 2; height += 1; }
    const level = held.levels[height];
    const left = [], best = [], lowest = [];
    for (let low = first; low < end;) {
      const place = Math.floor(low / step);
      const high = Math.min((place + 1) * step, end, held.count);
      const isWhole = low === place * step && (high - low === step || high === held.count);
      left.push(low);
      let most = level.best[place], least = level.lowest[place];
      if (!isWhole) {
        most = low;
        least = Infinity;
        for (let column = low; column < high; column += 1) {
          if (held.total[column] > held.total[most]) { most = column; }
          least = Math.min(least, held.levels[0].lowest[column]);
        }
      }
      best.push(most);
      lowest.push(least);
      low = high;
    }
    left.push(end);
    return { left, best, lowest, isExact: step === 1 && held.width === 1 };
  }

  // The range of columns for a range of the axis, and the edges of the axis: whole operators, and whole columns where
  // those are drawn together, so that no peak stands there that is outside.
  function fit(range, isTime) {
    const { ops, width, clock } = held;
    let [low, high] = [...range].sort((one, other) => one - other);
    const begun = (time, isBefore) => { // columns that begin before a time, or at it
      let from = 0, to = held.count + 1;
      while (from < to) {
        const at = (from + to) >> 1;
        if (clock[at] < time || (!isBefore && clock[at] === time)) { from = at + 1; } else { to = at; }
      }
      return from;
    };
    if (isTime) {
      [low, high] = [Math.min(Math.max(low, clock[0]), clock.at(-2)), Math.max(Math.min(high, clock.at(-1)), clock[1])];
      const end = Math.min(Math.max(begun(high, true), 1), held.count);
      const first = Math.min(Math.max(begun(low, false) - 1, 0), end - 1);
      const isExact = width === 1 || end - first <= MOST; // an operator is in a range that cuts it
      return { first, end, edges: isExact ? [low, high] : [clock[first], clock[end]] };
    }
    let [first, end] = [Math.max(Math.floor(low), 0), Math.min(Math.ceil(high), ops)];
    const missing = Math.min(NARROWEST, ops) - (end - first);
    if (missing > 0) {
      first = Math.max(0, Math.min(first - Math.floor(missing / 2), ops - NARROWEST));
      end = Math.min(ops, first + NARROWEST);
    }
    const isDeep = end - first <= MOST * width;
    const [start, stop] = [Math.floor(first / width), Math.ceil(end / width)];
    return { first: start, end: stop, edges: isDeep ? [first, end] : [start * width, Math.min(stop * width, ops)] };
  }

  // Binary units, as units.format_bytes writes them.
  function formatBytes(size) {
    const names = Object.keys(BYTES);
    if (size < 1024) { return `${size} B`; }
    const name = names.find((one) => one !== "B" && Number((size / BYTES[one]).toFixed(2)) < 1024) ?? names.at(-1);
    return `${(size / BYTES[name]).toFixed(2)} ${name}`;
  }

  // Draws a range from the columns; returns the range that is drawn.
  function draw(graph, range) {
    if (graph.data !== drawn.data) { drawn = { served: graph.data, layout: graph.layout }; }
    const { served, layout } = drawn;
    const total = served.find((one) => one.name === "total");
    if (!total) { return null; } // a message
    const isTime = isTimed(graph);
    const { first, end, edges } = fit(range, isTime);
    const before = numbers(total.x);
    if (before[0] === edges[0] && before.at(-1) === edges[1]) { // where the server's own stands, that returns
      drawn.data = served;
      window.Plotly.react(graph, served, { ...layout, xaxis: { ...layout.xaxis, range: edges, autorange: false } });
      return edges;
    }
    const columns = pick(first, end);
    const unit = layout.yaxis.title.text, bytes = BYTES[unit] ?? 1;
    const x = Float64Array.from(columns.left, (at) => (isTime ? held.clock[at] : at * held.width));
    [x[0], x[x.length - 1]] = edges;
    const stairs = (values) => Float64Array.from(x, (_, at) => values[Math.min(at, values.length - 1)] / bytes);
    const of = (values) => columns.best.map((at) => values[at]);
    const line = (values, look) => ({ ...total, ...look, x, y: stairs(values), text: null,
      hovertemplate: `%{y:,.3f} ${unit}` });
    const sums = of(held.total);
    const areas = held.areas.map((look, place) => ({ ...look, x, y: stairs(of(held.alive[place])), showlegend: false,
      visible: !hidden.has(look.name) })).filter((one) => one.y.some((size) => size > 0));
    const data = [...areas, line(sums, { line: { ...total.line, width: columns.isExact ? 1.25 : 0.75 } })];
    const dotted = { name: "lowest", opacity: 0.45, line: { ...total.line, width: 1, dash: "dot" } };
    if (!columns.isExact) { data.push(line(columns.lowest, dotted)); }
    const found = served.find((one) => one.name === "found");
    if (found && held.found) { data.push({ ...line(of(held.found), found), x, y: stairs(of(held.found)) }); }
    const own = new Set(["total", "lowest", "found", "phase", ...held.areas.map((look) => look.name)]);
    const others = served.filter((one) => one.xaxis !== "x3" && !own.has(one.name));
    data.push(...others, phases(of(held.phase), x, served.find((one) => one.name === "phase")));
    const place = sums.reduce((best, size, at) => (size > sums[best] ? at : best), 0);
    const changed = marked(layout, edges, { x: x[place], size: sums[place], bytes },
      others.map((one) => Math.max(...numbers(one.y))));
    const shown = `${layout.xaxis.title.text.split(" (")[0]}${columns.isExact ? "" : " (each pixel: max of several; dotted: min)"}`;
    changed.xaxis = { ...layout.xaxis, range: edges, autorange: false, title: { ...layout.xaxis.title, text: shown } };
    drawn.data = data;
    window.Plotly.react(graph, data, changed);
    return edges;
  }

  function phases(codes, x, look) {
    const starts = codes.map((_, at) => at).filter((at) => at === 0 || codes[at] !== codes[at - 1]);
    const width = starts.map((at, run) => x[starts[run + 1] ?? codes.length] - x[at]);
    const known = starts.map((at) => held.phases[codes[at]]);
    return { ...look, x: starts.map((at) => x[at]), y: starts.map(() => 1), width,
      marker: { ...look.marker, color: known.map((one) => one.colour) }, customdata: known.map((one) => one.name) };
  }

  // The layout with the peak's label at the new peak, lines of limits along the new range, and no inset of the old one.
  function marked(layout, edges, peak, others) {
    const isLimit = (one) => one.y0 === one.y1 && one.xref !== "paper" && one.yref !== "paper";
    const shapes = layout.shapes.filter((one) => one.xref !== "paper").map(
      (one) => (isLimit(one) ? { ...one, x0: edges[0], x1: edges[1] } : one));
    const heights = layout.shapes.filter(isLimit).map((one) => one.y0);
    const top = Math.max(peak.size / peak.bytes, ...heights, ...others);
    const side = peak.x < (edges[0] + edges[1]) / 2 ? 1 : -1;
    const annotations = layout.annotations.filter((one) => one.xref !== "paper").map((one) => {
      if (one.text.startsWith("peak ")) {
        return { ...one, x: peak.x, y: peak.size / peak.bytes, ax: side * Math.abs(one.ax), text: `peak ${formatBytes(peak.size)}` };
      }
      return heights.includes(one.y) && !one.yref ? { ...one, x: edges[one.xanchor === "right" ? 1 : 0] } : one;
    });
    const isShared = !!layout.title?.text; // a second recording's timeline has this one's axis
    const yaxis = isShared ? layout.yaxis : { ...layout.yaxis, range: [0, 1.12 * top] };
    return { ...layout, shapes, annotations, yaxis };
  }

  // Whatever the server is asked next takes the range along; after a pause, that is nothing else.
  function ask(data) {
    count += 1;
    const axis = isTimed(timeline()) ? "time" : "ops";
    window.dash_clientside.set_props("zoomed", { data: { ...data, trace: shown.trace, rank: shown.rank, axis, count } });
    clearTimeout(waiting);
    waiting = setTimeout(() => window.dash_clientside.set_props("go", { data: { zoomed: count } }), PAUSE_MS);
  }

  function zoomTo(range) {
    const graph = timeline();
    const edges = (held?.count && graph?.data && draw(graph, range)) || range;
    ask({ "xaxis.range": edges });
    return edges;
  }

  const whole = () => held?.count && [0, isTimed(timeline()) ? held.clock.at(-1) : held.ops];
  const zoomOut = () => { if (whole()) { zoomTo(whole()); } else { ask({ "xaxis.autorange": true }); } };

  // Hides and shows areas as the legend's buttons say; the server's figures have all of them.
  function setAreas() {
    document.querySelectorAll("[data-area]").forEach((one) => {
      one.setAttribute("aria-pressed", String(!hidden.has(one.dataset.area)));
    });
    document.querySelectorAll("#timeline .js-plotly-plot, #timeline-other .js-plotly-plot").forEach((graph) => {
      graph.removeListener?.("plotly_afterplot", setAreas);
      graph.on?.("plotly_afterplot", setAreas); // the next figure has all of them again
      const wrong = (graph.data ?? []).flatMap((one, place) => (
        one.stackgroup === "alive" && (one.visible !== false) === hidden.has(one.name) ? [place] : []));
      if (wrong.length) { window.Plotly.restyle(graph, { visible: wrong.map((place) => !hidden.has(graph.data[place].name)) }, wrong); }
    });
  }

  document.addEventListener("click", (event) => {
    const area = event.target.closest("[data-area]")?.dataset.area;
    if (!area) { return; }
    if (!hidden.delete(area)) { hidden.add(area); }
    setAreas();
  });

  Object.assign(window.dash_clientside.memprof, {
    sent: function () { clearTimeout(waiting); },
    hold: function (_, legend, view) {
      if (hidden.size) { requestAnimationFrame(setAreas); }
      if (!view || !window.dash_clientside.callback_context.triggered.some((one) => one.prop_id === "drawn-at.data")) { return; }
      shown = view;
      const wanted = JSON.stringify([view.trace, view.rank, view.find, view.tick]);
      if (wanted === key) { return; }
      key = wanted;
      held = null;
      const search = new URLSearchParams({ trace: view.trace, rank: view.rank, find: view.find });
      fetch(`columns?${search}`).then((answer) => (answer.status === 200 ? answer.arrayBuffer() : null)).then(
        (bytes) => { if (bytes && key === wanted) { held = unpack(bytes); } },
        () => { if (key === wanted) { key = ""; } }, // asked again after the next figure
      );
    },
    zoom: function () {
      const event = window.dash_clientside.callback_context.triggered[0]?.value ?? {};
      const range = event["xaxis.range"] ?? [event["xaxis.range[0]"], event["xaxis.range[1]"]];
      if (Number.isFinite(range[0]) && Number.isFinite(range[1])) { zoomTo(range); }
      else if (event["xaxis.autorange"]) { zoomOut(); }
    },
    // By keys and buttons, around the cursor where it is in the range.
    zoomBy: function (factor) {
      const graph = timeline();
      if (!graph?.layout?.xaxis?.title?.text) { return; } // nothing is drawn, or a message
      if (factor === Infinity) { zoomOut(); return; }
      const range = graph.layout.xaxis.range;
      const most = whole() || document.querySelector("#overview .js-plotly-plot")?.layout?.xaxis?.range || range;
      const isTime = isTimed(graph);
      const at = graph.layout.shapes[0].x0 - (isTime ? 0 : 0.5);
      const centre = range[0] <= at && at < range[1] ? at : (range[0] + range[1]) / 2;
      const edges = range.map((edge, side) => {
        const moved = centre + (edge - centre) * factor;
        return Math[side ? "min" : "max"](isTime ? moved : Math.round(moved), most[side]);
      });
      const least = isTime ? (most[1] - most[0]) / 1e6 : NARROWEST; // the server draws nothing narrower
      if (edges[1] - edges[0] < least) { return; }
      if (held?.count) { zoomTo(edges); } else { window.Plotly.relayout(graph, { "xaxis.range": [...edges] }); }
    },
  });
})();
