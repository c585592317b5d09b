//! Prints the engine's diagnostics as they occur: requested plans on stderr, and a warning where a warmed-up loop needs a new
//! plan. They are not delayed until the end of a script or step, which may never end.

use crate::console_out::ConsoleOut;
use crate::run_printer::RunPrinter;
use perilune_lua::Runtime;
use std::rc::Rc;
use std::sync::Arc;

/// Prints the plans that `print_plan` requests when they are compiled; without a GPU, with the source for one.
pub fn plans(runtime: &Runtime, out: &Rc<ConsoleOut>) {
    gpu_source(runtime);
    let out = out.clone();
    runtime
        .host()
        .engine
        .borrow_mut()
        .diagnostics
        .plans_shown
        .listen(Some(Rc::new(move |plan| out.note(plan.trim_end()))));
}

/// Reports every other notice of the engine as a warning of the run.
pub fn notices(runtime: &Runtime, printer: Rc<RunPrinter>) {
    runtime.host().engine.borrow_mut().diagnostics.notices.listen(Some(Rc::new(move |text| printer.warning(text))));
}

/// Lets plans include GPU source code on a machine without a GPU.
pub fn gpu_source(runtime: &Runtime) {
    runtime.show_offline_source(Arc::new(perilune_cuda::OfflineTarget::default()));
}
