//! Defines which names an entry of a bundle may have.
//!
//! A name is a relative path of plain parts, joined by `/`, that every system can store and that looks like what it is: letters
//! and digits of any script, and `. _ - @ + = , ( )` and spaces inside a part. No part is `.` or `..`, begins with `.` or `-`, or
//! ends with a dot or a space. Two names of one bundle differ in more than the case of letters. Letters that a file system may replace by
//! others, so that two names become one, are refused: parts of Hangul syllables, and ideographs and signs for compatibility.

use crate::error::{Result, refused};

/// Bytes of a name. The header of an entry has 100 for the last parts and 155 for those before.
const LONGEST: usize = 240;
/// Parts of a name.
const DEEPEST: usize = 16;
/// Names of devices on Windows, which no file can have there.
const DEVICES: [&str; 6] = ["con", "prn", "aux", "nul", "com", "lpt"];

/// Checks the name of an entry.
///
/// # Errors
/// It breaks a rule of this module; the error states the rule.
pub fn check(name: &str) -> Result<()> {
    let wrong = |rule: &str| refused(format!("the name {name:?}: {rule}"));
    if name.is_empty() || name.len() > LONGEST {
        return wrong(&format!("must have 1 to {LONGEST} bytes"));
    }
    if name.split('/').count() > DEEPEST {
        return wrong(&format!("must have at most {DEEPEST} parts"));
    }
    for part in name.split('/') {
        let allowed = |c: char| (c.is_alphanumeric() && !is_normalized_away(c)) || "._-@+=,() ".contains(c);
        if let Some(c) = part.chars().find(|c| !allowed(*c)) {
            return wrong(&format!("must not contain {c:?}"));
        }
        if part.is_empty() {
            return wrong("must have no empty part");
        }
        if part.starts_with(['.', '-', ' ']) || part.ends_with(['.', ' ']) {
            return wrong("no part may begin with '.', '-' or a space, or end with '.' or a space");
        }
        let stem = part.split('.').next().unwrap_or(part).trim_end_matches(|c: char| c.is_ascii_digit());
        if DEVICES.iter().any(|device| stem.eq_ignore_ascii_case(device)) {
            return wrong("is that of a device on Windows");
        }
    }
    Ok(())
}

/// Whether normalization (Unicode's form C) replaces a letter, or joins it with the one before.
fn is_normalized_away(c: char) -> bool {
    matches!(c, '\u{1100}'..='\u{11ff}' | '\u{a960}'..='\u{a97f}' | '\u{d7b0}'..='\u{d7ff}' | '\u{2126}' | '\u{212a}' | '\u{212b}')
        || matches!(c, '\u{f900}'..='\u{faff}' | '\u{2f800}'..='\u{2fa1f}')
}

/// Returns the form in which two names of a bundle must differ. Some small letters share a capital one: `ſ` and `s`, `ς` and `σ`.
pub(crate) fn folded(name: &str) -> String {
    name.to_uppercase().to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain_relative_paths() {
        for good in ["a", "run/recipe@57/lib/model.lua", "data/été 2.csv", "a/b/c-d_e.f", "模型.lua"] {
            assert!(check(good).is_ok(), "{good}");
        }
        let long = "x".repeat(241);
        let deep = ["a"; 17].join("/");
        let bad = [
            "",
            "/etc/passwd",
            "a//b",
            "a/",
            "../a",
            "a/../b",
            "a/./b",
            ".hidden",
            "a/.git",
            "-rf",
            "a\\b",
            "C:a",
            "a\0b",
            "a\nb",
            "a\u{202e}b",
            "con",
            "NUL.txt",
            "com1",
            "a/lpt9.x",
            "a.",
            "a ",
            " a",
            &long,
            &deep,
            "a*",
            "~",
            "a|b",
            "a\u{7f}",
            "e\u{301}",
            "\u{1112}\u{1161}\u{11ab}",
            "\u{212b}",
            "\u{f900}",
        ];
        for bad in bad {
            assert!(check(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn names_that_differ_in_case_alone_have_one_form() {
        for (a, b) in [("a/B.lua", "A/b.lua"), ("straße", "STRASSE"), ("ſet", "Set"), ("ΛΟΓΟΣ", "λογος"), ("é", "É")]
        {
            assert_eq!(folded(a), folded(b));
        }
        assert_ne!(folded("e"), folded("é"));
    }
}
