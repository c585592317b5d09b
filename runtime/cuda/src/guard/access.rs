//! Classifies PTX instructions by what they do with memory (PTX ISA, "Instruction Set").
//!
//! The list is of what is known and harmless, or known and checked. Every other instruction is refused, so that an instruction of a
//! later PTX version, or one that reads memory through a descriptor, is never run without a check.

/// What an access does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Act {
    Read,
    Write,
    Atomic,
}

/// What an instruction does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// It accesses no memory but the block's or the thread's own, or constants.
    Harmless,
    /// It accesses `bytes` bytes at its only address, aligned to them.
    Access {
        act: Act,
        is_generic: bool,
        bytes: u32,
    },
    /// It copies from global to shared memory; its operands have the number of bytes.
    CopyAsync,
    Call,
    Branch,
    /// A branch by a table of labels.
    IndexedBranch,
    Unknown,
}

/// Instructions without an address, by their first word.
const HARMLESS: &[&str] = &[
    "abs",
    "activemask",
    "add",
    "addc",
    "and",
    "bar",
    "bfe",
    "bfi",
    "bfind",
    "bmsk",
    "brev",
    "clz",
    "cnot",
    "copysign",
    "cos",
    "cvt",
    "cvta",
    "div",
    "dp2a",
    "dp4a",
    "elect",
    "ex2",
    "exit",
    "fence",
    "fma",
    "fns",
    "isspacep",
    "lg2",
    "lop3",
    "mad",
    "mad24",
    "madc",
    "match",
    "max",
    "membar",
    "min",
    "mma",
    "mov",
    "movmatrix",
    "mul",
    "mul24",
    "nanosleep",
    "neg",
    "not",
    "or",
    "popc",
    "prmt",
    "rcp",
    "redux",
    "rem",
    "ret",
    "rsqrt",
    "sad",
    "selp",
    "set",
    "setp",
    "shf",
    "shfl",
    "shl",
    "shr",
    "sin",
    "slct",
    "sqrt",
    "sub",
    "subc",
    "szext",
    "tanh",
    "testp",
    "trap",
    "vote",
    "xor",
];

/// Classifies an opcode with its modifiers, as in `ld.global.v4.f32`.
pub fn classify(opcode: &str) -> Class {
    let mut parts = opcode.split('.');
    let base = parts.next().unwrap_or_default();
    let rest: Vec<&str> = parts.collect();
    let has = |word: &str| rest.contains(&word);
    let in_shared = || has("shared") || has("shared::cta");
    match base {
        "ld" | "ldu" => access(Act::Read, &rest),
        "st" => access(Act::Write, &rest),
        "atom" | "red" => access(Act::Atomic, &rest),
        "bra" => Class::Branch,
        "brx" if has("idx") => Class::IndexedBranch,
        "call" => Class::Call,
        "cp" if rest == ["async", "wait_all"] => Class::Harmless,
        "cp" if matches!(rest[..], ["async", "commit_group" | "wait_group"]) => Class::Harmless,
        "cp" if is_copy(&rest) => Class::CopyAsync,
        "ldmatrix" | "stmatrix" if in_shared() => Class::Harmless,
        "wmma" if has("mma") || in_shared() => Class::Harmless,
        "barrier" if !rest.first().is_some_and(|word| word.starts_with("cluster")) => Class::Harmless,
        // A proxy fence or one over addresses belongs to instructions that are refused.
        "fence" if rest.iter().any(|word| word.starts_with("proxy") || word.starts_with("mbarrier")) => Class::Unknown,
        _ if HARMLESS.contains(&base) => Class::Harmless,
        _ => Class::Unknown,
    }
}

/// `cp.async.{ca,cg}.shared.global`, with hints for the cache.
fn is_copy(rest: &[&str]) -> bool {
    let ["async", "ca" | "cg", "shared" | "shared::cta", "global", hints @ ..] = rest else { return false };
    hints.iter().all(|word| word.starts_with("L2::"))
}

