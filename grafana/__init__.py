"""The Grafana dashboards: written here in Python, committed as JSON in dashboards/."""
