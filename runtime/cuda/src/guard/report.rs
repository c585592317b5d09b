//! Packs what a check reports into a word, and puts it into words.

use super::access::Act;
use perilune_core::DType;
use perilune_core::Shape;
use perilune_core::error::Error;
use perilune_core::ops::source::Body;
use std::sync::Arc;
use std::time::Duration;

/// The lower half of the second word of a report: 4 bits for the act, 4 for the logarithm of the bytes, 24 for the line. The upper half
/// is the number of the launch, and the first word is the address.
pub const INFO_STOP: u64 = 0;

/// The lower half of a report about an access.
pub fn info(act: Act, bytes: u32, line: u32) -> u64 {
    let act = match act {
        Act::Read => 1,
        Act::Write => 2,
        Act::Atomic => 3,
    };
    act | u64::from(bytes.trailing_zeros()) << 4 | u64::from(line.min((1 << 24) - 1)) << 8
}

/// An input or output of a launch.
#[derive(Clone, PartialEq, Debug)]
pub struct Buffer {
    pub name: String,
    pub shape: Shape,
    pub dtype: DType,
}

impl Buffer {
    pub fn nbytes(&self) -> usize {
        self.shape.numel() * self.dtype.size()
    }

    fn show(&self) -> String {
        let dims: Vec<String> = self.shape.dims().iter().map(ToString::to_string).collect();
        format!("{} ({} {{{}}})", self.name, self.dtype, dims.join(", "))
    }
}

/// The launch that a cell belongs to.
#[derive(Clone, PartialEq, Debug)]
pub struct Subject {
    pub body: Arc<Body>,
    /// Inputs, then outputs.
    pub buffers: Vec<Buffer>,
    pub inputs: usize,
    /// The limit of time, if there is one.
    pub time: Option<Duration>,
}

impl Subject {
    /// The recipe's line of a line of the text: `recipes/a.lua:12: `, or nothing where it is not known.
    fn place(&self, line: u32) -> String {
        match (self.body.line, line) {
            (0, 0) => String::new(),
            (0, n) => format!("line {n} of its source: "),
            (first, 0) => format!("{}:{first}: ", self.body.file),
            (first, n) => format!("{}:{}: ", self.body.file, first + n - 1),
        }
    }

    /// The error of a kernel that did not end. `is_stopped`: whether it has ended now.
    pub fn timed_out(&self, limit: Duration, is_stopped: bool) -> Error {
        let how = if is_stopped { "its threads were ended" } else { "the GPU cannot end it, so the process ends" };
        let message = format!("{}a launch of the kernel ran longer than {}: {how}", self.place(0), seconds(limit));
        Error::argument(&self.body.name, message)
            .hint("let its loops end, give each launch less work, or raise the limit with --kernel-time")
    }

    /// The error of a report. `address`, `word`: its two words; `bases`: the addresses of the buffers in that launch, if they are known.
    pub fn error(&self, address: u64, word: u64, bases: Option<&[u64]>) -> Error {
        let (act, bytes, line) = (word & 15, 1u64 << (word >> 4 & 15), (word >> 8 & 0xff_ffff) as u32);
        let verb = match act {
            0 => return self.timed_out(self.time.unwrap_or_default(), true),
            1 => "read",
            2 => "write",
            _ => "atomic operation",
        };
        let of = if bytes == 1 { "1 byte".into() } else { format!("{bytes} bytes") };
        let what = format!("{verb} of {of}");
        let place = self.place(line);
        let hint = "compare each index with the sizes that `args` passes before the access";
        let error =
            |message: String, hint: &str| Error::argument(&self.body.name, format!("{place}{message}")).hint(hint);
        let Some((k, offset)) = bases.and_then(|bases| self.nearest(address, bytes, bases)) else {
            return error(format!("{what} at {address:#x}, which is in none of its buffers"), hint);
        };
        let buffer = &self.buffers[k];
        let name = buffer.show();
        let size = buffer.nbytes() as i128;
        let inside = offset >= 0 && offset + i128::from(bytes) <= size;
        match () {
            () if inside && !address.is_multiple_of(bytes) => {
                let message = format!("{what} at byte {offset} of {name}, which is not aligned to {bytes}");
                error(message, "the address of a vector must be a multiple of its size")
            }
            () if inside && act != 1 && k < self.inputs => {
                let message = format!("{what} at byte {offset} of {name}, which is an input");
                error(message, "inputs are read-only: write to an output")
            }
            () if offset < 0 => error(format!("{what}, {} bytes before the start of {name}", -offset), hint),
            () if offset < size => error(format!("{what} at byte {offset} of {name}, beyond its end"), hint),
            () => error(format!("{what}, {} bytes past the end of {name}", offset - size), hint),
        }
    }

