// Appends the licences of the packages in the bundle to it, and writes them to licences.txt: the bundle is a copy of
// a part of each, and a report is passed on without this repository.
const fs = require("fs");
const path = require("path");

const { inputs } = Object.values(JSON.parse(fs.readFileSync("meta.json", "utf8")).outputs)[0];
const folders = Object.keys(inputs)
  .filter((file) => inputs[file].bytesInOutput > 0)
  .map((file) => file.match(/^.*node_modules\/(?:@[^/]+\/)?[^/]+/)?.[0])
  .filter(Boolean);

function unwritten({ author }) {
  return `By ${(author.name ?? author).replace(/ *<.*>/, "")}. The package names this licence without its text.`;
}

function licence(folder) {
  const about = JSON.parse(fs.readFileSync(path.join(folder, "package.json"), "utf8"));
  const file = fs.readdirSync(folder).find((name) => /^(licen[cs]e|copying)(\.|$)/i.test(name));
  const text = file ? fs.readFileSync(path.join(folder, file), "utf8") : unwritten(about);
  return `${about.name} ${about.version} (${about.license})\n\n${text.replace(/\r/g, "").replace(/[ \t]+$/gm, "").trim()}\n`;
}

const rule = `\n${"-".repeat(80)}\n`;
const all = [...new Set(folders)].sort().map(licence).join(rule).replace(/\u00a9/g, "(c)");
if (/\*\/|[^\x00-\x7f]/.test(all)) throw new Error("a licence has characters that the comment cannot hold");
fs.writeFileSync("licences.txt", all);
fs.appendFileSync("plotly.js", `/*! Licences of the packages in this file:\n\n${all}*/\n`);
