//! The access log of calls to providers.

use serde_json::{Value, json};

use crate::common::{Answer, Api, ONCE, get, standing};
use crate::wire::{capture, status};

#[tokio::test]
async fn calls_get_lines_with_their_outcome() {
    let (lines, _guard) = capture("json");
    let api = Api::start(|number, _| Answer::new(if number == 0 { 200 } else { 503 }, "hello")).await;
    let gateway = standing(&format!("{}[log]\naccess = \"all\"\n", api.policy(ONCE)));
    for expected in [200, 503, 503, 503, 503, 503, 503] {
        assert_eq!(status(&gateway.ask(get("/api/x?key=s3cret")).await), expected);
    }
    assert_eq!(status(&gateway.ask(get("/none/x")).await), 404);
    let both = "POST /api/x HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n";
    assert_eq!(status(&gateway.ask(both).await), 400);
    let text = lines.text();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let fields = ["listener", "path", "status", "outcome", "reason", "attempts", "waited_us", "bytes"];
    let found: Vec<Value> = lines
        .filter(|line| line["target"] == "access")
        .map(|line| fields.iter().map(|field| line[field].clone()).collect())
        .collect();
    assert_eq!(found.len(), 9, "{text}");
    assert_eq!(found[0], json!(["outbound", "/api/x", 200, "admitted", null, 1, 0, 5]));
    assert_eq!(found[1], json!(["outbound", "/api/x", 503, "admitted", null, 1, 0, 5]));
    let refused = &found[6].as_array().unwrap()[..7];
    assert_eq!(
        refused,
        [
            "outbound".into(),
            "/api/x".into(),
            503.into(),
            "refused".into(),
            "ProviderUnavailableError".into(),
            json!(0),
            json!(0)
        ]
    );
    assert_eq!(found[7].as_array().unwrap()[..4], ["outbound".into(), "/none/x".into(), 404.into(), json!("rejected")]);
    assert_eq!(found[8].as_array().unwrap()[2..5], [json!(400), json!("rejected"), json!("framing")]);
    assert!(!text.contains("s3cret"), "{text}");
}
