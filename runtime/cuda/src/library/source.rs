//! Wraps CUDA source from a recipe (`pl.kernel { source = … }`) in a kernel, and translates its compile errors.
//!
//! The recipe's `__global__` function becomes a device function, and a generated kernel calls it. This passes run-time
//! numbers, which are in device memory, by value; lets templates deduce their types; and lets the compiler check the
//! arguments. Each source is compiled separately, and errors name the recipe's lines.

use crate::guard::report::{Buffer, Subject};
use crate::guard::{self, Guard, Refusal};
use crate::launch::{Arg, Function, Launch, Props, Work};
use perilune_core::DType;
use perilune_core::error::{Error, Result};
use perilune_core::ops::source::{self, Body};
use perilune_plan::ir::{Library, Operand, Program, ValueId};
use std::sync::Arc;

/// The prefix of such a text; the key of its body follows.
pub const OWN: &str = "// source ";
/// The placeholder for the function's name. The word alone might occur in the recipe's text.
pub const ENTRY: &str = "/*entry*/KERNEL";
/// Maximum x, y and z extents of a grid.
const GRID: [i64; 3] = [i32::MAX as i64, 65_535, 65_535];

pub fn work(program: &Program, l: &Library, props: &Props) -> Result<Work> {
    let (Some(call), Some(body)) = (source::Launch::read(&l.attrs), source::body_of(l.op, &l.attrs)) else {
        return Err(Error::system("cuda", "this is a bug: a kernel from source without its source"));
    };
    let wrong = |message: String| Err(Error::argument(&body.name, message));
    if call.shared > i64::from(props.shared_bytes) {
        return wrong(format!(
            "shared is {} bytes; a block has at most {} on this GPU",
            call.shared, props.shared_bytes
        ));
    }
    if let Some(axis) = (0..3).find(|&a| call.grid[a] > GRID[a]) {
        return wrong(format!("grid is {:?}; its extent {} may be {} at most", call.grid, axis + 1, GRID[axis]));
    }
    let (mut params, mut given, mut args) = (Vec::new(), Vec::new(), Vec::new());
    let mut buffers: Vec<Buffer> = Vec::new();
    let mut buffer = |shape, dtype| {
        let name = body.names.get(buffers.len()).cloned().unwrap_or_else(|| format!("buffer {}", buffers.len() + 1));
        buffers.push(Buffer { name, shape, dtype });
    };
    let mut work = Work::default();
    let first_scalar = l.inputs.len() - call.scalars.min(l.inputs.len());
    let mut scalars = Vec::new();
    for (k, o) in l.inputs.iter().enumerate() {
        let Operand::View(v, layout) = o else {
            return Err(Error::system("cuda", "this is a bug: an operand of a kernel from source is not in memory"));
        };
        let dtype = program.values[v.0 as usize].dtype;
        buffer(layout.shape, dtype);
        params.push(format!("const {}* x{k}", element(dtype, &body.text)));
        if k < first_scalar {
            given.push(format!("x{k}"))
        } else {
            scalars.push(format!("*x{k}"))
        }
        args.push(Arg::Value(*v, layout.offset as i64 * dtype.size() as i64));
    }
    for (k, m) in call.outputs.iter().enumerate() {
        buffer(m.shape, m.dtype);
        params.push(format!("{}* y{k}", element(m.dtype, &body.text)));
        given.push(format!("y{k}"));
        args.push(match l.outputs.get(k).filter(|v| **v != ValueId::NONE) {
            Some(v) => Arg::Value(*v, 0),
            // The output is not read, but the kernel still writes it.
            None => {
                let at = work.scratch_bytes;
                work.scratch_bytes = at + (m.shape.numel() * m.dtype.size()).next_multiple_of(256);
                Arg::Scratch(at)
            }
        });
    }
    for (k, n) in call.numbers.iter().enumerate() {
        params.push(format!("long long n{k}"));
        given.push(format!("n{k}"));
        args.push(Arg::I64(*n));
    }
    given.append(&mut scalars);
    let threads: i64 = call.block.iter().product();
    let mut kind = String::new();
    if props.guard.is_on() {
        let Guard { check, stop } = props.guard;
        let layout = guard::Layout { inputs: l.inputs.len(), outputs: call.outputs.len(), numbers: call.numbers.len() };
        kind = guarded(check, stop, layout);
        for (k, b) in buffers.iter().enumerate() {
            params.push(format!("long long bytes{k}"));
            args.push(Arg::I64(b.nbytes() as i64));
        }
        params.extend(["cell", "halt", "stop", "launch"].map(|name| format!("unsigned long long guard_{name}")));
        let subject = Subject { body: body.clone(), buffers, inputs: layout.inputs, time: None };
        args.extend([Arg::Fault, Arg::Halt, Arg::Stop, Arg::Number(Arc::new(subject))]);
    }
    let text = text(&body, call.body, &kind, &params, &given, threads);
    let dims = |d: [i64; 3]| d.map(|n| n as u32);
    work.launches.push(Launch {
        function: Arc::new(Function { label: body.name.clone(), text }),
        grid: dims(call.grid),
        block: dims(call.block),
        shared_bytes: call.shared as u32,
        args,
    });
    Ok(work)
}

