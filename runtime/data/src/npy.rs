//! Reads and writes `.npy`, the file of one NumPy array: versions 1 to 3 are read, version 1 is written, little-endian, C order.
//!
//! Reading swaps big-endian data and converts Fortran order to C order. Integers that a `HostTensor` lacks
//! widen without loss: i1, i2, u2 to i32 and u4 to i64. Refused: u8 (unsigned 64-bit), complex, strings, records, and
//! object arrays, which are Python pickles and could run code. Memory is allocated only after the header's size has been
//! compared with the size of the file.

use crate::error::{Error, Result, quote};
use crate::file::write_whole;
use crate::safetensors::check_bools;
use perilune_core::{DType, HostTensor, Shape};
use perilune_policy::{Opened, Staged};
use std::io::{Read, Write};
use std::path::Path;

const MAGIC: &[u8] = b"\x93NUMPY";
/// NumPy's default limit is 10,000; only record dtypes need more than a few hundred.
const MAX_HEADER: u64 = 1 << 16;

/// Reads a file of one array.
pub fn load(mut file: Opened) -> Result<HostTensor> {
    let (path, len) = (file.path().to_path_buf(), file.len());
    read(&mut file, len, &At { path: &path, member: "" })
}

/// Writes a file of one array. NumPy has no bf16: cast first, or save as safetensors.
pub fn save(file: Staged, tensor: &HostTensor) -> Result<()> {
    let path = file.path().to_path_buf();
    write_whole(file, |out| write(out, tensor, &At { path: &path, member: "" }))
}

/// The location of an array, for messages: a file, or a member of an .npz file.
pub(crate) struct At<'a> {
    pub path: &'a Path,
    pub member: &'a str,
}

impl At<'_> {
    fn place(&self, what: &str) -> String {
        match self.member {
            "" => what.to_string(),
            m => format!("member {}: {what}", quote(m)),
        }
    }

    fn bad(&self, what: &str, rule: impl Into<String>) -> Error {
        Error::malformed(self.path, self.place(what), rule)
    }

    fn io(&self, e: std::io::Error) -> Error {
        match e.kind() {
            // The zip crate reports a wrong checksum and damaged deflate data this way.
            std::io::ErrorKind::InvalidData | std::io::ErrorKind::InvalidInput | std::io::ErrorKind::Other => {
                self.bad("data", format!("is damaged ({e})")).hint("copy or download the file again")
            }
            _ => Error::io(self.path, "read", e),
        }
    }
}

/// What the header of a file says of its array.
pub(crate) struct Described {
    /// The dtype without its byte order, as NumPy writes it: "u2".
    pub code: String,
    pub big_endian: bool,
    pub shape: Shape,
    /// The position of the first element, in bytes.
    pub offset: u64,
}

/// Reads the header of a file, and compares it with the size of the file.
pub(crate) fn describe(file: &mut Opened) -> Result<Described> {
    let (path, len) = (file.path().to_path_buf(), file.len());
    let at = At { path: &path, member: "" };
    let (header, needed) = read_header(file, len, &at)?;
    let code = header.descr.trim_start_matches(['<', '>', '|', '=']).to_string();
    Ok(Described { code, big_endian: header.big_endian, shape: header.shape, offset: len - needed })
}

/// Reads one array from a stream of `len` bytes, all of which must belong to it.
pub(crate) fn read(from: &mut impl Read, len: u64, at: &At) -> Result<HostTensor> {
    let (header, needed) = read_header(from, len, at)?;
    // Grow with the bytes that arrive, so that a compressed stream shorter than claimed costs no memory.
    let mut bytes = Vec::with_capacity(needed.min(1 << 20) as usize);
    from.take(needed).read_to_end(&mut bytes).map_err(|e| at.io(e))?;
    if bytes.len() as u64 != needed {
        return Err(at.bad("data", format!("ends after {} of {needed} bytes", bytes.len())));
    }
    // A zip reader compares its checksum at the end of the stream.
    if from.read(&mut [0]).map_err(|e| at.io(e))? != 0 {
        return Err(at.bad("data", "is longer than the file's own size says"));
    }
    header.tensor(bytes, at)
}

