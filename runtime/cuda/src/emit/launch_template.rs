//! Turns emitted text into launches: the kernel's body, its parameters and its launch configuration.
//!
//! A body reads its parameters (addresses, sizes, strides, slots) by name. For one region, they are kernel parameters.
//! For many regions with one body, they are rows of a table in device memory, and each block first finds its region
//! from the table's prefix sums of block counts. The text contains no sizes, so kernels that differ only in sizes share
//! machine code.

use crate::launch::{Arg, Function, Launch, Word};
use perilune_plan::ir::ValueId;
use std::collections::HashMap;
use std::fmt::Write;
use std::sync::Arc;

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum ParamValue {
    Value(ValueId),
    I32(i32),
    U32(u32),
    I64(i64),
}

#[derive(Clone, Debug)]
pub struct Param {
    pub name: String,
    /// The C type; for a value, the type that the pointer points to.
    pub ctype: &'static str,
    pub fact: ParamValue,
}

/// The parameters that a body reads.
#[derive(Clone, Default, Debug)]
pub struct Params {
    pub list: Vec<Param>,
    pointers: HashMap<ValueId, String>,
}

impl Params {
    /// The name of a value's address.
    pub fn pointer(&mut self, v: ValueId, ctype: &'static str) -> String {
        if let Some(name) = self.pointers.get(&v) {
            return name.clone();
        }
        let name = format!("p{}", self.list.len());
        self.list.push(Param { name: name.clone(), ctype, fact: ParamValue::Value(v) });
        self.pointers.insert(v, name.clone());
        name
    }

    pub fn number(&mut self, hint: &str, fact: ParamValue) -> String {
        let name = format!("{hint}{}", self.list.len());
        let ctype = match fact {
            ParamValue::I32(_) => "i32",
            ParamValue::U32(_) => "u32",
            _ => "i64",
        };
        self.list.push(Param { name: name.clone(), ctype, fact });
        name
    }
}

#[derive(Clone, Debug)]
pub struct LaunchTemplate {
    pub label: String,
    pub fields: Vec<Param>,
    pub body: String,
    pub blocks: u64,
    /// Threads per block, and the maximum that the text supports.
    pub threads: u32,
    pub most_threads: u32,
    /// Blocks that should fit on a multiprocessor.
    pub resident: u32,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    pub slots: bool,
    pub scratch: bool,
    /// Whether a State is written, so that the kernel returns at once after a bad index.
    pub halts: bool,
}

const HEAD: &str = "#include \"device/ops.cuh\"\n#include \"device/cast.cuh\"\n#include \"device/vec.cuh\"\n\
                    #include \"device/reduce.cuh\"\n\n";

impl LaunchTemplate {
    /// Requires at least one block per multiprocessor; otherwise ptxas spills registers to fit more. A stage that sets
    /// a higher number has enough registers for it.
    fn head(&self, params: &str) -> String {
        let mut common = String::new();
        if self.slots {
            common.push_str("const u64* slots, ");
        }
        if self.scratch {
            common.push_str("u8* scratch, ");
        }
        if self.halts {
            common.push_str("const volatile u32* halt, ");
        }
        let all = format!("{common}{params}");
        let all = all.trim_end_matches(", ");
        format!(
            "{HEAD}extern \"C\" __global__ void __launch_bounds__({}, {}) KERNEL({all}) {{\n    using namespace \
             region;\n{}",
            self.most_threads,
            self.resident,
            if self.halts { "    if (*halt) return;\n" } else { "" }
        )
    }

    fn common_args(&self) -> Vec<Arg> {
        let mut args = Vec::new();
        if self.slots {
            args.push(Arg::Slots);
        }
        if self.scratch {
            args.push(Arg::Scratch(0));
        }
        if self.halts {
            args.push(Arg::Halt);
        }
        args
    }

    /// The properties that regions must have in common to share a launch.
    pub fn alike(&self, other: &LaunchTemplate) -> bool {
        self.body == other.body
            && self.halts == other.halts
            && (self.threads, self.most_threads, self.shared_bytes)
                == (other.threads, other.most_threads, other.shared_bytes)
            && self.fields.len() == other.fields.len()
            && self
                .fields
                .iter()
                .zip(&other.fields)
                .all(|(a, b)| a.ctype == b.ctype && std::mem::discriminant(&a.fact) == std::mem::discriminant(&b.fact))
    }

    pub fn single(&self) -> Launch {
        let mut params = String::new();
        let mut args = self.common_args();
        for f in &self.fields {
            let star = if matches!(f.fact, ParamValue::Value(_)) { "*" } else { "" };
            let _ = write!(params, "{}{star} {}, ", f.ctype, f.name);
            args.push(match f.fact {
                ParamValue::Value(v) => Arg::Value(v, 0),
                ParamValue::I32(x) => Arg::I32(x),
                ParamValue::U32(x) => Arg::I32(x as i32),
                ParamValue::I64(x) => Arg::I64(x),
            });
        }
        let text =
            format!("{}    const u32 block = blockIdx.x, blocks = gridDim.x;\n{}}}\n", self.head(&params), self.body);
        self.launch(text, self.blocks, args)
    }

    /// Builds one launch for the same stage of many regions.
    pub fn many(stages: &[&LaunchTemplate]) -> Launch {
        let first = stages[0];
        let width = first.fields.len();
        let mut text = first.head("const u64* table, u32 regions");
        text.push_str(
            "    int found = -1;\n    for (u32 k = 0; k < regions; k += blockDim.x) {\n        \
             const u32 at = k + threadIdx.x;\n        \
             found += __syncthreads_count(at < regions && table[at] <= blockIdx.x);\n    }\n",
        );
        let _ = writeln!(text, "    const u64* const facts = table + regions + found * {width};");
        text.push_str(
            "    const u32 before = (u32)table[found];\n    \
             const u32 block = blockIdx.x - before;\n    \
             const u32 blocks = (found + 1 < regions ? (u32)table[found + 1] : gridDim.x) - before;\n",
        );
        for (k, f) in first.fields.iter().enumerate() {
            let star = if matches!(f.fact, ParamValue::Value(_)) { "*" } else { "" };
            let _ = writeln!(text, "    {0}{star} const {1} = ({0}{star})facts[{k}];", f.ctype, f.name);
        }
        text.push_str(&first.body);
        text.push_str("}\n");
        let mut table = Vec::with_capacity(stages.len() * (width + 1));
        let mut blocks = 0;
        for s in stages {
            table.push(Word::Number(blocks));
            blocks += s.blocks;
        }
        for f in stages.iter().flat_map(|s| &s.fields) {
            table.push(match f.fact {
                ParamValue::Value(v) => Word::Value(v, 0),
                ParamValue::I32(x) => Word::Number(x as i64 as u64),
                ParamValue::U32(x) => Word::Number(x as u64),
                ParamValue::I64(x) => Word::Number(x as u64),
            });
        }
        let mut args = first.common_args();
        args.push(Arg::Table(table.into()));
        args.push(Arg::I32(stages.len() as i32));
        first.launch(text, blocks, args)
    }

    fn launch(&self, text: String, blocks: u64, args: Vec<Arg>) -> Launch {
        let function = Arc::new(Function { label: self.label.clone(), text });
        Launch {
            function,
            grid: [blocks as u32, 1, 1],
            block: [self.threads, 1, 1],
            shared_bytes: self.shared_bytes,
            args,
        }
    }
}
