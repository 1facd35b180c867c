"""The queries of the dashboard and the alerts, and the metrics that they name."""

import re
from collections.abc import Iterator

from tests.packaging.chart.helm import alert_rules, dashboard

_VARIABLES = {"$job": ".*", "$replica": ".*", "$__rate_interval": "1m"}
# What may follow a metric's name; a label or a function is followed by something else.
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"')
_GROUPINGS = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_MATCHERS = re.compile(r"\{[^}]*\}")
_NAMES = re.compile(r"(?<![\w$.])[a-zA-Z_:][\w:]*(?!\w*\s*\()")
_WORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}
_DURATIONS = re.compile(r"\[[^\]]*\]")
_COMPARISON = re.compile(r"\s*(?:<=|>=|==|!=|<|>)\s*[\d.e+-]+\s*$")
_ABSENT = re.compile(r"absent\((.*)\)\s*$", re.DOTALL)


def metric_names(query: str) -> set[str]:
    """The names of the series that a query selects."""
    text = _STRINGS.sub('""', query)
    for part in (_DURATIONS, _MATCHERS, _GROUPINGS):
        text = part.sub(" ", text)
    return {name for name in _NAMES.findall(text) if name.lower() not in _WORDS}


def dashboard_queries() -> Iterator[str]:
    """Every query of the dashboard with its variables filled in."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in _VARIABLES.items():
                query = query.replace(name, value)
            yield query


def alert_values() -> dict[str, str]:
    """For every alert, the value that it compares: a query that has a result when all is well."""
    values = {}
    for rule in alert_rules():
        value = _COMPARISON.sub("", rule["expr"])
        if absent := _ABSENT.fullmatch(value):
            value = absent[1]
        values[rule["alert"]] = value
    return values
