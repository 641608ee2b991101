//! The announcements of nodes, as one hash.

use tidegate_core::Time;

use super::{RedisInner, invalid_response_error};
use crate::announcement::stored::{self, StoredNodes};
use crate::{AnnouncedNode, Announcement, StoreError, TimeSource};
use redis::Value;

/// The least time for which the hash is kept if the time of announcements isn't the server's, in milliseconds.
const CALLER_TIME_KEPT_MILLIS: u64 = 3_600_000;

impl RedisInner {
    /// Keeps a node's announcement, and returns those of all nodes.
    pub(super) async fn announce(
        &self,
        announcement: &Announcement,
        now: Time,
    ) -> Result<Vec<AnnouncedNode>, StoreError> {
        let (name, field) = (self.key_names.nodes_name(), stored::node_name(announcement.node_id()));
        let (value, caller_time) = (stored::encode_untimed(announcement), now.as_micros().to_le_bytes());
        let uses_caller_time = self.time_source == TimeSource::Caller;
        let kept_for = match announcement.kept_for().as_micros().div_ceil(1000) {
            0 => 0,
            millis if uses_caller_time => millis.max(CALLER_TIME_KEPT_MILLIS),
            millis => millis,
        };
        let kept_for = kept_for.to_string();
        let arguments = [field.as_bytes(), &value, kept_for.as_bytes()];
        let arguments = arguments.into_iter().chain(uses_caller_time.then_some(caller_time.as_slice()));
        let names = std::iter::once(name.as_slice());
        let response = self.run_script(self.scripts.announce(), names, arguments).await;
        let (now, values) =
            parse_response(response.map_err(|error| self.to_store_error(error))?).ok_or_else(invalid_response_error)?;
        let nodes = StoredNodes::read(values, |node_id| stored::node_name(node_id).into_bytes(), now);
        if !nodes.removable.is_empty() {
            let mut remove = redis::cmd("HDEL");
            remove.arg(name).arg(nodes.removable);
            self.send(&remove).await?;
        }
        Ok(nodes.listed)
    }
}

/// The name of a stored announcement, and its bytes.
type NamedBytes = (Vec<u8>, Vec<u8>);

/// The time of a response, and the announcements in it.
fn parse_response(response: Value) -> Option<(Time, Vec<NamedBytes>)> {
    let Value::Array(parts) = response else { return None };
    let [Value::BulkString(time), Value::Array(values)] = <[Value; 2]>::try_from(parts).ok()? else { return None };
    let values = values.into_iter().map(|value| {
        let Value::Array(pair) = value else { return None };
        match <[Value; 2]>::try_from(pair).ok()? {
            [Value::BulkString(name), Value::BulkString(bytes)] => Some((name, bytes)),
            _ => None,
        }
    });
    Some((Time::from_micros(u64::from_le_bytes(time.try_into().ok()?)), values.collect::<Option<_>>()?))
}
