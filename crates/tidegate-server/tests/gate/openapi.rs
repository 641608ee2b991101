//! The OpenAPI document of the decision API: a gate takes its examples, and answers as it says, with every status.

use std::collections::BTreeSet;
use std::sync::Arc;

use jsonschema::{Validator, draft202012};
use serde_json::{Map, Value, json};
use tidegate::Gate;
use tidegate::clock::ManualClock;
use tidegate::store::{Memory, Store, StoreError, StoreResponse};
use tidegate_core::{Batch, Limits, Outcomes, Time};
use tidegate_policy::KeySeed;

use crate::common::{
    Running, body, get, header, json as parsed, nobody, once, policy, post, serve, start, status, try_start,
};

const FILE: &str = r#"
    [api]
    forward_auth = true
    [inbound]
    x_ratelimit = true
    [inbound.global]
    limit = "1000 per 1h"
    [inbound.action.login]
    match = { method = "POST", path = "/login" }
    limit = "5 per 60s"
    penalty = { base = "2s", cap = "1h" }
    [inbound.action.tenant]
    key = ["key", "platform", "header:x-tenant"]
    limit = "9 per 60s"
    [inbound.action.export]
    key = "key"
    limit = "1 in flight"
"#;

/// Headers of every response, which the document leaves out.
const GENERAL_HEADERS: [&str; 4] = ["connection", "content-length", "content-type", "date"];

/// The document that a gate serves.
struct Document {
    json: Value,
    /// Its components. A value has no other properties than those of its schema.
    strict_components: Value,
}

impl Document {
    async fn of(gate: &Running) -> Self {
        let json = parsed(&once(gate.api, get("/v1/openapi.json")).await);
        let mut strict_components = json["components"].clone();
        for schema in strict_components["schemas"].as_object_mut().unwrap().values_mut() {
            schema["additionalProperties"] = json!(false);
        }
        Self { json, strict_components }
    }

    fn operations(&self) -> impl Iterator<Item = Operation<'_>> {
        self.json["paths"].as_object().unwrap().iter().flat_map(move |(path, methods)| {
            methods.as_object().unwrap().iter().map(move |(method, json)| Operation {
                document: self,
                path,
                method,
                json,
            })
        })
    }

    fn operation(&self, path: &str) -> Operation<'_> {
        self.operations().find(|operation| operation.path == path).unwrap()
    }

    /// The value, or that which it refers to.
    fn resolve<'d>(&'d self, value: &'d Value) -> &'d Value {
        match value["$ref"].as_str() {
            Some(place) => self.json.pointer(place.trim_start_matches('#')).unwrap_or_else(|| panic!("no {place}")),
            None => value,
        }
    }

    fn validator(&self, schema: &Value) -> Validator {
        let mut schema = schema.clone();
        schema["components"] = self.strict_components.clone();
        draft202012::options().should_validate_formats(true).build(&schema).unwrap()
    }

    fn assert_valid(&self, schema: &Value, value: &Value) {
        self.validator(schema)
            .validate(value)
            .unwrap_or_else(|error| panic!("{} at {}: {value}", error, error.instance_path()));
    }
}

/// One operation of the document.
struct Operation<'d> {
    document: &'d Document,
    path: &'d str,
    method: &'d str,
    json: &'d Value,
}

