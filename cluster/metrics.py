"""What a server shows to Prometheus.

Gauges and counters are read from the scheduler's own tables at scrape time, so they cannot drift
or freeze; only durations are recorded when they happen. Names use underscores only.
"""

from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plait.cluster.engine import Engine
from plait.cluster.planner import max_sequences
from plait.cluster.scheduler import SchedulerEvents
from plait.worker.plan import CachePlan

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_ADMISSIBLE_TOKENS = (128, 1024, 8192)
_REPLICA = "replica"
_GENERATION_ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
_COMMON_STATUSES = ("200", "400", "500", "503")


class Health(Protocol):
    """What the collector asks of the replica beside its engine."""

    @property
    def is_healthy(self) -> bool: ...

    @property
    def last_step_age_s(self) -> float:
        """Seconds since the last step ended while there is work, else 0."""


class LatencyEvents(SchedulerEvents):
    """Records the durations that the scheduler sees, and those of steps."""

    def __init__(self, registry: CollectorRegistry, replica: str) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(name, text, [_REPLICA], registry=registry, buckets=buckets)
            return metric.labels(replica)

        self._queue = histogram(
            "plait_queue_seconds", "Time from arrival until a request runs", _LATENCY_S
        )
        self._first = histogram(
            "plait_time_to_first_token_seconds", "Time from arrival to first token", _LATENCY_S
        )
        self._next = histogram(
            "plait_inter_token_seconds", "Time between two tokens of a request", _LATENCY_S
        )
        self._request = histogram(
            "plait_request_seconds", "Time from arrival to the end of a request", _LATENCY_S
        )
        self._steps = Histogram(
            "plait_step_seconds",
            "Time of one step, by what it held",
            [_REPLICA, "phase"],
            registry=registry,
            buckets=_STEP_S,
        )
        self._step_of = {
            phase: self._steps.labels(replica, phase) for phase in ("prefill", "decode", "mixed")
        }

    def admitted(self, wait_s: float) -> None:
        self._queue.observe(wait_s)

    def drew_token(self, latency_s: float, *, is_first: bool) -> None:
        (self._first if is_first else self._next).observe(latency_s)

    def ended(self, elapsed_s: float) -> None:
        self._request.observe(elapsed_s)

    def stepped(self, seconds: float, *, phase: str) -> None:
        self._step_of[phase].observe(seconds)