/// Reads the header of an array in a stream of `len` bytes; returns the bytes of the elements too, which must be the rest.
fn read_header(from: &mut impl Read, len: u64, at: &At) -> Result<(Header, u64)> {
    let short = || at.bad("header", format!("is cut off: the file has {len} bytes")).hint("is it an .npy file?");
    let mut fixed = [0; 8];
    if len < 10 {
        return Err(short());
    }
    from.read_exact(&mut fixed).map_err(|e| at.io(e))?;
    if &fixed[..6] != MAGIC {
        return Err(at.bad("header", "does not start with \\x93NUMPY").hint("is it an .npy file?"));
    }
    let length_bytes = match fixed[6] {
        1 => 2,
        2 | 3 => 4,
        v => return Err(Error::unsupported(at.path, at.place("version"), format!("is {v}; 1, 2 and 3 are read"))),
    };
    let mut word = [0; 4];
    if len < 8 + length_bytes as u64 {
        return Err(short());
    }
    from.read_exact(&mut word[..length_bytes]).map_err(|e| at.io(e))?;
    let header_len = u64::from(u32::from_le_bytes(word));
    if header_len > MAX_HEADER {
        return Err(Error::too_large(at.path, at.place("the header, in bytes,"), header_len, MAX_HEADER));
    }
    let data_len = len.checked_sub(8 + length_bytes as u64 + header_len).ok_or_else(short)?;
    let mut header = vec![0; header_len as usize];
    from.read_exact(&mut header).map_err(|e| at.io(e))?;
    let header = Header::parse(&header, at)?;

    let needed = header.shape.numel() as u64 * header.kind.file_size as u64;
    if needed != data_len {
        let rule = format!("shape {} of '{}' takes {needed} bytes, but {data_len} follow", header.shape, header.descr);
        return Err(at.bad("data", rule).hint("one array a file, and nothing after it"));
    }
    Ok((header, needed))
}

/// Writes one array to a stream.
pub(crate) fn write(out: &mut impl Write, tensor: &HostTensor, at: &At) -> Result<()> {
    let descr = match tensor.dtype {
        DType::F64 => "<f8",
        DType::F32 => "<f4",
        DType::F16 => "<f2",
        DType::I64 => "<i8",
        DType::I32 => "<i4",
        DType::U8 => "|u1",
        DType::Bool => "|b1",
        DType::BF16 => {
            let error = Error::unsupported(at.path, at.place("dtype"), "bf16 does not exist in NumPy's format");
            return Err(error.hint("cast to f32 first, or save as .safetensors"));
        }
    };
    let dims = tensor.shape.dims().iter().map(|d| format!("{d},")).collect::<Vec<_>>().join(" ");
    // A tuple of one has a trailing comma, longer ones do not: `(3,)` and `(2, 3)`.
    let dims = if tensor.shape.rank() > 1 { dims.trim_end_matches(',') } else { &dims };
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({dims}), }}");
    let padded = (10 + header.len() + 1).next_multiple_of(64) - 10;
    header.extend(std::iter::repeat_n(' ', padded - 1 - header.len()));
    header.push('\n');
    let mut put = |bytes: &[u8]| out.write_all(bytes).map_err(|e| Error::io(at.path, "write", e));
    put(MAGIC)?;
    put(&[1, 0])?;
    put(&(padded as u16).to_le_bytes())?;
    put(header.as_bytes())?;
    put(&tensor.bytes)
}

struct Header {
    descr: String,
    kind: Kind,
    big_endian: bool,
    fortran: bool,
    shape: Shape,
}

/// A dtype of the file and the dtype it is converted to.
#[derive(Clone, Copy)]
struct Kind {
    file_size: usize,
    dtype: DType,
    /// The conversion of one little-endian element, if the dtypes differ.
    widen: Option<fn(&[u8]) -> i64>,
}

