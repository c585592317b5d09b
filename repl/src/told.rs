//! What the engine says on its own (see `perilune_engine::diagnostics`), for people: plans on stderr, a warning where a warmed-up
//! loop needed a new plan. Both at once, for scripts as for recipes: what comes after may never end, or fail.

use crate::events;
use crate::screen::Screen;
use perilune_lua::Runtime;
use std::rc::Rc;

/// Plans that `print_plan` asks for are shown as they are compiled, with the texts of a GPU where the device has none.
pub fn plans(runtime: &Runtime, screen: &Rc<Screen>) {
    on_paper(runtime);
    let screen = screen.clone();
    runtime
        .host()
        .engine
        .borrow_mut()
        .diagnostics
        .plans_shown
        .listen(Some(Rc::new(move |plan| screen.note(plan.trim_end()))));
}

/// Whatever else the engine notices is a warning of the run.
pub fn notices(runtime: &Runtime, screen: &Rc<Screen>) {
    let screen = screen.clone();
    runtime
        .host()
        .engine
        .borrow_mut()
        .diagnostics
        .notices
        .listen(Some(Rc::new(move |text| events::warn(&screen, text))));
}

/// Lets plans be shown with the texts of a GPU.
pub fn on_paper(runtime: &Runtime) {
    runtime.host().engine.borrow_mut().diagnostics.paper = Some(Rc::new(perilune_cuda::OfflineTarget::default()));
}