class EngineCollector(Collector):
    """Gauges and counters of one replica, computed from its engine when scraped."""

    def __init__(self, engine: Engine, health: Health, *, replica: str) -> None:
        self._engine = engine
        self._health = health
        self._replica = replica

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._cache()
        yield from self._plan(self._engine.model.plan)

    def _requests(self) -> Iterator[Metric]:
        scheduler, counters = self._engine.scheduler, self._engine.scheduler.counters
        yield self._gauge("running_requests", "Requests that hold a seat", scheduler.num_running)
        yield self._gauge("waiting_requests", "Requests in the queue", scheduler.num_waiting)
        yield self._gauge(
            "oldest_wait_seconds", "Wait of the next request", scheduler.oldest_wait_s()
        )
        yield self._gauge(
            "replica_healthy", "1 while the ranks make progress", self._health.is_healthy
        )
        yield self._gauge(
            "last_step_age_seconds",
            "Time since the last step ended while there is work, else 0",
            self._health.last_step_age_s,
        )
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of accepted requests", counters.prompt_tokens),
            ("generation_tokens", "Tokens drawn", counters.generation_tokens),
            ("preemptions", "Requests that lost their cache and start over", counters.preemptions),
            ("non_finite_rows", "Rows whose logits were not finite", counters.non_finite_rows),
        ):
            yield self._counter(name, text, value)
        finished = CounterMetricFamily(
            "plait_finished_requests", "Requests that ended", labels=[_REPLICA, "reason"]
        )
        for reason in ("stop", "length", "abort", "error"):
            finished.add_metric([self._replica, reason], counters.finished.get(reason, 0))
        yield finished

    def _cache(self) -> Iterator[Metric]:
        allocator, plan = self._engine.scheduler.allocator, self._engine.model.plan
        pages = GaugeMetricFamily(
            "plait_pages", "Pages by what they hold now", labels=[_REPLICA, "kind"]
        )
        for name, count in {"free": allocator.free_pages, **allocator.pages_by_kind()}.items():
            pages.add_metric([self._replica, name], count)
        yield pages
        units = GaugeMetricFamily(
            "plait_used_units", "KV blocks and state slots in use", labels=[_REPLICA, "kind"]
        )
        for kind in plan.layout.kinds:
            units.add_metric([self._replica, kind.name], allocator.used_units(kind.name))
        yield units

    def _plan(self, plan: CachePlan) -> Iterator[Metric]:
        layout = plan.layout
        yield self._gauge(
            "usable_pages", "Pages of the plan, without the reserved one", plan.usable_pages
        )
        yield self._gauge("page_bytes", "Bytes of a page", layout.page_bytes)
        waste = GaugeMetricFamily(
            "plait_waste_bytes",
            "Bytes of a page lost to rounding while it holds a kind",
            labels=[_REPLICA, "kind"],
        )
        for kind in layout.kinds:
            lost = (kind.stride_bytes - kind.unit_bytes) * kind.units_per_page
            waste.add_metric([self._replica, kind.name], lost)
        yield waste
        admissible = GaugeMetricFamily(
            "plait_admissible_requests",
            "Requests of so many tokens that fit into an empty cache at once",
            labels=[_REPLICA, "tokens"],
        )
        limits = self._engine.model.limits
        for tokens in _ADMISSIBLE_TOKENS:
            fitting = max_sequences(layout, plan.num_pages, min(tokens, limits.max_model_len))
            admissible.add_metric([self._replica, str(tokens)], min(fitting, limits.max_num_seqs))
        yield admissible
        info = GaugeMetricFamily(
            "plait_plan_info",
            "The cache plan in force",
            labels=[_REPLICA, "layout_digest", "block_size", "kv_dtype", "conv_dtype", "ssm_dtype"],
        )
        dtypes = layout.dtypes
        info.add_metric(
            [
                self._replica,
                layout.digest[:12],
                str(layout.block_size),
                dtypes.kv,
                dtypes.conv,
                dtypes.ssm,
            ],
            1,
        )
        yield info
        backends = GaugeMetricFamily(
            "plait_kernel_backend_info",
            "The backend of each op",
            labels=[_REPLICA, "op", "backend"],
        )
        for op, backend in self._engine.model.backends.items():
            backends.add_metric([self._replica, op, backend], 1)
        yield backends

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        metric = GaugeMetricFamily(f"plait_{name}", text, labels=[_REPLICA])
        metric.add_metric([self._replica], float(value))
        return metric

    def _counter(self, name: str, text: str, value: float) -> Metric:
        metric = CounterMetricFamily(f"plait_{name}", text, labels=[_REPLICA])
        metric.add_metric([self._replica], float(value))
        return metric


class IngressMetrics:
    """What an ingress process counts about HTTP and its replicas."""

    def __init__(self, registry: CollectorRegistry, ingress: str) -> None:
        self._ingress = ingress
        self._requests = Counter(
            "plait_http_requests",
            "HTTP requests by endpoint and status",
            ["ingress", "endpoint", "status"],
            registry=registry,
        )
        # From the start, so that a rate of errors is 0 before there was one.
        for endpoint in _GENERATION_ENDPOINTS:
            for status in _COMMON_STATUSES:
                self._requests.labels(ingress, endpoint, status)
        self._seconds = Histogram(
            "plait_http_request_seconds",
            "Time from the request line to the last byte",
            ["ingress", "endpoint"],
            registry=registry,
            buckets=_LATENCY_S,
        )
        for endpoint in _GENERATION_ENDPOINTS:
            self._seconds.labels(ingress, endpoint)
        self.in_progress: Gauge = Gauge(
            "plait_http_requests_in_progress",
            "HTTP requests that are being answered",
            ["ingress"],
            registry=registry,
        ).labels(ingress)
        self.replica_failures: Counter = Counter(
            "plait_replica_failures",
            "Requests that ended because their replica failed",
            ["ingress"],
            registry=registry,
        ).labels(ingress)
        self.overloads: Counter = Counter(
            "plait_overloads",
            "Requests turned away with 503",
            ["ingress"],
            registry=registry,
        ).labels(ingress)

    def answered(self, endpoint: str, status: int, seconds: float) -> None:
        self._requests.labels(self._ingress, endpoint, str(status)).inc()
        self._seconds.labels(self._ingress, endpoint).observe(seconds)
