//! The files that pages load: a style sheet, a script and an icon.

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, ETAG, HeaderValue, IF_NONE_MATCH};
use http::{HeaderMap, Response, StatusCode};

use super::protect;
use crate::body::ResponseBody;

pub(super) static STYLE: Asset = Asset::new("/dashboard.css", "text/css; charset=utf-8", include_str!("dashboard.css"));
pub(super) static SCRIPT: Asset =
    Asset::new("/dashboard.js", "text/javascript; charset=utf-8", include_str!("dashboard.js"));
pub(super) static ICON: Asset = Asset::new("/dashboard.svg", "image/svg+xml", include_str!("dashboard.svg"));

/// A file of the dashboard.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Asset {
    path: &'static str,
    content_type: &'static str,
    text: &'static str,
    hash: u64,
}

impl Asset {
    const fn new(path: &'static str, content_type: &'static str, text: &'static str) -> Self {
        Self { path, content_type, text, hash: fnv_1a(text.as_bytes()) }
    }

    pub(super) fn find(path: &str) -> Option<&'static Self> {
        [&STYLE, &SCRIPT, &ICON].into_iter().find(|asset| asset.path == path)
    }

    /// The address that pages link to. It changes with the content, so that browsers may keep the file.
    pub(super) fn url(&self) -> String {
        format!("{}?v={:016x}", self.path, self.hash)
    }

    pub(super) fn response(&self, request: &HeaderMap) -> Response<ResponseBody> {
        let tag = format!("\"{:016x}\"", self.hash);
        let known = request.get(IF_NONE_MATCH).and_then(|tags| tags.to_str().ok());
        let is_known = known.is_some_and(|tags| tags.split(',').any(|known| known.trim().ends_with(&tag)));
        let body =
            if is_known { ResponseBody::empty() } else { ResponseBody::full(Bytes::from_static(self.text.as_bytes())) };
        let mut response = Response::new(body);
        if is_known {
            *response.status_mut() = StatusCode::NOT_MODIFIED;
        }
        protect(&mut response);
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(self.content_type));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("max-age=31536000, immutable"));
        if let Ok(tag) = HeaderValue::from_str(&tag) {
            headers.insert(ETAG, tag);
        }
        response
    }
}

/// The FNV-1a hash of some bytes, by Fowler, Noll and Vo.
const fn fnv_1a(bytes: &[u8]) -> u64 {
    let (mut hash, mut index) = (0xcbf2_9ce4_8422_2325_u64, 0);
    while index < bytes.len() {
        hash = (hash ^ bytes[index] as u64).wrapping_mul(0x0100_0000_01b3);
        index += 1;
    }
    hash
}