fn text(body: &Body, key: source::Key, kind: &str, params: &[String], given: &[String], threads: i64) -> String {
    let Body { name, text, .. } = body;
    // Defines Perilune's types, unless the recipe includes NVIDIA's.
    let types = params.iter().any(|p| p.contains("bf16*") || p.contains("f16*"));
    let base = if types { "#include \"device/base.cuh\"\n" } else { "" };
    let bounds = bounds(text, name).map_or_else(|| threads.to_string(), str::to_string);
    format!(
        "{OWN}{:016x}{:016x}{kind}\n{base}\
         #undef __global__\n#define __global__ __device__ __forceinline__\n\
         #undef __launch_bounds__\n#define __launch_bounds__(...)\n\
         #line 1 \"{name}\"\n{text}\n\
         #line 1 \"call {name}\"\n\
         extern \"C\" __attribute__((global)) void __attribute__((launch_bounds({bounds}))) {ENTRY}({}) {{ {name}({}); }}\n",
        key[0] as u64,
        key[1] as u64,
        params.join(", "),
        given.join(", "),
    )
}

/// The rest of the first line of a guarded text.
fn guarded(check: bool, stop: bool, layout: guard::Layout) -> String {
    let guard::Layout { inputs, outputs, numbers } = layout;
    format!(" guard {} {} {inputs} {outputs} {numbers} {}", u8::from(check), u8::from(stop), guard::REVISION)
}

/// What the code of a text is made to do, and what its launches pass; none for a kernel that is not guarded.
pub fn guard_of(text: &str) -> Option<(Guard, guard::Layout)> {
    let line = text.strip_prefix(OWN)?.lines().next()?;
    let list: Vec<usize> = line.split_once(" guard ")?.1.split(' ').filter_map(|n| n.parse().ok()).collect();
    let [check, stop, inputs, outputs, numbers, _] = list[..] else { return None };
    Some((Guard { check: check == 1, stop: stop == 1 }, guard::Layout { inputs, outputs, numbers }))
}

/// The body of a text.
fn body_of(text: &str) -> Option<Arc<Body>> {
    let key = text.strip_prefix(OWN).and_then(|t| t.lines().next()).unwrap_or_default();
    let half = |at: usize| key.get(at..at + 16).and_then(|h| u64::from_str_radix(h, 16).ok()).map(|n| n as i64);
    half(0).zip(half(16)).and_then(|(a, b)| source::body([a, b]))
}

/// The line of the recipe, for messages.
fn place(body: &Body, line: u32) -> String {
    match body.line {
        _ if line == 0 => String::new(),
        0 => format!("line {line} of the source: "),
        first => format!("{}:{}: ", body.file, first + line - 1),
    }
}

