//! Prints the instructions of a check and of a stop (PTX ISA, "isspacep", "setp", "selp", "atom", "%globaltimer").
//!
//! Names begin with [`RESERVED`], which no other name of the module contains. Each group of instructions is a block with registers of its
//! own.

use super::Layout;
use super::access::Act;
use super::report::{INFO_STOP, info};
use std::fmt::Write;

/// The beginning of all names that the rewriter declares.
pub const RESERVED: &str = "__plck";

/// Variables of the module: what a refused load reads, where a refused store goes, and the parameters for functions that are not inlined.
pub fn variables(layout: &Layout) -> String {
    format!(
        ".global .align 32 .b8 __plck_zero[32];\n.global .align 32 .b8 __plck_sink[32];\n\
         .global .align 8 .b64 __plck_words[{}];\n",
        layout.params()
    )
}

/// A variable of the module in global memory.
pub struct Variable {
    pub name: String,
    pub bytes: u64,
}

/// Where the parameters of the launch are read.
pub enum Place<'a> {
    /// In the kernel, which has these parameters.
    Entry(&'a [String]),
    /// In another function.
    Function,
}

impl Place<'_> {
    /// Reads parameter `k`.
    fn load(&self, to: &str, k: usize) -> String {
        match self {
            Place::Entry(params) => format!("ld.param.u64 {to}, [{}];\n", params[k]),
            Place::Function => format!("ld.global.u64 {to}, [__plck_words+{}];\n", 8 * k),
        }
    }
}

/// Copies the parameters to memory, at the start of a kernel that calls functions. All threads store the same words.
pub fn publish(params: &[String]) -> String {
    let mut out = String::from("{ .reg .b64 __plck_a;\n");
    for (k, param) in params.iter().enumerate() {
        let _ = writeln!(out, "ld.param.u64 __plck_a, [{param}];\nst.global.u64 [__plck_words+{}], __plck_a;", 8 * k);
    }
    out + "}\n"
}

/// An access to check.
pub struct Access<'a> {
    pub act: Act,
    pub is_generic: bool,
    pub bytes: u32,
    /// The address: a register or variable, and what is added to it.
    pub base: &'a str,
    pub offset: &'a str,
    /// The predicate of the instruction, and whether it is negated.
    pub predicate: Option<(&'a str, bool)>,
    pub line: u32,
}

/// Prints the check of an access. `__plck_t` has the address to use then. The caller closes the block after the access.
pub fn check(a: &Access, place: &Place, layout: &Layout, variables: &[Variable]) -> String {
    let mut out =
        String::from("{ .reg .b64 __plck_a, __plck_d, __plck_t; .reg .b32 __plck_r; .reg .pred __plck_ok, __plck_q;\n");
    let _ = writeln!(out, "mov.u64 __plck_a, {};", a.base);
    if !a.offset.is_empty() {
        let _ = writeln!(out, "add.s64 __plck_a, __plck_a, {};", a.offset);
    }
    let room = i64::from(a.bytes) - 1;
    let first = if a.act == Act::Read { 0 } else { layout.inputs };
    for k in first..layout.buffers() {
        out.push_str(&place.load("__plck_d", k));
        out.push_str(&place.load("__plck_t", layout.bytes(k)));
        out.push_str("sub.s64 __plck_d, __plck_a, __plck_d;\n");
        if room > 0 {
            let _ = writeln!(out, "add.s64 __plck_t, __plck_t, -{room};\nmax.s64 __plck_t, __plck_t, 0;");
        }
        out.push_str(match k == first {
            true => "setp.lt.u64 __plck_ok, __plck_d, __plck_t;\n",
            false => "setp.lt.or.u64 __plck_ok, __plck_d, __plck_t, __plck_ok;\n",
        });
    }
    for v in variables.iter().filter(|v| v.bytes >= u64::from(a.bytes)) {
        let _ = write!(
            out,
            "mov.u64 __plck_d, {};\nsub.s64 __plck_d, __plck_a, __plck_d;\nsetp.lt.or.u64 __plck_ok, __plck_d, {}, __plck_ok;\n",
            v.name,
            v.bytes - room as u64
        );
    }
    if a.is_generic {
        let spaces: &[&str] = if a.act == Act::Read { &["shared", "local", "const"] } else { &["shared", "local"] };
        for space in spaces {
            let _ = writeln!(out, "isspacep.{space} __plck_q, __plck_a;\nor.pred __plck_ok, __plck_ok, __plck_q;");
        }
    }
    if room > 0 {
        let _ =
            writeln!(out, "and.b64 __plck_d, __plck_a, {room};\nsetp.eq.and.s64 __plck_ok, __plck_d, 0, __plck_ok;");
    }
    out.push_str("not.pred __plck_q, __plck_ok;\n");
    match a.predicate {
        None => {}
        Some((p, false)) => drop(writeln!(out, "and.pred __plck_q, __plck_q, {p};")),
        Some((p, true)) => drop(writeln!(out, "or.pred __plck_q, __plck_ok, {p};\nnot.pred __plck_q, __plck_q;")),
    }
    let spare = if a.act == Act::Read { "__plck_zero" } else { "__plck_sink" };
    let _ = writeln!(out, "mov.u64 __plck_d, {spare};");
    if a.is_generic {
        out.push_str("cvta.global.u64 __plck_d, __plck_d;\n");
    }
    out.push_str("selp.b64 __plck_t, __plck_a, __plck_d, __plck_ok;\n");
    out + &record(place, layout, info(a.act, a.bytes, a.line))
}

