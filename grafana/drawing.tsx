// Draws one dashboard with Grafana's own components, from its JSON and the results of its queries, without a Grafana server.
//
// Panels that @grafana/ui does not export are approximated: a state timeline as steps with the states' names on the axis, a
// heatmap as lines of the buckets' counts. Links, tooltips, variables and annotations are not drawn.
import React from 'react';
import { createRoot } from 'react-dom/client';
import { FieldType, createTheme, dateTime, getDisplayProcessor, toDataFrame } from '@grafana/data';
import { BigValue, GlobalStyles, PanelChrome, Table, ThemeContext, TimeSeries } from '@grafana/ui';

declare const BOARD: any; // its JSON; each panel has `answers`, frames of named columns
declare const SPAN: [number, number]; // milliseconds

const [CELL, GAP, EDGE] = [30, 8, 12];
const theme = createTheme({ colors: { mode: 'dark' } });
const range = { from: dateTime(SPAN[0]), to: dateTime(SPAN[1]), raw: { from: dateTime(SPAN[0]), to: dateTime(SPAN[1]) } };

function frame(panel: any, answer: any, number: number, custom: any, more: any = {}) {
  const found = toDataFrame({
    name: answer.name,
    fields: answer.columns.map((column: any) => ({ name: column.name, type: column.type as FieldType, values: column.values })),
  });
  for (const field of found.fields) {
    const value = field.type === FieldType.number;
    field.config = value ? { ...panel.fieldConfig.defaults, ...more, custom: { ...custom } } : { custom: { align: 'auto' } };
    if (value && answer.name) {
      field.config.displayName = answer.name;
    }
    field.state = { seriesIndex: number };
    field.display = getDisplayProcessor({ field, theme, timeZone: 'utc' });
  }
  return found;
}

function Nothing({ height }: { height: number }) {
  return <div style={{ height, display: 'grid', placeItems: 'center', color: theme.colors.text.secondary }}>No data</div>;
}

function Stats({ panel, width, height }: any) {
  const values = panel.answers.flatMap((answer: any, n: number) => {
    const fields = frame(panel, answer, n, {}).fields.filter((field) => field.type === FieldType.number);
    return fields.map((field) => ({ field, last: field.values.filter((one: any) => one !== null).at(-1) }));
  });
  const shown = values.filter(({ last }: any) => last !== undefined);
  if (!shown.length) {
    return <Nothing height={height} />;
  }
  const { colorMode, graphMode, justifyMode, textMode } = panel.options;
  return (
    <div style={{ display: 'flex' }}>
      {shown.map(({ field, last }: any, n: number) => (
        <BigValue key={n} theme={theme} width={width / shown.length} height={height} colorMode={colorMode} graphMode={graphMode}
          justifyMode={justifyMode} textMode={shown.length > 1 ? 'value_and_name' : textMode}
          value={{ ...field.display(last), title: shown.length > 1 ? field.config.displayName ?? field.name : undefined }} />
      ))}
    </div>
  );
}

function Series({ panel, width, height, custom, more }: any) {
  const frames = panel.answers.map((answer: any, n: number) => frame(panel, answer, n, custom, more));
  if (!frames.length) {
    return <Nothing height={height} />;
  }
  const legend = panel.options.legend.show === undefined ? panel.options.legend : { showLegend: true, displayMode: 'list', placement: 'bottom', calcs: [] };
  return <TimeSeries frames={frames} timeRange={range} timeZone="utc" width={width} height={height} legend={legend} />;
}

function Content({ panel, width, height }: any) {
  const line = { drawStyle: 'line', lineInterpolation: 'linear', showPoints: 'never', axisPlacement: 'auto', lineWidth: 1 };
  switch (panel.type) {
    case 'stat':
      return <Stats panel={panel} width={width} height={height} />;
    case 'table': {
      const [answer] = panel.answers;
      return answer && answer.columns[0].values.length ? (
        <Table data={frame(panel, answer, 0, {})} width={width} height={height} />
      ) : (
        <Nothing height={height} />
      );
    }
    case 'state-timeline':
      return <Series panel={panel} width={width} height={height} custom={{ ...line, lineInterpolation: 'stepAfter', lineWidth: 2 }}
        more={{ color: { mode: 'palette-classic' }, decimals: 0 }} />;
    case 'heatmap':
      return <Series panel={panel} width={width} height={height} custom={{ ...line, fillOpacity: 20 }}
        more={{ color: { mode: 'palette-classic' }, unit: 'short' }} />;
    default:
      return <Series panel={panel} width={width} height={height} custom={{ ...line, ...panel.fieldConfig.defaults.custom }} />;
  }
}

function Board({ width }: { width: number }) {
  const step = (width - 2 * EDGE + GAP) / 24;
  const bottom = Math.max(...BOARD.panels.map(({ gridPos }: any) => gridPos.y + gridPos.h));
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div style={{ width, padding: EDGE, background: theme.colors.background.canvas, position: 'relative', boxSizing: 'border-box' }}>
        <div style={{ color: theme.colors.text.primary, fontSize: 18, height: 32 }}>{BOARD.title}</div>
        <div style={{ position: 'relative', height: bottom * (CELL + GAP) }}>
          {BOARD.panels.map((panel: any) => {
            const { x, y, w, h } = panel.gridPos;
            const place = { left: x * step, top: y * (CELL + GAP), width: w * step - GAP, height: h * (CELL + GAP) - GAP };
            return (
              <div key={panel.id} style={{ position: 'absolute', ...place }}>
                {panel.type === 'row' ? (
                  <div style={{ color: theme.colors.text.primary, fontWeight: 500, paddingTop: 6 }}>{panel.title}</div>
                ) : (
                  <PanelChrome title={panel.title} width={place.width} height={place.height}>
                    {(inner: number, high: number) => <Content panel={panel} width={inner} height={high} />}
                  </PanelChrome>
                )}
              </div>
            );
          })}
        </div>
      </div>
    </ThemeContext.Provider>
  );
}

createRoot(document.getElementById('board')!).render(<Board width={1280} />);
window.setTimeout(() => (document.documentElement.dataset.ready = 'yes'), 1500); // uPlot draws asynchronously
