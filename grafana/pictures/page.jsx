// One dashboard, drawn with the components that Grafana publishes. It is not Grafana: what stands
// around the panels, and two kinds of panels, are ours (drawn.jsx).
import '@fontsource/inter/400.css';
import '@fontsource/inter/500.css';
import {
  createTheme, getDisplayValueAlignmentFactors, getFieldDisplayValues, ThemeContext, VizOrientation,
} from '@grafana/data';
import { BarGauge, BigValue, GlobalStyles, PanelChrome, TimeSeries, VizRepeater } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import { createRoot } from 'react-dom/client';

import { Heatmap, StateTimeline } from './drawn.jsx';
import { framesOf, timeRange } from './frames.js';

const CELL = 30, GAP = 8, PADDING = 16;
const { dashboard, choices, range, marks } = window.DRAW;
const theme = createTheme({
  colors: { mode: new URLSearchParams(location.search).get('theme') },
});
const shown = timeRange(range);

const values = ({ data, fieldConfig, panel }) =>
  getFieldDisplayValues({
    fieldConfig, data, theme, reduceOptions: panel.options.reduceOptions,
    replaceVariables: (text) => text, timeZone: 'utc',
  });

const Stat = (props) => (
  <VizRepeater {...props} source={props.data} renderCounter={0} autoGrid itemSpacing={3}
    orientation={VizOrientation.Auto} getValues={() => values(props)}
    renderValue={({ value, width, height, count }) => {
      const { options } = props.panel;
      return <BigValue value={value.display} width={width} height={height} count={count}
        theme={theme} colorMode={options.colorMode} graphMode={options.graphMode}
        justifyMode={options.justifyMode} textMode={options.textMode} />;
    }} />
);

const Bars = (props) => {
  const { options } = props.panel;
  const found = values(props);
  const alignmentFactors = getDisplayValueAlignmentFactors(found);
  return (
    <VizRepeater {...props} source={props.data} renderCounter={0} itemSpacing={8}
      orientation={VizOrientation.Horizontal} minVizHeight={options.minVizHeight}
      maxVizHeight={options.maxVizHeight} minVizWidth={options.minVizWidth}
      getValues={() => found}
      renderValue={({ value, width, height }) => (
        <BarGauge value={value.display} field={value.field} width={width} height={height}
          theme={theme} orientation={VizOrientation.Horizontal} isOverflow={false}
          display={value.view?.getFieldDisplayProcessor(value.colIndex)}
          displayMode={options.displayMode} valueDisplayMode={options.valueMode}
          namePlacement={options.namePlacement} text={options.text} showUnfilled={options.showUnfilled}
          alignmentFactors={alignmentFactors} itemSpacing={8} />
      )} />
  );
};

const Table = ({ data, panel, width, height, fieldConfig }) => (
  <TableNG data={data[0]} width={width} height={height} cellHeight={panel.options.cellHeight}
    enablePagination={panel.options.enablePagination} fieldConfig={fieldConfig}
    initialSortBy={panel.options.sortBy} structureRev={1} />
);

const drawMarks = (u) => {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.setLineDash([5 * devicePixelRatio, 5 * devicePixelRatio]);
  marks.forEach(({ at, color }) => {
    const x = u.valToPos(at * 1000, 'x', true);
    if (x < bbox.left || x > bbox.left + bbox.width) return;
    ctx.strokeStyle = ctx.fillStyle = theme.visualization.getColorByName(color);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.fillRect(x - 3, bbox.top + bbox.height, 6, 5);
  });
  ctx.restore();
};

const Graph = ({ data, panel, width, height }) => (
  <TimeSeries frames={data} structureRev={1} timeRange={shown} timeZone="utc" width={width}
    height={height} legend={panel.options.legend} options={panel.options}>
    {(config) => { config.addHook('draw', drawMarks); return null; }}
  </TimeSeries>
);

const KINDS = {
  bargauge: Bars, heatmap: Heatmap, stat: Stat, 'state-timeline': StateTimeline, table: Table,
  timeseries: Graph,
};
const SAYS_ITSELF = new Set(['stat', 'bargauge']);

const Inside = ({ panel, width, height }) => {
  const { data, fieldConfig } = framesOf(panel, theme);
  const Kind = KINDS[panel.type];
  if (!SAYS_ITSELF.has(panel.type) && !data.some((frame) => frame.length)) {
    const centred = { display: 'flex', height: '100%', alignItems: 'center',
      justifyContent: 'center', textAlign: 'center', color: theme.colors.text.secondary };
    return <div style={centred}>{fieldConfig.defaults.noValue ?? 'No data'}</div>;
  }
  return <Kind {...{ data, fieldConfig, panel, theme, timeRange: shown, width, height }} />;
};

const Row = ({ panel }) => (
  <div style={{ font: `500 16px Inter`, lineHeight: `${CELL}px` }}>⌄ {panel.title}</div>
);

const Choices = () => (
  <div style={{ display: 'flex', gap: 8, alignItems: 'center', padding: `12px ${PADDING}px` }}>
    <span style={{ font: '500 16px Inter', marginRight: 'auto' }}>{dashboard.title}</span>
    {Object.entries(choices).map(([label, value]) => (
      <span key={label} style={{ border: `1px solid ${theme.colors.border.medium}`,
        borderRadius: 2, padding: '4px 8px', background: theme.components.input.background }}>
        <b style={{ fontWeight: 500 }}>{label}</b>&ensp;{value}
      </span>
    ))}
  </div>
);

const Page = () => {
  const column = (innerWidth - 2 * PADDING + GAP) / 24;
  const place = ({ x, y, w, h }) => ({
    position: 'absolute', left: PADDING + x * column, top: y * (CELL + GAP),
    width: w * column - GAP, height: h * (CELL + GAP) - GAP,
  });
  const bottom = Math.max(...dashboard.panels.map(({ gridPos: { y, h } }) => y + h));
  return (
    <div style={{ background: theme.colors.background.canvas, minHeight: '100vh' }}>
      <GlobalStyles />
      <Choices />
      <div style={{ position: 'relative', height: bottom * (CELL + GAP) + GAP }}>
        {dashboard.panels.map((panel) => {
          const { width, height, ...where } = place(panel.gridPos);
          return (
            <div key={panel.id} style={{ ...where, width, height }}>
              {panel.type === 'row' ? <Row panel={panel} /> : (
                <PanelChrome title={panel.title} description={panel.description} width={width}
                  height={height}>
                  {(w, h) => <Inside panel={panel} width={w} height={h} />}
                </PanelChrome>
              )}
            </div>
          );
        })}
      </div>
    </div>
  );
};

await document.fonts.load('12px Inter').then(() => document.fonts.load('500 16px Inter'));
createRoot(document.getElementById('page')).render(
  <ThemeContext.Provider value={theme}><Page /></ThemeContext.Provider>,
);
