//! The text form of reservations: `Tidegate-Reservation`, a structured field (RFC 9651).
//!
//! A refusal carries `Tidegate-Reservation: TOKEN;at=MILLISECONDS;wait=MILLISECONDS`, where `at` is the instant since the
//! Unix epoch, and `wait` the time until then, both rounded up. The caller returns then, with `Tidegate-Reservation: TOKEN`
//! in its request.

use std::fmt;
use std::str::FromStr;

use http::{HeaderMap, HeaderName};
use sfv::{Item, Parser};
use tidegate_core::decision::GivenReservation;
use tidegate_core::{Key, Span, Time};

use crate::key::KeySeed;

/// The name of the header in refusals, and in requests that present a reservation.
pub const TIDEGATE_RESERVATION: HeaderName = HeaderName::from_static("tidegate-reservation");

/// The number of hexadecimal digits of an instant, which has 52 bits.
const INSTANT_DIGITS: usize = 13;
const SIGNATURE_DIGITS: usize = 16;
/// The wait for a reservation that tells none, and whose instant is over by a clock that runs ahead: less than most graces.
const WAIT_BY_FAST_CLOCK: Span = Span::from_millis(200);
/// The maximum length of a token in the header, in bytes.
const MAX_TOKEN: usize = 128;

/// A reservation's instant, and the signature that only the gates of one store can make. Written as `r` and 29 hexadecimal
/// digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationToken(GivenReservation);

impl ReservationToken {
    /// The token of a reservation that a decision gave.
    pub fn new(reservation: GivenReservation) -> Self {
        Self(reservation)
    }

    /// The instant of the token, if it belongs to this caller of the limit with this tag and key; otherwise `None`.
    pub fn instant_for(self, seed: &KeySeed, limit: u64, key: Key, caller: u64) -> Option<Time> {
        let GivenReservation { at, signature } = self.0;
        (seed.reservation_signature(limit, key, caller, at) == signature).then_some(at)
    }

    /// The token in a request's header. A header that isn't a single item (RFC 9651) with a token of at most 128 characters
    /// is ignored.
    ///
    /// # Errors
    /// It is no token of a gate.
    pub fn in_headers(headers: &HeaderMap) -> Option<Result<Self, ReservationTokenError>> {
        let mut lines = headers.get_all(TIDEGATE_RESERVATION).iter();
        let line = lines.next().filter(|_| lines.next().is_none())?;
        Some(read_token(&read_item(line.as_bytes())?)?.parse())
    }

    /// The instant in milliseconds since the Unix epoch, rounded up.
    pub fn at_millis(self) -> u64 {
        self.0.at.as_micros().div_ceil(1000)
    }
}

/// A text that is no token of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a reservation is an `r` and 29 hexadecimal digits, as the refusal gave it")]
pub struct ReservationTokenError;

impl FromStr for ReservationToken {
    type Err = ReservationTokenError;
    fn from_str(text: &str) -> Result<Self, ReservationTokenError> {
        let digits = text.strip_prefix('r').filter(|digits| {
            digits.len() == INSTANT_DIGITS + SIGNATURE_DIGITS && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
        });
        let (at, signature) = digits.ok_or(ReservationTokenError)?.split_at(INSTANT_DIGITS);
        let number = |digits| u64::from_str_radix(digits, 16).map_err(|_| ReservationTokenError);
        Ok(Self(GivenReservation { at: Time::from_micros(number(at)?), signature: number(signature)? }))
    }
}

impl fmt::Display for ReservationToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GivenReservation { at, signature } = self.0;
        write!(f, "r{:0INSTANT_DIGITS$x}{signature:0SIGNATURE_DIGITS$x}", at.as_micros())
    }
}

/// A reservation in a reply, of any server that follows the same rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplyReservation {
    /// The token to send back.
    pub token: String,
    /// The instant from which the server admits the call, by its clock.
    pub at: Time,
    /// The time until then, counted from the reply, for clients whose clock differs; at least a millisecond.
    pub wait: Option<Span>,
}

impl ReplyReservation {
    /// The time until the instant, from the reply's arrival at `now` on. `most` is the reply's `Retry-After`: the wait is at
    /// most a second less, and never more. Without [`wait`](Self::wait), it depends on this machine's clock: then it is
    /// 200 ms if the instant is over, because that clock runs ahead of the server's.
    pub fn wait_within(&self, most: Span, now: Time) -> Span {
        let until = if self.at > now { self.at.since(now) } else { WAIT_BY_FAST_CLOCK };
        self.wait.unwrap_or(until).max(most - Span::from_secs(1)).min(most)
    }
}

