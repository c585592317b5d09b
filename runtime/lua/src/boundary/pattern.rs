//! Matches Lua patterns with an interruptible, step-counted port of the matcher of Lua 5.4 (lstrlib.c).
//!
//! The original backtracks for hours on a pattern such as `.-.-.-.-x` and polls no flag. This port has the same grammar,
//! captures, limits and messages; a test of `string_lib.rs` compares the two on random patterns. Names follow the C source.

use perilune_core::{Error, Interrupt};

/// The maximum depth of nested matches before the error "pattern too complex".
const MAX_DEPTH: u32 = 200;
const MAX_CAPTURES: usize = 32;
/// Steps between polls of the interrupt, less than a millisecond.
const LOOK_EVERY: usize = 1 << 14;

const ESC: u8 = b'%';

#[derive(Debug)]
pub enum Problem {
    /// The pattern is malformed.
    Pattern(String),
    Interrupted(Error),
}

type Result<T> = std::result::Result<T, Problem>;

fn malformed<T>(text: impl Into<String>) -> Result<T> {
    Err(Problem::Pattern(text.into()))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Extent {
    Unfinished,
    Position,
    Bytes(usize),
}

/// The value of a capture.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Captured {
    /// Start and end in the subject.
    Text(usize, usize),
    /// A position, counted from 1.
    Position(usize),
}

/// A subject, a pattern without its anchor, and the captures of the last match.
pub struct Matcher<'a> {
    src: &'a [u8],
    pat: &'a [u8],
    level: usize,
    captures: [(usize, Extent); MAX_CAPTURES],
    depth: u32,
    /// The remaining work before the next poll of the interrupt.
    left: usize,
    interrupt: &'a Interrupt,
}

