//! The reference page of all metrics, generated from their list. `UPDATE_EXPECT=1` rewrites it.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fmt::Write as _;
use std::{env, fs};

use tidegate_server::metrics::{METRICS, MetricKind};

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");

const INTRODUCTION: &str = "\
# Metrics

The admin listener (`admin.listen`, default `127.0.0.1:8083`) answers `GET /metrics` in the OpenMetrics text format, and in
Prometheus' older one if the reader accepts only `text/plain`. The page is generated from the program's own list, and a test
compares them. `admin.metrics = false` turns metrics off.

```yaml
# prometheus.yml
scrape_configs:
  - job_name: tidegate
    static_configs:
      - targets: [\"127.0.0.1:8083\"]
    # Beyond loopback, the listener has a token:
    # authorization: { credentials_file: /etc/prometheus/tidegate.token }
```

Values belong to this process; sum them over the nodes of a fleet. The policy bounds the number of series: no label has a value
that a client can choose. Histograms have buckets from 0.1 ms to 100 s. A grown counter is never reset while the process runs.

| metric | labels | meaning |
| --- | --- | --- |
";

const QUERIES: &str = "
## Rejected requests

`tidegate_rejections_total` counts these by `reason`, at all listeners. Each also has a line `rejected` in the log, of which at most
`log.refusals_per_second` are written in any second, and the reason in its line of the access log. Exceptions: `read_only` is a line of [changes](operating.md#changes), or has no
line if it was for a trial, and a form of the dashboard without the number of its session (`web_page`) has no line.

| reason | request | status |
| --- | --- | --- |
| `head` | its head can't be read as HTTP/1.1: an invalid target, header, `Content-Length` or version | 400 |
| `head_size` | its head has too many bytes or lines, or its target is too long | 431, 414 |
| `head_timeout` | its head took longer than `inbound.timeouts.header` | 408 |
| `head_displaced` | its unfinished head or TLS handshake took the place or the memory that others needed, or its connection the place without a request | 503; none in a handshake or before the first byte |
| `framing` | it has both `Content-Length` and `Transfer-Encoding`, a line that ends with LF alone, or a coding other than `chunked` | 400 |
| `target` | its target is neither a path nor an http URL | 400 |
| `method` | `CONNECT` or `TRACE` | 405 |
| `host` | its host is missing, invalid, or another one than that of its target | 400 |
| `ambiguous_path`, `path_readings` | its [path](paths.md) can't be counted | 400 |
| `missing_part`, `values`, `lookalike` | its [key](keys.md) can't be counted | 400 |
| `foreign_host`, `web_page` | it comes from a web page, or by a name that isn't the listener's | 421, 403 |
| `token`, `read_only` | without a valid token (not at the gateway), or without the right to change something | 401, 403 |
| `question` | forward-auth, ext_authz or the rate limit service is asked what can't be decided, such as an action that the policy doesn't have | 400, 404; a gRPC status |
| `proxy_header` | its connection doesn't begin with a valid header of the PROXY protocol, or not in time | none; the connection is closed |
| `tls_handshake` | its TLS handshake fails, or takes too long | none; the connection is closed |
| `http2` | its client breaks the rules of HTTP/2, or breaks off most of its requests | none; the connection is closed |
| `streams` | its client, or all clients of the listener, have too many requests of HTTP/2 at once | 503 |
| `plain_http` | it comes to a TLS port without TLS | 400 |
| `client_connections` | its connection is over the listener's `connections_per_client` | 503; none with TLS |

Forward-auth answers with `api.deny_status` instead of 400. Not counted here: requests without a valid token to the gateway (407), decision requests with wrong fields (400, 404), paths and options that the gateway can't use (400, 404),
and connections that end without an answer for another reason. Bodies that break off,
are too slow or too large (400, 408, 413) come after the decision and count as decided.

## Useful queries

| question | query |
| --- | --- |
| Refused requests per second, by limit | `sum by (limit) (rate(tidegate_decisions_total{outcome=\"refused\"}[5m]))` |
| Share of requests that a shadow limit would refuse | `sum by (limit) (rate(tidegate_decisions_total{outcome=\"shadow\"}[1h])) / ignoring (limit) group_left sum (rate(tidegate_decisions_total[1h]))` |
| 99th percentile of a decision's time | `histogram_quantile(0.99, sum by (le) (rate(tidegate_decision_duration_seconds_bucket[5m])))` |
| Amplification of a provider's traffic by retries | `1 + rate(tidegate_provider_retries_total[5m]) / rate(tidegate_provider_first_tries_total[5m])` |
| Providers with an open breaker | `tidegate_provider_breaker_state{state=\"open\"} == 1` |
| Providers without a usable credential | `tidegate_provider_credentials{state=\"usable\"} == 0` |
| Limits of which less than a fifth is left | `tidegate_provider_limit_remaining / tidegate_provider_limit < 0.2` |
| Share of calls that the cache answers | `sum by (provider) (rate(tidegate_provider_cache_results_total{result=~\"hit\\|coalesced\"}[5m])) / sum by (provider) (rate(tidegate_provider_cache_results_total[5m]))` |

[`deploy/grafana.json`](../deploy/grafana.json) is a dashboard with these, and
[`deploy/alerts.yml`](../deploy/alerts.yml) has rules for Prometheus.
";

#[test]
fn the_page_is_the_list() {
    let mut page = INTRODUCTION.to_owned();
    for metric in METRICS {
        let labels: Vec<String> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
        let kind = match metric.kind {
            MetricKind::Counter => "Counter",
            MetricKind::Gauge => "Gauge",
            MetricKind::Histogram => "Histogram",
            MetricKind::Info => "Info",
        };
        writeln!(page, "| `{}` | {} | {kind}. {}. |", metric.full_name(), labels.join(", "), metric.help).unwrap();
    }
    page += QUERIES;
    if env::var_os("UPDATE_EXPECT").is_some() {
        return fs::write(PAGE, page).unwrap();
    }
    let found = fs::read_to_string(PAGE).unwrap_or_default();
    assert!(found == page, "docs/metrics.md isn't the list of metrics; UPDATE_EXPECT=1 rewrites it");
}

#[test]
fn dashboards_and_rules_use_listed_metrics() {
    let mut names: Vec<String> = METRICS.iter().map(|metric| metric.full_name()).collect();
    names.extend(METRICS.iter().map(|metric| format!("{}_bucket", metric.full_name())));
    for (file, least) in [("grafana.json", 20), ("alerts.yml", 8)] {
        let text = fs::read_to_string(format!("{}/../../deploy/{file}", env!("CARGO_MANIFEST_DIR"))).unwrap();
        let words = text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
        let used: Vec<&str> = words.filter(|word| word.starts_with("tidegate_")).collect();
        assert!(used.len() >= least, "{file}: {used:?}");
        for name in used {
            assert!(names.iter().any(|listed| listed == name), "{file} uses {name}, which isn't a metric");
        }
    }
}
