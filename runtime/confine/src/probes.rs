//! Attempts forbidden acts. Each is harmless where it succeeds.

use rustix::io::Errno;
use std::path::Path;

fn is(e: &std::io::Error, errno: Errno) -> bool {
    e.raw_os_error() == Some(errno.raw_os_error())
}

/// Opens a file that is not granted, to read and to write.
pub fn file(path: &Path) -> Result<(), String> {
    let reads = std::fs::File::open(path).err();
    let writes = std::fs::OpenOptions::new().append(true).open(path).err();
    match (reads, writes) {
        (Some(a), Some(b)) if is(&a, Errno::ACCESS) && is(&b, Errno::ACCESS) => Ok(()),
        (None, _) => Err("a file that is not granted could be read".into()),
        (_, None) => Err("a file that is not granted could be written".into()),
        (Some(a), _) => Err(format!("the probe of a file that is not granted failed: {a}")),
    }
}

/// Binds a port of this machine; whether Landlock refuses it.
pub fn port() -> bool {
    std::net::TcpListener::bind(("127.0.0.1", 0)).is_err_and(|e| is(&e, Errno::ACCESS))
}

/// Asks whether the parent could be sent a signal, without sending one; whether Landlock refuses it.
pub fn signal() -> bool {
    let Some(parent) = rustix::process::getppid() else { return false };
    rustix::process::test_kill_process(parent).is_err_and(|e| e == Errno::PERM)
}

/// Starts a program that is not there: the filter refuses the new process before its name is looked up.
pub fn program() -> Result<(), String> {
    match std::process::Command::new("/nonexistent/perilune-probe").spawn() {
        Err(e) if is(&e, Errno::PERM) => Ok(()),
        Err(e) => Err(format!("starting a program was not refused: {e}")),
        Ok(mut child) => {
            let _ = child.kill();
            let _ = child.wait();
            Err("a program could be started".into())
        }
    }
}

/// Makes sockets.
pub fn socket() -> Result<(), String> {
    let refused = |made: std::io::Result<()>, what: &str| match made {
        Err(e) if is(&e, Errno::PERM) => Ok(()),
        Err(e) => Err(format!("{what} was not refused: {e}")),
        Ok(()) => Err(format!("{what} could be made")),
    };
    refused(std::os::unix::net::UnixDatagram::unbound().map(drop), "a Unix socket")?;
    refused(std::os::unix::net::UnixDatagram::pair().map(drop), "a pair of datagram sockets")?;
    refused(std::net::UdpSocket::bind(("127.0.0.1", 0)).map(drop), "a UDP socket")
}

/// Sets the process that may trace this one, signals the parent (signal 0), and changes the mode of the root directory to what it is.
pub fn call() -> Result<(), String> {
    if rustix::process::set_ptracer(rustix::process::PTracer::None) != Err(Errno::PERM) {
        return Err("prctl was not refused".into());
    }
    if !signal() {
        return Err("a signal to the parent was not refused".into());
    }
    let mode = std::fs::metadata("/").map(|meta| meta.permissions()).map_err(|e| e.to_string())?;
    match std::fs::set_permissions("/", mode) {
        Err(e) if is(&e, Errno::PERM) => Ok(()),
        _ => Err("changing a mode was not refused".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without walls every act succeeds or fails for its own reason, and the probes say so.
    #[test]
    fn probes_see_that_there_is_no_wall() {
        let there = tempfile::NamedTempFile::new().expect("a file");
        assert!(file(there.path()).is_err_and(|why| why.contains("could be read")));
        assert!(!port() && !signal());
        assert!(program().is_err_and(|why| why.contains("not refused")));
        assert!(socket().is_err());
    }
}
