//! Restricts the system calls of all threads, with seccomp.
//!
//! Two filters. One refuses the calls of [`REFUSED`] and some arguments of others with EPERM. The other is a list of what is known:
//! any other call, of a newer kernel or of the x32 interface, is ENOSYS, which libraries take as a reason to do without it (`clone3`
//! among them, whose flags a filter cannot see). A program of another architecture is ended by the kernel.

use crate::probes;
use crate::walls::{Error, Stand, Wall, Walls};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen as Length, SeccompCmpOp as Op, SeccompCondition as If,
    SeccompFilter, SeccompRule, TargetArch, apply_filter_all_threads,
};
use std::collections::BTreeMap;

/// Calls that a training run needs.
#[rustfmt::skip]
const ALLOWED: &[i64] = &[
    // Files: Landlock decides which.
    libc::SYS_read, libc::SYS_write, libc::SYS_readv, libc::SYS_writev, libc::SYS_pread64, libc::SYS_pwrite64, libc::SYS_preadv,
    libc::SYS_pwritev, libc::SYS_preadv2, libc::SYS_pwritev2, libc::SYS_openat, libc::SYS_openat2, libc::SYS_close,
    libc::SYS_close_range, libc::SYS_fstat, libc::SYS_newfstatat, libc::SYS_statx, libc::SYS_lseek, libc::SYS_ioctl, libc::SYS_faccessat,
    libc::SYS_faccessat2, libc::SYS_pipe2, libc::SYS_dup, libc::SYS_dup3, libc::SYS_fcntl, libc::SYS_flock, libc::SYS_fsync,
    libc::SYS_fdatasync, libc::SYS_sync_file_range, libc::SYS_syncfs, libc::SYS_ftruncate, libc::SYS_fallocate, libc::SYS_fadvise64,
    libc::SYS_getdents64, libc::SYS_getcwd, libc::SYS_chdir, libc::SYS_fchdir, libc::SYS_renameat, libc::SYS_renameat2,
    libc::SYS_mkdirat, libc::SYS_unlinkat, libc::SYS_linkat, libc::SYS_symlinkat, libc::SYS_readlinkat, libc::SYS_umask,
    libc::SYS_copy_file_range, libc::SYS_statfs, libc::SYS_fstatfs, libc::SYS_readahead,
    // Memory.
    libc::SYS_mmap, libc::SYS_mprotect, libc::SYS_munmap, libc::SYS_mremap, libc::SYS_madvise, libc::SYS_msync, libc::SYS_mincore,
    libc::SYS_mlock, libc::SYS_mlock2, libc::SYS_munlock, libc::SYS_mlockall, libc::SYS_munlockall, libc::SYS_brk,
    libc::SYS_memfd_create, libc::SYS_get_mempolicy, libc::SYS_set_mempolicy, libc::SYS_mbind,
    // Signals of this process, times, waiting.
    libc::SYS_rt_sigaction, libc::SYS_rt_sigprocmask, libc::SYS_rt_sigreturn, libc::SYS_rt_sigpending, libc::SYS_rt_sigtimedwait,
    libc::SYS_rt_sigsuspend, libc::SYS_sigaltstack, libc::SYS_kill, libc::SYS_tgkill, libc::SYS_nanosleep, libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime, libc::SYS_clock_getres, libc::SYS_gettimeofday, libc::SYS_times, libc::SYS_timer_create,
    libc::SYS_timer_settime, libc::SYS_timer_gettime, libc::SYS_timer_getoverrun, libc::SYS_timer_delete, libc::SYS_getitimer,
    libc::SYS_setitimer, libc::SYS_timerfd_create, libc::SYS_timerfd_settime, libc::SYS_timerfd_gettime, libc::SYS_signalfd4,
    libc::SYS_eventfd2, libc::SYS_epoll_create1, libc::SYS_epoll_ctl, libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2, libc::SYS_ppoll,
    libc::SYS_pselect6, libc::SYS_restart_syscall, libc::SYS_wait4, libc::SYS_waitid,
    // Threads.
    libc::SYS_clone, libc::SYS_exit, libc::SYS_exit_group, libc::SYS_futex, libc::SYS_futex_waitv, libc::SYS_set_robust_list,
    libc::SYS_get_robust_list, libc::SYS_set_tid_address, libc::SYS_rseq, libc::SYS_membarrier, libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity, libc::SYS_sched_setaffinity, libc::SYS_sched_getparam, libc::SYS_sched_getscheduler,
    libc::SYS_sched_get_priority_max, libc::SYS_sched_get_priority_min, libc::SYS_sched_rr_get_interval, libc::SYS_getpriority,
    libc::SYS_getcpu, libc::SYS_prctl,
    // Pairs of connected sockets within the process, by which signal handlers wake threads.
    libc::SYS_socketpair, libc::SYS_sendto, libc::SYS_recvfrom,
    // What the process is.
    libc::SYS_getpid, libc::SYS_gettid, libc::SYS_getppid, libc::SYS_getuid, libc::SYS_geteuid, libc::SYS_getgid, libc::SYS_getegid,
    libc::SYS_getresuid, libc::SYS_getresgid, libc::SYS_getgroups, libc::SYS_getpgid, libc::SYS_getsid, libc::SYS_capget,
    libc::SYS_uname, libc::SYS_sysinfo, libc::SYS_getrusage, libc::SYS_getrlimit, libc::SYS_prlimit64, libc::SYS_getrandom,
];

