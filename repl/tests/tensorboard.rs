//! Reads the event files of a run like TensorBoard, with a parser that shares no code with the writer.
//!
//! TFRecord: length u64, masked CRC-32C of the length, the bytes, their masked CRC-32C (tensorflow/core/lib/io/record_writer.h).
//! The checksum here works bit by bit, the writer's uses a table. Messages are parsed by wire type, without a schema.

#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use std::collections::BTreeMap;
use support::tiny;

fn crc32c(data: &[u8]) -> u32 {
    !data.iter().fold(u32::MAX, |crc, b| {
        (0..8).fold(crc ^ u32::from(*b), |c, _| if c & 1 == 1 { c >> 1 ^ 0x82f6_3b78 } else { c >> 1 })
    })
}

fn unmask(masked: u32) -> u32 {
    masked.wrapping_sub(0xa282_ead8).rotate_left(15)
}

fn records(mut file: &[u8]) -> Vec<Vec<u8>> {
    let mut out = Vec::new();
    let u32_at = |b: &[u8], at: usize| u32::from_le_bytes(b[at..at + 4].try_into().unwrap());
    while !file.is_empty() {
        let n = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        assert_eq!(unmask(u32_at(file, 8)), crc32c(&file[..8]), "checksum of a length");
        let data = &file[12..12 + n];
        assert_eq!(unmask(u32_at(file, 12 + n)), crc32c(data), "checksum of a record");
        out.push(data.to_vec());
        file = &file[16 + n..];
    }
    out
}

enum Field<'a> {
    Varint(u64),
    Fixed64([u8; 8]),
    Bytes(&'a [u8]),
    Fixed32([u8; 4]),
}

fn varint(data: &mut &[u8]) -> u64 {
    let mut out = 0;
    for shift in (0..64).step_by(7) {
        let b = data[0];
        *data = &data[1..];
        out |= u64::from(b & 127) << shift;
        if b < 128 {
            break;
        }
    }
    out
}

fn message(mut data: &[u8]) -> Vec<(u64, Field<'_>)> {
    let mut out = Vec::new();
    while !data.is_empty() {
        let key = varint(&mut data);
        let mut take = |n: usize| {
            let (head, tail) = data.split_at(n);
            data = tail;
            head
        };
        let field = match key & 7 {
            1 => Field::Fixed64(take(8).try_into().unwrap()),
            5 => Field::Fixed32(take(4).try_into().unwrap()),
            0 => Field::Varint(varint(&mut data)),
            2 => {
                let n = varint(&mut data) as usize;
                let (head, tail) = data.split_at(n);
                data = tail;
                Field::Bytes(head)
            }
            t => panic!("wire type {t}"),
        };
        out.push((key >> 3, field));
    }
    out
}

#[test]
fn a_run_writes_event_files_as_tensorboard_wants_them() {
    assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    let p = tiny();
    let r = p.run(&["run", "tiny.lua", "--quiet", "--run-dir", "r"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    let files: Vec<_> = std::fs::read_dir(p.path("r/tb")).unwrap().flatten().collect();
    assert_eq!(files.len(), 1);
    assert!(files[0].file_name().to_string_lossy().starts_with("events.out.tfevents."));
    let mut read: BTreeMap<(String, u64), f32> = BTreeMap::new();
    let mut last_time = 0.0;
    for (k, record) in records(&std::fs::read(files[0].path()).unwrap()).iter().enumerate() {
        let (mut step, mut version) = (0, None);
        let mut values = Vec::new();
        for (field, value) in message(record) {
            match (field, value) {
                (1, Field::Fixed64(b)) => {
                    let time = f64::from_le_bytes(b);
                    assert!(time > 1.7e9 && time >= last_time, "{time}");
                    last_time = time;
                }
                (2, Field::Varint(n)) => step = n,
                (3, Field::Bytes(b)) => version = Some(b.to_vec()),
                (5, Field::Bytes(summary)) => {
                    for (field, value) in message(summary) {
                        let (1, Field::Bytes(value)) = (field, value) else { panic!("field {field} of a summary") };
                        let (mut tag, mut number) = (String::new(), None);
                        for part in message(value) {
                            match part {
                                (1, Field::Bytes(b)) => tag = String::from_utf8(b.to_vec()).unwrap(),
                                (2, Field::Fixed32(b)) => number = Some(f32::from_le_bytes(b)),
                                (n, _) => panic!("field {n} of a value"),
                            }
                        }
                        values.push((tag, number.unwrap()));
                    }
                }
                (n, _) => panic!("field {n} of an event"),
            }
        }
        // The first record has the format version.
        assert_eq!(version.as_deref(), (k == 0).then_some(&b"brain.Event:2"[..]));
        for (tag, v) in values {
            assert!(read.insert((tag, step), v).is_none());
        }
    }
    // The scalars equal those of metrics.jsonl.
    let mut logged = 0;
    for line in p.read("r/metrics.jsonl").lines() {
        let event: Value = serde_json::from_str(line).unwrap();
        let step = event["step"].as_u64().unwrap();
        let named = event["metrics"].as_object().into_iter().flatten().map(|(k, v)| (k.clone(), v.clone()));
        let loss = event.get("loss").map(|v| ("loss".to_string(), v.clone()));
        for (name, v) in named.chain(loss) {
            logged += 1;
            assert_eq!(read[&(name.clone(), step)], v.as_f64().unwrap() as f32, "{name} of step {step}");
        }
    }
    assert_eq!(logged, read.len());
    assert!(logged >= 14, "{logged}");
}
