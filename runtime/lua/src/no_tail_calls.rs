//! Compiles recipes without tail calls, so that errors can name their line.
//!
//! In Lua, `return f(x)` replaces the caller's frame by that of `f`. A recipe is full of such lines (`return self.out(y)`,
//! `return pl.cross_entropy(…)`), and with the frame goes the line that an error, a kernel or a profile should name. Lua has
//! no switch for it, so this file takes the compiled chunk apart just far enough to find its instructions and turns each
//! OP_TAILCALL into the equivalent OP_CALL; the OP_RETURN after it already exists. The bytes come from our own
//! compiler immediately before; a chunk with unexpected contents is left unchanged. The price: unbounded recursion by tail
//! calls overflows the stack, as in most languages.
//!
//! The layout is that of Lua 5.4's lundump.c and lopcodes.h.

use mlua::chunk::ChunkMode;
use mlua::{Function, Lua, Table};
use std::ops::Range;

/// Compiles text (never bytecode) that runs in `env`, or with the globals.
pub fn compile(lua: &Lua, text: &str, name: &str, env: Option<&Table>) -> mlua::Result<Function> {
    let build = |source: &[u8], mode: ChunkMode| {
        let chunk = lua.load(source).set_name(name).set_mode(mode);
        match env {
            Some(env) => chunk.set_environment(env.clone()).into_function(),
            None => chunk.into_function(),
        }
    };
    let plain = build(text.as_bytes(), ChunkMode::Text)?;
    let mut bytes = plain.dump(false);
    match keep_frames(&mut bytes) {
        Some(changed) if changed > 0 => build(&bytes, ChunkMode::Binary),
        _ => Ok(plain),
    }
}

const OP_CALL: u32 = 68;
const OP_TAILCALL: u32 = 69;
/// The opcode and the operands A and B; k and C differ in meaning between the two instructions, and 0 is correct for a call.
const KEPT: u32 = 0x00ff_0000 | 0x7f80 | 0x7f;
/// `\x1bLua`, version 5.4, format 0, LUAC_DATA, sizes of instruction, integer and number.
const HEADER: &[u8] = b"\x1bLua\x54\x00\x19\x93\r\n\x1a\n\x04\x08\x08";

/// Turns tail calls into calls and returns their number. `None` if the chunk has unexpected contents and is unchanged.
fn keep_frames(bytes: &mut [u8]) -> Option<usize> {
    let found = read(bytes)?.found;
    for &at in &found {
        let word: [u8; 4] = bytes[at..at + 4].try_into().ok()?;
        let call = (u32::from_le_bytes(word) & KEPT & !0x7f) | OP_CALL;
        bytes[at..at + 4].copy_from_slice(&call.to_le_bytes());
    }
    Some(found.len())
}

/// Removes the lines at which functions begin and end, which a stripped chunk still has. `None` if the chunk has unexpected contents.
pub fn without_lines(stripped: &[u8]) -> Option<Vec<u8>> {
    let (mut out, mut from) = (Vec::with_capacity(stripped.len()), 0);
    for lines in read(stripped)?.lines {
        out.extend_from_slice(&stripped[from..lines.start]);
        from = lines.end;
    }
    out.extend_from_slice(&stripped[from..]);
    Some(out)
}

