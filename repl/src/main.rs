//! Parses the command line, runs one command of `cmd/`, and turns its result into an exit status.

mod cmd;
mod config_folder;
mod confined;
mod console_out;
mod device;
mod diagnostics;
mod failure;
mod fetching;
mod format;
mod job;
mod log;
mod plot;
mod policy_args;
mod progress;
mod prompt;
mod retention;
mod run_printer;
mod saved;
mod signals;
mod table;
mod target;
mod terminal;

use failure::Failure;
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Prints a panic as one line; the backtrace follows with RUST_BACKTRACE.
fn install_panic_hook() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let text = info.payload().downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| info.payload().downcast_ref::<&str>().copied()).unwrap_or("no message");
        let at = info.location().map(|l| format!(" ({}:{})", l.file(), l.line())).unwrap_or_default();
        console_out::complain("error", &format!("this is a bug in perilune, please report it: {text}{at}"));
        if std::env::var_os("RUST_BACKTRACE").is_some() {
            default(info);
        }
    }));
}

#[expect(unsafe_code, reason = "it sets environment variables")]
fn main() -> ExitCode {
    // SAFETY: the process has one thread yet.
    unsafe {
        perilune_cuda::nvrtc::place_vendor_cache();
        perilune_cuda::nccl::set_environment();
    }
    install_panic_hook();
    // Before any thread is started.
    let command = || confined::child::enter().and_then(|()| cmd::dispatch());
    let result: std::thread::Result<Result<(), Failure>> = std::panic::catch_unwind(command);
    perilune_cuda::nccl::finish();
    match result {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(failure)) => {
            failure.show();
            ExitCode::from(failure.status())
        }
        Err(_) => ExitCode::FAILURE,
    }
}
