//! The servers' addresses, from a URL.

use std::fmt;
use std::sync::Arc;

use percent_encoding::percent_decode_str;
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, ProtocolVersion, RedisConnectionInfo};

const SERVER_PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

/// The error of a URL. Its text repeats no part of the URL, because there may be a password in it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RedisUrlError {
    /// An unknown scheme.
    #[error(
        "a store's URL begins with redis://, rediss://, redis-cluster://, rediss-cluster://, redis-sentinel:// or \
         rediss-sentinel://"
    )]
    Scheme,
    /// No host, or several where one is expected.
    #[error("the store's URL names no host, or more than one that isn't part of a cluster or a sentinel")]
    Hosts,
    /// An invalid port.
    #[error("a port in the store's URL is no number from 1 to 65535")]
    Port,
    /// An invalid database.
    #[error("the database in the store's URL is no number")]
    Database,
    /// A user or password that isn't UTF-8.
    #[error("user or password in the store's URL are no percent-encoded UTF-8")]
    Credentials,
    /// A sentinel's URL without the name of the service.
    #[error("a sentinel's URL ends with the service's name: redis-sentinel://HOST:PORT/SERVICE")]
    Service,
    /// Parameters, which aren't supported.
    #[error("the store's URL has parameters, and takes none")]
    Parameters,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Topology {
    SingleServer,
    /// Some nodes of a cluster.
    Cluster,
    /// Sentinels, for the master of a service.
    Sentinel(Arc<str>),
}

#[derive(Clone)]
pub(super) struct RedisAddress {
    pub(super) topology: Topology,
    pub(super) hosts: Vec<(String, u16)>,
    pub(super) is_encrypted: bool,
    /// The log-in to the servers; not to the sentinels.
    pub(super) login: RedisConnectionInfo,
}

impl fmt::Debug for RedisAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisAddress")
            .field("topology", &self.topology)
            .field("hosts", &self.hosts)
            .finish_non_exhaustive()
    }
}

impl RedisAddress {
    /// Parses `SCHEME://[[USER]:PASSWORD@]HOST[:PORT][,HOST[:PORT]…][/DATABASE]`; of sentinels, `/SERVICE[/DATABASE]`.
    pub(super) fn parse(url: &str) -> Result<Self, RedisUrlError> {
        let (scheme, rest) = url.split_once("://").ok_or(RedisUrlError::Scheme)?;
        let (is_encrypted, mut topology) = match scheme {
            "redis" => (false, Topology::SingleServer),
            "rediss" => (true, Topology::SingleServer),
            "redis-cluster" => (false, Topology::Cluster),
            "rediss-cluster" => (true, Topology::Cluster),
            "redis-sentinel" => (false, Topology::Sentinel(Arc::default())),
            "rediss-sentinel" => (true, Topology::Sentinel(Arc::default())),
            _ => return Err(RedisUrlError::Scheme),
        };
        if rest.contains(['?', '#']) {
            return Err(RedisUrlError::Parameters);
        }
        let (login, rest) = rest.rsplit_once('@').map_or((None, rest), |(login, rest)| (Some(login), rest));
        let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
        let mut database = path.trim_end_matches('/');
        let mut port = SERVER_PORT;
        if let Topology::Sentinel(name) = &mut topology {
            let (service, rest) = database.split_once('/').unwrap_or((database, ""));
            if service.is_empty() {
                return Err(RedisUrlError::Service);
            }
            (*name, database, port) = (service.into(), rest, SENTINEL_PORT);
        }
        let hosts: Vec<_> = hosts.split(',').map(|host| host_and_port(host, port)).collect::<Result<_, _>>()?;
        if topology == Topology::SingleServer && hosts.len() != 1 {
            return Err(RedisUrlError::Hosts);
        }
        let mut info = RedisConnectionInfo::default().set_protocol(ProtocolVersion::RESP3);
        if !database.is_empty() {
            info = info.set_db(database.parse().map_err(|_| RedisUrlError::Database)?);
        }
        if let Some(login) = login {
            let (user, password) = login.split_once(':').unwrap_or((login, ""));
            let decoded = |text| percent_decode_str(text).decode_utf8().map_err(|_| RedisUrlError::Credentials);
            if !user.is_empty() {
                info = info.set_username(decoded(user)?);
            }
            if !password.is_empty() {
                info = info.set_password(decoded(password)?);
            }
        }
        Ok(Self { topology, hosts, is_encrypted, login: info })
    }