impl Operation<'_> {
    fn request_schema(&self) -> &Value {
        &self.json["requestBody"]["content"]["application/json"]["schema"]
    }

    fn bodies(&self) -> impl Iterator<Item = &Value> {
        let examples = self.json["requestBody"]["content"]["application/json"]["examples"].as_object();
        examples.into_iter().flat_map(Map::values).map(|example| &example["value"])
    }

    /// A request with a body, or with the examples of all parameters. `lines` are further headers.
    fn request(&self, method: &str, lines: &str, body: &str) -> String {
        let (mut query, mut lines) = (Vec::new(), lines.to_owned());
        for parameter in self.json["parameters"].as_array().into_iter().flatten() {
            let parameter = self.document.resolve(parameter);
            let (name, example) = (parameter["name"].as_str().unwrap(), &parameter["example"]);
            match (parameter["in"].as_str().unwrap(), example) {
                ("header", Value::String(value)) => lines += &format!("{name}: {value}\r\n"),
                (_, Value::Object(members)) => {
                    query.extend(members.iter().map(|(name, value)| format!("{name}={}", value.as_str().unwrap())));
                }
                (_, Value::String(value)) => query.push(format!("{name}={value}")),
                (_, value) => query.push(format!("{name}={value}")),
            }
        }
        let host = if lines.contains("host: ") { "" } else { "host: gate.test\r\n" };
        let (path, query, length) = (self.path, query.join("&"), body.len());
        let method = method.to_uppercase();
        format!("{method} {path}?{query} HTTP/1.1\r\n{host}{lines}content-length: {length}\r\n\r\n{body}")
    }

    /// A request as the document has it.
    fn example(&self, lines: &str) -> String {
        self.request(self.method, lines, &self.bodies().next().map(Value::to_string).unwrap_or_default())
    }

    /// Checks that a response is as the document says, and returns its status.
    fn assert_describes(&self, answer: &str) -> String {
        let (document, status) = (self.document, status(answer).to_string());
        let responses = &self.json["responses"];
        assert!(!responses[&status].is_null(), "{} {status} is not documented: {answer}", self.path);
        let response = document.resolve(&responses[&status]);
        let (head, _) = answer.split_once("\r\n\r\n").unwrap();
        let documented = response["headers"].as_object().cloned().unwrap_or_default();
        for (name, _) in head.lines().skip(1).filter_map(|line| line.split_once(':')) {
            let known = GENERAL_HEADERS.iter().copied().chain(documented.keys().map(String::as_str));
            assert!(known.into_iter().any(|one| one.eq_ignore_ascii_case(name)), "{} {status}: {name}", self.path);
        }
        for (name, described) in &documented {
            let described = document.resolve(described);
            match header(answer, name) {
                Some(value) if described["schema"]["type"] == "integer" => {
                    document.assert_valid(&described["schema"], &serde_json::from_str(value).unwrap());
                }
                found => assert!(found.is_some() || described["required"] != true, "{} {status}: no {name}", self.path),
            }
        }
        match header(answer, "content-type") {
            Some(kind) => document.assert_valid(&response["content"][kind]["schema"], &parsed(answer)),
            None => assert!(response["content"].is_null() && body(answer).is_empty(), "{answer}"),
        }
        status
    }
}

/// A store that can't be reached.
struct Unreachable(Memory);

impl Store for Unreachable {
    type Future = std::future::Ready<Result<Outcomes, StoreError>>;

    fn limits(&self) -> &Arc<Limits> {
        self.0.limits()
    }

    fn apply(&self, _: &Batch, _: Time) -> StoreResponse<Self::Future> {
        StoreResponse::Pending(std::future::ready(Err(StoreError::Unavailable)))
    }

    fn submit(&self, _: &Batch, _: Time) {}
}

fn without_store() -> Running {
    let policy = policy(nobody(), FILE);
    let store = Unreachable(Memory::new(Arc::clone(policy.plan().limits()), 1 << 20));
    let plan = Arc::clone(policy.plan());
    serve(Gate::from_parts(plan, store, ManualClock::default(), KeySeed::new([7; 16])), &policy, |_| None).unwrap()
}

fn with_token() -> Running {
    let file = FILE.replace("[api]", "[api]\ntoken = \"env:T\"\ndeny_status = 403");
    try_start(&policy(nobody(), &file), |_| Some("secret".to_owned())).unwrap()
}

