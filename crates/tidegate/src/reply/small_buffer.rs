//! Small texts, put together on the stack.

use std::fmt;

use tidegate_core::Time;

/// A text that is put together piece by piece: on the stack up to `N` bytes, beyond that in memory of its own.
pub(super) struct SmallBuffer<const N: usize> {
    buffer: [u8; N],
    used: usize,
    spill: Vec<u8>,
}

impl<const N: usize> SmallBuffer<N> {
    pub(super) fn new() -> Self {
        Self { buffer: [0; N], used: 0, spill: Vec::new() }
    }

    #[inline]
    pub(super) fn put(&mut self, bytes: impl AsRef<[u8]>) {
        let bytes = bytes.as_ref();
        if let Some(free) = self.buffer.get_mut(self.used..self.used + bytes.len())
            && self.spill.is_empty()
        {
            free.copy_from_slice(bytes);
            self.used += bytes.len();
        } else {
            self.overflow(bytes);
        }
    }

    #[cold]
    fn overflow(&mut self, bytes: &[u8]) {
        if self.spill.is_empty() {
            self.spill.extend_from_slice(&self.buffer[..self.used]);
        }
        self.spill.extend_from_slice(bytes);
    }

    /// A number in decimal.
    #[inline]
    pub(super) fn put_number(&mut self, number: u64) {
        self.put(DecimalDigits::from_number(number).as_bytes());
    }

    /// A number in decimal, or `null`.
    #[inline]
    pub(super) fn put_optional(&mut self, number: Option<u64>) {
        match number {
            Some(number) => self.put_number(number),
            None => self.put(b"null"),
        }
    }

    #[inline]
    pub(super) fn as_bytes(&self) -> &[u8] {
        if self.spill.is_empty() { &self.buffer[..self.used] } else { &self.spill }
    }
}

/// A string of RFC 9651 §3.3.3.
pub(super) struct QuotedString<'a>(pub(super) &'a str);

impl fmt::Display for QuotedString<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write as _;
        f.write_char('"')?;
        for char in self.0.chars() {
            match char {
                '"' | '\\' => write!(f, "\\{char}")?,
                ' '..='~' => f.write_char(char)?,
                _ => f.write_char('?')?,
            }
        }
        f.write_char('"')
    }
}

/// A string of JSON.
pub(super) struct JsonString<'a>(pub(super) &'a str);

impl fmt::Display for JsonString<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write as _;
        f.write_char('"')?;
        for char in self.0.chars() {
            match char {
                '"' | '\\' => write!(f, "\\{char}")?,
                char if u32::from(char) < 0x20 => write!(f, "\\u{:04x}", u32::from(char))?,
                _ => f.write_char(char)?,
            }
        }
        f.write_char('"')
    }
}

/// `00` to `99`: half the divisions.
const DIGIT_PAIRS: [[u8; 2]; 100] = {
    let mut pairs = [[0; 2]; 100];
    let mut number = 0;
    while number < 100 {
        pairs[number] = [b'0' + (number / 10) as u8, b'0' + (number % 10) as u8];
        number += 1;
    }
    pairs
};

/// A number in decimal, on the stack.
pub(super) struct DecimalDigits {
    buffer: [u8; 20],
    start: usize,
}

impl DecimalDigits {
    #[inline]
    pub(super) fn from_number(mut number: u64) -> Self {
        let mut digits = Self { buffer: [0; 20], start: 20 };
        while number >= 100 {
            digits.start -= 2;
            digits.buffer[digits.start..digits.start + 2].copy_from_slice(&DIGIT_PAIRS[(number % 100) as usize]);
            number /= 100;
        }
        if number >= 10 {
            digits.start -= 2;
            digits.buffer[digits.start..digits.start + 2].copy_from_slice(&DIGIT_PAIRS[number as usize]);
        } else {
            digits.start -= 1;
            digits.buffer[digits.start] = b'0' + number as u8;
        }
        digits
    }

    #[inline]
    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.buffer[self.start..]
    }
}

/// `2026-11-21 12:01:45Z`.
pub(super) struct Timestamp(pub(super) [u8; 20]);

impl Timestamp {
    /// The days-to-civil conversion is Howard Hinnant's ("chrono-compatible low-level date algorithms"), for years
    /// from 1970 on.
    pub(super) fn from_time(at: Time) -> Self {
        let seconds = at.as_secs_ceil();
        let (days, second) = (seconds / 86_400, seconds % 86_400);
        let shifted = days + 719_468;
        let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
        let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
        let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
        let year = year_of_era + era * 400 + u64::from(month <= 2);
        let mut text = *b"0000-00-00 00:00:00Z";
        for (place, width, mut number) in [
            (0, 4, year),
            (5, 2, month),
            (8, 2, day),
            (11, 2, second / 3_600),
            (14, 2, second / 60 % 60),
            (17, 2, second % 60),
        ] {
            for digit in (place..place + width).rev() {
                text[digit] = b'0' + (number % 10) as u8;
                number /= 10;
            }
        }
        Self(text)
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(str::from_utf8(&self.0).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_round_up_to_seconds() {
        for (micros, text) in [
            (0, "1970-01-01 00:00:00Z"),
            (1, "1970-01-01 00:00:01Z"),
            (951_782_399_000_001, "2000-02-29 00:00:00Z"),
            (1_709_251_199_000_000, "2024-02-29 23:59:59Z"),
            (1_709_251_200_000_000, "2024-03-01 00:00:00Z"),
            (4_107_542_400_000_000, "2100-03-01 00:00:00Z"),
            (u64::MAX, "2112-09-17 23:53:48Z"),
        ] {
            assert_eq!(Timestamp::from_time(Time::from_micros(micros)).to_string(), text);
        }
    }

    #[test]
    fn decimal_digits_match_the_standard_format() {
        for number in (0..=1000).chain([9_999, 10_000, 1 << 40, u64::MAX - 1, u64::MAX]) {
            assert_eq!(DecimalDigits::from_number(number).as_bytes(), number.to_string().as_bytes());
        }
    }

    #[test]
    fn long_text_moves_from_stack_to_heap() {
        for pieces in [&["", "abcd"][..], &["abc", "de"], &["abcde"], &["a", "", "bcdefgh", "", "i"]] {
            let mut sheet = SmallBuffer::<4>::new();
            for piece in pieces {
                sheet.put(piece);
            }
            assert_eq!(sheet.as_bytes(), pieces.concat().as_bytes());
        }
    }
}
