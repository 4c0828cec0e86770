"use strict";
const chart = document.getElementById("chart");
const picture = JSON.parse(document.getElementById("figure").textContent);

function colors() {
  const style = getComputedStyle(document.documentElement);
  const text = style.getPropertyValue("--text").trim(), line = style.getPropertyValue("--line").trim();
  const found = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", "font.color": text };
  for (const axis of Object.keys(picture.layout).filter((name) => /^[xy]axis/.test(name))) {
    found[`${axis}.gridcolor`] = line;
    found[`${axis}.linecolor`] = line;
  }
  return found;
}

Plotly.newPlot(chart, picture.data, picture.layout, { responsive: true, displayModeBar: false })
  .then(() => Plotly.relayout(chart, colors()))
  .then(() => { document.documentElement.dataset.ready = "yes"; });
for (const query of ["(prefers-color-scheme: dark)", "print"]) {
  matchMedia(query).addEventListener("change", () => Plotly.relayout(chart, colors()));
}
