//! Reads the footer of a Parquet file, and bounds what the decoder does with it.
//!
//! The decoder of the `parquet` crate descends one call for each level of a schema, so a hostile footer would exhaust the stack. It skips
//! a list of booleans without reading a byte for each, so six bytes would keep it busy for seconds, and a thousand lists for an hour. The
//! walk here is a minimal reader of the Thrift compact protocol over the whole footer, in which every element takes a byte or more.

use crate::error::{Error, Result};
use crate::open_files::OpenFiles;

/// The most levels of a schema.
const MAX_DEPTH: usize = 64;
/// The most bytes of a footer.
const MAX_FOOTER: u64 = 512 << 20;
/// The footer's length and the magic word.
const TAIL: u64 = 8;

/// Reads the footer of a file, whose schema is not nested too deeply.
///
/// # Errors
/// The file is no Parquet file, is encrypted, or is damaged.
pub(crate) fn read(open: &OpenFiles, number: usize) -> Result<Vec<u8>> {
    let (path, len) = (open.path(number), open.len(number));
    let no_parquet = |rule: &str| {
        Error::malformed(path, "file", rule.to_string()).hint("is it a Parquet file, and was it copied completely?")
    };
    if len < 4 + TAIL {
        return Err(no_parquet(&format!("has {len} bytes, too few for a Parquet file")));
    }
    let mut tail = [0; TAIL as usize];
    open.read_at(number, len - TAIL, &mut tail)?;
    let [a, b, c, d, magic @ ..] = tail;
    match &magic {
        b"PAR1" => {}
        b"PARE" => {
            let error = Error::unsupported(path, "file", "is encrypted");
            return Err(error.hint("write it without encryption"));
        }
        _ => return Err(no_parquet("does not end with PAR1")),
    }
    let size = u64::from(u32::from_le_bytes([a, b, c, d]));
    if size > len - TAIL - 4 {
        return Err(no_parquet(&format!("has a footer of {size} bytes, and {len} bytes in all")));
    }
    if size > MAX_FOOTER {
        return Err(Error::too_large(path, "the footer's size in bytes", size, MAX_FOOTER));
    }
    let mut footer = vec![0; size as usize];
    open.read_at(number, len - TAIL - size, &mut footer)?;
    match schema_depth(&footer) {
        None => {
            let error = Error::malformed(path, "footer", "cannot be decoded (it violates Thrift's compact protocol)");
            Err(error.hint("the file is damaged, or uses what this reader lacks; write it again with pyarrow"))
        }
        Some(depth) if depth > MAX_DEPTH => {
            let rule = format!("nests deeper than {MAX_DEPTH} levels");
            Err(Error::malformed(path, "schema", rule).hint("write it with less nesting"))
        }
        Some(_) => Ok(footer),
    }
}

/// The levels of the schema in a footer, counted until they exceed the limit. `None` if the footer is damaged.
fn schema_depth(footer: &[u8]) -> Option<usize> {
    let mut from = Compact(footer);
    let (mut id, mut deepest) = (0, 0);
    while let Some(kind) = from.field(&mut id)? {
        match (id, kind) {
            (2, 9 | 10) => deepest = deepest.max(from.schema()?),
            (_, kind) => from.skip(kind, 0)?,
        }
        if deepest > MAX_DEPTH {
            break;
        }
    }
    Some(deepest)
}

/// The rest of a text in Thrift's compact protocol.
pub(super) struct Compact<'a>(pub &'a [u8]);