/// The class of a load, store or atomic operation with these modifiers.
fn access(act: Act, modifiers: &[&str]) -> Class {
    let (mut space, mut lanes, mut size) = ("", 1, None);
    for word in modifiers {
        match *word {
            "global" | "local" | "const" if space.is_empty() => space = word,
            "shared" | "shared::cta" | "param" | "param::entry" | "param::func" if space.is_empty() => space = "own",
            "v2" => lanes = 2,
            "v4" => lanes = 4,
            "v8" => lanes = 8,
            word if element(word).is_some() => size = element(word),
            // Order, scope and caches.
            "weak" | "volatile" | "relaxed" | "acquire" | "release" | "acq_rel" | "cta" | "cluster" | "gpu" | "sys" => {
            }
            "ca" | "cg" | "cs" | "lu" | "cv" | "cop" | "wb" | "wt" | "nc" | "unified" | "noftz" => {}
            "and" | "or" | "xor" | "cas" | "exch" | "add" | "inc" | "dec" | "min" | "max" if act == Act::Atomic => {}
            word if word.starts_with("L1::") || word.starts_with("L2::") => {}
            _ => return Class::Unknown,
        }
    }
    match (space, size) {
        ("own" | "local" | "const", _) => Class::Harmless,
        ("" | "global", Some(size)) => Class::Access { act, is_generic: space.is_empty(), bytes: size * lanes },
        _ => Class::Unknown,
    }
}

/// The bytes of a type.
pub fn element(word: &str) -> Option<u32> {
    Some(match word {
        "b8" | "u8" | "s8" => 1,
        "b16" | "u16" | "s16" | "f16" | "bf16" => 2,
        "b32" | "u32" | "s32" | "f32" | "f16x2" | "bf16x2" => 4,
        "b64" | "u64" | "s64" | "f64" | "f32x2" => 8,
        "b128" => 16,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_have_their_bytes() {
        let all = |act, is_generic, bytes| Class::Access { act, is_generic, bytes };
        for (opcode, class) in [
            ("ld.global.nc.L1::no_allocate.L2::128B.v4.f32", all(Act::Read, false, 16)),
            ("ld.u8", all(Act::Read, true, 1)),
            ("ld.volatile.global.v2.b64", all(Act::Read, false, 16)),
            ("ld.acquire.sys.global.b128", all(Act::Read, false, 16)),
            ("ld.global.v8.b32", all(Act::Read, false, 32)),
            ("st.global.cs.v2.u8", all(Act::Write, false, 2)),
            ("atom.global.add.noftz.bf16x2", all(Act::Atomic, false, 4)),
            ("atom.acq_rel.gpu.cas.b64", all(Act::Atomic, true, 8)),
            ("red.global.v4.f32.add", all(Act::Atomic, false, 16)),
        ] {
            assert_eq!(classify(opcode), class, "{opcode}");
        }
    }

    #[test]
    fn what_is_not_known_is_refused() {
        for opcode in [
            "ld.shared::cluster.u32",
            "ld.mmio.sys.global.u32",
            "st.async.weak.shared::cluster.b32",
            "st.bulk.weak.shared::cta",
            "cp.async.bulk.global.shared::cta.bulk_group",
            "cp.async.mbarrier.arrive.b64",
            "tex.2d.v4.f32.f32",
            "suld.b.1d.b32",
            "wmma.load.a.sync.aligned.row.m16n16k16.global.f16",
            "wmma.load.a.sync.aligned.row.m16n16k16.f16",
            "prefetch.global.L2",
            "discard.global.L2",
            "multimem.ld_reduce.global.add.f32",
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16",
            "tcgen05.ld",
            "mapa.u64",
            "brkpt",
            "alloca.u64",
            "ld.global",
            "xyz",
            "",
            "barrier.cluster.arrive",
            "atom.global.frob.b32",
            "fence.proxy.async",
        ] {
            assert_eq!(classify(opcode), Class::Unknown, "{opcode}");
        }
        for opcode in [
            "ld.shared.v4.f32",
            "ld.param.u64",
            "st.local.u32",
            "atom.shared.add.u32",
            "bar.sync",
            "mma.sync.aligned",
            "cvta.to.global.u64",
        ] {
            assert_eq!(classify(opcode), Class::Harmless, "{opcode}");
        }
        assert_eq!(classify("cp.async.cg.shared.global.L2::128B"), Class::CopyAsync);
    }
}
