//! The exit codes of curl (curl(1), "EXIT CODES") and the parts of its output that tell more.

use tidegate_core::Class;
use tidegate_policy::{ReplyReservation, ReservationTokenError, TIDEGATE_RESERVATION};

/// The header with the wait, as `-i` and `-D` print it.
pub(super) const RETRY_AFTER_LINE: &str = "(?i)^retry-after:(.*)";

/// Returns the class of an exit code other than 0.
///
/// Wrong arguments, certificates, failures of this machine, and a server's answer that it has no such thing or doesn't
/// allow it are permanent. Failures of the network and of a server, and unknown codes, are transient. An HTTP error has
/// the class of its status, and is transient if `-s` without `-S` hides the status.
pub(super) fn class_of_exit(code: u8, http_status: Option<u16>) -> Class {
    match code {
        22 => http_status.map_or(Class::Transient, Class::from_status),
        // Protocol, URL, options of this build.
        1..=4
        // FTP: access, commands, uploads, PORT and REST.
        | 9 | 21 | 25 | 30 | 31
        // Local files.
        | 23 | 26 | 36 | 37
        // Ranges, posts, LDAP searches.
        | 33 | 34 | 39
        // Internal errors, interfaces, redirects, options.
        | 41..=43 | 45 | 47..=49
        // Certificates and TLS settings, sizes, rewinds, log-ins.
        | 51 | 53 | 54 | 58..=60 | 62..=67
        // TFTP, except a full disk and an unknown transfer.
        | 68 | 69 | 71 | 73 | 74
        // CA files, missing resources, revocation lists, issuers.
        | 77 | 78 | 82 | 83
        // FTP's PRET and lists; pinned keys, certificate status, callbacks, authentication.
        | 84 | 87 | 88 | 90 | 91 | 93 | 94
        // Client certificates, sizes of values, Encrypted Client Hello.
        | 98 | 100 | 101 => Class::Permanent,
        _ => Class::Transient,
    }
}

/// Returns the status in curl's message about an HTTP error.
pub(super) fn http_status(line: &[u8]) -> Option<u16> {
    let (_, rest) = str::from_utf8(line).ok()?.split_once("(22) The requested URL returned error: ")?;
    rest.get(..3)?.parse().ok().filter(|status| *status >= 400)
}

/// Returns the reservation of a header `Tidegate-Reservation`; `None` for another line.
pub(super) fn reservation(line: &[u8]) -> Option<Result<ReplyReservation, ReservationTokenError>> {
    let (name, value) = str::from_utf8(line).ok()?.split_once(':')?;
    name.eq_ignore_ascii_case(TIDEGATE_RESERVATION.as_str()).then(|| value.trim().parse())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_have_classes() {
        for code in [5, 6, 7, 8, 16, 18, 28, 35, 52, 55, 56, 61, 79, 92, 95, 97, 200] {
            assert_eq!(class_of_exit(code, None), Class::Transient, "{code}");
        }
        for code in [1, 2, 3, 4, 23, 26, 37, 47, 58, 60, 67, 77, 78, 90] {
            assert_eq!(class_of_exit(code, None), Class::Permanent, "{code}");
        }
    }

    #[test]
    fn http_errors_have_their_statuss_class() {
        for (status, class) in [
            (None, Class::Transient),
            (Some(400), Class::Permanent),
            (Some(403), Class::Auth),
            (Some(404), Class::Permanent),
            (Some(408), Class::Transient),
            (Some(429), Class::Throttled),
            (Some(500), Class::Transient),
            (Some(501), Class::Permanent),
            (Some(505), Class::Permanent),
            (Some(503), Class::Transient),
        ] {
            assert_eq!(class_of_exit(22, status), class, "{status:?}");
        }
    }
}