/// The requests of one operation that get errors, with the statuses.
fn wrong_requests(operation: &Operation<'_>) -> Vec<(u16, String)> {
    let Operation { path, method, .. } = *operation;
    let mut requests = Vec::new();
    if path != "/v1/auth" {
        requests.push((403, operation.example("origin: http://elsewhere.test\r\n")));
        requests.push((421, operation.example("host: elsewhere.test\r\n")));
        requests.push((405, operation.request("PUT", "", "")));
    }
    if let Some(mut known) = operation.bodies().next().cloned() {
        requests.push((400, post(path, r#"{"acton":"login"}"#)));
        requests.push((413, post(path, &" ".repeat(17_000))));
        known["action"] = json!("nope");
        requests.push((404, post(path, &known.to_string())));
    } else if path != "/v1/openapi.json" {
        assert_eq!(method, "get");
        requests.push((400, get(&format!("{path}?acton=login"))));
        requests.push((404, get(&format!("{path}?action=nope"))));
    }
    requests
}

#[tokio::test]
async fn every_documented_response_is_a_real_one() {
    let (gate, guarded, broken) = (start(nobody(), FILE).await, with_token(), without_store());
    let document = Document::of(&gate).await;
    let mut seen = BTreeSet::new();
    // Refusals come first, so that a reset finds something.
    for path in ["/v1/auth", "/v1/check"] {
        let operation = document.operation(path);
        for _ in 0..6 {
            seen.insert((path, operation.assert_describes(&once(gate.api, operation.example("")).await)));
        }
        let problem = operation.example("accept: application/problem+json\r\n");
        assert_eq!(operation.assert_describes(&once(gate.api, problem).await), "429");
    }
    let token = "x-tidegate-token: secret\r\n";
    for _ in 0..6 {
        let auth = document.operation("/v1/auth");
        seen.insert((auth.path, auth.assert_describes(&once(guarded.api, auth.example(token)).await)));
    }
    for operation in document.operations() {
        for body in operation.bodies() {
            document.assert_valid(operation.request_schema(), body);
            let answer = once(gate.api, operation.request(operation.method, "", &body.to_string())).await;
            seen.insert((operation.path, operation.assert_describes(&answer)));
        }
        seen.insert((operation.path, operation.assert_describes(&once(gate.api, operation.example("")).await)));
        for (expected, request) in wrong_requests(&operation) {
            let answer = once(gate.api, &request).await;
            assert_eq!(status(&answer), expected, "{request}: {answer}");
            seen.insert((operation.path, operation.assert_describes(&answer)));
        }
        for answer in [once(guarded.api, operation.example("")).await, once(broken.api, operation.example("")).await] {
            seen.insert((operation.path, operation.assert_describes(&answer)));
        }
        assert_ne!(status(&once(guarded.api, operation.example(token)).await), 401, "{}", operation.path);
    }
    for operation in document.operations() {
        for status in operation.json["responses"].as_object().unwrap().keys().filter(|status| *status != "default") {
            assert!(seen.contains(&(operation.path, status.clone())), "{} never answers {status}", operation.path);
        }
    }
}

#[tokio::test]
async fn the_documents_response_examples_are_valid() {
    let document = Document::of(&start(nobody(), FILE).await).await;
    let mut examples = 0;
    for operation in document.operations() {
        for response in operation.json["responses"].as_object().unwrap().values() {
            let content = &document.resolve(response)["content"]["application/json"];
            if !content["example"].is_null() {
                document.assert_valid(&content["schema"], &content["example"]);
                examples += 1;
            }
        }
    }
    assert!(examples > 3);
}

#[tokio::test]
async fn gate_and_document_refuse_the_same_requests() {
    let gate = start(nobody(), FILE).await;
    let document = Document::of(&gate).await;
    let (check, release) = (document.operation("/v1/check"), document.operation("/v1/release"));
    let table = [
        (&check, json!({ "action": "login", "ip": "::1" }), true),
        (&check, json!({ "action": "login", "ip": "::1", "key": null, "cost": null, "headers": null }), true),
        (&check, json!({ "action": "login", "ip": "::1", "headers": { "x-tenant": null } }), true),
        (&check, json!({ "action": "login", "ip": "::1", "cost": 1.5 }), false),
        (&check, json!({ "action": "login", "ip": "::1", "cost": -1 }), false),
        (&check, json!({ "action": "login", "ip": "::1", "cost": (1_u64 << 40) + 1 }), false),
        (&check, json!({ "action": "login", "ip": "::1", "cost": "1" }), false),
        (&check, json!({ "action": "login", "ip": "203.0.113.7:80" }), false),
        (&check, json!({ "action": "login", "ip": "::1", "permit": "3e55bdcbdfd00009" }), false),
        (&check, json!({ "action": "login", "ip": "::1", "headers": [] }), false),
        (&check, json!({ "action": "login", "ip": "::1", "headers": { "x-tenant": 1 } }), false),
        (&check, json!({ "action": 1, "ip": "::1" }), false),
        (&check, json!({ "action": "tenant", "key": "a", "platform": "fax" }), false),
        (&release, json!({ "action": "export", "key": "a", "permit": "3e55bdcbdfd00009" }), true),
        (&release, json!({ "action": "export", "key": "a", "permit": "3e55" }), false),
        (&release, json!({ "action": "export", "key": "a" }), false),
        (&release, json!([]), false),
    ];
    for (operation, request, is_valid) in table {
        let answer = once(gate.api, post(operation.path, &request.to_string())).await;
        let is_documented = document.validator(operation.request_schema()).is_valid(&request);
        assert_eq!((is_documented, status(&answer) != 400), (is_valid, is_valid), "{request}: {answer}");
    }
}
