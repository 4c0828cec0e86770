// Prints the diagnostics of AsyncAPI's own parser as JSON: node asyncapi_diagnostics.cjs PARSER_FOLDER DOCUMENT
const { readFileSync } = require("node:fs");
const { createRequire } = require("node:module");
const [folder, file] = process.argv.slice(2);
const { Parser } = createRequire(`${folder}/`)("@asyncapi/parser");
new Parser().parse(readFileSync(file, "utf8")).then(({ document, diagnostics }) => {
  const channels = document ? document.channels().all().map((channel) => channel.address()) : [];
  console.log(JSON.stringify({ channels, diagnostics }));
});
