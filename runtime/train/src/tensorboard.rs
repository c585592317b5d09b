//! Writes TensorBoard event files with scalars.
//!
//! A file is a sequence of TFRecords (length, masked CRC-32C of the length, bytes, masked CRC-32C of the bytes); each holds a
//! protobuf `Event` { 1: wall_time f64, 2: step i64, 3: file_version, 5: Summary { 1: Value { 1: tag, 2: simple_value f32 } } }.
//! tensorflow/core/util/event.proto and summary.proto define the other fields, which curves do not need.

use perilune_policy::Directory;
use std::fs::File;
use std::io::{BufWriter, Result, Write};

/// The first part of the names of event files, by which TensorBoard finds them.
const PREFIX: &str = "events.out.tfevents.";

/// Whether a file has the name of an event file.
pub fn is_file_name(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// An open event file.
pub struct EventFile {
    out: BufWriter<File>,
}

impl EventFile {
    /// Creates `DIR/events.out.tfevents.TIME.HOST.PID.NUMBER`, with the first free number.
    pub fn create(dir: &Directory, wall_time: f64, host: &str) -> crate::Result<EventFile> {
        let stem = format!("{PREFIX}{:.0}.{host}.{}", wall_time.floor(), std::process::id());
        // A process that resumes its own run within a second needs a different name for each file.
        let mut number = 0;
        let file = loop {
            match dir.create_new(&format!("{stem}.{number}")) {
                Err(e) if e.is_already_there() && number < 1000 => number += 1,
                other => break other?,
            }
        };
        let mut file = EventFile { out: BufWriter::new(file) };
        let mut event = Vec::new();
        double(&mut event, 1, wall_time);
        bytes(&mut event, 3, b"brain.Event:2");
        let written = file.record(&event).and_then(|()| file.flush());
        written.map_err(crate::error::disk("write to", dir.path()))?;
        Ok(file)
    }

    /// Appends the scalars of a step.
    pub fn scalars<'a>(
        &mut self,
        wall_time: f64,
        step: u64,
        values: impl Iterator<Item = (&'a str, f64)>,
    ) -> Result<()> {
        let mut summary = Vec::new();
        for (tag, v) in values {
            let mut value = Vec::new();
            bytes(&mut value, 1, tag.as_bytes());
            value.push(2 << 3 | 5);
            value.extend((v as f32).to_le_bytes());
            bytes(&mut summary, 1, &value);
        }
        let mut event = Vec::new();
        double(&mut event, 1, wall_time);
        event.push(2 << 3);
        varint(&mut event, step);
        bytes(&mut event, 5, &summary);
        self.record(&event)
    }

    fn record(&mut self, data: &[u8]) -> Result<()> {
        let length = (data.len() as u64).to_le_bytes();
        self.out.write_all(&length)?;
        self.out.write_all(&masked(&length).to_le_bytes())?;
        self.out.write_all(data)?;
        self.out.write_all(&masked(data).to_le_bytes())
    }

    /// Flushes the buffer.
    pub fn flush(&mut self) -> Result<()> {
        self.out.flush()
    }
}

fn varint(out: &mut Vec<u8>, mut v: u64) {
    while v >= 0x80 {
        out.push(v as u8 | 0x80);
        v >>= 7;
    }
    out.push(v as u8);
}

fn double(out: &mut Vec<u8>, field: u8, v: f64) {
    out.push(field << 3 | 1);
    out.extend(v.to_le_bytes());
}

fn bytes(out: &mut Vec<u8>, field: u8, v: &[u8]) {
    out.push(field << 3 | 2);
    varint(out, v.len() as u64);
    out.extend(v);
}

fn masked(data: &[u8]) -> u32 {
    crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Computes CRC-32C (Castagnoli), one bit at a time: a record has some dozens of bytes.
fn crc32c(data: &[u8]) -> u32 {
    !data.iter().fold(!0u32, |crc, b| {
        (0..8).fold(crc ^ u32::from(*b), |c, _| if c & 1 == 1 { c >> 1 ^ 0x82f6_3b78 } else { c >> 1 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc_gives_the_check_value_of_the_catalogue() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa); // RFC 3720, B.4
    }

    #[test]
    fn a_long_varint_has_seven_bits_a_byte() {
        let mut out = Vec::new();
        varint(&mut out, 300);
        assert_eq!(out, [0xac, 0x02]);
    }
}
