// Draws the figures of a report in the colours of the reader's system, and in light ones on paper.
"use strict";
(function () {
  let figures;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(pointer: coarse)");
  let isPrinting = false;

  function draw() {
    const theme = dark.matches && !isPrinting ? "dark" : "light";
    for (const [name, figure] of Object.entries(figures.themes[theme])) {
      const element = document.getElementById(name);
      const layout = Object.assign({}, figure.layout);
      if (element.clientWidth < 640) {
        layout.legend = Object.assign({}, layout.legend, { orientation: "h", y: -0.28, yanchor: "top", x: 0 });
        layout.margin = Object.assign({}, layout.margin, { l: Math.min(layout.margin.l, 48), r: 4 });
      }
      if (touch.matches) {
        layout.dragmode = false;
      }
      layout.width = isPrinting ? element.clientWidth : undefined;
      Plotly.react(element, figure.data, layout, figures.config);
    }
  }

  // Returns what an element holds compressed.
  async function unpack(name) {
    const held = document.getElementById(name).textContent;
    const packed = Uint8Array.from(atob(held), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  // plotly.js is most of the file. The content security policy allows it by its hash.
  async function load() {
    figures = JSON.parse(await unpack("figures"));
    const script = document.createElement("script");
    script.textContent = await unpack("plotly");
    document.head.append(script);
  }

  function fail() {
    for (const plot of document.querySelectorAll(".plot")) {
      plot.textContent = "The figure needs a browser of 2023 or newer; the tables do not.";
    }
  }

  load().then(start, fail);

  function start() {
    draw();
    dark.addEventListener("change", draw);
    window.addEventListener("beforeprint", function () {
      isPrinting = true;
      document.documentElement.classList.add("printing");
      for (const details of document.querySelectorAll("details:not([open])")) {
        details.open = true;
        details.dataset.wasClosed = "";
      }
      draw();
    });
    window.addEventListener("afterprint", function () {
      isPrinting = false;
      document.documentElement.classList.remove("printing");
      for (const details of document.querySelectorAll("details[data-was-closed]")) {
        details.open = false;
        delete details.dataset.wasClosed;
      }
      draw();
    });
    document.documentElement.dataset.drawn = "yes";
  }
})();
