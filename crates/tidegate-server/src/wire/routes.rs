//! The paths of the decision API.

use tidegate_policy::document::nearest;

use crate::wire::admin::is_admin_path;
use crate::wire::compat::CompatiblePath;
use crate::wire::{forward_auth, openapi};

/// Each path with its method. Forward-auth takes any method, and also has all paths behind its own.
pub(crate) const ROUTES: [(&str, Option<&str>); 9] = [
    ("/v1/check", Some("POST")),
    ("/v1/status", Some("GET")),
    ("/v1/explain", Some("GET")),
    ("/v1/reset", Some("POST")),
    ("/v1/refund", Some("POST")),
    ("/v1/release", Some("POST")),
    ("/v1/renew", Some("POST")),
    (forward_auth::PATH_PREFIX, None),
    (openapi::PATH, Some("GET")),
];

/// True for the paths of the decision API.
pub(crate) fn is_api_path(path: &str) -> bool {
    ROUTES.iter().any(|(known, _)| *known == path) || forward_auth::is_forward_auth_path(path)
}

/// The method that a path takes. `None` for unknown paths and forward-auth.
pub(crate) fn method_of(path: &str) -> Option<&'static str> {
    ROUTES.iter().find(|(known, _)| *known == path).and_then(|(_, method)| *method)
}

/// The message for a path that the decision API doesn't have.
pub(crate) fn unknown_path_message(path: &str) -> String {
    let paths = ROUTES.map(|(path, _)| path);
    match nearest(path, paths) {
        _ if let Some(compatible) = CompatiblePath::find(path) => {
            let server = compatible.server().name();
            format!("{path} is a path of {server}'s, which is answered with compat = [\"{server}\"] (api.compat)")
        }
        _ if is_admin_path(path) => {
            format!("{path} is a path of the admin listener (admin.listen), and this is the decision API (api.listen)")
        }
        Some(nearest) => format!("no such path; did you mean {nearest}?"),
        None => format!("no such path; there are {}", paths.join(", ")),
    }
}
