//! Defines a Lua function outside of any Lua state: its code, and the graph of the values that it captures.
//!
//! Tables, functions and captured variables (upvalues) have numbers, so that what two functions share is shared in the copy, and
//! cycles stay cycles. Everything is plain data that threads share; each worker builds its own Lua values from it.

use super::modules::Modules;
use crate::no_tail_calls::without_lines;
use blake3::Hasher;
use std::sync::Arc;

/// A native object that all states may share, such as a tokenizer.
pub trait Portable: Send + Sync {
    /// Makes a Lua value for the same object.
    fn bring(self: Arc<Self>, lua: &mlua::Lua) -> mlua::Result<mlua::Value>;

    /// The hash of all that its results depend on.
    fn fingerprint(&self) -> [u8; 32];
}

/// A captured value, or a part of one.
#[derive(Clone)]
pub enum Copied {
    Nil,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(Arc<[u8]>),
    /// The null pointer, which stands for `null` of JSON.
    Null,
    /// The global environment: in a worker the standard libraries.
    Globals,
    /// A table of the standard libraries, such as `string`.
    Library(Arc<str>),
    /// A function of a library, such as `string.format`; the library is empty for `ipairs` and other globals.
    LibraryFunction(Arc<str>, Arc<str>),
    /// What `require` returns for a name.
    Module(Arc<str>),
    /// A number in [`Carried::tables`].
    Table(usize),
    /// A number in [`Carried::functions`].
    Function(usize),
    Object(Arc<dyn Portable>),
}

#[derive(Clone, Default)]
pub struct CopiedTable {
    /// Its entries by key: booleans, numbers, strings.
    pub entries: Vec<(Copied, Copied)>,
    /// Whether reading a field that it lacks is an error, as for `params`.
    pub is_strict: bool,
}

#[derive(Clone, Default)]
pub struct CopiedFunction {
    /// The bytecode of this process's own compiler, with lines and names for messages.
    pub code: Vec<u8>,
    /// The hash of its bytecode without lines and names.
    pub hash: [u8; 32],
    /// Numbers in [`Carried::variables`], one for each upvalue.
    pub upvalues: Vec<usize>,
}

impl CopiedFunction {
    /// `code` is the dump of a function with its lines, `stripped` that without.
    pub fn new(code: Vec<u8>, stripped: &[u8]) -> CopiedFunction {
        let plain = without_lines(stripped);
        let hash = *blake3::hash(plain.as_deref().unwrap_or(stripped)).as_bytes();
        CopiedFunction { code, hash, upvalues: Vec::new() }
    }
}

/// A function with all that it captures.
#[derive(Clone, Default)]
pub struct Carried {
    /// The first is the function itself.
    pub functions: Vec<CopiedFunction>,
    pub tables: Vec<CopiedTable>,
    /// The captured variables.
    pub variables: Vec<Copied>,
    /// The files that `require` finds.
    pub modules: Modules,
    /// The names of the modules that it captures.
    pub required: Vec<Arc<str>>,
}

impl Carried {
    /// Hashes everything that results depend on besides the record. The graph is numbered in the order in which it is found, with
    /// tables in the order of their keys, so equal functions have equal hashes in every process.
    pub fn fingerprint(&self, seed: u64) -> [u8; 32] {
        let mut hasher = Hasher::new();
        hasher.update(b"Lua 5.4 function 1").update(&seed.to_le_bytes());
        for function in &self.functions {
            hasher.update(b"F").update(&function.hash);
            number(&mut hasher, function.upvalues.len());
            function.upvalues.iter().for_each(|variable| number(&mut hasher, *variable));
        }
        for table in &self.tables {
            hasher.update(&[b'T', u8::from(table.is_strict)]);
            number(&mut hasher, table.entries.len());
            for (key, value) in &table.entries {
                write(&mut hasher, key);
                write(&mut hasher, value);
            }
        }
        hasher.update(b"V");
        self.variables.iter().for_each(|variable| write(&mut hasher, variable));
        // A function may call `require`, and a module may require others: all texts count then.
        if !self.required.is_empty()
            || self.functions.iter().any(|f| memchr::memmem::find(&f.code, b"require").is_some())
        {
            for (file, contents) in self.modules.texts() {
                text(&mut hasher, b'M', file.to_string_lossy().as_bytes());
                text(&mut hasher, b'M', contents.as_bytes());
            }
        }
        *hasher.finalize().as_bytes()
    }
}

fn number(hasher: &mut Hasher, n: usize) {
    hasher.update(&(n as u64).to_le_bytes());
}

fn text(hasher: &mut Hasher, tag: u8, bytes: &[u8]) {
    hasher.update(&[tag]);
    number(hasher, bytes.len());
    hasher.update(bytes);
}

fn write(hasher: &mut Hasher, value: &Copied) {
    match value {
        Copied::Nil => drop(hasher.update(b"n")),
        Copied::Bool(b) => drop(hasher.update(&[b'b', u8::from(*b)])),
        Copied::Int(i) => drop(hasher.update(b"i").update(&i.to_le_bytes())),
        Copied::Float(x) => drop(hasher.update(b"d").update(&x.to_bits().to_le_bytes())),
        Copied::Text(bytes) => text(hasher, b's', bytes),
        Copied::Null => drop(hasher.update(b"0")),
        Copied::Globals => drop(hasher.update(b"g")),
        Copied::Library(name) => text(hasher, b'l', name.as_bytes()),
        Copied::LibraryFunction(library, name) => {
            text(hasher, b'c', library.as_bytes());
            text(hasher, b'c', name.as_bytes());
        }
        Copied::Module(name) => text(hasher, b'm', name.as_bytes()),
        Copied::Table(k) => {
            hasher.update(b"t");
            number(hasher, *k);
        }
        Copied::Function(k) => {
            hasher.update(b"f");
            number(hasher, *k);
        }
        Copied::Object(object) => drop(hasher.update(b"o").update(&object.fingerprint())),
    }
}
