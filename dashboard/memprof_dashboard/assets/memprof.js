"use strict";
// What the browser does by itself: hands on the parts of the view, keys, buttons, and light or dark.

(function () {
  const PARTS = [
    ["trace", "rank", "other", "first", "end", "find", "budget"],
    ["trace", "rank", "at", "storage", "find", "first", "end"],
    ["trace", "rank", "other", "tab"],
  ];
  const CONTROLS = [["trace", "trace"], ["other", "other"], ["find", "find"], ["budget", "budget"], ["tabs", "tab"]];
  let presses = 0;

  function part(view, names, tick) {
    // A page is made anew when another is chosen, not when a recording grows: its fields would be lost.
    const made = names.includes("tab") ? {} : { tick: tick };
    names.forEach((name) => { made[name] = view[name]; });
    return made;
  }

  function same(one, other) {
    return JSON.stringify(one) === JSON.stringify(other);
  }

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    memprof: {
      split: function (view, tick, ...before) {
        const none = window.dash_clientside.no_update;
        if (!view) { return [none, none, none]; }
        CONTROLS.forEach(([control, field]) => {
          window.dash_clientside.set_props(control, { value: view[field] });
        });
        if (view.rank >= 0) { window.dash_clientside.set_props("rank", { value: view.rank }); }
        return PARTS.map((names, place) => {
          const made = part(view, names, tick);
          return same(made, before[place]) ? none : made;
        });
      },
    },
  });

  function press(key, shift) {
    presses += 1;
    window.dash_clientside.set_props("key", { data: { key: key, shift: shift, count: presses } });
  }

  document.addEventListener("keydown", function (event) {
    const inside = event.target.closest("input, textarea, select, [contenteditable], [role=listbox], [role=tab]");
    if (inside || event.ctrlKey || event.metaKey || event.altKey) { return; }
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
    if (jump) { go(JSON.parse(jump.dataset.go)); return; }
    const button = event.target.closest("button");
    if (!button) { return; }
    if (BUTTONS[button.id]) { press(BUTTONS[button.id], false); }
    if (button.id === "theme-button") {
      setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
      localStorage.setItem("memprof-theme", document.documentElement.dataset.theme);
    }
  });

  // Tables: [tag, attributes, parts] as parts.table writes them. Texts are text nodes, never markup.
  const TAGS = ("table thead tbody tr th td span strong em small code kbd br div p ul ol li button").split(" ");
  const NAMES = { className: "class", colSpan: "colspan", rowSpan: "rowspan" };
  const ATTRIBUTES = ["class", "title", "scope", "type", "colspan", "rowspan", "role", "aria-label", "data-go"];

  function build(part) {
    if (!Array.isArray(part)) { return document.createTextNode(part); }
    const [tag, attributes, parts] = part;
    const element = document.createElement(TAGS.includes(tag) ? tag : "span");
    Object.entries(attributes).forEach(([key, value]) => {
      const name = NAMES[key] || key;
      if (name === "style") { Object.assign(element.style, value); }
      else if (ATTRIBUTES.includes(name)) { element.setAttribute(name, value); }
    });
    parts.forEach((one) => element.appendChild(build(one)));
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
