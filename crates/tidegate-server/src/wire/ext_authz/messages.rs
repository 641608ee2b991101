//! The messages of Envoy's external authorization service, version 3: the fields that are read or written here.

use prost::{Message, Oneof};

/// `envoy.service.auth.v3.CheckRequest`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct CheckRequest {
    #[prost(message, optional, tag = "1")]
    pub(crate) attributes: Option<Attributes>,
}

/// `envoy.service.auth.v3.AttributeContext`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Attributes {
    #[prost(message, optional, tag = "1")]
    pub(crate) source: Option<Peer>,
    #[prost(message, optional, tag = "4")]
    pub(crate) request: Option<Request>,
    /// The settings of Envoy's route: a map.
    #[prost(message, repeated, tag = "10")]
    pub(crate) context_extensions: Vec<Extension>,
}

/// `envoy.service.auth.v3.AttributeContext.Peer`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Peer {
    #[prost(message, optional, tag = "1")]
    pub(crate) address: Option<Address>,
}

/// `envoy.config.core.v3.Address`. Only clients with an IP address have this kind.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Address {
    #[prost(message, optional, tag = "1")]
    pub(crate) socket: Option<SocketAddress>,
}

/// `envoy.config.core.v3.SocketAddress`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct SocketAddress {
    #[prost(string, tag = "2")]
    pub(crate) address: String,
}

/// An entry of a map of texts.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Extension {
    #[prost(string, tag = "1")]
    pub(crate) key: String,
    #[prost(string, tag = "2")]
    pub(crate) value: String,
}

/// `envoy.service.auth.v3.AttributeContext.Request`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Request {
    #[prost(message, optional, tag = "2")]
    pub(crate) http: Option<HttpRequest>,
}

/// `envoy.service.auth.v3.AttributeContext.HttpRequest`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct HttpRequest {
    #[prost(string, tag = "2")]
    pub(crate) method: String,
    /// The headers as a map, all values of a name joined by commas.
    #[prost(message, repeated, tag = "3")]
    pub(crate) headers: Vec<Header>,
    /// The path with its query.
    #[prost(string, tag = "4")]
    pub(crate) path: String,
    #[prost(string, tag = "5")]
    pub(crate) host: String,
    /// The headers as they came, if the filter sets `encode_raw_headers`.
    #[prost(message, optional, tag = "13")]
    pub(crate) header_map: Option<RawHeaders>,
}

/// `envoy.config.core.v3.HeaderMap`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct RawHeaders {
    #[prost(message, repeated, tag = "1")]
    pub(crate) headers: Vec<Header>,
}

/// `envoy.config.core.v3.HeaderValue`, and an entry of a map of headers.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Header {
    #[prost(string, tag = "1")]
    pub(crate) key: String,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) value: Vec<u8>,
    /// The value instead of `value`, if it isn't empty.
    #[prost(bytes = "vec", tag = "3")]
    pub(crate) raw_value: Vec<u8>,
}

/// `envoy.service.auth.v3.CheckResponse`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct CheckResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) status: Option<RpcStatus>,
    #[prost(oneof = "HttpResponse", tags = "2, 3")]
    pub(crate) http_response: Option<HttpResponse>,
}

/// `google.rpc.Status`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct RpcStatus {
    #[prost(int32, tag = "1")]
    pub(crate) code: i32,
}

/// The part of a response that is about HTTP.
#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum HttpResponse {
    #[prost(message, tag = "2")]
    Denied(Denied),
    #[prost(message, tag = "3")]
    Ok(Ok),
}

/// `envoy.service.auth.v3.DeniedHttpResponse`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Denied {
    #[prost(message, optional, tag = "1")]
    pub(crate) status: Option<HttpStatus>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) headers: Vec<HeaderOption>,
    #[prost(string, tag = "3")]
    pub(crate) body: String,
}

/// `envoy.service.auth.v3.OkHttpResponse`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Ok {
    #[prost(message, repeated, tag = "6")]
    pub(crate) response_headers_to_add: Vec<HeaderOption>,
}

/// `envoy.type.v3.HttpStatus`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct HttpStatus {
    #[prost(int32, tag = "1")]
    pub(crate) code: i32,
}

/// `envoy.config.core.v3.HeaderValueOption`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct HeaderOption {
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<Header>,
    #[prost(enumeration = "AppendAction", tag = "3")]
    pub(crate) append_action: i32,
}

/// `envoy.config.core.v3.HeaderValueOption.HeaderAppendAction`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
pub(crate) enum AppendAction {
    AppendOrAdd = 0,
    OverwriteOrAdd = 2,
}
