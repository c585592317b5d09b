//! Passes over JSON text by its grammar, without converting it.
//!
//! What it accepts is what `serde_json` accepts of a value that it ignores: words, numbers, strings with their escapes, and brackets that match,
//! up to 64 levels. Text beyond ASCII in such strings is not looked at.

/// The most levels, below the limit of `serde_json`: one bit of a word each.
pub(super) const MAX_DEPTH: u32 = 64;
/// Bytes of a string that are compared together.
const LANES: usize = 32;

/// Whether a byte ends the plain part of a string.
pub(super) fn is_special(byte: u8) -> bool {
    (byte == b'"') | (byte == b'\\') | (byte < 0x20)
}

/// Marks the high bit of bytes that [`is_special`], in the order of memory. Bits above the first one may be wrong.
fn special(word: u64) -> u64 {
    const ONES: u64 = u64::from_ne_bytes([1; 8]);
    let below = |word: u64, bound: u64| word.wrapping_sub(ONES * bound) & !word;
    (below(word ^ (ONES * 0x22), 1) | below(word ^ (ONES * 0x5C), 1) | below(word, 0x20)) & (ONES << 7)
}

/// A text and a place in it. Functions return nothing where the text is another.
pub(super) struct Scan<'a> {
    pub text: &'a [u8],
    pub at: usize,
}

impl<'a> Scan<'a> {
    /// The next byte that is no space.
    #[inline]
    pub fn peek(&mut self) -> Option<u8> {
        loop {
            let byte = *self.text.get(self.at)?;
            if !matches!(byte, b' ' | b'\n' | b'\t' | b'\r') {
                return Some(byte);
            }
            self.at += 1;
        }
    }

    #[inline]
    pub fn next(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.at += 1;
        Some(byte)
    }

    #[inline]
    pub fn expect(&mut self, byte: u8) -> Option<()> {
        (self.next()? == byte).then_some(())
    }

    pub fn rest(&self) -> &'a [u8] {
        self.text.get(self.at..).unwrap_or_default()
    }

    /// Moves to the next quote, backslash or control character.
    #[inline]
    pub fn seek_special(&mut self) {
        let rest = self.rest();
        let (mut from, mut words) = (0, 0);
        while let Some(word) = rest.get(from..).and_then(<[u8]>::first_chunk::<8>) {
            let found = special(u64::from_le_bytes(*word));
            if found != 0 {
                self.at += from + found.trailing_zeros() as usize / 8;
                return;
            }
            (from, words) = (from + 8, words + 8);
            if words == LANES {
                words = 0;
                // A comparison of all lanes has no branches, so the compiler makes vectors of it.
                while let Some(lanes) = rest.get(from..from + LANES)
                    && !lanes.iter().fold(false, |any, b| any | is_special(*b))
                {
                    from += LANES;
                }
            }
        }
        let tail = rest.get(from..).unwrap_or_default();
        self.at += from + tail.iter().position(|b| is_special(*b)).unwrap_or(tail.len());
    }

    /// Reads a string without escapes, behind its first quote.
    #[inline]
    pub fn plain_string(&mut self) -> Option<&'a [u8]> {
        let start = self.at;
        self.seek_special();
        let text = self.text.get(start..self.at)?;
        (*self.text.get(self.at)? == b'"').then_some(())?;
        self.at += 1;
        Some(text)
    }

    /// Passes over a string, behind its first quote.
    pub fn string(&mut self) -> Option<()> {
        loop {
            self.seek_special();
            match *self.text.get(self.at)? {
                b'"' => {
                    self.at += 1;
                    return Some(());
                }
                b'\\' => match *self.text.get(self.at + 1)? {
                    b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => self.at += 2,
                    b'u' => {
                        let digits = self.text.get(self.at + 2..self.at + 6)?;
                        digits.iter().all(u8::is_ascii_hexdigit).then_some(())?;
                        self.at += 6;
                    }
                    _ => return None,
                },
                _ => return None,
            }
        }
    }

    /// Passes over the digits, of which there is one at least.
    pub fn digits(&mut self) -> Option<()> {
        let count = self.rest().iter().take_while(|b| b.is_ascii_digit()).count();
        self.at += count;
        (count > 0).then_some(())
    }

    /// Passes over a number. Returns whether it is an integer.
    pub fn number(&mut self) -> Option<bool> {
        let next = |scan: &Self| scan.text.get(scan.at).copied();
        if next(self) == Some(b'-') {
            self.at += 1;
        }
        match next(self)? {
            b'0' => self.at += 1,
            _ => self.digits()?,
        }
        // Digits behind a zero.
        if next(self).is_some_and(|b| b.is_ascii_digit()) {
            return None;
        }
        let mut integer = true;
        if next(self) == Some(b'.') {
            self.at += 1;
            self.digits()?;
            integer = false;
        }
        if matches!(next(self), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(next(self), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
            integer = false;
        }
        Some(integer)
    }

    /// Passes over a value that begins with `first`, the byte at the place.
    pub fn pass_over(&mut self, first: u8) -> Option<()> {
        // The open brackets: a bit each, set for an object.
        let (mut open, mut depth, mut first) = (0u64, 0u32, first);
        loop {
            match first {
                b'"' => {
                    self.at += 1;
                    self.string()?;
                }
                b'{' | b'[' => {
                    self.at += 1;
                    let object = first == b'{';
                    let next = self.peek()?;
                    if next == if object { b'}' } else { b']' } {
                        self.at += 1;
                    } else {
                        if depth == MAX_DEPTH {
                            return None;
                        }
                        open = open << 1 | u64::from(object);
                        depth += 1;
                        first = if object { self.name()? } else { next };
                        continue;
                    }
                }
                b't' => self.word(b"true")?,
                b'f' => self.word(b"false")?,
                b'n' => self.word(b"null")?,
                _ => {
                    self.number()?;
                }
            }
            // Ends of values.
            loop {
                if depth == 0 {
                    return Some(());
                }
                let object = open & 1 == 1;
                match self.next()? {
                    b',' => {
                        first = if object { self.name()? } else { self.peek()? };
                        break;
                    }
                    b'}' if object => {}
                    b']' if !object => {}
                    _ => return None,
                }
                open >>= 1;
                depth -= 1;
            }
        }
    }

    /// Passes over a name and its colon. Returns the first byte of the value.
    pub fn name(&mut self) -> Option<u8> {
        self.expect(b'"')?;
        self.string()?;
        self.expect(b':')?;
        self.peek()
    }

    pub fn word(&mut self, word: &[u8]) -> Option<()> {
        self.rest().starts_with(word).then_some(())?;
        self.at += word.len();
        Some(())
    }
}
