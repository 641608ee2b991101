//! Replies of gRPC.
