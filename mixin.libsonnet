// The alerts, recording rules and dashboards as a monitoring mixin: the same files as in
// prometheus/rules and grafana/dashboards, with what differs between sites set in _config.
//
//   local mps = import 'mps-exporter/mixin.libsonnet';
//   mps { _config+:: { selector: 'job="gpu-hosts"', thresholds+: { MpsUidWaitLong: '15 * 60' } } }
// What the files have in their place.
local written = {
  runbook_url: 'https://github.com/mps-exporter/mps-exporter/blob/main/prometheus/runbooks',
  dashboard_url: 'http://localhost:3000/d',
};

local shipped = {
  // Which targets are exporters.
  selector: 'job="mps-exporter"',
  // In front of /ALERT.md, and of /UID of a dashboard: 'https://grafana.example.org/d'. Where it is
  // null, alerts have no such link.
  runbookUrl: written.runbook_url,
  dashboardUrl: null,
  // Alert -> the number in its expression, as it is written there.
  thresholds: {
    MpsClientMemoryNearLimit: '0.95',
    MpsContextsNearLimit: '0.9',
    MpsControlLogLarge: '2 ^ 30',
    MpsHandoverIdle: '0.10',
    MpsLogWordingUnknown: '10',
    MpsSmOvercommitted: '2',
    MpsUidStarved: '30 * 60',
    MpsUidWaitLong: '5 * 60',
  },
};

{
  _config+:: shipped,

  local config = $._config,

  local threshold(rule) =
    local name = std.get(rule, 'alert', '');
    if !std.objectHas(shipped.thresholds, name) then rule.expr else std.strReplace(
      rule.expr, ' ' + shipped.thresholds[name], ' ' + config.thresholds[name]
    ),

  local addresses = { runbook_url: config.runbookUrl, dashboard_url: config.dashboardUrl },

  local linked(annotations) = {
    [name]: if std.objectHas(written, name)
    then std.strReplace(annotations[name], written[name], addresses[name])
    else annotations[name]
    for name in std.objectFields(annotations)
    if std.get(addresses, name, '') != null
  },

  local configured(rule) = rule {
    expr: std.strReplace(threshold(rule), shipped.selector, config.selector),
    [if std.objectHas(rule, 'annotations') then 'annotations']: linked(rule.annotations),
  },

  local groupsOf(text) = [
    group { rules: [configured(rule) for rule in group.rules] }
    for group in std.parseYaml(text).groups
  ],

  // Dashboards find the jobs of exporters by themselves; with a selector, of those that it matches.
  local chosen(variable) = if variable.name != 'job' || config.selector == shipped.selector
  then variable else variable {
    query: 'label_values(mps_exporter_build_info{%s}, job)' % config.selector,
    definition: self.query,
    allValue: null,
  },

  local board(dashboard) = dashboard {
    templating+: { list: [chosen(variable) for variable in super.list] },
  },

  prometheusAlerts+:: {
    groups+: std.flatMap(groupsOf, [
      importstr 'prometheus/rules/mps-advice.yml',
      importstr 'prometheus/rules/mps-clients.yml',
      importstr 'prometheus/rules/mps-daemons.yml',
      importstr 'prometheus/rules/mps-exporter.yml',
      importstr 'prometheus/rules/mps-gpus.yml',
      importstr 'prometheus/rules/mps-kubernetes.yml',
      importstr 'prometheus/rules/mps-servers.yml',
      importstr 'prometheus/rules/mps-waits.yml',
    ]),
  },

  prometheusRules+:: {
    groups+: groupsOf(importstr 'prometheus/rules/mps-recording.yml'),
  },

  grafanaDashboards+:: {
    'mps-exporter.json': board(import 'grafana/dashboards/mps-exporter.json'),
    'mps-fleet.json': board(import 'grafana/dashboards/mps-fleet.json'),
    'mps-gpu.json': board(import 'grafana/dashboards/mps-gpu.json'),
    'mps-host.json': board(import 'grafana/dashboards/mps-host.json'),
    'mps-incidents.json': board(import 'grafana/dashboards/mps-incidents.json'),
    'mps-sharing.json': board(import 'grafana/dashboards/mps-sharing.json'),
    'mps-user.json': board(import 'grafana/dashboards/mps-user.json'),
    'mps-v3.json': board(import 'grafana/dashboards/mps-v3.json'),
  },
}