/// Reads a whole chunk.
fn read(bytes: &[u8]) -> Option<Reader<'_>> {
    let mut r = Reader { bytes, at: 0, found: Vec::new(), lines: Vec::new() };
    if r.take(HEADER.len())? != HEADER {
        return None;
    }
    // LUAC_INT and LUAC_NUM show the byte order.
    if r.take(8)? != 0x5678i64.to_le_bytes() || r.take(8)? != 370.5f64.to_le_bytes() {
        return None;
    }
    r.take(1)?; // upvalues of the main function
    r.function(0)?;
    (r.at == r.bytes.len()).then_some(r)
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    /// The positions of the tail calls.
    found: Vec<usize>,
    /// The positions of the first and last lines of functions.
    lines: Vec<Range<usize>>,
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let part = self.bytes.get(self.at..self.at.checked_add(n)?)?;
        self.at += n;
        Some(part)
    }

    /// Reads a number with seven bits per byte, the highest first; the last byte is marked.
    fn number(&mut self) -> Option<usize> {
        let mut n = 0usize;
        loop {
            let b = self.take(1)?[0];
            n = n.checked_mul(128)? | usize::from(b & 0x7f);
            if b & 0x80 != 0 {
                return Some(n);
            }
        }
    }

    fn string(&mut self) -> Option<()> {
        match self.number()? {
            0 => Some(()),
            n => self.take(n - 1).map(drop),
        }
    }

    fn function(&mut self, depth: usize) -> Option<()> {
        if depth > 250 {
            return None;
        }
        self.string()?; // source
        let lines = self.at;
        self.number()?; // first line
        self.number()?; // last line
        self.lines.push(lines..self.at);
        self.take(3)?; // parameters, varargs, registers
        let n = self.number()?;
        let start = self.at;
        for (k, word) in self.take(n.checked_mul(4)?)?.chunks_exact(4).enumerate() {
            if u32::from(word[0] & 0x7f) == OP_TAILCALL {
                self.found.push(start + 4 * k);
            }
        }
        for _ in 0..self.number()? {
            match self.take(1)?[0] {
                0x00 | 0x01 | 0x11 => {}            // nil, false, true
                0x03 | 0x13 => drop(self.take(8)?), // integer, float
                0x04 | 0x14 => self.string()?,
                _ => return None,
            }
        }
        let upvalues = self.number()?;
        self.take(upvalues.checked_mul(3)?)?;
        for _ in 0..self.number()? {
            self.function(depth + 1)?;
        }
        let lines = self.number()?;
        self.take(lines)?;
        for _ in 0..self.number()? {
            self.number()?; // absolute lines: instruction, line
            self.number()?;
        }
        for _ in 0..self.number()? {
            self.string()?; // local variables: name, first and last instruction
            self.number()?;
            self.number()?;
        }
        for _ in 0..self.number()? {
            self.string()?; // names of upvalues
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "local function f(...) local t <close> = nil; local n = { 1, 2.5, 'x', true, nil, ('y'):rep(3) }; return select('#', ...) end\n\
                          local function g(...) return f(...) end\n\
                          local function h(a, b) local function up() return a end; return g(up(), b, nil) end\n\
                          return h(1, 2)";

    #[test]
    fn tail_calls_become_calls_and_values_stay() {
        let lua = Lua::new();
        let plain = lua.load(SOURCE).into_function().expect("compiles");
        let mut bytes = plain.dump(false);
        assert_eq!(keep_frames(&mut bytes), Some(3));
        assert_eq!(keep_frames(&mut bytes), Some(0));
        let kept = compile(&lua, SOURCE, "=test", None).expect("compiles");
        assert_eq!(kept.call::<i64>(()).expect("runs"), plain.call::<i64>(()).expect("runs"));
        assert_eq!(kept.call::<i64>(()).expect("runs"), 3);
    }

    #[test]
    fn frames_stay_on_the_stack() {
        let lua = Lua::new();
        let source =
            "local function inner() return nil + 1 end\nlocal function outer()\n  return inner()\nend\nreturn outer()";
        let e = compile(&lua, source, "=test", None).expect("compiles").call::<()>(()).expect_err("raises");
        let text = e.to_string();
        assert!(text.contains("test:3:") && text.contains("test:5:") && !text.contains("tail calls"), "{text}");
    }

    #[test]
    fn lines_do_not_change_a_stripped_chunk() {
        let lua = Lua::new();
        let code =
            |text: &str| without_lines(&lua.load(text).into_function().expect("compiles").dump(true)).expect("a chunk");
        assert_eq!(code(SOURCE), code(&format!("\n\n{}", SOURCE.replace('\n', "\n\n\n"))));
        assert_ne!(code("return 1 + ..."), code("return 2 + ..."));
    }

    #[test]
    fn a_strange_chunk_is_left_alone() {
        let lua = Lua::new();
        let plain = lua.load(SOURCE).into_function().expect("compiles").dump(false);
        for n in [0, 3, 20, plain.len() - 1] {
            let mut part = plain[..n].to_vec();
            assert_eq!(keep_frames(&mut part), None);
            assert_eq!(part, plain[..n]);
        }
    }
}
