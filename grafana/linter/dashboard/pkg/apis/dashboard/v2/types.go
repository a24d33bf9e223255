// Package v2 has what dashboard-linter needs of dashboards in the second schema to
// compile. It is never used: ours are in the first.
package v2

type DashboardVariableRefresh string

const (
	DashboardVariableRefreshOnTimeRangeChanged DashboardVariableRefresh = "onTimeRangeChanged"
	DashboardVariableRefreshOnDashboardLoad    DashboardVariableRefresh = "onDashboardLoad"
)

type DashboardDataQueryKind struct {
	Group      string
	Spec       map[string]any
	Datasource *struct{ Name *string }
}

type DashboardPanelQueryKind struct {
	Spec struct {
		RefId  string
		Hidden bool
		Query  DashboardDataQueryKind
	}
}

type DashboardPanelSpec struct {
	Id                 float64
	Title, Description string
	VizConfig          struct {
		Group string
		Spec  struct{ FieldConfig, Options any }
	}
	Data struct {
		Spec struct{ Queries []DashboardPanelQueryKind }
	}
}

type DashboardElement struct {
	PanelKind *struct{ Spec DashboardPanelSpec }
}

type named struct {
	Name            string
	Label, AllValue *string
	Multi           bool
	Refresh         DashboardVariableRefresh
}

type queried struct {
	Spec struct {
		named
		Query DashboardDataQueryKind
	}
}

type plain struct {
	Spec struct {
		named
		PluginId, Query string
	}
}

type DashboardVariableKind struct {
	QueryVariableKind      *queried
	DatasourceVariableKind *plain
	CustomVariableKind     *plain
	IntervalVariableKind   *plain
	ConstantVariableKind   *plain
	TextVariableKind       *plain
	AdhocVariableKind      *plain
	GroupByVariableKind    *plain
	SwitchVariableKind     *plain
}

type DashboardAnnotationQueryKind struct {
	Spec struct {
		Name  string
		Query DashboardDataQueryKind
	}
}

type DashboardSpec struct {
	Title       string
	Editable    *bool
	Elements    map[string]DashboardElement
	Variables   []DashboardVariableKind
	Annotations []DashboardAnnotationQueryKind
}
