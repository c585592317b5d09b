//! Plans and prints kernels for a GPU that is not present: a backend that neither compiles nor runs.

use crate::launch::{Arg, Props, Work};
use crate::library::collective::{self, Collective};
use crate::library::fp8;
use crate::library::source::{ENTRY, OWN};
use crate::library::transfer;
use crate::{conv, emit, executable, library, nvrtc};
use perilune_core::Layout;
use perilune_core::error::{Error, Result};
use perilune_core::graph::Node;
use perilune_plan::ir::{Kernel, Program};
use perilune_plan::{Backend, Buffer, BufferDesc, Executable};
use std::fmt::Write;
use std::sync::Arc;

/// A target GPU that plans and emits texts, but computes nothing.
#[derive(Clone, Copy, Debug)]
pub struct OfflineTarget {
    pub props: Props,
    /// Whether it has cuDNN: convolutions have kernels then, and images may be stored channels last.
    pub cudnn: bool,
}

impl OfflineTarget {
    /// Without cuDNN.
    pub fn new(props: Props) -> Self {
        OfflineTarget { props, cudnn: false }
    }
}

impl Default for OfflineTarget {
    fn default() -> Self {
        OfflineTarget::new(Props::H200)
    }
}

fn nothing<T>() -> Result<T> {
    Err(Error::system("cuda", "this is a bug: an offline target cannot compute"))
}

impl Backend for OfflineTarget {
    fn name(&self) -> &str {
        "cuda"
    }

    fn describe(&self) -> String {
        let (major, minor) = self.props.arch;
        format!("a GPU (sm_{major}{minor}, {} SMs)", self.props.sms)
    }

    fn has_kernel(&self, node: &Node) -> bool {
        executable::has_kernel(node, &self.props) || (self.cudnn && conv::has_kernel(node))
    }

    fn can_store_layout(&self, node: &Node, output: usize, layout: &Layout) -> bool {
        let own = [conv::can_store_layout, library::pool::can_store_layout];
        crate::attention::can_store_layout(node, output, layout)
            || (self.cudnn && own.iter().any(|stores| stores(node, output, layout)))
    }

    fn row_bytes(&self) -> Option<usize> {
        Some(crate::blas::ALIGNMENT as usize)
    }

    fn fills_rows(&self) -> bool {
        true
    }

    fn has_host_memory_route(&self) -> bool {
        self.props.has_host_memory_route()
    }

    fn defers_index_faults(&self) -> bool {
        true
    }

    fn message_slots(&self) -> Option<perilune_plan::MessageSlots> {
        Some(crate::driver::SLOTS)
    }

    fn source(&self, program: &Program, k: usize) -> Option<Result<String>> {
        Some(text(program, k, &self.props))
    }

    fn alloc(&self, _: &BufferDesc) -> Result<Buffer> {
        nothing()
    }

    fn upload(&self, _: &BufferDesc, _: &[u8]) -> Result<Buffer> {
        nothing()
    }

    fn download(&self, _: &Buffer) -> Result<Vec<u8>> {
        nothing()
    }

    fn compile(&self, _: Arc<Program>) -> Result<Box<dyn Executable>> {
        nothing()
    }
}

/// Returns the work of kernel `k` of a program: a line about the cuBLASLt product or the cuDNN convolution, if there is
/// one, and launches.
pub fn work(program: &Program, k: usize, props: &Props) -> Result<(Option<String>, Vec<Work>)> {
    let (mut product, mut works) = (None, Vec::new());
    let regions = match &program.kernels[k] {
        Kernel::Library(l) if conv::is(l.op) => {
            let conv::Parts { before, calls, after } = conv::parts(l)?;
            product = match calls.len() {
                0 => None,
                1 => Some(format!("cuDNN: {}", l.op.name)),
                n => Some(format!("cuDNN: {}, {n} groups", l.op.name)),
            };
            works.extend([before, after]);
            &[]
        }
        Kernel::Library(l) if fp8::is(l.op) => {
            let (before, operands) = fp8::parts(program, l)?;
            product = Some(format!("cuBLASLt: {}", operands.problem.describe(false)));
            works.push(before);
            &[]
        }
        Kernel::Library(l) if collective::is(l.op) => {
            let (before, all) = collective::parts(program, l, props)?;
            product = all.first().map(|c| format!("{} along {}", c.name, c.axis.name()));
            works.push(before);
            works.extend(all.iter().map(Collective::example).collect::<Result<Vec<_>>>()?);
            l.epilogue.as_slice()
        }
        Kernel::Library(l) if transfer::is(l.op) => {
            let (before, transfer) = transfer::parts(program, l)?;
            product = Some(transfer.describe());
            works.push(before);
            l.epilogue.as_slice()
        }
        Kernel::Library(l) => match executable::product(program, l) {
            Some(p) => {
                let inside = l.epilogue.as_ref().is_some_and(|r| executable::epilogue(program, l, r, &p).is_some());
                let tail = if inside { ", and what follows" } else { "" };
                product = Some(format!("cuBLASLt: {}{tail}", p.problem.describe(l.tf32)));
                if inside { &[] } else { l.epilogue.as_slice() }
            }
            None => {
                works.push(library::routine(program, l, props)?);
                l.epilogue.as_slice()
            }
        },
        other => other.regions(),
    };
    if !regions.is_empty() {
        works.push(emit::regions(program, regions, props)?);
    }
    Ok((product, works))
}

/// The launches of kernel `k` with the text of each; a cuBLASLt product is one line.
pub fn text(program: &Program, k: usize, props: &Props) -> Result<String> {
    let (product, works) = work(program, k, props)?;
    let mut out = product.map_or_else(String::new, |line| format!("// {line}\n"));
    works.iter().for_each(|w| launches(&mut out, w));
    Ok(out)
}

fn launches(out: &mut String, work: &Work) {
    for l in &work.launches {
        let shared = if l.shared_bytes > 0 { format!(", {} bytes shared", l.shared_bytes) } else { String::new() };
        let tables = l.args.iter().filter(|a| matches!(a, Arg::Table(_))).count();
        let tables = if tables > 0 { ", operands in a table" } else { "" };
        let _ = writeln!(out, "// {:?} blocks of {:?}{shared}{tables}", l.grid, l.block);
        let own = l.function.text.starts_with(OWN);
        let text = l.function.text.replace(if own { ENTRY } else { "KERNEL" }, &nvrtc::name(&l.function));
        out.push_str(text.trim_end());
        out.push('\n');
    }
}
