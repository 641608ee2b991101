//! The protocols that the gate speaks, one file each.

pub(crate) mod admin;
pub(crate) mod forward_auth;
pub(crate) mod http_api;
pub(crate) mod question;
