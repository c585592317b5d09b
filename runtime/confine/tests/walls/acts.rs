//! The forbidden acts, by raw system calls, and what must still work behind the walls.

use std::ffi::CString;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The wall that refuses an act.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum By {
    Files,
    Calls,
}

type Attempt = Box<dyn Fn() -> libc::c_long>;

pub struct Act {
    pub name: &'static str,
    pub by: By,
    /// Every user may do it without the wall, so that its refusal is the wall's. Others the system may refuse for its own reasons, or
    /// another wall does.
    pub free: bool,
    call: Attempt,
}

impl Act {
    /// The error number; 0 if it was done.
    pub fn attempt(&self) -> i32 {
        if (self.call)() >= 0 { 0 } else { std::io::Error::last_os_error().raw_os_error().unwrap_or(-1) }
    }
}

fn c(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

/// Opens and closes a path.
fn open(path: &Path, flags: i32) -> libc::c_long {
    let path = c(path);
    // SAFETY: the path is NUL-terminated, and the descriptor is closed once.
    unsafe {
        let fd = libc::open(path.as_ptr(), flags | libc::O_CLOEXEC, 0o600);
        if fd >= 0 {
            libc::close(fd);
        }
        fd.into()
    }
}

/// A call with integer arguments that no memory is read by, or only NULL.
fn raw(number: libc::c_long, a: [i64; 5]) -> libc::c_long {
    // SAFETY: every use passes numbers, flags or NULL.
    unsafe { libc::syscall(number, a[0], a[1], a[2], a[3], a[4]) }
}

/// Like [`raw`] for calls that return a descriptor, which is closed.
fn descriptor(number: libc::c_long, a: [i64; 5]) -> libc::c_long {
    let fd = raw(number, a);
    if fd >= 0 {
        raw(libc::SYS_close, [fd, 0, 0, 0, 0]);
    }
    fd
}

/// Makes a process by a call that returns twice; the child ends at once.
fn process(number: libc::c_long, flags: i64) -> libc::c_long {
    // SAFETY: the child calls `_exit` alone.
    unsafe {
        let pid = libc::syscall(number, flags, 0, 0, 0, 0);
        if pid == 0 {
            libc::_exit(0);
        }
        if pid > 0 {
            libc::waitpid(pid as i32, std::ptr::null_mut(), libc::__WALL);
        }
        pid
    }
}

fn clone3() -> libc::c_long {
    // struct clone_args: flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls.
    let arguments: [u64; 8] = [0, 0, 0, 0, libc::SIGCHLD as u64, 0, 0, 0];
    // SAFETY: the structure has the size that is given; the child calls `_exit` alone.
    unsafe {
        let pid = libc::syscall(libc::SYS_clone3, arguments.as_ptr(), size_of_val(&arguments));
        if pid == 0 {
            libc::_exit(0);
        }
        if pid > 0 {
            libc::waitpid(pid as i32, std::ptr::null_mut(), 0);
        }
        pid
    }
}

/// Executes a path that is not there: refused, or ENOENT.
fn execute(path: &str) -> libc::c_long {
    let path = CString::new(path).unwrap();
    let arguments = [path.as_ptr(), std::ptr::null()];
    // SAFETY: strings and lists are terminated.
    unsafe { libc::execve(path.as_ptr(), arguments.as_ptr(), arguments[1..].as_ptr()).into() }
}

fn ioctl(request: u64) -> libc::c_long {
    let byte = 0u8;
    // SAFETY: descriptor 0 is no terminal, and the request reads one byte at most.
    unsafe { libc::syscall(libc::SYS_ioctl, 0, request, &raw const byte) }
}

fn by_path(number: libc::c_long, path: &Path, a: [i64; 3]) -> libc::c_long {
    let path = c(path);
    // SAFETY: the path is NUL-terminated.
    unsafe { libc::syscall(number, libc::AT_FDCWD, path.as_ptr(), a[0], a[1], a[2]) }
}

fn two_paths(number: libc::c_long, from: &Path, to: &Path) -> libc::c_long {
    let (from, to) = (c(from), c(to));
    // SAFETY: the paths are NUL-terminated.
    unsafe { libc::syscall(number, libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), 0) }
}

