//! The check of the URL of a store's server. It is as strict as the parsers of the stores, so that a policy that can't be
//! served isn't accepted.

use std::net::Ipv6Addr;

use percent_encoding::percent_decode_str;

/// A fault of a URL: the message, and the expected form. Neither repeats the URL, which may hold a password.
pub(super) type UrlFault = (&'static str, &'static str);

/// The fault that keeps a store from using the URL of this scheme, whose text after `://` is `rest`.
pub(super) fn find_fault(scheme: &str, rest: &str) -> Option<UrlFault> {
    let is_redis = scheme.starts_with("redis");
    let is_sentinel = scheme.ends_with("-sentinel");
    if is_redis && rest.contains(['?', '#']) {
        return Some(("`url` has parameters", "a URL without them; `?` and `#` of a password are written %3F and %23"));
    }
    // The log-in of a Redis server ends with the last `@`, because its password may have a slash.
    let login_until = if is_redis { rest.len() } else { rest.find(['/', '?', '#']).unwrap_or(rest.len()) };
    let login_end = rest[..login_until].rfind('@');
    let servers = login_end.map_or(rest, |at| &rest[at + 1..]);
    if percent_decode_str(&rest[..login_end.unwrap_or(0)]).decode_utf8().is_err() {
        return Some(("the user or the password in `url` isn't UTF-8", "their letters, or %XX for each byte of them"));
    }
    let (hosts, path) = servers.split_at(servers.find(['/', '?', '#']).unwrap_or(servers.len()));
    let is_several = is_sentinel || scheme.ends_with("-cluster") || scheme == "mongodb";
    let is_sql = !is_redis && scheme != "mongodb";
    if !is_several && hosts.contains(',') {
        return Some(("`url` names several servers", "one HOST:PORT"));
    }
    // A database of this machine may have no host.
    let fault = hosts.split(',').filter(|host| !(is_sql && host.is_empty())).find_map(host_fault);
    fault.or_else(|| if is_redis { redis_path_fault(path, is_sentinel) } else { None })
}

fn host_fault(text: &str) -> Option<UrlFault> {
    const NO_HOST: Option<UrlFault> = Some(("`url` names no valid host", "HOST, HOST:PORT or [IPV6]:PORT after `://`"));
    let is_forbidden = |letter: char| letter.is_whitespace() || letter.is_control() || "[]<>\"\\^`{}|".contains(letter);
    let (is_valid, port) = match text.strip_prefix('[') {
        Some(inside) => {
            let Some((address, port)) = inside.split_once(']') else { return NO_HOST };
            (address.split('%').next().is_some_and(|address| address.parse::<Ipv6Addr>().is_ok()), port)
        }
        None => {
            let (host, port) = text.split_at(text.find(':').unwrap_or(text.len()));
            (!host.is_empty() && !host.contains(is_forbidden), port)
        }
    };
    let is_port = |digits: &str| digits.parse::<u16>().is_ok_and(|port| port > 0);
    match port.strip_prefix(':') {
        _ if !is_valid => NO_HOST,
        None if port.is_empty() => None,
        None => NO_HOST,
        Some(digits) if is_port(digits) => None,
        Some(_) => Some(("the port in `url` is no port's number", "a number from 1 to 65535 after the host and `:`")),
    }
}

/// The fault of `/DATABASE`; of sentinels, `/SERVICE` or `/SERVICE/DATABASE`.
fn redis_path_fault(path: &str, is_sentinel: bool) -> Option<UrlFault> {
    let mut database = path.strip_prefix('/').unwrap_or(path).trim_end_matches('/');
    if is_sentinel {
        let (service, rest) = database.split_once('/').unwrap_or((database, ""));
        if service.is_empty() {
            return Some(("`url` names no service", "redis-sentinel://HOST:PORT/SERVICE"));
        }
        database = rest;
    }
    let is_number = database.is_empty() || database.parse::<u32>().is_ok();
    (!is_number).then_some(("the database in `url` is no number", "a number after the host, such as /0"))
}