    /// The buffer nearest to an access, and where in it the access starts.
    fn nearest(&self, address: u64, bytes: u64, bases: &[u64]) -> Option<(usize, i128)> {
        let candidates = self.buffers.iter().zip(bases).enumerate().map(|(k, (buffer, base))| {
            let offset = i128::from(address) - i128::from(*base);
            let past = (offset + i128::from(bytes) - buffer.nbytes() as i128).max(0);
            (past.max(-offset), k, offset)
        });
        candidates.min_by_key(|(distance, k, _)| (*distance, *k)).map(|(_, k, offset)| (k, offset))
    }
}

/// Seconds with as many digits as they have.
fn seconds(time: Duration) -> String {
    format!("{} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subject() -> Subject {
        let body =
            Body { name: "scale".into(), text: String::new(), file: "a.lua".into(), line: 10, names: Vec::new() };
        let buffer =
            |name: &str, dims: &[usize]| Buffer { name: name.into(), shape: Shape::of(dims), dtype: DType::F32 };
        Subject {
            body: Arc::new(body),
            buffers: vec![buffer("x", &[4, 8]), buffer("y", &[4, 8])],
            inputs: 1,
            time: None,
        }
    }

    fn message(act: Act, bytes: u32, address: u64) -> String {
        subject().error(address, info(act, bytes, 3) | 7 << 32, Some(&[0x1000, 0x2000])).to_string()
    }

    #[test]
    fn violations_name_the_buffer_and_the_line() {
        let cases = [
            (Act::Write, 4, 0x2080, "a.lua:12: write of 4 bytes, 0 bytes past the end of y (f32 {4, 8})"),
            (Act::Read, 16, 0x2078, "read of 16 bytes at byte 120 of y (f32 {4, 8}), beyond its end"),
            (Act::Read, 4, 0xffc, "read of 4 bytes, 4 bytes before the start of x (f32 {4, 8})"),
            (Act::Write, 4, 0x1004, "write of 4 bytes at byte 4 of x (f32 {4, 8}), which is an input"),
            (Act::Read, 8, 0x1004, "read of 8 bytes at byte 4 of x (f32 {4, 8}), which is not aligned to 8"),
            (Act::Atomic, 4, 0x2000 + 12800, "atomic operation of 4 bytes, 12672 bytes past the end of y"),
            (Act::Read, 1, u64::MAX, "read of 1 byte, "),
        ];
        for (act, bytes, address, text) in cases {
            let got = message(act, bytes, address);
            assert!(got.contains(text) && got.contains("scale"), "{got}");
        }
        let unknown = subject().error(0x99, info(Act::Read, 4, 0), None).to_string();
        assert!(unknown.contains("a.lua:10: read of 4 bytes at 0x99"), "{unknown}");
    }

    #[test]
    fn a_stop_names_the_limit() {
        let mut subject = subject();
        subject.time = Some(Duration::from_millis(1500));
        let text = subject.error(0, INFO_STOP | 3 << 32, None).to_string();
        assert!(
            text.contains("a.lua:10") && text.contains("longer than 1.5 s") && text.contains("--kernel-time"),
            "{text}"
        );
    }
}
