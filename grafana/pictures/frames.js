// From Prometheus's answers to Grafana's data frames, as its data source would shape them.
import {
  applyFieldOverrides, cacheFieldDisplayNames, dateTime, FieldConfigOptionsRegistry, FieldType, standardTransformers,
  standardTransformersRegistry, toDataFrame, transformDataFrame,
} from '@grafana/data';

standardTransformersRegistry.setInit(() =>
  [standardTransformers.mergeTransformer, standardTransformers.organizeFieldsTransformer].map(
    (transformation) => ({ id: transformation.id, name: transformation.name, transformation }),
  ),
);

export const timeRange = ({ from, to }) => {
  const range = { from: dateTime(from * 1000), to: dateTime(to * 1000) };
  return { ...range, raw: range };
};

const named = ({ __name__, ...labels }, format) => {
  if (format === '__auto') {
    const all = Object.entries(labels).map(([name, value]) => `${name}="${value}"`);
    return all.length ? `{${all.join(', ')}}` : 'Value';
  }
  return format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => labels[label] ?? '');
};

// Every step of the time range, so that bars are as wide as a step and lines have gaps.
const everyStep = (values, { start, end, step }) => {
  const points = [];
  for (let at = start; at <= end; at += step) points.push([at, null]);
  values.forEach(([at, value]) => { points[Math.round((at - start) / step)] = [at, value]; });
  return points;
};

const series = ({ refId, legend, grid, result }) =>
  result.map(({ metric, values, value }) => {
    const points = values ? everyStep(values, grid) : [value];
    return toDataFrame({
      refId,
      fields: [
        { name: 'Time', type: FieldType.time, values: points.map(([at]) => at * 1000),
          config: { interval: grid.step * 1000 } },
        { name: 'Value', type: FieldType.number, labels: metric,
          values: points.map(([, number]) => (number === null ? null : Number(number))),
          config: { displayNameFromDS: named(metric, legend) } },
      ],
    });
  });

const rows = ({ refId, result }, several) => {
  const labels = [...new Set(result.flatMap(({ metric }) => Object.keys(metric)))].sort();
  return toDataFrame({
    refId,
    fields: [
      { name: 'Time', type: FieldType.time, values: result.map(({ value }) => value[0] * 1000) },
      ...labels.map((name) => ({
        name, type: FieldType.string, values: result.map(({ metric }) => metric[name] ?? ''),
      })),
      { name: several ? `Value #${refId}` : 'Value', type: FieldType.number,
        values: result.map(({ value }) => Number(value[1])) },
    ],
  });
};

const transformed = (frames, steps) => {
  let done = frames;
  transformDataFrame(steps, frames).subscribe((found) => { done = found; }).unsubscribe();
  return done;
};

// Every property that a panel sets is known, and taken as it is.
const registry = ({ defaults, overrides }) => {
  const { custom = {}, ...plain } = defaults;
  const ids = new Set([
    ...Object.keys(plain),
    ...Object.keys(custom).map((name) => `custom.${name}`),
    ...overrides.flatMap(({ properties }) => properties.map(({ id }) => id)),
  ]);
  return new FieldConfigOptionsRegistry(() =>
    [...ids].map((id) => ({
      id, name: id, path: id.replace(/^custom\./, ''), isCustom: id.startsWith('custom.'),
      process: (value) => value, shouldApply: () => true, override: null, editor: null,
    })),
  );
};

// Grafana's JSON has null for "from the very bottom".
const grounded = (config) =>
  JSON.parse(JSON.stringify(config), (key, value) =>
    key === 'steps' && Array.isArray(value)
      ? value.map((step) => ({ ...step, value: step.value ?? -Infinity }))
      : value,
  );

export const framesOf = (panel, theme) => {
  const asked = panel.answers;
  const full = asked.filter(({ result }) => result.length);
  const raw = panel.type === 'table'
    ? full.map((answer) => rows(answer, asked.length > 1))
    : full.flatMap(series);
  const fieldConfig = grounded(panel.fieldConfig);
  const data = applyFieldOverrides({
    data: transformed(raw, panel.transformations ?? []),
    fieldConfig,
    fieldConfigRegistry: registry(fieldConfig),
    replaceVariables: (text) => text,
    theme,
    timeZone: 'utc',
  });
  cacheFieldDisplayNames(data);
  return { data, fieldConfig };
};
