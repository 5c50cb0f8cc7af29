"use strict";
// A click on a box of the treemap chooses it, and does not zoom, which would hide where it is.
(function () {
  let clicks = 0;

  function choose(event) {
    clicks += 1;
    window.dash_clientside.set_props("treemap-clicked", { data: { id: event.points[0].id, count: clicks } });
    return false;
  }

  document.addEventListener("mouseover", function (event) {
    const plot = event.target.closest("#treemap-graph .js-plotly-plot");
    if (plot && plot.on && !plot.dataset.isStill) {
      plot.dataset.isStill = "yes";
      plot.on("plotly_treemapclick", choose);
    }
  });
})();
