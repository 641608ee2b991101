"""Reads a metrics page with Prometheus' own parser, which rejects what OpenMetrics doesn't allow."""

import sys
import urllib.request

from prometheus_client.openmetrics.parser import text_string_to_metric_families

page = urllib.request.urlopen(sys.argv[1]).read().decode()
families = {family.name: family for family in text_string_to_metric_families(page)}
for name, family in families.items():
    assert family.documentation, f"{name} has no help"
    assert family.type != "unknown", f"{name} has no type"
samples = sum(len(family.samples) for family in families.values())
calls = families["tidegate_provider_calls"].samples
print(f"ok {len(families)} families, {samples > len(families)}, {sum(sample.value for sample in calls):.0f} calls")
