//! Short texts, built on the stack.

/// A text that is built from pieces: on the stack up to `N` bytes, beyond that on the heap.
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

    /// Appends a number in decimal.
    #[inline]
    pub(super) fn put_number(&mut self, number: u64) {
        self.put(DecimalDigits::from_number(number).as_bytes());
    }

    #[inline]
    pub(super) fn as_bytes(&self) -> &[u8] {
        if self.spill.is_empty() { &self.buffer[..self.used] } else { &self.spill }
    }
}

/// Quotes a string as RFC 9651 §3.3.3 says. `?` replaces the characters that it can't contain.
pub(super) fn quoted_string(text: &str) -> String {
    let mut quoted = String::from('"');
    for letter in text.chars() {
        match letter {
            '"' | '\\' => quoted.extend(['\\', letter]),
            ' '..='~' => quoted.push(letter),
            _ => quoted.push('?'),
        }
    }
    quoted + "\""
}

/// The digits of `00` to `99`. Pairs of digits halve the number of divisions.
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

#[cfg(test)]
mod tests {
    use super::*;

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
