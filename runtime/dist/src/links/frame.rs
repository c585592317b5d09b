//! Encodes what processes send each other: frames of a header with kind and length, and a payload.
//!
//! A header has 16 bytes: a magic number, the kind, and the length of the payload. Numbers are little-endian. A length beyond the
//! limit of its kind is an error before anything is allocated.

use crate::exchange::{Group, Round};
use perilune_core::Mesh;
use perilune_core::mesh::{Axis, Coordinates};
use std::sync::Arc;

pub const HEADER: usize = 16;
const MAGIC: [u8; 4] = *b"PRLf";

/// What a frame carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A sign of life, with the call that the process is in.
    Heartbeat = 1,
    /// The message of a device in a round of an exchange.
    Message,
    /// A device has failed in a run.
    DeviceFailed,
    /// A part of a call of all processes.
    Call,
    /// The process fails, or knows of one that has failed.
    Abort,
    /// The process has finished.
    Goodbye,
    /// The abort or goodbye has arrived.
    Seen,
}

impl Kind {
    const ALL: [Kind; 7] =
        [Kind::Heartbeat, Kind::Message, Kind::DeviceFailed, Kind::Call, Kind::Abort, Kind::Goodbye, Kind::Seen];

    /// The largest payload. `message`: that of a message.
    pub fn limit(self, message: usize) -> usize {
        match self {
            Kind::Message => message.saturating_add(MESSAGE_HEAD),
            Kind::Call => 256 << 20,
            Kind::Abort => 1 << 20,
            Kind::Heartbeat | Kind::DeviceFailed | Kind::Goodbye | Kind::Seen => 4096,
        }
    }
}

pub fn header(kind: Kind, length: usize) -> [u8; HEADER] {
    let mut out = [0; HEADER];
    out[..4].copy_from_slice(&MAGIC);
    out[4] = kind as u8;
    out[8..].copy_from_slice(&(length as u64).to_le_bytes());
    out
}

/// Reads a header; the error says what is wrong with it.
pub fn parse_header(bytes: &[u8; HEADER], message_limit: usize) -> Result<(Kind, usize), String> {
    let kind = Kind::ALL.into_iter().find(|k| *k as u8 == bytes[4]);
    let (Some(kind), true) = (kind, bytes[..4] == MAGIC && bytes[5..8] == [0; 3]) else {
        return Err("it has sent bytes that are no frame".into());
    };
    let length = u64::from_le_bytes(std::array::from_fn(|i| bytes[8 + i]));
    let limit = kind.limit(message_limit);
    match usize::try_from(length).ok().filter(|n| *n <= limit) {
        Some(length) => Ok((kind, length)),
        None => Err(format!("it has sent a frame of {length} bytes, and the limit is {limit}")),
    }
}

/// Writes numbers and texts one behind the other.
#[derive(Default, Debug)]
pub struct Encoder(pub Vec<u8>);

impl Encoder {
    pub fn u8(mut self, n: u8) -> Encoder {
        self.0.push(n);
        self
    }

    pub fn u32(mut self, n: usize) -> Encoder {
        self.0.extend((n as u32).to_le_bytes());
        self
    }

    pub fn u64(mut self, n: u64) -> Encoder {
        self.0.extend(n.to_le_bytes());
        self
    }

    /// A text of at most `most` bytes; a longer one is cut.
    pub fn text(mut self, text: &str, most: usize) -> Encoder {
        let text = &text[..text.floor_char_boundary(most)];
        self = self.u32(text.len());
        self.0.extend(text.as_bytes());
        self
    }
}

/// Reads what an [`Encoder`] has written; `None` where bytes are missing or not what they should be.
pub struct Decoder<'a>(pub &'a [u8]);

impl<'a> Decoder<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(head)
    }

    pub fn u8(&mut self) -> Option<u8> {
        Some(self.take(1)?[0])
    }

    pub fn u32(&mut self) -> Option<usize> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?) as usize)
    }

    pub fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    /// A text without control characters except line breaks and tabs, so that printing it does nothing else.
    pub fn text(&mut self) -> Option<String> {
        let n = self.u32()?;
        let text = std::str::from_utf8(self.take(n)?).ok()?;
        Some(text.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect())
    }

    /// Whether all has been read.
    pub fn end(&self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

/// What stands before the bytes of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MessageHead {
    /// Number of the exchange.
    pub exchange: usize,
    pub round: Round,
    pub program: u64,
    /// Which member of the group has sent it.
    pub from: usize,
    /// The device that alone receives it, if it is no message to a group. Then the group is all devices.
    pub to: Option<usize>,
}

pub const MESSAGE_HEAD: usize = 4 + 8 + 8 + 8 + 1 + 4 * Axis::ALL.len() + 4 + 4;

/// The number of "all devices", which is no axis.
const NO_AXIS: u8 = 255;

