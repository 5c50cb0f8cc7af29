/*! plotly.js 4.1.1, in part: scatter, bar and treemap. Copyright 2012-2026 Plotly, Inc. MIT licence, see the end of this file. */
const Plotly = require("plotly.js/lib/core");
Plotly.register([require("plotly.js/lib/bar"), require("plotly.js/lib/treemap")]);
module.exports = Plotly;
