"""What /metrics tells."""

from __future__ import annotations

from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

from tests.bench.dataplane.planes import ServedPlane


def figures(plane: ServedPlane) -> dict[tuple[str, ...], float]:
    """Metrics by name and label values, summed over processes."""
    values: Counter[tuple[str, ...]] = Counter()
    for family in text_string_to_metric_families(plane.http.get("/metrics").text):
        for sample in family.samples:
            labels = [sample.labels[name] for name in sorted(sample.labels) if name != "process"]
            values[sample.name, *labels] += sample.value  # type: ignore[assignment]
    return dict(values)