impl Kind {
    fn of(code: &str) -> Option<Kind> {
        let same = |dtype: DType| Kind { file_size: dtype.size(), dtype, widen: None };
        Some(match code {
            "f8" => same(DType::F64),
            "f4" => same(DType::F32),
            "f2" => same(DType::F16),
            "i8" => same(DType::I64),
            "i4" => same(DType::I32),
            "u1" => same(DType::U8),
            "b1" | "?" => same(DType::Bool),
            "i1" => Kind { file_size: 1, dtype: DType::I32, widen: Some(|b| i64::from(b[0] as i8)) },
            "i2" => {
                Kind { file_size: 2, dtype: DType::I32, widen: Some(|b| i64::from(i16::from_le_bytes([b[0], b[1]]))) }
            }
            "u2" => {
                Kind { file_size: 2, dtype: DType::I32, widen: Some(|b| i64::from(u16::from_le_bytes([b[0], b[1]]))) }
            }
            "u4" => Kind {
                file_size: 4,
                dtype: DType::I64,
                widen: Some(|b| i64::from(u32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
            },
            _ => return None,
        })
    }
}

impl Header {
    fn parse(bytes: &[u8], at: &At) -> Result<Header> {
        let text = std::str::from_utf8(bytes).map_err(|_| at.bad("header", "is not UTF-8"))?;
        let mut p = Parser { text, pos: 0, at };
        let (mut descr, mut fortran, mut dims) = (None, None, None);
        p.expect('{')?;
        while !p.eat('}') {
            let key = p.string()?;
            p.expect(':')?;
            let again = match key {
                "descr" => descr.replace(p.descr()?).is_some(),
                "fortran_order" => fortran.replace(p.boolean()?).is_some(),
                "shape" => dims.replace(p.tuple()?).is_some(),
                _ => return Err(at.bad("header", format!("has the unknown key {}", quote(key)))),
            };
            if again {
                return Err(at.bad("header", format!("has the key {} twice", quote(key))));
            }
            if !p.eat(',') {
                p.expect('}')?;
                break;
            }
        }
        if !p.rest().trim().is_empty() {
            return Err(at.bad("header", format!("goes on after its '}}': {}", quote(p.rest().trim()))));
        }
        let missing = |key: &str| at.bad("header", format!("lacks the key '{key}'"));
        let descr = descr.ok_or_else(|| missing("descr"))?.to_string();
        let fortran = fortran.ok_or_else(|| missing("fortran_order"))?;
        let dims: Vec<usize> = dims.ok_or_else(|| missing("shape"))?;
        let shape = Shape::new(&dims).map_err(|e| at.bad("shape", e.message))?;
        let (order, code) = match descr.chars().next() {
            Some(c @ ('<' | '>' | '|' | '=')) => (c, &descr[1..]),
            _ => ('<', descr.as_str()),
        };
        let Some(kind) = Kind::of(code) else {
            let rule = format!("{} is not read; read are f8 f4 f2 i8 i4 i2 i1 u4 u2 u1 b1", quote(&descr));
            let error = Error::unsupported(at.path, at.place("dtype"), rule);
            return Err(error.hint("in NumPy: np.save(path, a.astype('float32')), or another dtype of these"));
        };
        Ok(Header { descr, kind, big_endian: order == '>', fortran, shape })
    }

    /// Converts file bytes to a tensor: swaps, reorders, widens, in that order.
    fn tensor(self, mut bytes: Vec<u8>, at: &At) -> Result<HostTensor> {
        let size = self.kind.file_size;
        if self.big_endian && size > 1 {
            bytes.chunks_exact_mut(size).for_each(<[u8]>::reverse);
        }
        if self.fortran && self.shape.rank() > 1 {
            bytes = from_fortran(&bytes, size, &self.shape);
        }
        if let Some(widen) = self.kind.widen {
            let mut wide = Vec::with_capacity(self.shape.numel() * self.kind.dtype.size());
            for element in bytes.chunks_exact(size) {
                perilune_core::host_tensor::push_i64(self.kind.dtype, widen(element), &mut wide);
            }
            bytes = wide;
        }
        if self.kind.dtype == DType::Bool {
            check_bools(at.path, &at.place("data"), &bytes)?;
        }
        Ok(HostTensor::new(self.kind.dtype, self.shape, bytes))
    }
}

/// Converts column-major bytes to row-major order.
fn from_fortran(bytes: &[u8], size: usize, shape: &Shape) -> Vec<u8> {
    let dims = shape.dims();
    let mut strides = vec![1usize; dims.len()];
    for d in 1..dims.len() {
        strides[d] = strides[d - 1] * dims[d - 1];
    }
    let mut out = Vec::with_capacity(bytes.len());
    let (mut index, mut from) = (vec![0usize; dims.len()], 0usize);
    for _ in 0..shape.numel() {
        out.extend_from_slice(&bytes[from * size..(from + 1) * size]);
        for d in (0..dims.len()).rev() {
            index[d] += 1;
            from += strides[d];
            if index[d] < dims[d] {
                break;
            }
            from -= strides[d] * dims[d];
            index[d] = 0;
        }
    }
    out
}

/// A parser for the part of Python's grammar that .npy headers use.
struct Parser<'a> {
    text: &'a str,
    pos: usize,
    at: &'a At<'a>,
}

impl<'a> Parser<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.pos..]
    }

    fn skip_space(&mut self) {
        self.pos += self.rest().len() - self.rest().trim_start().len();
    }

    fn eat(&mut self, c: char) -> bool {
        self.skip_space();
        let hit = self.rest().starts_with(c);
        self.pos += if hit { c.len_utf8() } else { 0 };
        hit
    }

    fn fail<T>(&self, wanted: &str) -> Result<T> {
        let found = self.rest().chars().take(20).collect::<String>();
        Err(self.at.bad("header", format!("has {} where {wanted} is needed", quote(&found))))
    }

    fn expect(&mut self, c: char) -> Result<()> {
        if self.eat(c) { Ok(()) } else { self.fail(&format!("'{c}'")) }
    }

    fn string(&mut self) -> Result<&'a str> {
        let mark = match (self.eat('\''), self.eat('"')) {
            (true, false) => '\'',
            (false, true) => '"',
            _ => return self.fail("a quoted word"),
        };
        match self.rest().find(mark) {
            Some(end) => {
                let word = &self.rest()[..end];
                self.pos += end + 1;
                Ok(word)
            }
            None => self.fail("a closing quote"),
        }
    }

    fn descr(&mut self) -> Result<&'a str> {
        if self.eat('[') {
            let error =
                Error::unsupported(self.at.path, self.at.place("dtype"), "records (structured arrays) are not read");
            return Err(error.hint("save each field as an array of its own, for instance with np.savez"));
        }
        self.string()
    }

    fn word(&mut self) -> &'a str {
        self.skip_space();
        let end = self.rest().find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(self.rest().len());
        let word = &self.rest()[..end];
        self.pos += end;
        word
    }

    fn boolean(&mut self) -> Result<bool> {
        let start = self.pos;
        match self.word() {
            "True" => Ok(true),
            "False" => Ok(false),
            _ => {
                self.pos = start;
                self.fail("True or False")
            }
        }
    }

    fn tuple(&mut self) -> Result<Vec<usize>> {
        self.expect('(')?;
        let mut dims = Vec::new();
        while !self.eat(')') {
            self.skip_space();
            let start = self.pos;
            // Python 2 writes a long as `3L`.
            let Ok(dim) = self.word().trim_end_matches('L').parse() else {
                self.pos = start;
                return self.fail("a dim (a whole number that fits in memory)");
            };
            dims.push(dim);
            if !self.eat(',') {
                self.expect(')')?;
                break;
            }
        }
        Ok(dims)
    }
}

#[cfg(test)]
#[path = "npy_tests.rs"]
mod tests;