/// Prints the report of threads with `__plck_q`, of which the first of the launch writes: `__plck_a` and the words of a cell (`errors.rs`).
fn record(place: &Place, layout: &Layout, info: u64) -> String {
    let cell = place.load("__plck_d", layout.cell());
    let launch = place.load("__plck_a", layout.launch());
    let halt = place.load("__plck_a", layout.halt());
    format!(
        "{cell}mov.b32 __plck_r, 1;\n\
         @__plck_q atom.global.cas.b32 __plck_r, [__plck_d+4], 0, 1;\n\
         setp.eq.and.s32 __plck_q, __plck_r, 0, __plck_q;\n\
         @__plck_q st.volatile.global.u64 [__plck_d+8], __plck_a;\n\
         {launch}or.b64 __plck_a, __plck_a, {info};\n\
         @__plck_q st.volatile.global.u64 [__plck_d+16], __plck_a;\n\
         @__plck_q membar.sys;\n\
         mov.b32 __plck_r, 1;\n\
         @__plck_q st.volatile.global.u32 [__plck_d], __plck_r;\n\
         {halt}@__plck_q st.volatile.global.u32 [__plck_a], __plck_r;\n"
    )
}

/// Declares what a function remembers: when it last read the stop word.
pub const STOP_STATE: &str = ".reg .b32 __plck_seen;\nmov.b32 __plck_seen, 0;\n";

/// Prints the exit of threads whose launch is to end. The stop word is read when the upper bits of the time have changed, which they do
/// every 1.05 ms.
pub fn stop(place: &Place, layout: &Layout) -> String {
    let (stop, launch) = (place.load("__plck_d", layout.stop()), place.load("__plck_a", layout.launch()));
    let record = record(place, layout, INFO_STOP);
    format!(
        "{{ .reg .b64 __plck_a, __plck_d; .reg .b32 __plck_r, __plck_n; .reg .pred __plck_q, __plck_e;\n\
         mov.u32 __plck_r, %globaltimer_lo;\nshr.u32 __plck_r, __plck_r, 20;\nadd.u32 __plck_r, __plck_r, 1;\n\
         setp.ne.u32 __plck_q, __plck_r, __plck_seen;\nmov.b32 __plck_seen, __plck_r;\n\
         {stop}mov.b32 __plck_r, 0;\n@__plck_q ld.volatile.global.u32 __plck_r, [__plck_d];\n\
         {launch}shr.u64 __plck_a, __plck_a, 32;\ncvt.u32.u64 __plck_n, __plck_a;\n\
         setp.eq.and.u32 __plck_q, __plck_r, __plck_n, __plck_q;\nmov.pred __plck_e, __plck_q;\n\
         {record}@__plck_e exit;\n}}\n"
    )
}