/// Calls of the x86-64 interface that newer ones replace; libraries still use them.
#[cfg(target_arch = "x86_64")]
#[rustfmt::skip]
const OLDER: &[i64] = &[
    libc::SYS_open, libc::SYS_creat, libc::SYS_stat, libc::SYS_lstat, libc::SYS_access, libc::SYS_pipe, libc::SYS_dup2, libc::SYS_poll,
    libc::SYS_select, libc::SYS_rename, libc::SYS_mkdir, libc::SYS_rmdir, libc::SYS_unlink, libc::SYS_link, libc::SYS_symlink,
    libc::SYS_readlink, libc::SYS_getdents, libc::SYS_alarm, libc::SYS_pause, libc::SYS_time, libc::SYS_epoll_create,
    libc::SYS_epoll_wait, libc::SYS_eventfd, libc::SYS_signalfd, libc::SYS_getpgrp, libc::SYS_arch_prctl,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER: &[i64] = &[];

/// Calls that are refused whatever their arguments.
#[rustfmt::skip]
const REFUSED: &[i64] = &[
    // Programs.
    libc::SYS_execve, libc::SYS_execveat,
    // Sockets.
    libc::SYS_socket, libc::SYS_connect, libc::SYS_bind, libc::SYS_listen, libc::SYS_accept, libc::SYS_accept4,
    libc::SYS_sendmsg, libc::SYS_sendmmsg, libc::SYS_recvmsg, libc::SYS_recvmmsg,
    libc::SYS_shutdown, libc::SYS_setsockopt, libc::SYS_getsockopt, libc::SYS_getsockname, libc::SYS_getpeername,
    // Other processes.
    libc::SYS_ptrace, libc::SYS_process_vm_readv, libc::SYS_process_vm_writev, libc::SYS_process_madvise, libc::SYS_process_mrelease,
    libc::SYS_pidfd_open, libc::SYS_pidfd_getfd, libc::SYS_pidfd_send_signal, libc::SYS_kcmp, libc::SYS_tkill, libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo, libc::SYS_setpgid, libc::SYS_setsid, libc::SYS_setpriority, libc::SYS_ioprio_set,
    libc::SYS_sched_setscheduler, libc::SYS_sched_setparam, libc::SYS_sched_setattr, libc::SYS_migrate_pages, libc::SYS_move_pages,
    // The system.
    libc::SYS_kexec_load, libc::SYS_kexec_file_load, libc::SYS_init_module, libc::SYS_finit_module, libc::SYS_delete_module,
    libc::SYS_reboot, libc::SYS_swapon, libc::SYS_swapoff, libc::SYS_acct, libc::SYS_quotactl, libc::SYS_syslog,
    libc::SYS_settimeofday, libc::SYS_clock_settime, libc::SYS_clock_adjtime, libc::SYS_adjtimex, libc::SYS_sethostname,
    libc::SYS_setdomainname, libc::SYS_vhangup, libc::SYS_personality,
    // Mounts and namespaces.
    libc::SYS_mount, libc::SYS_umount2, libc::SYS_pivot_root, libc::SYS_chroot, libc::SYS_move_mount, libc::SYS_open_tree,
    libc::SYS_fsopen, libc::SYS_fsconfig, libc::SYS_fsmount, libc::SYS_fspick, libc::SYS_mount_setattr, libc::SYS_unshare,
    libc::SYS_setns,
    // Parts of the kernel that have often been broken into.
    libc::SYS_bpf, libc::SYS_perf_event_open, libc::SYS_keyctl, libc::SYS_add_key, libc::SYS_request_key, libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register, libc::SYS_splice, libc::SYS_tee, libc::SYS_vmsplice,
    libc::SYS_seccomp, libc::SYS_memfd_secret,
    // What Landlock does not restrict: modes, owners, times, attributes, handles, events of files.
    libc::SYS_fchmod, libc::SYS_fchmodat, libc::SYS_fchown, libc::SYS_fchownat, libc::SYS_utimensat, libc::SYS_setxattr,
    libc::SYS_lsetxattr, libc::SYS_fsetxattr, libc::SYS_removexattr, libc::SYS_lremovexattr, libc::SYS_fremovexattr,
    libc::SYS_truncate, libc::SYS_mknodat, libc::SYS_open_by_handle_at, libc::SYS_name_to_handle_at, libc::SYS_fanotify_init,
    libc::SYS_fanotify_mark, libc::SYS_inotify_init1, libc::SYS_inotify_add_watch,
    // Privileges and limits.
    libc::SYS_setuid, libc::SYS_setgid, libc::SYS_setreuid, libc::SYS_setregid, libc::SYS_setresuid, libc::SYS_setresgid,
    libc::SYS_setfsuid, libc::SYS_setfsgid, libc::SYS_setgroups, libc::SYS_capset, libc::SYS_setrlimit,
    // Memory and queues that processes share by a key.
    libc::SYS_shmget, libc::SYS_shmat, libc::SYS_shmctl, libc::SYS_semget, libc::SYS_semop, libc::SYS_semctl, libc::SYS_msgget,
    libc::SYS_msgsnd, libc::SYS_msgrcv, libc::SYS_msgctl, libc::SYS_mq_open, libc::SYS_mq_unlink,
];

#[cfg(target_arch = "x86_64")]
#[rustfmt::skip]
const REFUSED_OLDER: &[i64] = &[
    libc::SYS_fork, libc::SYS_vfork, libc::SYS_chmod, libc::SYS_chown, libc::SYS_lchown, libc::SYS_utime, libc::SYS_utimes,
    libc::SYS_futimesat, libc::SYS_mknod, libc::SYS_inotify_init, libc::SYS_iopl, libc::SYS_ioperm, libc::SYS_modify_ldt,
    libc::SYS_uselib, libc::SYS_ustat,
];
#[cfg(not(target_arch = "x86_64"))]
const REFUSED_OLDER: &[i64] = &[];

/// Requests of `ioctl` that put text into the input of a terminal, or change how a terminal or a socket works for others.
#[allow(clippy::unnecessary_cast, reason = "the type differs among C libraries")]
const TERMINAL: [u64; 7] = [
    libc::TIOCSTI as u64,
    libc::TIOCLINUX as u64,
    libc::TIOCSETD as u64,
    libc::TIOCCONS as u64,
    // TIOCVHANGUP, FIOSETOWN and SIOCSPGRP, which the libc crate does not name.
    0x5437,
    0x8901,
    0x8902,
];

/// Commands of `fcntl` by which the kernel signals other processes or tells of their files: F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE,
/// F_NOTIFY.
const OWNERS: [u64; 5] = [8, 10, 15, 1024, 1026];

/// Options of `prctl` that a library may need: names, memory regions, and looking.
const OPTIONS: [u64; 9] = [
    libc::PR_SET_NAME as u64,
    libc::PR_GET_NAME as u64,
    libc::PR_GET_DUMPABLE as u64,
    libc::PR_CAPBSET_READ as u64,
    libc::PR_GET_NO_NEW_PRIVS as u64,
    libc::PR_GET_SECCOMP as u64,
    libc::PR_SET_TIMERSLACK as u64,
    libc::PR_GET_TIMERSLACK as u64,
    // PR_SET_VMA: names of memory regions.
    0x5356_4d41,
];

/// Flags of `clone` that make a namespace.
const NAMESPACES: [libc::c_int; 7] = [
    libc::CLONE_NEWNS,
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
];

/// The bits of the type of a socket that are not flags.
const KINDS_OF_SOCKETS: u64 = 0xf;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn rule(conditions: Vec<(u8, Length, Op, u64)>) -> Result<SeccompRule, BackendError> {
    let conditions = conditions.into_iter().map(|(argument, length, op, value)| If::new(argument, length, op, value));
    SeccompRule::new(conditions.collect::<Result<_, _>>()?)
}

/// What is refused.
fn refused() -> Result<Rules, BackendError> {
    let mut rules: Rules = REFUSED.iter().chain(REFUSED_OLDER).map(|call| (*call, Vec::new())).collect();
    let equals = |argument, values: &[u64]| {
        values.iter().map(|value| rule(vec![(argument, Length::Dword, Op::Eq, *value)])).collect::<Result<Vec<_>, _>>()
    };
    rules.insert(libc::SYS_ioctl, equals(1, &TERMINAL)?);
    rules.insert(libc::SYS_fcntl, equals(1, &OWNERS)?);
    // A thread of this process, never a process.
    let thread = libc::CLONE_THREAD as u64;
    let mut clone = vec![rule(vec![(0, Length::Qword, Op::MaskedEq(thread), 0)])?];
    for flag in NAMESPACES {
        let flag = flag as u64;
        clone.push(rule(vec![(0, Length::Qword, Op::MaskedEq(flag), flag)])?);
    }
    rules.insert(libc::SYS_clone, clone);
    let this = u64::from(std::process::id());
    for call in [libc::SYS_kill, libc::SYS_tgkill] {
        rules.insert(call, vec![rule(vec![(0, Length::Dword, Op::Ne, this)])?]);
    }
    // A pair of streams has no address, and no file can be sent over it.
    let streams = libc::SOCK_STREAM as u64;
    let mut pair = vec![rule(vec![(0, Length::Dword, Op::Ne, libc::AF_UNIX as u64)])?];
    for other in (0..=KINDS_OF_SOCKETS).filter(|kind| *kind != streams) {
        pair.push(rule(vec![(1, Length::Dword, Op::MaskedEq(KINDS_OF_SOCKETS), other)])?);
    }
    rules.insert(libc::SYS_socketpair, pair);
    rules.insert(libc::SYS_sendto, vec![rule(vec![(4, Length::Qword, Op::Ne, 0)])?]);
    rules.insert(libc::SYS_sched_setaffinity, vec![rule(vec![(0, Length::Dword, Op::Ne, 0)])?]);
    // Looking at limits is no harm; setting them, or looking at those of others, is refused.
    let limits = vec![rule(vec![(0, Length::Dword, Op::Ne, 0)])?, rule(vec![(2, Length::Qword, Op::Ne, 0)])?];
    rules.insert(libc::SYS_prlimit64, limits);
    let other = OPTIONS.iter().map(|option| (0, Length::Dword, Op::Ne, *option)).collect();
    rules.insert(libc::SYS_prctl, vec![rule(other)?]);
    Ok(rules)
}

fn compiled(rules: Rules, others: SeccompAction, these: SeccompAction) -> Result<BpfProgram, BackendError> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    SeccompFilter::new(rules, others, these, arch)?.try_into()
}

