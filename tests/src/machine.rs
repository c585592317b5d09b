//! Compiles plans to machine code without a GPU, and checks that no generated kernel spills registers.

use crate::known::{Known, with_headers};
use perilune_cuda::headers::HEADERS;
use perilune_cuda::launch::{Function, Props};
use perilune_cuda::nvrtc::{self, Compiler};
use perilune_cuda::offline_target;
use perilune_plan::ir::Program;
use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock, Mutex};

/// The GPUs for which every plan must compile: compute capability, multiprocessors, shared memory of a block.
pub const GPUS: [Props; 3] = [
    Props { arch: (8, 0), sms: 108, shared_bytes: 163 << 10, ..Props::H200 },
    Props::H200,
    Props { arch: (10, 0), sms: 148, shared_bytes: 227 << 10, ..Props::H200 },
];

/// Returns the compiler's options for these GPUs, on one line.
pub fn options() -> String {
    format!("{:?}", GPUS.map(|props| nvrtc::text_options(props.arch)))
}

/// Whether a line of ptxas's report says that registers are spilled.
fn spills(line: &str) -> bool {
    line.contains("spill stores") && !line.contains(" 0 bytes spill stores, 0 bytes spill loads")
}

/// Compiles all kernels of the plan except cuBLASLt's, and fails if one spills registers. A text that several plans share, or that is
/// known not to spill (`known.rs`), is not compiled again. `PERILUNE_DUMP` names a folder for the texts of kernels that spill.
pub fn compiles(name: &str, p: &Program) {
    let mut bad = Vec::new();
    static KNOWN: LazyLock<Known> = LazyLock::new(|| Known::open("plans", &options()));
    static SEEN: Mutex<BTreeSet<(u32, String)>> = Mutex::new(BTreeSet::new());
    for props in GPUS {
        let Ok(mut compiler) = Compiler::new(props.arch, None) else {
            return crate::skip::no_nvrtc();
        };
        let version = compiler.version;
        let works = (0..p.kernels.len())
            .map(|k| offline_target::work(p, k, &props).unwrap_or_else(|e| panic!("{name}: {e}")).1);
        let launches = works.flatten().flat_map(|w| w.launches);
        let new = |f: &Arc<Function>| SEEN.lock().unwrap().insert((props.arch.0, f.text.clone()));
        let key = |f: &Function| {
            let how = format!("spills {:?} {:?}", props.arch, version);
            Known::key(&[how.as_bytes(), with_headers(&f.text, HEADERS).as_bytes()])
        };
        let fresh = launches.map(|l| l.function).filter(new).map(|f| (key(&f), f));
        let fresh: Vec<(String, Arc<Function>)> = fresh.filter(|(key, _)| KNOWN.find(key).is_none()).collect();
        // Texts of one kind are compiled as one program.
        for contract in [false, true] {
            let of_kind = || fresh.iter().filter(|(_, f)| f.text.starts_with(nvrtc::CONTRACT) == contract);
            let list: Vec<&Function> = of_kind().map(|(_, f)| &**f).collect();
            if list.is_empty() {
                continue;
            }
            let log = compiler.program(&list).unwrap_or_else(|e| panic!("{name}: {e}")).1;
            if !log.lines().any(spills) {
                of_kind().for_each(|(key, _)| KNOWN.add(key, "clean"));
            }
            let mut entry = "";
            for line in log.lines() {
                entry = line.split_once("entry function '").map_or(entry, |l| l.1);
                if !spills(line) {
                    continue;
                }
                bad.push(format!("{name} for {:?}: {entry}: {}", props.arch, line.trim()));
                if let Some(folder) = std::env::var_os("PERILUNE_DUMP") {
                    let of = |f: &&&Function| entry.starts_with(&nvrtc::name(f));
                    let text = list.iter().find(of).map_or("", |f| &f.text);
                    let file = format!("{}_{}.cu", entry.split('\'').next().unwrap_or(""), props.arch.0);
                    std::fs::write(std::path::Path::new(&folder).join(file), text).unwrap();
                }
            }
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remembered_results_hold_for_their_options_only() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/compiled/plans.txt");
        let text = std::fs::read_to_string(file).unwrap();
        let (key, result) = text.lines().nth(1).and_then(|line| line.split_once(' ')).unwrap();
        assert_eq!(Known::open("plans", &options()).find(key).as_deref(), Some(result));
        assert_eq!(Known::open("plans", &options()).find("0000000000000000"), None);
        assert_eq!(Known::open("plans", &options().replace("--fmad=false", "--fmad=true")).find(key), None);
    }
}