impl MessageHead {
    pub fn encode(&self) -> Vec<u8> {
        let Round { run, group, number } = self.round;
        let axis = group.axis.map_or(NO_AXIS, |axis| axis as u8);
        let mut out = Encoder::default().u32(self.exchange).u64(run).u64(number).u64(self.program).u8(axis);
        for at in group.at {
            out = out.u32(at);
        }
        out.u32(self.from).u32(self.to.map_or(0, |to| to + 1)).0
    }

    pub fn decode(bytes: &[u8]) -> Option<MessageHead> {
        let mut d = Decoder(bytes);
        let (exchange, run, number, program) = (d.u32()?, d.u64()?, d.u64()?, d.u64()?);
        let axis = match d.u8()? {
            NO_AXIS => None,
            n => Some(*Axis::ALL.get(usize::from(n))?),
        };
        let mut at = Coordinates::default();
        for coordinate in &mut at {
            *coordinate = d.u32()?;
        }
        let (from, to) = (d.u32()?, d.u32()?.checked_sub(1));
        d.end()?;
        Some(MessageHead { exchange, round: Round { run, group: Group { axis, at }, number }, program, from, to })
    }

    /// The rank of the sending device, if the mesh has such a group and member.
    pub fn device(&self, mesh: &Mesh) -> Option<usize> {
        let group = self.round.group;
        let inside = Axis::ALL.into_iter().all(|axis| group.at[axis as usize] < mesh.size(axis));
        let normal = group.axis.map_or(group == Group::ALL, |axis| group.at[axis as usize] == 0);
        let receives = self.to.is_none_or(|to| group == Group::ALL && to < mesh.devices());
        (inside && normal && receives && self.from < group.len(mesh)).then(|| group.member(mesh, self.from))
    }
}

/// A frame to be sent. The body is not copied.
#[derive(Clone, Debug)]
pub struct Frame {
    pub kind: Kind,
    pub head: Vec<u8>,
    pub body: Arc<[u8]>,
}

impl Frame {
    pub fn new(kind: Kind, head: Vec<u8>) -> Frame {
        Frame { kind, head, body: Arc::from([]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_round_trip_and_name_a_device_of_the_mesh() {
        let mesh = Mesh::parse("dp=2,tp=3").unwrap();
        for rank in 0..6 {
            let at = mesh.coordinates(rank);
            for (group, from) in [
                (Group::along(Axis::Dp, at), at[Axis::Dp as usize]),
                (Group::along(Axis::Tp, at), at[Axis::Tp as usize]),
                (Group::ALL, rank),
            ] {
                let round = Round { run: 9, group, number: 7 };
                let head = MessageHead { exchange: 3, round, program: 5, from, to: None };
                let bytes = head.encode();
                assert_eq!((bytes.len(), MessageHead::decode(&bytes)), (MESSAGE_HEAD, Some(head)));
                assert_eq!(head.device(&mesh), Some(rank));
                assert_eq!(MessageHead { from: 6, ..head }.device(&mesh), None);
                // A message to one device names all devices as its group.
                let mail = MessageHead { to: Some(4), ..head };
                assert_eq!(MessageHead::decode(&mail.encode()), Some(mail));
                assert_eq!(mail.device(&mesh), (group == Group::ALL).then_some(rank));
                assert_eq!(MessageHead { to: Some(6), ..head }.device(&mesh), None);
                for cut in 0..bytes.len() {
                    assert_eq!(MessageHead::decode(&bytes[..cut]), None);
                }
            }
        }
        let mut at = Coordinates::default();
        at[Axis::Tp as usize] = 3;
        let round = Round { run: 1, group: Group { axis: Some(Axis::Dp), at }, number: 0 };
        assert_eq!(MessageHead { exchange: 0, round, program: 0, from: 0, to: None }.device(&mesh), None);
    }

    #[test]
    fn headers_beyond_their_limit_are_errors() {
        for kind in Kind::ALL {
            let limit = kind.limit(1000);
            assert_eq!(parse_header(&header(kind, limit), 1000), Ok((kind, limit)));
            assert!(parse_header(&header(kind, limit + 1), 1000).is_err());
        }
        let mut bytes = header(Kind::Call, 1);
        bytes[4] = 99;
        assert!(parse_header(&bytes, 10).unwrap_err().contains("no frame"));
        assert!(parse_header(&[0; HEADER], 10).is_err());
    }

    #[test]
    fn texts_are_cut_at_characters_and_cleaned() {
        let bytes = Encoder::default().text("añb\u{1b}[1m\n", 4).text("x\u{1b}[1m\n", 99).0;
        let mut d = Decoder(&bytes);
        assert_eq!((d.text(), d.text()), (Some("añb".to_string()), Some("x[1m\n".to_string())));
        assert_eq!(d.end(), Some(()));
        assert_eq!(Decoder(&[5, 0, 0, 0, b'x']).text(), None);
    }
}
