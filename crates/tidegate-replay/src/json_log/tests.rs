use http::HeaderName;
use proptest::prelude::*;
use tidegate_core::{Span, Time};

use super::*;

const CADDY: &str = r#"{"level":"info","ts":1700000000.25,"logger":"http.log.access.log0","msg":"handled request","request":{"remote_ip":"203.0.113.7","remote_port":"52318","client_ip":"198.51.100.1","proto":"HTTP/2.0","method":"POST","host":"example.com","uri":"/login?x=\"1\"","headers":{"User-Agent":["curl/8.5"],"X-Forwarded-For":["198.51.100.1"],"X-Api-Key":["k1","k2"]},"tls":{"resumed":false,"version":772}},"bytes_read":0,"user_id":"ann","duration":0.001,"size":12,"status":200,"resp_headers":{"Server":["Caddy"],"X-Api-Key":["no"]}}"#;
const NGINX: &str = r#"{"time_iso8601":"2023-11-14T22:13:20+00:00","msec":"1700000000.250","remote_addr":"203.0.113.7","remote_user":"","request":"POST /login?x=1 HTTP/1.1","status":"200","http_host":"example.com","http_x_api_key":"k1","http_user_agent":"-"}"#;
const ENVOY: &str = r#"{"start_time":"2023-11-14T22:13:20.250Z","method":"POST","path":"/login?x=1","protocol":"HTTP/2","response_code":200,"downstream_remote_address":"203.0.113.7:52318","authority":"example.com","x_forwarded_for":null,"user_agent":"curl/8.5","duration":3}"#;

fn wanted() -> HeaderCollector {
    HeaderCollector::for_names(["x-api-key", "user-agent"].map(HeaderName::from_static).to_vec())
}

fn expected(micros: u64) -> LoggedRequest<'static> {
    LoggedRequest {
        time: Time::from_micros(micros),
        duration: None,
        peer: Some("203.0.113.7".parse().unwrap()),
        method: "POST".into(),
        path: "/login?x=1".into(),
        host: Some("example.com".into()),
        user: None,
        action: None,
    }
}

#[test]
fn fields_of_common_servers_are_detected() {
    let caddy = LoggedRequest {
        path: "/login?x=\"1\"".into(),
        user: Some("ann".into()),
        duration: Some(Span::from_millis(1)),
        ..expected(1_700_000_000_249_000)
    };
    for (line, request, found) in [
        (CADDY, caddy, vec![("user-agent", "curl/8.5"), ("x-api-key", "k1"), ("x-api-key", "k2")]),
        // `time_iso8601` comes before `msec`, which is the same time to the millisecond.
        (NGINX, expected(1_700_000_000_000_000), vec![("x-api-key", "k1")]),
        (ENVOY, expected(1_700_000_000_250_000), vec![("user-agent", "curl/8.5")]),
    ] {
        let mut headers = wanted();
        assert_eq!(parse_line(line.as_bytes(), &FieldNames::default(), &mut headers), Ok(LogLine::Request(request)));
        let mut named: Vec<(&str, &str)> =
            headers.values.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        named.sort_unstable();
        assert_eq!(named, found);
    }
}

