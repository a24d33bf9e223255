// Two kinds of panels that Grafana keeps to itself, drawn with its published plot: the nearest
// thing, not the thing itself.
import { AxisPlacement, ScaleDirection, ScaleOrientation } from '@grafana/schema';
import { UPlotChart, UPlotConfigBuilder, VizLayout, VizLegend } from '@grafana/ui';
import { interpolateOranges } from 'd3-scale-chromatic';

const LABELS = 12;

const widest = (labels) => {
  const context = document.createElement('canvas').getContext('2d');
  context.font = `${LABELS}px Inter`;
  return Math.max(0, ...labels.map((label) => context.measureText(label).width));
};

// Rows from top to bottom, time from left to right, and a hook that paints the cells.
const plot = ({ theme, timeRange, labels, between, paint }) => {
  const builder = new UPlotConfigBuilder('utc');
  builder.addScale({
    scaleKey: 'x', isTime: true, orientation: ScaleOrientation.Horizontal,
    direction: ScaleDirection.Right,
    range: () => [timeRange.from.valueOf(), timeRange.to.valueOf()],
  });
  builder.addScale({
    scaleKey: 'y', orientation: ScaleOrientation.Vertical,
    direction: between ? ScaleDirection.Up : ScaleDirection.Down,
    range: () => [0, labels.length],
  });
  builder.addAxis({ scaleKey: 'x', isTime: true, placement: AxisPlacement.Bottom, theme,
    timeZone: 'utc', grid: { show: true } });
  builder.addAxis({
    scaleKey: 'y', placement: AxisPlacement.Left, theme, grid: { show: false },
    size: widest(labels) + 20,
    splits: () => labels.map((_, index) => (between ? index + 1 : index + 0.5)),
    values: () => labels,
  });
  builder.addSeries({ scaleKey: 'y', theme, pathBuilder: () => null, pointsBuilder: () => null,
    lineColor: 'transparent' });
  builder.addHook('draw', (u) => {
    u.ctx.save();
    u.ctx.beginPath();
    u.ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
    u.ctx.clip();
    paint(u);
    u.ctx.restore();
  });
  return builder;
};

const runs = (field, times, step) => {
  const found = [];
  field.values.forEach((value, index) => {
    if (value === null) return;
    const last = found.at(-1);
    const { text, color } = field.display(value);
    const end = times[index] + step;
    if (last?.text === text && last.end >= times[index]) last.end = end;
    else found.push({ text, color, start: times[index], end });
  });
  return found;
};

export const StateTimeline = ({ data, panel, theme, timeRange, width, height }) => {
  const rows = data.map((frame) => {
    const [time, field] = frame.fields;
    return { name: field.config.displayNameFromDS,
      runs: runs(field, time.values, time.config.interval) };
  });
  const legend = new Map(rows.flatMap((row) => row.runs.map(({ text, color }) => [text, color])));
  const states = Object.values(panel.fieldConfig.defaults.mappings[0].options)
    .filter(({ text }) => legend.has(text));
  const paint = (u) => {
    const tall = u.bbox.height / rows.length;
    u.ctx.font = `${LABELS * devicePixelRatio}px Inter`;
    u.ctx.textBaseline = 'middle';
    u.ctx.textAlign = 'left';
    rows.forEach((row, index) => row.runs.forEach(({ text, color, start, end }) => {
      const left = u.valToPos(start, 'x', true);
      const wide = Math.max(u.valToPos(end, 'x', true) - left, 1);
      const top = u.bbox.top + tall * (index + (1 - panel.options.rowHeight) / 2);
      u.ctx.globalAlpha = panel.fieldConfig.defaults.custom.fillOpacity / 100;
      u.ctx.fillStyle = color;
      u.ctx.fillRect(left, top, wide, tall * panel.options.rowHeight);
      u.ctx.globalAlpha = 1;
      if (u.ctx.measureText(text).width + 8 < wide) {
        u.ctx.fillStyle = theme.colors.getContrastText(color, theme.isDark ? 3 : 4.5);
        u.ctx.fillText(text, left + 4, top + (tall * panel.options.rowHeight) / 2);
      }
    }));
  };
  const config = plot({ theme, timeRange, labels: rows.map(({ name }) => name), paint });
  const items = states.map(({ text }) => ({ label: text, color: legend.get(text), yAxis: 1 }));
  return (
    <VizLayout width={width} height={height} legend={
      <VizLayout.Legend placement="bottom"><VizLegend placement="bottom" items={items}
        displayMode="list" /></VizLayout.Legend>}>
      {(w, h) => <UPlotChart config={config} width={w} height={h}
        data={[data[0].fields[0].values, data[0].fields[1].values]} />}
    </VizLayout>
  );
};

export const Heatmap = ({ data, theme, timeRange, width, height }) => {
  const buckets = data
    .map((frame) => ({ le: Number(frame.fields[1].labels.le.replace('+Inf', 'Infinity')), frame }))
    .sort((one, other) => one.le - other.le);
  // Buckets hold what is in the smaller ones too.
  const below = new Map();
  const cells = buckets.flatMap(({ frame }, row) => {
    const [time, field] = frame.fields;
    return field.values.map((total, index) => {
      const at = time.values[index];
      const count = total - (below.get(at) ?? 0);
      below.set(at, total);
      return { at, row, count, step: time.config.interval };
    });
  }).filter(({ count }) => count > 0);
  const most = Math.max(1, ...cells.map(({ count }) => count));
  const paint = (u) => {
    const tall = u.bbox.height / buckets.length;
    cells.forEach(({ at, row, count, step }) => {
      const left = u.valToPos(at - step, 'x', true);
      const wide = u.valToPos(at, 'x', true) - left;
      // Grafana turns this scheme round in the dark: there the most is the palest.
      u.ctx.fillStyle = interpolateOranges(theme.isDark ? 1 - count / most : count / most);
      u.ctx.fillRect(left, u.bbox.top + u.bbox.height - tall * (row + 1), wide - 1, tall - 1);
    });
  };
  const unit = data[0].fields[1];
  const labels = buckets.map(({ le }) => (le === Infinity ? '+Inf' : `${seconds(le)}`));
  const config = plot({ theme, timeRange, labels, between: true, paint });
  return <UPlotChart config={config} width={width} height={height}
    data={[unit && data[0].fields[0].values, unit.values]} />;
};

const seconds = (value) => {
  const units = [[86400, 'day'], [3600, 'hour'], [60, 'min'], [1, 's'], [0.001, 'ms']];
  const [size, name] = units.find(([least]) => value >= least) ?? units.at(-1);
  return `${Number((value / size).toFixed(2))} ${name}`;
};