impl FromStr for ReplyReservation {
    type Err = ReservationTokenError;
    /// Reads the value of a reply's header: a token of at most 128 characters, with the parameter `at`, and maybe `wait`.
    fn from_str(text: &str) -> Result<Self, ReservationTokenError> {
        let item = read_item(text.as_bytes()).ok_or(ReservationTokenError)?;
        let millis = |name| {
            let millis = u64::try_from(i64::from(item.params.get(name)?.as_integer()?)).ok()?;
            Some(Span::from_millis(millis))
        };
        let (token, at) = read_token(&item).zip(millis("at")).ok_or(ReservationTokenError)?;
        Ok(Self { token: token.to_owned(), at: Time::ZERO + at, wait: millis("wait").filter(|wait| !wait.is_zero()) })
    }
}

fn read_item(line: &[u8]) -> Option<Item> {
    Parser::new(line).parse().ok()
}

fn read_token(item: &Item) -> Option<&str> {
    item.bare_item.as_token().map(|token| token.as_str()).filter(|token| token.len() <= MAX_TOKEN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_belong_to_limit_key_caller_and_instant() {
        let (seed, key) = (KeySeed::new([1; 16]), Key::new(2, 3));
        let at = Time::from_micros(1_795_766_358_180_725);
        let reservation = GivenReservation { at, signature: seed.reservation_signature(7, key, 9, at) };
        let token = ReservationToken::new(reservation);
        let text = token.to_string();
        assert_eq!((text.len(), u64::from_str_radix(&text[1..14], 16)), (30, Ok(at.as_micros())));
        assert_eq!(text.parse(), Ok(token));
        assert_eq!(token.instant_for(&seed, 7, key, 9), Some(at));
        assert_eq!(token.at_millis(), 1_795_766_358_181);
        let others = [
            token.instant_for(&seed, 8, key, 9),
            token.instant_for(&seed, 7, Key::new(2, 4), 9),
            token.instant_for(&seed, 7, key, 10),
            token.instant_for(&KeySeed::new([2; 16]), 7, key, 9),
            ReservationToken::new(GivenReservation { at: at + Span::from_micros(1), ..reservation })
                .instant_for(&seed, 7, key, 9),
        ];
        assert_eq!(others, [None; 5]);
        for wrong in [
            "",
            "r",
            &text[1..],
            &text[..29],
            &format!("{text}0"),
            &text.replace('r', "q"),
            "r+66140b1eae9d5+23456789012345678",
        ] {
            assert_eq!(wrong.parse::<ReservationToken>(), Err(ReservationTokenError), "{wrong}");
        }
    }

    #[test]
    fn headers_that_are_no_single_item_are_ignored() {
        let text = format!("r{}", "0".repeat(29));
        let read = |lines: &[&str]| {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append(TIDEGATE_RESERVATION, http::HeaderValue::from_str(line).expect("printable"));
            }
            ReservationToken::in_headers(&headers)
        };
        let token = text.parse().ok();
        for line in [text.clone(), format!(" {text} "), format!("{text};at=5;b")] {
            assert_eq!(read(&[&line]), token.map(Ok), "{line}");
        }
        let longest = "a".repeat(MAX_TOKEN);
        for wrong in ["r5", "*foreign/token", &longest] {
            assert_eq!(read(&[wrong]), Some(Err(ReservationTokenError)), "{wrong}");
        }
        for lines in [
            &[][..],
            &[""],
            &["5"],
            &[&format!("{longest}a")],
            &[&format!("{text};=")],
            &[&format!("{text}, {text}")],
            &[&text, &text],
        ] {
            assert_eq!(read(lines), None, "{lines:?}");
        }
    }

    #[test]
    fn replies_are_read_strictly() {
        let read = |text: &str| {
            let found = text.parse::<ReplyReservation>().ok()?;
            Some((found.token, found.at.as_micros(), found.wait.map(Span::as_micros)))
        };
        assert_eq!(read("rabc;at=1795766358181"), Some(("rabc".to_owned(), 1_795_766_358_181_000, None)));
        assert_eq!(read("*a/b:c;x=1; at=5;wait=7"), Some(("*a/b:c".to_owned(), 5_000, Some(7_000))));
        for unreadable in ["0", "-1", "1.5", "\"7\"", "?1", "a"] {
            assert_eq!(read(&format!("r;wait={unreadable};at=5")), Some(("r".to_owned(), 5_000, None)), "{unreadable}");
        }
        let long = format!("r{};at=5", "a".repeat(MAX_TOKEN));
        for wrong in [
            "",
            "rabc",
            "rabc;at=",
            "rabc;at=-5",
            "1abc;at=5",
            "\"r\";at=5",
            "r,b;at=5",
            "r;at=1e3",
            "r ;at=5",
            "r;at=5;=",
            "r;at=9999999999999999",
            &long,
        ] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }
}
