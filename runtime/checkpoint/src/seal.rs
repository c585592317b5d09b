//! Seals records and logs with BLAKE3 hashes, so that a reader detects later changes.
//!
//! A record is a JSON object in its own file. Its last field contains the hash of its text. A log has one JSON object per
//! line, and is a hash chain: the last field of a line contains the hash of that line and of the seal before it. A line that was
//! edited, inserted, removed or moved breaks the chain there.
//!
//! A seal has no secret: a program that changes a file can compute its seals again. The author of a file is proved by a
//! signature, and the correctness of a run by a replay.

use serde_json::{Map, Value};

/// The last field of a record.
pub const RECORD_SEAL: &str = "blake3";
/// The last field of a line of a log.
pub const LINE_SEAL: &str = "seal";
/// Hexadecimal digits of a line's seal: 128 bits.
const DIGITS: usize = 32;

/// Returns the text of a record with its seal: the BLAKE3 hash of the text with an empty string in the seal's place.
pub fn seal(mut record: Map<String, Value>) -> String {
    record.shift_remove(RECORD_SEAL);
    record.insert(RECORD_SEAL.into(), "".into());
    let mut text = format!("{:#}\n", Value::Object(record));
    let hash = blake3::hash(text.as_bytes()).to_hex();
    if let Some(at) = text.rfind("\"\"") {
        text.insert_str(at + 1, &hash);
    }
    text
}

/// Removes the seal of a record after checking it against the text from which the record was parsed. The error states the violated
/// rule.
pub fn unseal(record: &mut Map<String, Value>, text: &str) -> Result<(), String> {
    let stated = record.shift_remove(RECORD_SEAL).as_ref().and_then(Value::as_str).map(String::from);
    let place = stated.as_ref().filter(|s| !s.is_empty()).and_then(|s| Some((text.rfind(s.as_str())?, s)));
    let Some((at, stated)) = place else {
        return Err("must be the hash of the record".into());
    };
    let (mut hasher, end) = (blake3::Hasher::new(), at + stated.len());
    hasher.update(&text.as_bytes()[..at]).update(&text.as_bytes()[end..]);
    let found = hasher.finalize().to_hex();
    if found.as_str() != stated {
        return Err(format!("is {stated}, but the hash of the record is {found}: the file was changed or damaged"));
    }
    Ok(())
}

/// The chain of a log up to the last written or read line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chain {
    head: String,
}

impl Chain {
    /// Starts the chain of a log. `origin` names the log and its run, so that lines of another log do not continue it.
    pub fn new(origin: &str) -> Chain {
        Chain { head: short(blake3::Hasher::new().update(origin.as_bytes())) }
    }

    /// Returns the seal of the last line, or of the origin.
    pub fn head(&self) -> &str {
        &self.head
    }

    /// Returns the line with its seal, which becomes the head. `line` is a JSON object with at least one field.
    pub fn append(&mut self, line: &str) -> String {
        let line = line.trim_end();
        let body = line.strip_suffix('}').unwrap_or(line);
        self.head = self.next(body);
        format!("{body},\"{LINE_SEAL}\":\"{}\"}}", self.head)
    }

    /// Checks that a line of the log continues the chain. The error states the violated rule.
    pub fn follow(&mut self, line: &str) -> Result<(), String> {
        let (body, stated) = split(line).ok_or_else(|| format!("{LINE_SEAL}: is missing"))?;
        let found = self.next(body);
        if found != stated {
            return Err(format!(
                "{LINE_SEAL}: is {stated}, but the hash of this line and the lines before it is {found}"
            ));
        }
        self.head = found;
        Ok(())
    }

    /// Computes the seal of a line without its last brace.
    fn next(&self, body: &str) -> String {
        short(blake3::Hasher::new().update(self.head.as_bytes()).update(b"\n").update(body.as_bytes()))
    }
}

