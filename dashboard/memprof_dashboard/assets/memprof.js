"use strict";
// What the browser does by itself: hands on the parts of the view, keys, buttons, and light or dark.

(function () {
  const PARTS = [
    ["trace", "rank", "other", "first", "end", "find", "budget", "lay", "axis", "plan"],
    ["trace", "rank", "at", "storage", "find", "first", "end", "side", "by", "inverted", "axis"],
    ["trace", "rank", "other", "tab"],
  ];
  const CONTROLS = [["trace", "trace"], ["other", "other"], ["find", "find"], ["budget", "budget"], ["tabs", "tab"],
    ["side", "side"], ["by", "by"], ["lay", "lay"], ["axis", "axis"]];
  let presses = 0;
  let current = {}; // the view
  let fetchedAt = 0; // when rows were asked for that have not come; after a while they will not

  function part(view, names, tick) {
    // A page is made anew when another is chosen, not when a recording grows: its fields would be lost.
    const made = names.includes("tab") ? {} : { tick: tick };
    names.forEach((name) => { made[name] = view[name]; });
    return made;
  }

  function setControls(view) {
    CONTROLS.forEach(([control, field]) => { window.dash_clientside.set_props(control, { value: view[field] }); });
    if (view.rank >= 0) { window.dash_clientside.set_props("rank", { value: view.rank }); }
  }

  function same(one, other) {
    return JSON.stringify(one) === JSON.stringify(other);
  }

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    memprof: {
      split: function (view, tick, ...before) {
        const none = window.dash_clientside.no_update;
        if (!view) { return [none, none, none]; }
        current = view;
        const isFirst = !before[0];
        if (!isFirst) { setControls(view); }
        return PARTS.map((names, place) => {
          const made = part(view, names, tick);
          return same(made, before[place]) || (isFirst && place) ? none : made;
        });
      },
      // What the first timeline comes before, since the browser asks for six things at a time: the other two parts.
      splitRest: function (drawn, view, tick, cursor) {
        const none = window.dash_clientside.no_update;
        if (!view || cursor) { return [none, none]; }
        setControls(view);
        return PARTS.slice(1).map((names) => part(view, names, tick));
      },
      // Rows of the table of live tensors: the first ones replace those there, later ones follow them.
      append: function (chunk) {
        const none = window.dash_clientside.no_update;
        const table = document.querySelector(".side-table [data-more]");
        fetchedAt = 0;
        if (!chunk || table?.dataset.key !== chunk.key) { return none; }
        const body = table.querySelector("tbody");
        if (chunk.first === 0) { body.replaceChildren(); }
        if (body.children.length === chunk.first) { body.append(...chunk.rows.map(build)); }
        table.dataset.more = chunk.more ? "yes" : "no";
        return none;
      },
    },
  });

  const ZOOMS = { "+": 0.5, "=": 0.5, "-": 2, Home: Infinity };
  function press(key, shift) {
    if (ZOOMS[key]) { window.dash_clientside.memprof.zoomBy(ZOOMS[key]); return; }
    presses += 1;
    window.dash_clientside.set_props("key", { data: { key: key, shift: shift, count: presses } });
  }

  document.addEventListener("keydown", function (event) {
    const inside = event.target.closest(
      "input:not([type=radio], [type=checkbox]), textarea, select, [contenteditable], [role=listbox]");
    if (event.key === "Escape" && inside?.matches("input")) { inside.blur(); return; }
    if (inside || event.ctrlKey || event.metaKey || event.altKey) { return; }
    // A tab or a choice keeps the keys that move between them.
    if (/^(Arrow.*|Home|End)$/.test(event.key) && event.target.closest("[role=tab], [type=radio]")) { return; }
    const help = document.getElementById("help");
    if (help?.open) { if (event.key === "?") { help.close(); } return; }
    if (event.key === "?") { help?.showModal(); return; }
    const side = { t: "table", f: "flame", m: "treemap" }[event.key.toLowerCase()];
    if (side) { go({ side: side, storage: -1 }); return; }
    if (/^[1-9]$/.test(event.key)) {
      document.querySelectorAll(".tabs [role=tab], .tabs .tab")[Number(event.key) - 1]?.click();
      return;
    }
    if (event.key === "/") {
      const find = document.getElementById("find");
      if (find) { find.focus(); event.preventDefault(); }
      return;
    }
    if (["ArrowLeft", "ArrowRight", "p", "P", "+", "=", "-", "Home", "Escape"].includes(event.key)) {
      event.preventDefault();
      press(event.key, event.shiftKey);
    }
  });

  const BUTTONS = { "peak-button": "p", "in-button": "+", "out-button": "-", "all-button": "Home" };
  function go(fields) {
    presses += 1;
    window.dash_clientside.set_props("go", { data: Object.assign({ count: presses }, fields) });
  }

  document.addEventListener("click", function (event) {
    const jump = event.target.closest("[data-go]");
    if (jump) {
      go(JSON.parse(jump.dataset.go));
      if (jump.dataset.then) { follow(jump.dataset.then); }
      return;
    }
    const copied = event.target.closest("[data-copy]");
    if (copied) { copy(copied); return; }
    const head = event.target.closest("th button");
    if (head) { (head.closest("[data-more=yes]") ? sortAll : sort)(head.parentElement); return; }
    if (event.target.closest(".tabs .tab")) { reveal(); return; }
    const button = event.target.closest("button");
    if (!button) { return; }
    if (BUTTONS[button.id]) { press(BUTTONS[button.id], false); }
    if (button.id === "swap-button" && current.other >= 0) {
      go({ trace: current.other, other: current.trace, first: -1, end: -1, at: -1, storage: -1 });
    }
    if (button.id === "png-button") { savePictures(); }
    if (button.id === "help-button") { document.getElementById("help").showModal(); }
    if (button.className === "close-help") { button.closest("dialog").close(); }
    if (button.id === "theme-button") {
      setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
      localStorage.setItem("memprof-theme", document.documentElement.dataset.theme);
    }
  });

  // Saves the timelines that are shown as pictures on the page's background.
  function savePictures() {
    ["timeline", "timeline-other"].forEach(function (name) {
      const graph = document.querySelector(`#${name} .js-plotly-plot`);
      if (!graph?.offsetWidth) { return; }
      const paper = getComputedStyle(document.body).backgroundColor;
      const figure = { data: graph.data, layout: Object.assign({}, graph.layout, { paper_bgcolor: paper }) };
      const size = { width: graph.offsetWidth, height: graph.offsetHeight, scale: 2 };
      window.Plotly.downloadImage(figure, Object.assign(size, { format: "png", filename: `memprof-${name}` }));
    });
  }

  // After a tab was chosen: scrolls to its page where that is mostly below the window.
  function reveal() {
    const tabs = document.getElementById("tabs");
    if (tabs.getBoundingClientRect().bottom > 0.6 * window.innerHeight) { tabs.scrollIntoView({ block: "start" }); }
  }

  // After a jump: scrolls to the page below, and presses its button where one is named, once it is there and filled.
  function follow(name) {
    let tries = 0;
    const wait = setInterval(function () {
      const found = document.getElementById(name);
      const field = document.getElementById("whatif-budget");
      tries += 1;
      if (tries > 200) { clearInterval(wait); return; }
      if (!found || (name === "whatif-search" && !field?.value)) { return; }
      clearInterval(wait);
      document.getElementById("tabs").scrollIntoView({ block: "start" });
      if (name === "whatif-search") { found.click(); }
    }, 50);
  }

  function copy(button) {
    const before = button.textContent;
    navigator.clipboard.writeText(button.dataset.copy).then(
      function () { button.textContent = "copied"; },
      function () { button.textContent = "cannot copy"; },
    ).finally(function () { setTimeout(function () { button.textContent = before; }, 1500); });
  }

  // The table of live tensors is fetched in chunks, as it is scrolled or sorted by another column.
  function fetchRows(table, first) {
    const head = table.querySelector("th[aria-sort]");
    const column = head ? Array.from(head.parentElement.children).indexOf(head) : 0;
    presses += 1;
    fetchedAt = Date.now();
    window.dash_clientside.set_props("more", { data: {
      first: first, column: column, up: head?.getAttribute("aria-sort") === "ascending", count: presses,
    } });
  }

  document.addEventListener("scroll", function (event) {
    const table = event.target.closest?.(".side-table")?.querySelector("[data-more=yes]");
    if (!table || Date.now() - fetchedAt < 10000) { return; }
    const left = event.target.scrollHeight - event.target.scrollTop - event.target.clientHeight;
    if (left < 400) { fetchRows(table, table.querySelector("tbody").children.length); }
  }, true);

  function sortAll(head) {
    const isUp = head.getAttribute("aria-sort") === "descending";
    Array.from(head.parentElement.children).forEach((one) => one.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
    fetchRows(head.closest("[data-more]"), 0);
  }

  // Sorts a table by a column: numbers first by size, then by text; a second click turns the order around.
  function sort(head) {
    const body = head.closest("table").querySelector("tbody");
    const column = Array.from(head.parentElement.children).indexOf(head);
    const isUp = head.getAttribute("aria-sort") === "descending";
    const key = (row) => {
      const cell = row.children[column];
      const text = cell?.dataset.sort ?? cell?.textContent.replaceAll(",", "") ?? "";
      const number = Number.parseFloat(text);
      return [Number.isNaN(number) ? -Infinity : number, text];
    };
    const rows = Array.from(body.children).map((row) => [key(row), row]);
    rows.sort(([one], [other]) => other[0] - one[0] || one[1].localeCompare(other[1]));
    if (isUp) { rows.reverse(); }
    rows.forEach(([, row]) => body.appendChild(row));
    Array.from(head.parentElement.children).forEach((one) => one.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
  }

  // Tables: [tag, attributes, parts] as parts.table writes them. Texts are text nodes, never markup.
  const TAGS = ("table thead tbody tr th td span strong em small code kbd br wbr div p ul ol li button").split(" ");
  const NAMES = { className: "class", colSpan: "colspan", rowSpan: "rowspan" };
  const ATTRIBUTES = ["class", "title", "scope", "type", "colspan", "rowspan", "role", "aria-label", "data-go",
    "data-sort", "data-copy"];

  // A name breaks behind its dots, slashes and underscores, not inside a word or a range of layers.
  function named(text) {
    return text.replace(/([./_])(?=[^\s\d./_])(?!py\b)/g, "$1\n").split("\n").flatMap((piece, place) => {
      const whole = piece.includes("-") && !piece.includes(" ") ? build(["span", { className: "whole" }, [piece]]) : piece;
      return place ? [document.createElement("wbr"), whole] : [whole];
    });
  }

  function build(part) {
    const [tag, attributes, parts] = part;
    const element = document.createElement(TAGS.includes(tag) ? tag : "span");
    Object.entries(attributes).forEach(([key, value]) => {
      const name = NAMES[key] || key;
      if (name === "style") { Object.assign(element.style, value); }
      else if (ATTRIBUTES.includes(name)) { element.setAttribute(name, value); }
    });
    const isName = tag === "button" || attributes.className === "name";
    parts.forEach((one) => element.append(...(Array.isArray(one) ? [build(one)] : isName ? named(one) : [one])));
    if (element.tagName === "TH" && element.textContent) {
      const button = document.createElement("button");
      button.type = "button";
      button.title = "sort";
      button.append(...element.childNodes);
      element.appendChild(button);
    }
    return element;
  }

  function fill(element) {
    const old = Array.from(element.children).find((child) => child.dataset.built);
    if (old) { old.remove(); }
    if (element.dataset.drawn) {
      const table = build(JSON.parse(element.dataset.drawn));
      table.dataset.built = "yes";
      element.appendChild(table);
    }
  }

  new MutationObserver(function (changes) {
    changes.forEach(function (change) {
      if (change.type === "attributes") { fill(change.target); return; }
      change.addedNodes.forEach(function (node) {
        if (node.nodeType !== Node.ELEMENT_NODE) { return; }
        if (node.dataset.drawn) { fill(node); }
        node.querySelectorAll("[data-drawn]").forEach(fill);
      });
    });
  }).observe(document.documentElement, { childList: true, subtree: true, attributeFilter: ["data-drawn"] });

  function setTheme(name) {
    document.documentElement.dataset.theme = name;
    const wait = setInterval(function () {
      if (window.dash_clientside.set_props && document.getElementById("panel")) {
        clearInterval(wait);
        window.dash_clientside.set_props("theme", { data: name });
      }
    }, 20);
  }

  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const kept = localStorage.getItem("memprof-theme");
  setTheme(kept || (system.matches ? "dark" : "light"));
  system.addEventListener("change", function (event) {
    if (!localStorage.getItem("memprof-theme")) { setTheme(event.matches ? "dark" : "light"); }
  });
})();