/// Adds the checks to the PTX of a text.
pub fn rewrite(text: &str, ptx: &str, entry: &str) -> Result<String> {
    let unknown = || Error::system("cuda", "this is a bug: unknown source");
    let (Some(body), Some((guard, layout))) = (body_of(text), guard_of(text)) else { return Err(unknown()) };
    let refused = |Refusal { line, message }| {
        let (place, flag) = (place(&body, line), if guard.check { "--check-kernels" } else { "--kernel-time" });
        Error::argument(&body.name, format!("{place}{message}"))
            .hint(format!("write it in plain CUDA C++, or run without {flag} a kernel that you trust"))
    };
    guard::rewrite(ptx, entry, &body.name, layout, guard).map_err(refused)
}

/// Returns the argument of the function's `__launch_bounds__`.
fn bounds<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let called = |at: &usize| text[at + name.len()..].trim_start().starts_with('(');
    let at = text.match_indices(name).map(|m| m.0).find(called)?;
    let head = &text[..at];
    let head = &head[head.rfind("__global__")?..];
    let inside = head[head.find("__launch_bounds__")?..].split_once('(')?.1;
    inside.rsplit_once(')').map(|s| s.0.trim())
}

/// The C++ type of an element.
fn element(dtype: DType, text: &str) -> &'static str {
    match dtype {
        DType::F64 => "double",
        DType::F32 => "float",
        DType::BF16 if text.contains("cuda_bf16.h") => "__nv_bfloat16",
        DType::BF16 => "bf16",
        DType::F16 if text.contains("cuda_fp16.h") => "__half",
        DType::F16 => "f16",
        DType::I64 => "long long",
        DType::I32 => "int",
        DType::U8 => "unsigned char",
        DType::Bool => "bool",
    }
}

/// Translates NVRTC's log about such a text into the recipe's terms.
pub fn refused(text: &str, log: &str) -> Error {
    let Some(body) = body_of(text) else {
        return Error::system("cuda", format!("this is a bug: unknown source\n{log}"));
    };
    let (own, call) = (format!("{}(", body.name), format!("call {}(", body.name));
    let mut lines: Vec<String> = Vec::new();
    for line in log.lines().map(str::trim_end).filter(|l| !l.is_empty()) {
        if line.contains("detected in the compilation of") || line.contains("ptxas") {
            continue;
        }
        let numbered =
            |rest: &str| rest.split_once(')').and_then(|(n, rest)| Some((n.parse::<u32>().ok()?, rest.to_string())));
        if let Some((_, rest)) = line.strip_prefix(&call).and_then(numbered) {
            lines.push(format!("its call{rest}"));
        } else if let Some((n, rest)) = line.strip_prefix(&own).and_then(numbered) {
            lines.push(match body.line {
                0 => format!("line {n} of the source{rest}"),
                first => format!("{}:{}{rest}", body.file, first + n - 1),
            });
        } else {
            lines.push(format!("  {line}"));
        }
    }
    lines.truncate(24);
    let signature = text.rsplit_once(ENTRY).and_then(|(_, call)| call.split_once(") {")).map_or("(", |c| c.0);
    // The parameters of the checks are none of the recipe's.
    let signature = signature.split_once(", long long bytes0,").map_or(signature, |s| s.0);
    let message = format!("its CUDA source does not compile\n  {}", lines.join("\n  "));
    Error::argument(&body.name, message)
        .hint(format!("it is called with {}): inputs, outputs, args and (by value) scalars, in this order", signature))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launch_bounds_are_those_of_the_function() {
        let text = "__global__ void __launch_bounds__(64) other(int n) {}\n\
                    template <int N> __global__ __launch_bounds__(N * (2), 4) void mine (float* y) { other_mine(1); }";
        assert_eq!(bounds(text, "mine"), Some("N * (2), 4"));
        assert_eq!(bounds(text, "other"), Some("64"));
        assert_eq!(bounds("__global__ void mine(float* y) {}", "mine"), None);
    }
}
