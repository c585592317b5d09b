//! A step that is recorded and not run: what `--watch` asks of an edit before it takes over.
//!
//! Every op checks shapes, dtypes and devices when it is recorded, so a recording on the live States finds what a step would
//! raise, and costs no device time. Only what the recipe reads itself in mid-step is computed.

use crate::args::RefGuard;
use crate::errors::{self, Raise};
use crate::functions::{host, tensors_of};
use crate::tensor::Ref;
use mlua::{Function, Lua, MultiValue};
use perilune_plan::Outline;

/// What the last rehearsal that was to be planned would run, kept with the Lua state.
#[derive(Default)]
pub struct Planned(pub Option<Outline>);

/// `native.rehearse(fn, planned)`: records `fn` as a step and drops it: no State changes, no random number is used up. With
/// `planned` the step is planned too.
pub fn rehearse(lua: &Lua, (f, planned): (Function, Option<bool>)) -> mlua::Result<()> {
    let host = host(lua)?;
    host.settle();
    if host.engine.borrow().is_dirty() {
        host.flush(lua)?;
    }
    let site = host.site(lua);
    let fail = |e| errors::raise(&host, Raise::Fault(e, site));
    host.engine.borrow_mut().begin_step().map_err(fail)?;
    let result = f.call::<MultiValue>(()).and_then(|out| {
        if planned != Some(true) {
            return Ok(());
        }
        let refs = tensors_of(&out);
        let outline = host.record(lua, |engine| {
            let nodes = |r: &&RefGuard| matches!(r.0, Ref::Node(_));
            let nodes: Vec<_> = refs.iter().filter(nodes).map(|r| r.node(engine)).collect::<Result<_, _>>()?;
            engine.outline(&nodes)
        })?;
        lua.set_app_data(Planned(Some(outline)));
        Ok(())
    });
    host.settle();
    let aborted = host.engine.borrow_mut().abort_step();
    host.customs.borrow_mut().clear();
    result?;
    aborted.map_err(fail)
}
