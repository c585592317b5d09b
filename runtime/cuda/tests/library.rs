//! Tests library calls without a GPU: the launches of every op, dtype and layout match their kernels' parameters, and
//! every kernel compiles for every supported architecture without spilling registers.

mod common_library;

use common_library::nvrtc::{Nvrtc, each};
use common_library::{bench, cases};
use perilune_cuda::launch::{Arg, Props};
use std::collections::BTreeSet;

/// The parameters of a function, parsed from its text.
fn parameters(text: &str) -> Vec<String> {
    let (_, rest) = text.split_once("KERNEL(").expect("a function");
    let (list, _) = rest.split_once(") {").expect("a body");
    let (mut out, mut depth) = (vec![String::new()], 0);
    for c in list.chars() {
        match c {
            '<' => depth += 1,
            '>' => depth -= 1,
            ',' if depth == 0 => {
                out.push(String::new());
                continue;
            }
            _ => {}
        }
        if let Some(last) = out.last_mut() {
            last.push(c);
        }
    }
    out.into_iter().map(|p| p.trim().to_string()).collect()
}

fn everything() -> Vec<common_library::Call> {
    cases().into_iter().chain(bench::cases()).chain(bench::huge()).collect()
}

#[test]
fn arguments_fit_parameters() {
    for c in everything() {
        let work = c.work();
        for l in &work.launches {
            let params = parameters(&l.function.text);
            assert_eq!(params.len(), l.args.len(), "{}: {}", c.label, l.function.text);
            for (p, a) in params.iter().zip(&l.args) {
                let fits = match a {
                    Arg::Fault => p == "Fault* fault",
                    Arg::I32(_) => p.starts_with("i32 ") || p.starts_with("u32 "),
                    Arg::I64(0) => p.starts_with("i64 ") || p.starts_with("u64 ") || p.contains('*'),
                    Arg::I64(_) => p.starts_with("i64 ") || p.starts_with("u64 "),
                    Arg::Bytes(b) => p.contains("__grid_constant__") && b.len() % 8 == 0 && b.len() < 4000,
                    Arg::Scratch(at) => p.contains('*') && *at <= work.scratch_bytes,
                    Arg::Value(..) | Arg::Table(_) => p.contains('*'),
                    _ => false,
                };
                assert!(fits, "{}: {a:?} for {p}", c.label);
            }
        }
    }
}

#[test]
fn functions_compile_without_spills() {
    let Some(nvrtc) = Nvrtc::open() else { return };
    let calls = everything();
    let arches = [("sm_80", (8, 0)), ("sm_90a", (9, 0)), ("sm_100a", (10, 0))].map(|(name, arch)| {
        let launches = calls.iter().flat_map(|c| c.work_on(&Props { arch, ..Props::H200 }).launches);
        let all: BTreeSet<String> = launches.map(|l| l.function.text.clone()).collect();
        println!("{} functions for {name}", all.len());
        (name, all.into_iter().collect::<Vec<_>>())
    });
    let programs: Vec<_> =
        arches.iter().flat_map(|(arch, all)| all.chunks(100).map(move |texts| (arch, texts))).collect();
    each(&programs, |(arch, texts)| nvrtc.spill_free(texts, arch));
}