fn filters() -> Result<[BpfProgram; 2], BackendError> {
    let refuse = compiled(refused()?, SeccompAction::Allow, SeccompAction::Errno(libc::EPERM as u32))?;
    // Where both filters answer, the one that was entered last does: what the first refuses passes the second.
    let known =
        ALLOWED.iter().chain(OLDER).chain(REFUSED).chain(REFUSED_OLDER).map(|call| (*call, Vec::new())).collect();
    let known = compiled(known, SeccompAction::Errno(libc::ENOSYS as u32), SeccompAction::Allow)?;
    Ok([known, refuse])
}

/// Enters the walls of system calls for all threads, and attempts what they forbid. A kernel without seccomp is no error.
///
/// # Errors
/// The filters cannot be compiled for this architecture.
pub fn enter_calls() -> Result<Walls, Error> {
    let mut walls = Walls::default();
    let filters = filters().map_err(|e| Error::Built(format!("seccomp: {e}")))?;
    let mut applied = Ok(());
    for filter in &filters {
        applied = applied.and_then(|()| apply_filter_all_threads(filter));
    }
    if let Err(e) = applied {
        for wall in [Wall::Programs, Wall::Sockets, Wall::Calls] {
            walls.add(wall, Stand::Missing(format!("the kernel refuses the filter: {e}")));
        }
        return Ok(walls);
    }
    let found = |refused: Result<(), String>| match refused {
        Ok(()) => Stand::Stands,
        Err(why) => Stand::Missing(why),
    };
    walls.add(Wall::Programs, found(probes::program()));
    walls.add(Wall::Sockets, found(probes::socket()));
    walls.add(Wall::Calls, found(probes::call()));
    Ok(walls)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn no_call_is_both_allowed_and_refused() {
        let allowed: BTreeSet<i64> = ALLOWED.iter().chain(OLDER).copied().collect();
        let refused: BTreeSet<i64> = REFUSED.iter().chain(REFUSED_OLDER).copied().collect();
        assert_eq!(allowed.intersection(&refused).count(), 0);
        assert_eq!(allowed.len(), ALLOWED.len() + OLDER.len(), "a call is listed twice");
        assert_eq!(refused.len(), REFUSED.len() + REFUSED_OLDER.len(), "a call is listed twice");
        assert!(!allowed.contains(&libc::SYS_clone3), "its flags are not seen");
    }

    #[test]
    fn filters_compile() {
        filters().expect("filters");
    }
}
