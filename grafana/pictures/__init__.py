"""Pictures of the dashboards, drawn with the components that Grafana publishes on npm."""
