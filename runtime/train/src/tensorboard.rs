//! Writes TensorBoard event files with scalars, texts, images and histograms.
//!
//! A file is a sequence of TFRecords (length, masked CRC-32C of the length, bytes, masked CRC-32C of the bytes); each holds a
//! protobuf `Event` { 1: wall_time f64, 2: step i64, 3: file_version, 5: Summary { 1: Value … } }. A `Value` has 1: tag, and one of
//! 2: simple_value f32, 4: Image, 5: HistogramProto, or 8: TensorProto with 9: SummaryMetadata for texts. The fields are defined in
//! tensorflow/core/util/event.proto, summary.proto, tensor.proto and tensor_shape.proto.

use perilune_lua::{Histogram, LoggedImage};
use perilune_policy::Directory;
use std::fs::File;
use std::io::{BufWriter, Result, Write};

/// The first part of the names of event files, by which TensorBoard finds them.
const PREFIX: &str = "events.out.tfevents.";

/// Whether a file has the name of an event file.
pub fn is_file_name(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// A value of a step.
#[derive(Clone, Copy, Debug)]
pub enum Summary<'a> {
    Scalar(f64),
    Text(&'a str),
    Image(&'a LoggedImage),
    Histogram(&'a Histogram),
}

/// TensorProto.dtype of strings (tensorflow/core/framework/types.proto).
const DT_STRING: u64 = 7;

impl Summary<'_> {
    /// Appends the fields of a `Value` that follow its tag.
    fn write(self, out: &mut Vec<u8>) {
        match self {
            Summary::Scalar(v) => {
                out.push(2 << 3 | 5);
                out.extend((v as f32).to_le_bytes());
            }
            Summary::Image(image) => {
                let mut proto = Vec::new();
                for (field, n) in [(1, image.height), (2, image.width), (3, image.channels)] {
                    integer(&mut proto, field, n as u64);
                }
                bytes(&mut proto, 4, &image.png);
                bytes(out, 4, &proto);
            }
            Summary::Histogram(h) => {
                let mut proto = Vec::new();
                let ends = [h.edges.first(), h.edges.last()].map(|edge| edge.copied().unwrap_or(0.0));
                let count: u64 = h.counts.iter().sum();
                for (field, v) in [(1, ends[0]), (2, ends[1]), (3, count as f64), (4, h.sum), (5, h.sum_squares)] {
                    double(&mut proto, field, v);
                }
                packed(&mut proto, 6, h.edges.iter().skip(1).copied());
                packed(&mut proto, 7, h.counts.iter().map(|n| *n as f64));
                bytes(out, 5, &proto);
            }
            Summary::Text(text) => {
                // A string tensor of shape {1}; the plugin's name selects the tab.
                let (mut dim, mut shape, mut tensor, mut plugin, mut metadata) =
                    (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
                integer(&mut dim, 1, 1);
                bytes(&mut shape, 2, &dim);
                integer(&mut tensor, 1, DT_STRING);
                bytes(&mut tensor, 2, &shape);
                bytes(&mut tensor, 8, text.as_bytes());
                bytes(&mut plugin, 1, b"text");
                bytes(&mut metadata, 1, &plugin);
                bytes(out, 8, &tensor);
                bytes(out, 9, &metadata);
            }
        }
    }
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

    /// Appends values of a step.
    pub fn values<'a>(
        &mut self,
        wall_time: f64,
        step: u64,
        values: impl Iterator<Item = (&'a str, Summary<'a>)>,
    ) -> Result<()> {
        let mut summary = Vec::new();
        for (tag, v) in values {
            let mut value = Vec::new();
            bytes(&mut value, 1, tag.as_bytes());
            v.write(&mut value);
            bytes(&mut summary, 1, &value);
        }
        let mut event = Vec::new();
        double(&mut event, 1, wall_time);
        integer(&mut event, 2, step);
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

fn integer(out: &mut Vec<u8>, field: u8, v: u64) {
    out.push(field << 3);
    varint(out, v);
}

fn packed(out: &mut Vec<u8>, field: u8, values: impl Iterator<Item = f64>) {
    bytes(out, field, &values.flat_map(f64::to_le_bytes).collect::<Vec<u8>>());
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

/// CRC-32C (Castagnoli) of every byte, in reversed bit order.
const CRC_OF_BYTE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (mut crc, mut bit) = (byte as u32, 0);
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

fn crc32c(data: &[u8]) -> u32 {
    !data.iter().fold(!0u32, |crc, b| crc >> 8 ^ CRC_OF_BYTE[usize::from(crc as u8 ^ b)])
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