#[test]
fn configured_field_names_take_precedence() {
    let mut names = FieldNames::default();
    for name in ["time=msec", "ip=who.where", "user=who.name", "action=call", "header:X-Api-Key=key"] {
        names.add(name).unwrap();
    }
    let line = NGINX.replace("\"status\"", r#""who":{"where":"::1","name":"bob"},"call":"otp","key":"k9","status""#);
    let request = LoggedRequest {
        peer: Some("::1".parse().unwrap()),
        user: Some("bob".into()),
        action: Some("otp".into()),
        ..expected(1_700_000_000_250_000)
    };
    let mut headers = wanted();
    assert_eq!(parse_line(line.as_bytes(), &names, &mut headers), Ok(LogLine::Request(request)));
    assert!(headers.values.get_all("x-api-key").iter().any(|value| value == "k9"));
    for wrong in ["", "time", "time=", "=x", "header:=x", "tim=x"] {
        assert!(names.add(wrong).is_err(), "{wrong}");
    }
}

/// A header's name may hold dots, and an id may have more digits than a double.
#[test]
fn clients_are_never_confused_with_each_other() {
    let line = CADDY.replace("\"X-Api-Key\":[\"k1\"", "\"a.X-Api-Key\":[\"k1\"");
    let mut headers = wanted();
    parse_line(line.as_bytes(), &FieldNames::default(), &mut headers).unwrap();
    assert!(!headers.values.contains_key("x-api-key"));
    for id in ["175928847299117063", "175928847299117064", "-5", "18446744073709551615"] {
        let line = CADDY.replace("\"ann\"", id);
        let Ok(LogLine::Request(request)) = parse_line(line.as_bytes(), &FieldNames::default(), &mut wanted()) else {
            panic!()
        };
        assert_eq!(request.user.as_deref(), Some(id));
    }
}

#[test]
fn non_requests_and_broken_lines_are_distinguished() {
    let read = |line: &str| {
        parse_line(line.as_bytes(), &FieldNames::default(), &mut HeaderCollector::default())
            .map(|request| request == LogLine::Other)
    };
    for (line, said) in [
        (r#"{"ts":1700000000,"msg":"shutting down"}"#, Ok(true)),
        (r#"{"ts":1700000000,"request":"\u0016\u0003"}"#, Ok(true)),
        (r#"{"ts":1700000000,"method":"G T","path":"/"}"#, Ok(true)),
        (r#"{"ts":1700000000,"method":"GET","path":"/"}"#, Ok(false)),
        (r#"{"method":"GET","path":"/"}"#, Err(LineError::InvalidTime)),
        (r#"{"ts":"soon","method":"GET","path":"/"}"#, Err(LineError::InvalidTime)),
        (r#"{"ts":1700000000,"method":"GET","path":"/","ip":"host"}"#, Err(LineError::InvalidAddress)),
        (r#"{"ts":1700000000,"method":"GET","path":"/""#, Err(LineError::InvalidJson)),
        (r#"{"ts":1700000000}}"#, Err(LineError::InvalidJson)),
    ] {
        assert_eq!(read(line), said, "{line}");
    }
    let deep = format!("{}1{}", r#"{"request":"#.repeat(60), "}".repeat(60));
    assert_eq!(read(&deep), Err(LineError::InvalidTime));
}

proptest! {
    #[test]
    fn any_damaged_line_is_read_without_panic(
        which in 0_usize..3, cut in 0_usize..900, place in 0_usize..900, byte in any::<u8>(),
    ) {
        let mut line = [CADDY, NGINX, ENVOY][which].as_bytes().to_vec();
        if let Some(there) = line.get_mut(place) {
            *there = byte;
        }
        line.truncate(cut);
        let _ = parse_line(&line, &FieldNames::default(), &mut wanted());
    }

    #[test]
    fn any_json_is_read_without_panic(text in "[\\[\\]{}:,\"a-c0-9.e-]{0,80}") {
        let _ = parse_line(text.as_bytes(), &FieldNames::default(), &mut wanted());
    }
}

/// The duration counts only where its unit is known and the time is that of the line.
#[test]
fn arrivals_are_found_where_durations_are() {
    let own =
        r#"{"timestamp":"2023-11-14T22:13:20.250Z","target":"access","method":"GET","path":"/","duration_us":1500}"#;
    let nginx = NGINX.replace("\"status\"", "\"request_time\":\"0.200\",\"status\"");
    let slow = CADDY.replace("0.001", "7200.5");
    let implausible = NGINX.replace("\"status\"", "\"request_time\":\"1700000000.250\",\"status\"");
    for (line, field, micros, duration) in [
        (own, None, 1_700_000_000_248_500, Some(1500)),
        (&nginx, None, 1_699_999_999_800_000, Some(200_000)),
        (CADDY, None, 1_700_000_000_249_000, Some(1000)),
        (&slow, None, 1_699_996_400_250_000, Some(3_600_000_000)),
        (&implausible, None, 1_700_000_000_000_000, None),
        // Envoy's duration is in milliseconds, and its time is that of the arrival.
        (ENVOY, None, 1_700_000_000_250_000, None),
        (ENVOY, Some("duration=duration"), 1_699_999_997_250_000, Some(3_000_000)),
    ] {
        let mut names = FieldNames::default();
        field.iter().for_each(|field| names.add(field).unwrap());
        let Ok(LogLine::Request(request)) = parse_line(line.as_bytes(), &names, &mut wanted()) else {
            panic!("{line}")
        };
        let expected = (Time::from_micros(micros), duration.map(Span::from_micros));
        assert_eq!((request.time, request.duration), expected, "{line}");
    }
}

#[test]
fn own_lines_of_other_kinds_are_distinguished() {
    let line = r#"{"timestamp":"2023-11-14T22:13:20Z","target":"access","listener":"inbound","method":"GET","path":"/","outcome":"refused"}"#;
    fn read(line: &str) -> LogLine<'_> {
        parse_line(line.as_bytes(), &FieldNames::default(), &mut wanted()).unwrap()
    }
    let outbound = line.replace("inbound", "outbound");
    assert!(matches!(read(line), LogLine::Request(_)));
    assert_eq!(read(&outbound), LogLine::ProviderCall);
    for outcome in ["answered", "rejected"] {
        assert_eq!(read(&line.replace("refused", outcome)), LogLine::Undecided);
    }
    // Another server's log.
    assert!(matches!(read(&outbound.replace(r#""target":"access","#, "")), LogLine::Request(_)));
}
