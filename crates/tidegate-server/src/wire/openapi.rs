//! The description of the decision API as an OpenAPI document, from which clients in any language can be generated.
//!
//! The document is written by hand. The tests here compare it with the routes, the fields of a request and the reports.
//! `tests/gate/openapi.rs` sends its examples to a gate and validates the responses.

/// The path of the document.
pub(crate) const PATH: &str = "/v1/openapi.json";

/// The document, in OpenAPI 3.1.
pub(crate) const DOCUMENT: &[u8] = include_bytes!("openapi.json");

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde::Serialize;
    use serde_json::{Value, json};
    use tidegate::{DecisionReport, Explanation, LimitReport, PermitId, ReservationReport, ResetReport};
    use tidegate_core::{MAX_COST, Reason};

    use super::DOCUMENT;
    use crate::wire::decision_request::{FIELDS, MAX_HEADERS};
    use crate::wire::routes::ROUTES;

    fn document() -> Value {
        serde_json::from_slice(DOCUMENT).expect("the document is JSON")
    }

    fn names(object: &Value) -> BTreeSet<&str> {
        object.as_object().expect("an object").keys().map(String::as_str).collect()
    }

    fn texts(list: &Value) -> BTreeSet<&str> {
        list.as_array().expect("a list").iter().map(|item| item.as_str().expect("a text")).collect()
    }

    #[test]
    fn the_document_has_every_route() {
        let document = document();
        let paths = &document["paths"];
        assert_eq!(names(paths), ROUTES.iter().map(|(path, _)| *path).collect());
        for (path, method) in ROUTES {
            // A path that takes any method is described by GET.
            let method = method.unwrap_or("GET").to_lowercase();
            assert_eq!(names(&paths[path]), BTreeSet::from([&*method]), "{path}");
        }
    }

    #[test]
    fn the_document_has_every_request_field() {
        let document = document();
        let schemas = &document["components"]["schemas"];
        let all: BTreeSet<_> = FIELDS.iter().copied().collect();
        let without_permit: BTreeSet<_> = all.iter().copied().filter(|field| *field != "permit").collect();
        assert_eq!(names(&schemas["Call"]["properties"]), without_permit);
        assert_eq!(names(&schemas["PermitCall"]["properties"]), all);
        for schema in ["Call", "PermitCall"] {
            assert_eq!(schemas[schema]["additionalProperties"], false);
            assert_eq!(schemas[schema]["properties"]["cost"]["maximum"], MAX_COST);
            assert_eq!(schemas[schema]["properties"]["headers"]["maxProperties"], MAX_HEADERS);
        }
        let parameters = &document["components"]["parameters"];
        let queries = parameters.as_object().expect("an object").values().filter(|one| one["in"] == "query");
        let queries = queries.map(|one| one["name"].as_str().expect("a name"));
        assert_eq!(queries.collect::<BTreeSet<_>>(), without_permit);
    }

    /// The properties of a schema are those of the fullest value, and the required ones those of the emptiest.
    fn assert_describes(schema: &str, fullest: &impl Serialize, emptiest: &impl Serialize) {
        let (document, fullest, emptiest) = (document(), json!(fullest), json!(emptiest));
        let schema = &document["components"]["schemas"][schema];
        assert_eq!(names(&schema["properties"]), names(&fullest));
        assert_eq!(texts(&schema["required"]), names(&emptiest));
    }

    #[test]
    fn the_document_has_every_response_field() {
        let decision = json!({
            "allowed": true, "limit": null, "remaining": null, "reset_after": 0, "retry_after": null, "blocked": false,
            "backoff_seconds": null, "next_allowed_at": null, "bound_by": null, "reason": "ok", "source": null,
        });
        let emptiest: DecisionReport = serde_json::from_value(decision).expect("a decision");
        let fullest = DecisionReport {
            shadow: true,
            permit: Some(PermitId::new(1)),
            reservation: Some(ReservationReport { token: "r".to_owned(), at: 1, wait: 1 }),
            by_reservation: true,
            unknown_reservation: true,
            ..emptiest.clone()
        };
        assert_describes("Decision", &fullest, &emptiest);
        let limit = json!({
            "name": "a", "source": "action", "words": "", "key": [], "limit": 1, "used": 0, "remaining": 1,
            "allowed": true, "retry_after": null, "reset_after": 0, "blocked": false, "backoff_seconds": null,
            "strikes": 0, "shadow": false,
        });
        let limit: LimitReport = serde_json::from_value(limit).expect("a limit");
        assert_describes("Limit", &LimitReport { next_block: Some(1), share: Some(1), ..limit.clone() }, &limit);
        let emptiest = Explanation { action: None, also: Vec::new(), decision: emptiest, limits: Vec::new() };
        assert_describes("Explanation", &Explanation { also: vec!["b".to_owned()], ..emptiest.clone() }, &emptiest);
        let (limits, skipped) = (vec![limit], vec!["b".to_owned()]);
        let fullest = ResetReport { limits: limits.clone(), still_refusing: limits, skipped, ..ResetReport::default() };
        assert_describes("Reset", &fullest, &ResetReport::default());
    }

    #[test]
    fn the_document_has_every_reason() {
        use Reason::{AllowList, DenyList, Limit, Ok, Parole, Penalty, Reservation, Reserved, Share, Unlimited};
        let document = document();
        let reasons = [Ok, Unlimited, Parole, Reservation, AllowList, DenyList, Limit, Share, Reserved, Penalty]
            .map(Reason::as_str);
        let listed = &document["components"]["schemas"]["Decision"]["properties"]["reason"]["enum"];
        assert_eq!(texts(listed), BTreeSet::from(reasons));
    }
}
