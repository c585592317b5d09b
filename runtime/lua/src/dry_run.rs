//! Records a step without running it: the check of an edit under `--watch` before it takes over.
//!
//! Every op checks shapes, dtypes and devices when it is recorded, so a recording on the current States finds the errors that a
//! step would raise, without device time. Only values that the recipe reads in the middle of the step are computed.

use crate::args::RefGuard;
use crate::errors::{self, Raise};
use crate::functions::{host, tensors_of};
use crate::tensor::Ref;
use mlua::{Function, Lua, MultiValue};
use perilune_core::graph::NodeId;
use perilune_core::{DType, Shape};
use perilune_engine::{Code, Content, Engine, Fault};
use perilune_plan::Fingerprint;

/// Additional results of the last dry run, stored with the Lua state.
#[derive(Default)]
pub struct Planned {
    /// The kernels of the step.
    pub fingerprint: Option<Fingerprint>,
    /// Their machine code.
    pub code: Code,
    /// Every tensor of the step.
    pub tensors: Vec<TensorDigest>,
}

/// A tensor of a step, with the hash of its value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorDigest {
    pub op: &'static str,
    pub dtype: DType,
    pub shape: Shape,
    /// The path of the State that it reads.
    pub state: Option<String>,
    /// The file and line of the recipe.
    pub place: Option<(String, u32)>,
    /// BLAKE3 of its elements, in hexadecimal digits; of a number the number itself.
    pub hash: String,
}

/// Computes every tensor of the open step, and hashes it.
fn digests(engine: &mut Engine, nodes: &[NodeId]) -> std::result::Result<Vec<TensorDigest>, Fault> {
    let mut found = Vec::new();
    engine.each_tensor(nodes, &mut |t| {
        let hash = match t.content {
            Content::Elements(value) => blake3::hash(&value.bytes).to_hex().to_string(),
            // The shortest digits that read as the same number.
            Content::Number(bits) if t.dtype.is_float() => format!("{:?}", f64::from_bits(bits)),
            Content::Number(bits) => (bits as i64).to_string(),
        };
        found.push((t.op, (t.dtype, t.shape), t.state, t.loc, hash));
    })?;
    let named = found.into_iter().map(|(op, (dtype, shape), state, loc, hash)| {
        let place = engine.recorder.source_map.get(loc).map(|(file, line)| (file.to_string(), line));
        let state = state.and_then(|id| engine.state_path(id)).map(|path| path.to_string());
        TensorDigest { op, dtype, shape, state, place, hash }
    });
    Ok(named.collect())
}

/// Records `f` as a step, calls `then` with the tensors that it returns, and drops the step: no State changes, no random number is
/// consumed, no file is written.
pub fn recorded<T>(
    lua: &Lua,
    f: &Function,
    then: impl FnOnce(&mut Engine, &[NodeId]) -> std::result::Result<T, Fault>,
) -> mlua::Result<T> {
    let host = host(lua)?;
    if host.engine.borrow().in_step() {
        let message = "a dry run records a step of its own and cannot begin inside one";
        return Err(errors::argument(&host, lua, "dry_run", message, Some("begin it between two steps".into())));
    }
    host.settle();
    if host.engine.borrow().is_dirty() {
        host.flush(lua)?;
    }
    let loc = host.loc(lua);
    let fail = |e| errors::raise(&host, Raise::Fault(e, loc));
    host.engine.borrow_mut().begin_step().map_err(fail)?;
    // What the step would save is checked and not written.
    let _held = host.policy.hold_writes();
    let result = f.call::<MultiValue>(()).and_then(|out| {
        let refs = tensors_of(&out);
        host.record(lua, |engine| {
            let nodes = |r: &&RefGuard| matches!(r.0, Ref::Node(_));
            let nodes: Vec<_> = refs.iter().filter(nodes).map(|r| r.node(engine)).collect::<Result<_, _>>()?;
            then(engine, &nodes)
        })
    });
    host.settle();
    let aborted = host.engine.borrow_mut().abort_step();
    host.customs.borrow_mut().clear();
    let value = result?;
    aborted.map_err(fail)?;
    Ok(value)
}

/// `native.dry_run(fn, plan)`: records `fn` as a step and drops it: no State changes, no random number is consumed, no file
/// is written. With `plan` "kernels" the step is also planned; with "code", compilation of its missing machine code starts; with
/// "tensors" all its tensors are computed and hashed. Returns whether its plan was cached.
pub fn dry_run(lua: &Lua, (f, plan): (Function, Option<String>)) -> mlua::Result<bool> {
    let planned = recorded(lua, &f, |engine, nodes| {
        Ok(match plan.as_deref() {
            None => None,
            Some("tensors") => Some(Planned { tensors: digests(engine, nodes)?, ..Planned::default() }),
            Some("code") => Some(Planned { code: engine.prepare(nodes)?, ..Planned::default() }),
            Some(_) => Some(Planned { fingerprint: Some(engine.fingerprint(nodes)?), ..Planned::default() }),
        })
    })?;
    let Some(planned) = planned else { return Ok(false) };
    let known = matches!(planned.code, Code::Known);
    lua.set_app_data(planned);
    Ok(known)
}