    /// The named hosts with their connection options.
    pub(super) fn connection_infos(&self) -> Result<Vec<ConnectionInfo>, redis::RedisError> {
        let connection_info = |(host, port): &(String, u16)| {
            let (host, port) = (host.clone(), *port);
            let address = if self.is_encrypted {
                ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None }
            } else {
                ConnectionAddr::Tcp(host, port)
            };
            let info = address.into_connection_info()?;
            Ok(match self.topology {
                Topology::Sentinel(_) => info,
                _ => info.set_redis_settings(self.login.clone()),
            })
        };
        self.hosts.iter().map(connection_info).collect()
    }
}

/// `HOST`, `HOST:PORT`, `[V6]` or `[V6]:PORT`.
fn host_and_port(text: &str, port: u16) -> Result<(String, u16), RedisUrlError> {
    let (host, tail) = match text.strip_prefix('[') {
        Some(rest) => rest.split_once(']').ok_or(RedisUrlError::Hosts)?,
        None => text.find(':').map_or((text, ""), |colon| text.split_at(colon)),
    };
    if host.is_empty() {
        return Err(RedisUrlError::Hosts);
    }
    let port = match tail.strip_prefix(':') {
        Some(digits) => digits.parse().ok().filter(|port| *port > 0).ok_or(RedisUrlError::Port)?,
        None if tail.is_empty() => port,
        None => return Err(RedisUrlError::Hosts),
    };
    Ok((host.to_owned(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_redis_urls_are_parsed() {
        let hosts = |url: &str| RedisAddress::parse(url).map(|address| address.hosts);
        assert_eq!(hosts("redis://localhost"), Ok(vec![("localhost".into(), 6379)]));
        assert_eq!(hosts("rediss://[::1]:7000/3"), Ok(vec![("::1".into(), 7000)]));
        assert_eq!(hosts("redis-cluster://a:1,b,c:3"), Ok(vec![("a".into(), 1), ("b".into(), 6379), ("c".into(), 3)]));
        let sentinel = RedisAddress::parse("redis-sentinel://u:p%40ss@a,b:5/mymaster/2").unwrap();
        assert_eq!((sentinel.topology.clone(), sentinel.hosts.len()), (Topology::Sentinel("mymaster".into()), 2));
        assert_eq!(sentinel.hosts[0].1, 26379);
        let login = &sentinel.login;
        assert_eq!((login.username(), login.password(), login.db()), (Some("u"), Some("p@ss"), 2));
        let login = RedisAddress::parse("redis://:s%3Acret@h/0").unwrap().login;
        assert_eq!((login.username(), login.password()), (None, Some("s:cret")));
    }

    #[test]
    fn url_errors_hide_the_password() {
        for (url, error) in [
            ("http://:hunter2@h", RedisUrlError::Scheme),
            ("hunter2", RedisUrlError::Scheme),
            ("redis://:hunter2@", RedisUrlError::Hosts),
            ("redis://:hunter2@a,b", RedisUrlError::Hosts),
            ("redis://:hunter2@a:0", RedisUrlError::Port),
            ("redis://:hunter2@a:70000", RedisUrlError::Port),
            ("redis://:hunter2@a/x", RedisUrlError::Database),
            ("redis-sentinel://:hunter2@a", RedisUrlError::Service),
            ("redis://:hunter2%ff@a", RedisUrlError::Credentials),
            ("redis://:hunter2@a?db=3", RedisUrlError::Parameters),
        ] {
            let found = RedisAddress::parse(url).unwrap_err();
            assert_eq!(found, error, "{url}");
            assert!(!found.to_string().contains("hunter2"));
        }
        let address = RedisAddress::parse("redis://me:hunter2@a").unwrap();
        assert!(!format!("{address:?} {:?}", address.connection_infos()).contains("hunter2"));
    }
}