/// Splits a sealed line into the text before the seal, and the seal.
fn split(line: &str) -> Option<(&str, &str)> {
    let inside = line.strip_suffix("\"}")?;
    let (before, stated) = inside.split_at_checked(inside.len().checked_sub(DIGITS)?)?;
    Some((before.strip_suffix(&format!(",\"{LINE_SEAL}\":\""))?, stated))
}

/// Returns a line without its seal, or unchanged if it has none.
pub fn unsealed(line: &str) -> String {
    split(line).map_or_else(|| line.to_string(), |(body, _)| format!("{body}}}"))
}

fn short(hasher: &blake3::Hasher) -> String {
    hasher.finalize().to_hex()[..DIGITS].to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn object(v: Value) -> Map<String, Value> {
        v.as_object().expect("an object").clone()
    }

    #[test]
    fn a_record_opens_only_as_it_was_sealed() {
        let record = object(json!({ "lr": 0.5, "note": "\"\"", "list": [1, 2] }));
        let text = seal(record.clone());
        let parse = |text: &str| object(serde_json::from_str(text).expect("JSON"));
        let mut opened = parse(&text);
        assert_eq!(unseal(&mut opened, &text), Ok(()));
        assert_eq!(opened, record);
        assert_eq!(seal(opened), text);

        let changed = text.replace("0.5", "0.25");
        let error = unseal(&mut parse(&changed), &changed).expect_err("changed");
        assert!(error.contains("the file was changed or damaged"), "{error}");
        let bare = json!({ "lr": 0.5 }).to_string();
        assert_eq!(unseal(&mut parse(&bare), &bare), Err("must be the hash of the record".into()));
    }

    #[test]
    fn every_changed_byte_of_a_record_is_found() {
        let text = seal(object(json!({ "params": { "lr": 0.1 }, "seed": 3 })));
        for at in 0..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] ^= 1;
            let Ok(changed) = String::from_utf8(bytes) else { continue };
            let Ok(Value::Object(mut record)) = serde_json::from_str(&changed) else { continue };
            assert!(unseal(&mut record, &changed).is_err(), "byte {at}");
        }
    }

    /// Each of five lines is edited, removed, duplicated and swapped with the next.
    #[test]
    fn a_log_is_read_only_in_the_order_in_which_it_was_written() {
        let mut chain = Chain::new("run metrics.jsonl");
        let lines: Vec<String> = (0..5).map(|k| chain.append(&json!({ "step": k }).to_string())).collect();
        let read = |lines: &[String]| {
            let mut chain = Chain::new("run metrics.jsonl");
            lines.iter().enumerate().find_map(|(k, line)| chain.follow(line).err().map(|_| k)).map_or(Ok(chain), Err)
        };
        assert_eq!(read(&lines), Ok(chain));
        assert_eq!(unsealed(&lines[3]), r#"{"step":3}"#);
        assert_eq!(serde_json::from_str::<Value>(&lines[3]).expect("JSON")["step"], 3);
        for k in 0..5 {
            let mut edited = lines.clone();
            edited[k] = edited[k].replacen(&k.to_string(), "9", 1);
            assert_eq!(read(&edited), Err(k));
            let mut doubled = lines.clone();
            doubled.insert(k, lines[k].clone());
            assert_eq!(read(&doubled), Err(k + 1));
            if k < 4 {
                let mut without = lines.clone();
                without.remove(k);
                assert_eq!(read(&without), Err(k));
                let mut exchanged = lines.clone();
                exchanged.swap(k, k + 1);
                assert_eq!(read(&exchanged), Err(k));
            }
        }
        assert!(Chain::new("another metrics.jsonl").follow(&lines[0]).is_err());
        for bad in ["", "{}", "}", "\"}", "{\"step\":0}", "ü\"}", ",\"seal\":\"\"}"] {
            assert!(Chain::new("run metrics.jsonl").follow(bad).is_err(), "{bad}");
        }
    }
}