impl<'a> Matcher<'a> {
    pub fn new(src: &'a [u8], pat: &'a [u8], interrupt: &'a Interrupt) -> Matcher<'a> {
        Matcher {
            src,
            pat,
            level: 0,
            captures: [(0, Extent::Unfinished); MAX_CAPTURES],
            depth: MAX_DEPTH,
            left: LOOK_EVERY,
            interrupt,
        }
    }

    /// Returns the end of a match that begins at `s`.
    pub fn match_at(&mut self, s: usize) -> Result<Option<usize>> {
        (self.level, self.depth) = (0, MAX_DEPTH);
        self.do_match(s, 0)
    }

    /// Returns the number of values of a match: its captures, or the whole match if there are none.
    pub fn count(&self) -> usize {
        self.level.max(1)
    }

    /// Returns the number of captures of the last match.
    pub fn captures(&self) -> usize {
        self.level
    }

    /// Returns capture `i` of the match `start..end`; without captures, number 0 is the match.
    pub fn captured(&self, i: usize, start: usize, end: usize) -> Result<Captured> {
        if i >= self.level {
            return if i == 0 {
                Ok(Captured::Text(start, end))
            } else {
                malformed(format!("invalid capture index %{}", i + 1))
            };
        }
        match self.captures[i] {
            (_, Extent::Unfinished) => malformed("unfinished capture"),
            (at, Extent::Position) => Ok(Captured::Position(at + 1)),
            (at, Extent::Bytes(n)) => Ok(Captured::Text(at, at + n)),
        }
    }

    /// Counts work of about `bytes` scanned bytes.
    fn spend(&mut self, bytes: usize) -> Result<()> {
        match self.left.checked_sub(bytes) {
            Some(left) => self.left = left,
            None => {
                self.left = LOOK_EVERY;
                self.interrupt.check().map_err(Problem::Interrupted)?;
            }
        }
        Ok(())
    }

    /// Returns a byte of the pattern; C reads a zero after its end.
    fn p(&self, at: usize) -> u8 {
        self.pat.get(at).copied().unwrap_or(0)
    }

    fn check_capture(&self, digit: u8) -> Result<usize> {
        let l = i32::from(digit) - i32::from(b'1');
        match usize::try_from(l) {
            Ok(l) if l < self.level && self.captures[l].1 != Extent::Unfinished => Ok(l),
            _ => malformed(format!("invalid capture index %{}", l + 1)),
        }
    }

    fn capture_to_close(&self) -> Result<usize> {
        match (0..self.level).rev().find(|&l| self.captures[l].1 == Extent::Unfinished) {
            Some(l) => Ok(l),
            None => malformed("invalid pattern capture"),
        }
    }

    fn class_end(&self, mut p: usize) -> Result<usize> {
        let c = self.p(p);
        p += 1;
        match c {
            ESC if p >= self.pat.len() => malformed("malformed pattern (ends with '%')"),
            ESC => Ok(p + 1),
            b'[' => {
                if self.p(p) == b'^' {
                    p += 1;
                }
                loop {
                    if p >= self.pat.len() {
                        return malformed("malformed pattern (missing ']')");
                    }
                    let c = self.p(p);
                    p += 1;
                    if c == ESC && p < self.pat.len() {
                        p += 1; // skip escapes, as `%]`
                    }
                    if self.p(p) == b']' && p < self.pat.len() {
                        return Ok(p + 1);
                    }
                }
            }
            _ => Ok(p),
        }
    }

    /// Returns whether `c` is in the set from `p`, a `[`, to `end`, its `]`.
    fn in_set(&self, c: u8, mut p: usize, end: usize) -> bool {
        let mut sign = true;
        if self.p(p + 1) == b'^' {
            sign = false;
            p += 1;
        }
        loop {
            p += 1;
            if p >= end {
                return !sign;
            }
            if self.p(p) == ESC {
                p += 1;
                if in_class(c, self.p(p)) {
                    return sign;
                }
            } else if self.p(p + 1) == b'-' && p + 2 < end {
                p += 2;
                if self.p(p - 2) <= c && c <= self.p(p) {
                    return sign;
                }
            } else if self.p(p) == c {
                return sign;
            }
        }
    }

    fn single_match(&self, s: usize, p: usize, ep: usize) -> bool {
        let Some(&c) = self.src.get(s) else { return false };
        match self.p(p) {
            b'.' => true,
            ESC => in_class(c, self.p(p + 1)),
            b'[' => self.in_set(c, p, ep - 1),
            other => other == c,
        }
    }

    fn match_balance(&mut self, s: usize, p: usize) -> Result<Option<usize>> {
        if p + 1 >= self.pat.len() {
            return malformed("malformed pattern (missing arguments to '%b')");
        }
        let (begin, end) = (self.p(p), self.p(p + 1));
        // C reads a zero after the subject's end.
        if self.src.get(s).copied().unwrap_or(0) != begin {
            return Ok(None);
        }
        let mut open = 1;
        for at in s + 1..self.src.len() {
            self.spend(1)?;
            let c = self.src[at];
            if c == end {
                open -= 1;
                if open == 0 {
                    return Ok(Some(at + 1));
                }
            } else if c == begin {
                open += 1;
            }
        }
        Ok(None)
    }

    fn max_expand(&mut self, s: usize, p: usize, ep: usize) -> Result<Option<usize>> {
        let mut i = 0;
        while self.single_match(s + i, p, ep) {
            self.spend(ep - p)?;
            i += 1;
        }
        loop {
            let found = self.do_match(s + i, ep + 1)?;
            if found.is_some() || i == 0 {
                return Ok(found);
            }
            i -= 1;
        }
    }

    fn min_expand(&mut self, mut s: usize, p: usize, ep: usize) -> Result<Option<usize>> {
        loop {
            let found = self.do_match(s, ep + 1)?;
            if found.is_some() {
                return Ok(found);
            }
            if !self.single_match(s, p, ep) {
                return Ok(None);
            }
            s += 1;
        }
    }

    fn start_capture(&mut self, s: usize, p: usize, what: Extent) -> Result<Option<usize>> {
        if self.level >= MAX_CAPTURES {
            return malformed("too many captures");
        }
        self.captures[self.level] = (s, what);
        self.level += 1;
        let found = self.do_match(s, p)?;
        if found.is_none() {
            self.level -= 1;
        }
        Ok(found)
    }

    fn end_capture(&mut self, s: usize, p: usize) -> Result<Option<usize>> {
        let l = self.capture_to_close()?;
        self.captures[l].1 = Extent::Bytes(s - self.captures[l].0);
        let found = self.do_match(s, p)?;
        if found.is_none() {
            self.captures[l].1 = Extent::Unfinished;
        }
        Ok(found)
    }

    /// Returns the end of the repeated text of capture `digit` at `s`, if it matches.
    fn match_capture(&mut self, s: usize, digit: u8) -> Result<Option<usize>> {
        let l = self.check_capture(digit)?;
        if let (_, Extent::Bytes(n)) = self.captures[l] {
            self.spend(n / 16)?;
        }
        Ok(match self.captures[l] {
            (at, Extent::Bytes(n)) if self.src[s..].starts_with(&self.src[at..at + n]) => Some(s + n),
            _ => None,
        })
    }

    fn do_match(&mut self, s: usize, p: usize) -> Result<Option<usize>> {
        if self.depth == 0 {
            return malformed("pattern too complex");
        }
        self.depth -= 1;
        let found = self.run(s, p)?;
        self.depth += 1;
        Ok(found)
    }

    /// The loop that C writes as `goto init`.
    fn run(&mut self, mut s: usize, mut p: usize) -> Result<Option<usize>> {
        loop {
            self.spend(1)?;
            if p >= self.pat.len() {
                return Ok(Some(s));
            }
            match (self.p(p), self.p(p + 1)) {
                (b'(', b')') => return self.start_capture(s, p + 2, Extent::Position),
                (b'(', _) => return self.start_capture(s, p + 1, Extent::Unfinished),
                (b')', _) => return self.end_capture(s, p + 1),
                (b'$', _) if p + 1 == self.pat.len() => return Ok((s == self.src.len()).then_some(s)),
                (ESC, b'b') => match self.match_balance(s, p + 2)? {
                    Some(end) => (s, p) = (end, p + 4),
                    None => return Ok(None),
                },
                (ESC, b'f') => {
                    p += 2;
                    if self.p(p) != b'[' {
                        return malformed("missing '[' after '%f' in pattern");
                    }
                    let ep = self.class_end(p)?;
                    self.spend(ep - p)?;
                    let before = if s == 0 { 0 } else { self.src[s - 1] };
                    let here = self.src.get(s).copied().unwrap_or(0);
                    if self.in_set(before, p, ep - 1) || !self.in_set(here, p, ep - 1) {
                        return Ok(None);
                    }
                    p = ep;
                }
                (ESC, digit @ b'0'..=b'9') => match self.match_capture(s, digit)? {
                    Some(end) => (s, p) = (end, p + 2),
                    None => return Ok(None),
                },
                _ => {
                    let ep = self.class_end(p)?;
                    self.spend(ep - p)?;
                    let suffix = self.p(ep);
                    if !self.single_match(s, p, ep) {
                        if !matches!(suffix, b'*' | b'?' | b'-') {
                            return Ok(None);
                        }
                        p = ep + 1;
                        continue;
                    }
                    match suffix {
                        b'?' => {
                            if let Some(end) = self.do_match(s + 1, ep + 1)? {
                                return Ok(Some(end));
                            }
                            p = ep + 1;
                        }
                        b'+' => return self.max_expand(s + 1, p, ep),
                        b'*' => return self.max_expand(s, p, ep),
                        b'-' => return self.min_expand(s, p, ep),
                        _ => (s, p) = (s + 1, ep),
                    }
                }
            }
        }
    }
}

/// Character classes of the C locale.
fn in_class(c: u8, class: u8) -> bool {
    let found = match class.to_ascii_lowercase() {
        b'a' => c.is_ascii_alphabetic(),
        b'c' => c.is_ascii_control(),
        b'd' => c.is_ascii_digit(),
        b'g' => c.is_ascii_graphic(),
        b'l' => c.is_ascii_lowercase(),
        b'p' => c.is_ascii_punctuation(),
        b's' => matches!(c, b' ' | b'\t'..=b'\r'),
        b'u' => c.is_ascii_uppercase(),
        b'w' => c.is_ascii_alphanumeric(),
        b'x' => c.is_ascii_hexdigit(),
        b'z' => c == 0,
        _ => return class == c,
    };
    found != class.is_ascii_uppercase()
}

/// Returns whether a pattern has no special character and can be searched as text.
pub fn is_plain(pattern: &[u8]) -> bool {
    !pattern.iter().any(|c| b"^$*+?.([%-".contains(c))
}