/// All acts, with the folder of `place()`.
pub fn all(dir: &Path) -> Vec<Act> {
    let mut out: Vec<Act> = Vec::new();
    let mut add = |name, by, free, call: Attempt| out.push(Act { name, by, free, call });
    let at = |name: &str| dir.join(name);
    let (files, calls) = (By::Files, By::Calls);

    // Files.
    for (name, path, flags) in [
        ("read", at("closed/secret"), libc::O_RDONLY),
        ("read-by-link", at("read/link"), libc::O_RDONLY),
        ("read-by-dots", at("read/../closed/secret"), libc::O_RDONLY),
        ("read-by-folder-link", at("write/up/secret"), libc::O_RDONLY),
        ("read-beside-one-file", at("two"), libc::O_RDONLY),
        ("read-what-is-listed", at("list/a"), libc::O_RDONLY),
        ("list", at("closed"), libc::O_RDONLY | libc::O_DIRECTORY),
        ("write", at("closed/secret"), libc::O_WRONLY | libc::O_APPEND),
        ("write-what-is-read", at("read/a"), libc::O_WRONLY | libc::O_APPEND),
        ("create", at("closed/new"), libc::O_WRONLY | libc::O_CREAT),
        ("create-where-read", at("read/new"), libc::O_WRONLY | libc::O_CREAT),
        ("temporary", at("closed"), libc::O_WRONLY | libc::O_TMPFILE),
        ("etc", "/etc/passwd".into(), libc::O_RDONLY),
        ("root-folder", "/".into(), libc::O_RDONLY | libc::O_DIRECTORY),
        ("parent-environment", format!("/proc/{}/environ", std::os::unix::process::parent_id()).into(), libc::O_RDONLY),
        ("parent-memory-map", format!("/proc/{}/maps", std::os::unix::process::parent_id()).into(), libc::O_RDONLY),
        ("parent-command", format!("/proc/{}/cmdline", std::os::unix::process::parent_id()).into(), libc::O_RDONLY),
        ("processes", "/proc".into(), libc::O_RDONLY | libc::O_DIRECTORY),
    ] {
        // The kernel guards these two by the capabilities of both processes as well.
        let free = !matches!(name, "parent-environment" | "parent-memory-map");
        add(name, files, free, Box::new(move || open(&path, flags)));
    }
    let path = at("closed/dir");
    add("mkdir", files, false, Box::new(move || by_path(libc::SYS_mkdirat, &path, [0o700, 0, 0])));
    let path = at("closed/probe-gone");
    add(
        "unlink",
        files,
        false,
        Box::new(move || {
            let _ = std::fs::write(&path, "");
            if path.exists() {
                by_path(libc::SYS_unlinkat, &path, [0, 0, 0])
            } else {
                by_path(libc::SYS_unlinkat, &path.with_file_name("secret"), [0, 0, 0])
            }
        }),
    );
    for (name, number, from, to) in [
        ("link-out", libc::SYS_linkat, at("closed/secret"), at("write/stolen")),
        ("rename-in", libc::SYS_renameat2, at("write/a"), at("closed/a")),
    ] {
        add(name, files, false, Box::new(move || two_paths(number, &from, &to)));
    }
    let to = at("closed/sym");
    add(
        "symlink",
        files,
        false,
        Box::new(move || {
            let (from, to) = (c"/etc/passwd", c(&to));
            // SAFETY: the paths are NUL-terminated.
            unsafe { libc::syscall(libc::SYS_symlinkat, from.as_ptr(), libc::AT_FDCWD, to.as_ptr()) }
        }),
    );

    // What Landlock leaves to the filter.
    for (name, number, path, a) in [
        ("chmod", libc::SYS_fchmodat, at("one"), [0o600, 0, 0]),
        ("chown", libc::SYS_fchownat, at("one"), [-1, -1, 0]),
        ("utimes", libc::SYS_utimensat, at("one"), [0, 0, 0]),
    ] {
        add(name, calls, true, Box::new(move || by_path(number, &path, a)));
    }
    let path = at("two");
    add(
        "truncate",
        calls,
        false,
        Box::new(move || {
            let path = c(&path);
            // SAFETY: the path is NUL-terminated.
            unsafe { libc::syscall(libc::SYS_truncate, path.as_ptr(), 3) }
        }),
    );

    // Programs and processes.
    add("execve", calls, true, Box::new(|| execute("/nonexistent/program")));
    add(
        "execveat",
        calls,
        true,
        Box::new(|| {
            let (path, list) = (c"/nonexistent/program", [std::ptr::null::<libc::c_char>()]);
            // SAFETY: strings and lists are terminated.
            unsafe { libc::syscall(libc::SYS_execveat, libc::AT_FDCWD, path.as_ptr(), list.as_ptr(), list.as_ptr(), 0) }
        }),
    );
    add("clone-process", calls, true, Box::new(|| process(libc::SYS_clone, libc::SIGCHLD.into())));
    add("clone3-process", calls, true, Box::new(clone3));
    #[cfg(target_arch = "x86_64")]
    add("fork", calls, true, Box::new(|| process(libc::SYS_fork, 0)));
    for (name, flag) in [
        ("clone-user", libc::CLONE_NEWUSER),
        ("clone-pid", libc::CLONE_NEWPID),
        ("clone-net", libc::CLONE_NEWNET),
        ("clone-mounts", libc::CLONE_NEWNS),
    ] {
        let flags = i64::from(flag | libc::SIGCHLD);
        add(name, calls, false, Box::new(move || process(libc::SYS_clone, flags)));
    }
    let parent = i64::from(std::os::unix::process::parent_id());
    let user = i64::from(libc::CLONE_NEWUSER);
    let plain: &[(&'static str, libc::c_long, [i64; 5], bool)] = &[
        ("kill-parent", libc::SYS_kill, [parent, 0, 0, 0, 0], false),
        ("kill-group", libc::SYS_kill, [0, 0, 0, 0, 0], false),
        ("tgkill-parent", libc::SYS_tgkill, [parent, parent, 0, 0, 0], false),
        ("tkill", libc::SYS_tkill, [parent, 0, 0, 0, 0], false),
        ("process-vm-readv", libc::SYS_process_vm_readv, [parent, 0, 0, 0, 0], false),
        ("process-vm-writev", libc::SYS_process_vm_writev, [parent, 0, 0, 0, 0], false),
        ("kcmp", libc::SYS_kcmp, [parent, parent, 0, 0, 0], false),
        ("setpgid", libc::SYS_setpgid, [0, 0, 0, 0, 0], true),
        ("setsid", libc::SYS_setsid, [0, 0, 0, 0, 0], false),
        ("setpriority", libc::SYS_setpriority, [0, 0, 0, 0, 0], false),
        ("affinity-of-parent", libc::SYS_sched_setaffinity, [parent, 0, 0, 0, 0], false),
        ("scheduler", libc::SYS_sched_setscheduler, [parent, 0, 0, 0, 0], false),
        ("limits-of-parent", libc::SYS_prlimit64, [parent, 7, 0, 0, 0], false),
        ("dumpable", libc::SYS_prctl, [libc::PR_SET_DUMPABLE.into(), 1, 0, 0, 0], true),
        ("death-signal", libc::SYS_prctl, [libc::PR_SET_PDEATHSIG.into(), 0, 0, 0, 0], true),
        // Namespaces and mounts.
        ("unshare", libc::SYS_unshare, [user, 0, 0, 0, 0], false),
        ("setns", libc::SYS_setns, [0, 0, 0, 0, 0], true),
        ("mount", libc::SYS_mount, [0, 0, 0, 0, 0], false),
        ("umount", libc::SYS_umount2, [0, 0, 0, 0, 0], false),
        ("chroot", libc::SYS_chroot, [0, 0, 0, 0, 0], false),
        ("pivot-root", libc::SYS_pivot_root, [0, 0, 0, 0, 0], false),
        // The kernel.
        ("bpf", libc::SYS_bpf, [-1, 0, 0, 0, 0], false),
        ("perf", libc::SYS_perf_event_open, [0, 0, -1, -1, 0], false),
        ("keyctl", libc::SYS_keyctl, [0, -3, 0, 0, 0], false),
        ("add-key", libc::SYS_add_key, [0, 0, 0, 0, 0], false),
        ("kexec", libc::SYS_kexec_load, [0, 0, 0, 0, 0], false),
        ("init-module", libc::SYS_init_module, [0, 0, 0, 0, 0], false),
        ("io-uring", libc::SYS_io_uring_setup, [0, 0, 0, 0, 0], false),
        ("splice", libc::SYS_splice, [-1, 0, -1, 0, 0], true),
        ("personality", libc::SYS_personality, [0xffff_ffff, 0, 0, 0, 0], true),
        ("syslog", libc::SYS_syslog, [10, 0, 0, 0, 0], false),
        ("reboot", libc::SYS_reboot, [0, 0, 0, 0, 0], false),
        ("setrlimit", libc::SYS_setrlimit, [0, 0, 0, 0, 0], false),
        ("setuid", libc::SYS_setresuid, [-1, -1, -1, 0, 0], true),
        ("setgroups", libc::SYS_setgroups, [0, 0, 0, 0, 0], false),
        ("capset", libc::SYS_capset, [0, 0, 0, 0, 0], false),
        ("shmget", libc::SYS_shmget, [0, 4096, 0o600, 0, 0], false),
        ("semget", libc::SYS_semget, [0, 1, 0o600, 0, 0], false),
        ("seccomp", libc::SYS_seccomp, [0, 1, 0, 0, 0], true),
        ("open-by-handle", libc::SYS_open_by_handle_at, [-1, 0, 0, 0, 0], false),
        ("fanotify", libc::SYS_fanotify_init, [0, 0, 0, 0, 0], false),
        ("terminal-break", libc::SYS_vhangup, [1, 0, 0, 0, 0], false),
        ("set-owner", libc::SYS_fcntl, [0, 8, parent, 0, 0], true),
        ("notify", libc::SYS_fcntl, [-1, 1026, 0, 0, 0], true),
    ];
    for (name, number, a, free) in plain {
        // Ending the terminal of the person who runs the tests is not attempted without the filter; it is not free of harm.
        if *name == "terminal-break" && !walled() {
            add(name, calls, false, Box::new(|| -1));
            continue;
        }
        let (number, a) = (*number, *a);
        add(name, calls, *free, Box::new(move || raw(number, a)));
    }
    for (name, number, a, free) in [
        ("pidfd-open", libc::SYS_pidfd_open, [parent, 0, 0, 0, 0], true),
        ("userfaultfd", libc::SYS_userfaultfd, [0, 0, 0, 0, 0], false),
        ("inotify", libc::SYS_inotify_init1, [0, 0, 0, 0, 0], true),
        ("memfd-secret", libc::SYS_memfd_secret, [0, 0, 0, 0, 0], false),
        ("socket-unix", libc::SYS_socket, [libc::AF_UNIX.into(), libc::SOCK_STREAM.into(), 0, 0, 0], true),
        ("socket-inet", libc::SYS_socket, [libc::AF_INET.into(), libc::SOCK_STREAM.into(), 0, 0, 0], true),
        ("socket-udp", libc::SYS_socket, [libc::AF_INET6.into(), libc::SOCK_DGRAM.into(), 0, 0, 0], false),
        ("socket-netlink", libc::SYS_socket, [libc::AF_NETLINK.into(), libc::SOCK_RAW.into(), 0, 0, 0], true),
        ("socket-packet", libc::SYS_socket, [libc::AF_PACKET.into(), libc::SOCK_RAW.into(), 0, 0, 0], false),
        ("socket-vsock", libc::SYS_socket, [libc::AF_VSOCK.into(), libc::SOCK_STREAM.into(), 0, 0, 0], false),
        ("socket-alg", libc::SYS_socket, [libc::AF_ALG.into(), libc::SOCK_SEQPACKET.into(), 0, 0, 0], false),
    ] {
        add(name, calls, free, Box::new(move || descriptor(number, a)));
    }
    add("ptrace", calls, true, Box::new(move || raw(libc::SYS_ptrace, [-1, parent, 0, 0, 0])));
    add(
        "datagram-pair",
        calls,
        true,
        Box::new(|| {
            let mut pair = [0i32; 2];
            // SAFETY: two descriptors fit; they are closed.
            unsafe {
                let out = libc::socketpair(libc::AF_UNIX, libc::SOCK_DGRAM, 0, pair.as_mut_ptr());
                if out == 0 {
                    libc::close(pair[0]);
                    libc::close(pair[1]);
                }
                out.into()
            }
        }),
    );
    let address = [0u8; 16];
    add(
        "send-to",
        calls,
        true,
        Box::new(move || {
            // SAFETY: descriptor -1 is refused before the address is read.
            unsafe { libc::syscall(libc::SYS_sendto, -1, address.as_ptr(), 1, 0, address.as_ptr(), 16) }
        }),
    );
    add("send-descriptors", calls, true, Box::new(|| raw(libc::SYS_sendmsg, [-1, 0, 0, 0, 0])));
    for (name, request) in [
        ("push-terminal-input", libc::TIOCSTI as u64),
        ("linux-terminal", libc::TIOCLINUX as u64),
        ("line-discipline", libc::TIOCSETD as u64),
        // Only the lower half of a request counts, and the filter sees both.
        ("push-terminal-input-wide", libc::TIOCSTI as u64 | 1 << 32),
    ] {
        add(name, calls, true, Box::new(move || ioctl(request)));
    }
    // The x32 interface has its own numbers for the same calls.
    #[cfg(target_arch = "x86_64")]
    add("x32", calls, false, Box::new(|| raw(0x4000_0000 | libc::SYS_socket, [1, 1, 0, 0, 0])));
    add("unknown-call", calls, false, Box::new(|| raw(5000, [0; 5])));
    out
}

/// Whether a filter stands in this process.
fn walled() -> bool {
    std::fs::read_to_string("/proc/self/status").is_ok_and(|text| text.lines().any(|l| l == "Seccomp:\t2"))
}

/// What a training run does behind the walls. A panic is a failure of the test.
pub fn allowed(dir: &Path) {
    let at = |name: &str| dir.join(name);
    assert_eq!(std::fs::read_to_string(at("read/a")).unwrap(), "content\n");
    assert_eq!(std::fs::read_dir(at("list")).unwrap().count(), 2);
    std::fs::create_dir_all(at("write/run/checkpoints")).unwrap();
    std::fs::write(at("write/run/part"), "x").unwrap();
    std::fs::rename(at("write/run/part"), at("write/run/checkpoints/whole")).unwrap();
    let file = std::fs::File::options().append(true).open(at("write/run/checkpoints/whole")).unwrap();
    file.set_len(0).unwrap();
    file.sync_all().unwrap();
    file.try_lock().unwrap();
    std::fs::remove_dir_all(at("write/run")).unwrap();
    let sum: u64 = (0..8).map(|k| std::thread::spawn(move || k * 2)).map(|t| t.join().unwrap()).sum();
    assert_eq!(sum, 56);
    let (mut a, mut b) = std::os::unix::net::UnixStream::pair().unwrap();
    a.write_all(b"wake").unwrap();
    let mut four = [0; 4];
    b.read_exact(&mut four).unwrap();
    let (mut from, mut to) = std::io::pipe().unwrap();
    to.write_all(b"pipe").unwrap();
    from.read_exact(&mut four).unwrap();
    assert_eq!(&four, b"pipe");
    // CUDA names its threads so.
    std::fs::write("/proc/self/comm", "confined").unwrap();
    let task = format!("/proc/self/task/{}/comm", unsafe { libc::gettid() });
    std::fs::write(task, "confined").unwrap();
    std::fs::write("/dev/null", "x").unwrap();
    assert!(std::fs::read_to_string("/proc/meminfo").unwrap().contains("MemTotal"));
    assert!(std::thread::available_parallelism().is_ok());
    // SAFETY: a signal of this process that is ignored, and a region that is unmapped again.
    unsafe {
        libc::signal(libc::SIGUSR1, libc::SIG_IGN);
        assert_eq!(libc::raise(libc::SIGUSR1), 0);
        let size = 1 << 20;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let memory = libc::mmap(std::ptr::null_mut(), size, protection, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
        assert_ne!(memory, libc::MAP_FAILED);
        assert_eq!(libc::munmap(memory, size), 0);
        let fd = libc::memfd_create(c"x".as_ptr(), libc::MFD_CLOEXEC);
        assert!(fd >= 0);
        libc::close(fd);
        let queue = libc::epoll_create1(libc::EPOLL_CLOEXEC);
        assert!(queue >= 0);
        libc::close(queue);
    }
}
