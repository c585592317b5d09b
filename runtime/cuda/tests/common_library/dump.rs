//! Writes cases to disk: launches, inputs and the CPU's result.
//!
//! A case is a text file `NAME.case` with binary files next to it. Lines: `label`, `input BYTES DTYPE`, `output BYTES DTYPE`,
//! `scratch BYTES`, then for each launch `launch FUNCTION GRID BLOCK SHARED` and its arguments in order. Functions are
//! `f_NUMBER.cu`, each with its own name in place of KERNEL.

use super::Call;
use perilune_core::{HostTensor, Interrupt};
use perilune_cpu::Cpu;
use perilune_cuda::launch::{Arg, Props, Word};
use perilune_plan::{Backend, BufferDesc, RunContext};
use std::collections::HashMap;
use std::fmt::Write;
use std::path::Path;

pub struct Dump<'a> {
    to: &'a Path,
    functions: HashMap<String, usize>,
    cases: usize,
    cpu: Cpu,
}

impl<'a> Dump<'a> {
    pub fn new(to: &'a Path) -> Dump<'a> {
        std::fs::create_dir_all(to).expect("a directory");
        Dump { to, functions: HashMap::new(), cases: 0, cpu: Cpu::new(Some(1)) }
    }

    pub fn write(&mut self, c: &Call) {
        // The lab compiles for sm_90, without the features of sm_90a.
        let props = Props { arch: (8, 0), ..Props::H200 };
        let (work, name) = (c.work_on(&props), format!("c{:05}", self.cases));
        self.cases += 1;
        let mut text = format!("label {}\n", c.label);
        let file = |part: &str, bytes: &[u8]| {
            std::fs::write(self.to.join(format!("{name}.{part}")), bytes).expect("written");
        };
        for (shape, dtype) in &c.program.inputs {
            let _ = writeln!(text, "input {} {dtype}", shape.numel() * dtype.size());
        }
        for (k, t) in c.inputs.iter().enumerate() {
            file(&format!("in{k}"), &t.bytes);
        }
        let dtype = c.program.values.last().expect("a value").dtype;
        let size = c.program.outputs[0].nbytes();
        let _ = writeln!(text, "output {size} {dtype}\nscratch {}", work.scratch_bytes);
        let given = c.inputs.len() == c.program.inputs.len();
        if let Some(want) = given.then(|| self.want(c)).flatten() {
            file("want", &want);
        }
        for l in &work.launches {
            let next = self.functions.len();
            let k = *self.functions.entry(l.function.text.clone()).or_insert(next);
            if k == next {
                let text = l.function.text.replace("KERNEL", &format!("f_{k}"));
                std::fs::write(self.to.join(format!("f_{k}.cu")), text).expect("written");
            }
            let _ = writeln!(text, "launch {k} {} {} {}", l.grid[0], l.block[0], l.shared_bytes);
            for a in &l.args {
                let _ = match a {
                    Arg::Value(v, at) => writeln!(text, "value {} {at}", v.0),
                    Arg::Scratch(at) => writeln!(text, "scratch {at}"),
                    Arg::Fault => writeln!(text, "fault"),
                    Arg::I32(x) => writeln!(text, "i32 {x}"),
                    Arg::I64(x) => writeln!(text, "i64 {x}"),
                    Arg::Bytes(b) => {
                        let hex: String = b.iter().map(|b| format!("{b:02x}")).collect();
                        writeln!(text, "bytes {hex}")
                    }
                    Arg::Table(words) => {
                        let words: Vec<String> = words
                            .iter()
                            .map(|w| match w {
                                Word::Number(n) => n.to_string(),
                                Word::Value(..) => panic!("addresses in tables are not used here"),
                            })
                            .collect();
                        writeln!(text, "table {}", words.join(" "))
                    }
                    other => panic!("{other:?} is not used here"),
                };
            }
        }
        file("case", text.as_bytes());
    }

    /// The CPU's result, if the indices are valid.
    fn want(&self, c: &Call) -> Option<Vec<u8>> {
        let program = self.cpu.compile(c.program.clone()).expect("compiles");
        let upload = |t: &HostTensor| self.cpu.upload(&BufferDesc::new(t.shape, t.dtype), &t.bytes).expect("memory");
        let inputs: Vec<_> = c.inputs.iter().map(upload).collect();
        let output = self.cpu.alloc(&c.program.outputs[0]).expect("memory");
        program.run(&inputs, &[], std::slice::from_ref(&output), RunContext::new(&Interrupt::default())).ok()?;
        Some(self.cpu.download(&output).expect("bytes").to_vec())
    }
}
