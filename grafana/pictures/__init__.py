"""Pictures of the dashboards in a real Grafana, and a report of what each panel shows there."""
