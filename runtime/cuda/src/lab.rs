//! Times every cuDNN plan of a convolution, for `examples/conv_lab.rs`.

use crate::conv::{Kind, Problem};
use crate::dnn::{Addresses, Dnn};
use crate::driver::{Device, Event, Heap};
use perilune_core::DType;
use perilune_core::error::Result;
use std::fmt::Write;

/// A square convolution of `n` images in bf16: input channels, rows, output channels, kernel size, stride.
pub fn square(kind: Kind, n: i64, [c, h, o, k, stride]: [i64; 5]) -> Problem {
    let out = (h + 2 * (k / 2) - k) / stride + 1;
    let pad = [k / 2; 2];
    Problem {
        kind,
        dtype: DType::BF16,
        x: [n, c, h, h],
        w: [o, c, k, k],
        y: [n, o, out, out],
        stride: [stride; 2],
        before: pad,
        after: pad,
        dilation: [1; 2],
        adds: false,
    }
}

/// One line per problem: its work, then engine, microseconds and MiB of workspace of each plan, in cuDNN's order.
pub fn convolutions(problems: &[Problem], most: usize) -> Result<String> {
    let device = Device::open(0, crate::guard::Guard::NONE)?;
    let heap = Heap::new(&device)?;
    let dnn = Dnn::new(&device)?;
    let mut out = format!("cuDNN {}\n", dnn.version());
    for p in problems {
        let numel = |d: [i64; 4]| d.iter().product::<i64>() as usize;
        let (x, w, y) = (heap.alloc(numel(p.x) * 2)?, heap.alloc(numel(p.w) * 2)?, heap.alloc(numel(p.y) * 2)?);
        let flops = 2.0 * numel(p.y) as f64 * (p.w[1] * p.w[2] * p.w[3]) as f64;
        let bytes = 2.0 * (numel(p.x) + numel(p.w) + numel(p.y)) as f64;
        let _ = write!(out, "{:?} x{:?} w{:?} {:.1} GF {:.1} MB:", p.kind, p.x, p.w, flops / 1e9, bytes / 1e6);
        let plans = match dnn.plans(p, most) {
            Ok((plans, _)) => plans,
            Err(e) => {
                let _ = writeln!(out, " {e}");
                continue;
            }
        };
        for plan in plans {
            let scratch = heap.alloc(plan.workspace.max(256))?;
            let at = Addresses { x: x.address, w: w.address, y: y.address, scratch: scratch.address };
            let mut fastest = f64::INFINITY;
            let mut failed = dnn.run(&plan, at).is_err();
            for _ in 0..4 {
                let start = Event::record(&device)?;
                failed |= dnn.run(&plan, at).is_err();
                let end = Event::record(&device)?;
                device.synchronize()?;
                fastest = fastest.min(end.since(&start)?);
            }
            let time = if failed { "failed".to_string() } else { format!("{:.0}us", fastest * 1e6) };
            let _ = write!(out, "  e{} {time} {}M", plan.engine, plan.workspace >> 20);
        }
        out.push('\n');
    }
    Ok(out)
}
