//! Tests `--untrusted` on kernels that lack a wall: a filter answers the calls of the wall as such a kernel does.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]
// `pre_exec` is unsafe; the filter is made before the fork.
#![allow(unsafe_code)]

mod support;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use std::os::unix::process::CommandExt;
use support::{Place, Ran, TINY, place};

/// Makes a filter that answers `errno` to calls; `rules`: those with a value of their first argument only.
fn filter(calls: &[i64], option: Option<(i64, u64)>, errno: i32) -> BpfProgram {
    let mut rules: std::collections::BTreeMap<i64, Vec<SeccompRule>> = calls.iter().map(|c| (*c, Vec::new())).collect();
    if let Some((call, value)) = option {
        let is = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value).unwrap();
        rules.insert(call, vec![SeccompRule::new(vec![is]).unwrap()]);
    }
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let answer = SeccompAction::Errno(errno as u32);
    SeccompFilter::new(rules, SeccompAction::Allow, answer, arch).unwrap().try_into().unwrap()
}

/// Linux before 5.13, or one that was built or started without Landlock.
fn without_landlock(errno: i32) -> BpfProgram {
    filter(
        &[libc::SYS_landlock_create_ruleset, libc::SYS_landlock_add_rule, libc::SYS_landlock_restrict_self],
        None,
        errno,
    )
}

/// A container whose own filter forbids to enter another one, by `seccomp` and by `prctl`.
fn without_filters() -> BpfProgram {
    filter(&[libc::SYS_seccomp], Some((libc::SYS_prctl, libc::PR_SET_SECCOMP as u64)), libc::EPERM)
}

fn run(p: &Place, kernel: &BpfProgram, args: &[&str]) -> Ran {
    let mut command = p.command(args);
    command.env("PERILUNE_CACHE", p.path("cache"));
    let kernel = kernel.clone();
    // SAFETY: between fork and exec the closure makes system calls alone, and takes no memory.
    unsafe {
        command.pre_exec(move || seccompiler::apply_filter(&kernel).map_err(|_| std::io::ErrorKind::Other.into()))
    };
    command.output().unwrap().into()
}

fn tree() -> Place {
    let p = place();
    p.file("tiny.lua", TINY);
    std::fs::create_dir(p.path("secret")).unwrap();
    p.file("secret/table.csv", "4711,1\n");
    let own = "local pl = require \"perilune\"\nprint('it ran', pcall(pl.data.csv, '../secret/table.csv'))\n";
    std::fs::create_dir(p.path("work")).unwrap();
    p.file("work/s.lua", own);
    p
}

#[test]
fn a_kernel_without_a_wall_is_told_before_the_recipe_runs() {
    let p = tree();
    for (kernel, wall) in [
        (without_landlock(libc::ENOSYS), "files outside the granted ones"),
        (without_landlock(libc::EOPNOTSUPP), "files outside the granted ones"),
        (without_filters(), "system calls that a recipe does not need"),
    ] {
        for command in ["run", "check"] {
            let ran = run(&p, &kernel, &[command, "work/s.lua", "--untrusted"]);
            assert!(ran.status == Some(4) && !ran.out.contains("it ran"), "{wall}: {:?} {}", ran.status, ran.err);
            assert!(ran.err.contains(wall) && ran.err.contains("--accept-missing-walls"), "{wall}: {}", ran.err);
        }
        // The boundary of the language holds alone.
        let ran = run(&p, &kernel, &["run", "work/s.lua", "--untrusted", "--accept-missing-walls"]);
        assert!(ran.status == Some(0) && ran.out.contains("it ran\tfalse"), "{wall}: {}{}", ran.out, ran.err);
        assert!(!ran.out.contains("4711"), "{}", ran.out);
    }
}

#[test]
fn a_run_has_the_same_bits_without_a_wall() {
    let p = tree();
    let free: Ran = p.command(&["run", "tiny.lua", "--run-dir", "free", "-q"]).output().unwrap().into();
    assert_eq!(free.status, Some(0), "{}", free.err);
    for (k, kernel) in [without_landlock(libc::ENOSYS), without_filters()].iter().enumerate() {
        let dir = format!("held-{k}");
        let ran =
            run(&p, kernel, &["run", "tiny.lua", "--untrusted", "--accept-missing-walls", "--run-dir", &dir, "-q"]);
        assert_eq!(ran.status, Some(0), "{}", ran.err);
        assert_eq!(p.run_json(&dir)["weights"], p.run_json("free")["weights"]);
    }
}