impl Compact<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn varint(&mut self) -> Option<u64> {
        let mut out = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            out |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                return Some(out);
            }
        }
        None
    }

    pub fn zigzag(&mut self) -> Option<i64> {
        let word = self.varint()?;
        Some((word >> 1) as i64 ^ -((word & 1) as i64))
    }

    /// The type of the next field of a struct, whose number replaces `id`; `Some(None)` at the end of the struct.
    pub fn field(&mut self, id: &mut i64) -> Option<Option<u8>> {
        let head = self.byte()?;
        if head == 0 {
            return Some(None);
        }
        *id = match head >> 4 {
            0 => self.zigzag()?,
            delta => id.checked_add(i64::from(delta))?,
        };
        Some(Some(head & 0x0F))
    }

    fn list(&mut self) -> Option<(u64, u8)> {
        let head = self.byte()?;
        let size = match head >> 4 {
            15 => self.varint()?,
            size => u64::from(size),
        };
        Some((size, head & 0x0F))
    }

    pub fn skip(&mut self, kind: u8, depth: usize) -> Option<()> {
        if depth > MAX_DEPTH {
            return None;
        }
        match kind {
            // Booleans are in the head of their field.
            1 | 2 => {}
            3 => drop(self.byte()?),
            4..=6 => drop(self.varint()?),
            7 => self.0 = self.0.get(8..)?,
            8 => {
                let size = usize::try_from(self.varint()?).ok()?;
                self.0 = self.0.get(size..)?;
            }
            9 | 10 => {
                let (size, kind) = self.list()?;
                for _ in 0..size {
                    self.item(kind, depth + 1)?;
                }
            }
            11 => {
                let size = self.varint()?;
                let kinds = if size > 0 { self.byte()? } else { 0 };
                for _ in 0..size {
                    self.item(kinds >> 4, depth + 1)?;
                    self.item(kinds & 0x0F, depth + 1)?;
                }
            }
            12 => {
                let mut id = 0;
                while let Some(kind) = self.field(&mut id)? {
                    self.skip(kind, depth + 1)?;
                }
            }
            _ => return None,
        }
        Some(())
    }

    /// Skips an element of a list or map. Neither footers nor page headers have booleans there, which readers take differently: by
    /// the protocol each has a byte of its own.
    fn item(&mut self, kind: u8, depth: usize) -> Option<()> {
        match kind {
            1 | 2 => None,
            kind => self.skip(kind, depth),
        }
    }

    /// The levels of a list of schema elements in depth-first order, counted until they exceed the limit.
    fn schema(&mut self) -> Option<usize> {
        let (count, _) = self.list()?;
        // How many elements each open level still has, and the deepest that was open.
        let (mut open, mut deepest) = (Vec::new(), 0);
        for _ in 0..count {
            let children = self.children()?;
            while open.last() == Some(&0) {
                open.pop();
            }
            if let Some(left) = open.last_mut() {
                *left -= 1;
            }
            if children > 0 {
                open.push(children);
                deepest = deepest.max(open.len());
            }
            if deepest > MAX_DEPTH {
                break;
            }
        }
        Some(deepest)
    }

    /// The number of children of a schema element, which it skips.
    fn children(&mut self) -> Option<u64> {
        let (mut id, mut children) = (0, 0);
        while let Some(kind) = self.field(&mut id)? {
            match (id, kind) {
                (5, 5) => children = u64::try_from(self.zigzag()?).unwrap_or(0),
                (_, kind) => self.skip(kind, 0)?,
            }
        }
        Some(children)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A footer whose schema has one column in `levels` groups.
    fn nested(levels: usize) -> Vec<u8> {
        let mut out = vec![0x15, 0x02, 0x19, 0xFC];
        let mut count = levels + 1;
        while count >= 0x80 {
            out.push(count as u8 | 0x80);
            count >>= 7;
        }
        out.push(count as u8);
        for _ in 0..levels {
            // name = "a" (field 4), num_children = 1 (field 5).
            out.extend_from_slice(&[0x48, 1, b'a', 0x15, 0x02, 0]);
        }
        out.extend_from_slice(&[0x15, 0x02, 0x38, 1, b'b', 0]);
        out.push(0);
        out
    }

    #[test]
    fn lists_take_bytes_for_their_elements() {
        let whole = nested(3);
        let before_end = &whole[..whole.len() - 1];
        // Field 9 is a list of three i32, of three booleans, and of 2^31 - 1 of them; a map from booleans.
        let with = |field: &[u8]| schema_depth(&[before_end, field, &[0]].concat());
        assert_eq!(with(&[0x79, 0x35, 2, 2, 2]), Some(3));
        assert_eq!(with(&[0x79, 0x31, 2, 2, 2]), None);
        assert_eq!(with(&[0x79, 0xF2, 0xFF, 0xFF, 0xFF, 0xFF, 7]), None);
        assert_eq!(with(&[0x7B, 1, 0x15, 2, 2]), None);
        assert_eq!(with(&[0x79, 0xF5, 0xFF, 0xFF, 0xFF, 0xFF, 7]), None);
    }

    #[test]
    fn the_depth_of_a_schema_is_that_of_its_groups() {
        assert_eq!(schema_depth(&nested(1)), Some(1));
        assert_eq!(schema_depth(&nested(40)), Some(40));
        assert_eq!(schema_depth(&nested(100_000)), Some(MAX_DEPTH + 1));
        let whole = nested(3);
        for end in 0..whole.len() {
            assert_eq!(schema_depth(&whole[..end]), None, "{end}");
        }
        // Siblings do not add up: a root of two groups with a column each.
        let two = [
            &[0x19u8, 0x5C][..],
            &[0x48, 1, b'r', 0x15, 0x04, 0],
            &[0x48, 1, b'g', 0x15, 0x02, 0],
            &[0x48, 1, b'x', 0],
            &[0x48, 1, b'h', 0x15, 0x02, 0],
            &[0x48, 1, b'y', 0],
        ]
        .concat();
        let footer = [&[0x15, 0x02][..], &two, &[0]].concat();
        assert_eq!(schema_depth(&footer), Some(2));
    }
}
