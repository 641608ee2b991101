//! The messages of Envoy's rate limit service that the benchmark sends and answers.

use prost::Message;

/// The path of the service's method.
pub const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// `RateLimitRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct Question {
    /// The domain.
    #[prost(string, tag = "1")]
    pub domain: String,
    /// The descriptors.
    #[prost(message, repeated, tag = "2")]
    pub descriptors: Vec<Descriptor>,
}

/// `RateLimitDescriptor`.
#[derive(Clone, PartialEq, Message)]
pub struct Descriptor {
    /// The entries.
    #[prost(message, repeated, tag = "1")]
    pub entries: Vec<Entry>,
}

/// An entry of a descriptor, or a header.
#[derive(Clone, PartialEq, Message)]
pub struct Entry {
    /// The name.
    #[prost(string, tag = "1")]
    pub key: String,
    /// The value.
    #[prost(string, tag = "2")]
    pub value: String,
}

/// `RateLimitResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct Answer {
    /// 1 to admit.
    #[prost(int32, tag = "1")]
    pub overall_code: i32,
    /// One status for each descriptor.
    #[prost(message, repeated, tag = "2")]
    pub statuses: Vec<Status>,
    /// The headers for the client.
    #[prost(message, repeated, tag = "3")]
    pub response_headers_to_add: Vec<Entry>,
}

/// `DescriptorStatus`.
#[derive(Clone, PartialEq, Message)]
pub struct Status {
    /// 1 to admit.
    #[prost(int32, tag = "1")]
    pub code: i32,
    /// The amount that remains.
    #[prost(uint32, tag = "3")]
    pub limit_remaining: u32,
}
