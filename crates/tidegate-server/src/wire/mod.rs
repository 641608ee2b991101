//! The protocols of the gate's API listeners, one file each.

pub(crate) mod admin;
pub(crate) mod compat;
pub(crate) mod decision_request;
pub(crate) mod ext_authz;
pub(crate) mod forward_auth;
pub(crate) mod http_api;
pub(crate) mod limitador;
pub(crate) mod openapi;
pub(crate) mod resp;
pub(crate) mod rls;
pub(crate) mod routes;
pub(crate) mod small_body;
