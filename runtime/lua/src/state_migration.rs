//! Moves States from one version of a run to the next, matched by path, shape and dtype.
//!
//! Reload, resume, rollback and `perilune check --against` share one function with one result, [`StateMigration`]. The source
//! is a live run or a checkpoint; States are matched by path, shape and dtype.

use crate::dry_run::{Planned, TensorDigest};
use crate::host::Host;
use crate::run::{ParamValue, Run};
use crate::runtime::Failed;
use crate::tensor::{Ref, Tensor};
use mlua::{AnyUserData, Lua, Table, Value};
use perilune_core::{DType, HostTensor, Shape};
use perilune_engine::{Code, StateId, StateInfo};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::thread::JoinHandle;

/// The source from which a run continues.
#[derive(Clone, Copy)]
pub enum Source<'a> {
    Run(&'a Run),
    /// A checkpoint: States by path, and the counters.
    Values {
        states: &'a [(String, HostTensor)],
        cursor: &'a [(String, ParamValue)],
    },
}

/// The treatment of States that do not match.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Taking {
    /// Refuse the migration.
    Exact,
    /// `recipe.migrate` may fill them.
    Fitting,
    /// Keep their values: a run that continues after another has failed has its own.
    Back,
}

/// The path, dtype and shape of a State.
pub type Described = (String, DType, Shape);

/// The outcome for each State when one version replaces another.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct StateMigration {
    /// Kept States; for moments with the same meaning under another name, that name.
    pub kept: Vec<(String, String)>,
    /// States that an edit dropped since the last checkpoint and that are restored.
    pub parked: Vec<String>,
    /// Path, old and new dtype and shape: initialized unless `recipe.migrate` fills it.
    pub reshaped: Vec<(String, String, String)>,
    pub new: Vec<String>,
    /// States of the old version only.
    pub dropped: Vec<String>,
}

impl StateMigration {
    /// Returns whether every State is kept under its own name, and none is dropped.
    pub fn exact(&self) -> bool {
        self.reshaped.is_empty()
            && self.new.is_empty()
            && self.dropped.is_empty()
            && self.parked.is_empty()
            && self.kept.iter().all(|(to, from)| to == from)
    }

    /// Formats `12 States kept · new: model.2.weight · dropped: …`; empty if all are kept.
    pub fn show(&self) -> Option<String> {
        if self.exact() {
            return None;
        }
        let list = |what: &str, names: Vec<String>| {
            let more = if names.len() > 3 { format!(" and {} more", names.len() - 3) } else { String::new() };
            let shown: Vec<_> = names.into_iter().take(3).collect();
            (!shown.is_empty()).then(|| format!("{what} {}{more}", shown.join(", ")))
        };
        let renamed = self.kept.iter().filter(|(to, from)| to != from).map(|(to, from)| format!("{from} as {to}"));
        let reshaped = self.reshaped.iter().map(|(path, was, is)| format!("{path} {was} -> {is}"));
        let parts = [
            Some(format!("{} States kept", self.kept.len())),
            list("taken over:", renamed.collect()),
            list("back again:", self.parked.clone()),
            list("reshaped:", reshaped.collect()),
            list("new:", self.new.clone()),
            list("dropped:", self.dropped.clone()),
        ];
        Some(parts.into_iter().flatten().collect::<Vec<_>>().join(" · "))
    }

    /// Returns the reason why a checkpoint does not fit this recipe.
    pub fn misfit(&self) -> String {
        let reshaped = self.reshaped.iter().map(|(path, was, is)| format!("{path} is {was}, and the recipe's is {is}"));
        let mut wrong: Vec<String> = reshaped.collect();
        wrong.extend(self.new.iter().map(|path| format!("{path} is missing")));
        wrong.extend(self.dropped.iter().map(|path| format!("the recipe has no State {path}")));
        wrong.extend(self.kept.iter().filter(|(a, b)| a != b).map(|(to, from)| format!("{to} is called {from}")));
        let more = if wrong.len() > 4 { format!("; and {} more", wrong.len() - 4) } else { String::new() };
        wrong.truncate(4);
        format!("{}{more}", wrong.join("; "))
    }
}

/// Returns the canonical name of a moment: Adam and AdamW share moments and differ in the weight update.
fn meaning(path: &str) -> String {
    path.strip_prefix("optim.adam.").map_or_else(|| path.to_string(), |rest| format!("optim.adamw.{rest}"))
}

/// The source of a State of the new version.
#[derive(Clone, Copy, PartialEq, Eq)]
enum From {
    Old(usize),
    Dropped(usize),
    Nowhere,
}

fn show(dtype: DType, shape: Shape) -> String {
    format!("{dtype} {shape}")
}

fn matched(old: &[Described], parked: &[Described], new: &[Described]) -> (StateMigration, Vec<From>) {
    let by_path: BTreeMap<&str, usize> = old.iter().enumerate().map(|(i, s)| (s.0.as_str(), i)).collect();
    let by_meaning: BTreeMap<String, usize> = old.iter().enumerate().map(|(i, s)| (meaning(&s.0), i)).collect();
    let (mut out, mut from) = (StateMigration::default(), Vec::with_capacity(new.len()));
    let mut used = BTreeSet::new();
    for (path, dtype, shape) in new {
        let at = by_path.get(path.as_str()).copied().or_else(|| by_meaning.get(&meaning(path)).copied());
        let fits = at.filter(|&i| old[i].1 == *dtype && old[i].2 == *shape);
        // The State dropped last is restored first.
        let aside = || parked.iter().rposition(|p| p == &(path.clone(), *dtype, *shape));
        from.push(match (fits, at) {
            (Some(i), _) => {
                out.kept.push((path.clone(), old[i].0.clone()));
                used.insert(i);
                From::Old(i)
            }
            (None, at) => match aside() {
                Some(k) => {
                    out.parked.push(path.clone());
                    From::Dropped(k)
                }
                None => {
                    match at {
                        Some(i) => {
                            out.reshaped.push((path.clone(), show(old[i].1, old[i].2), show(*dtype, *shape)));
                            used.insert(i);
                        }
                        None => out.new.push(path.clone()),
                    }
                    From::Nowhere
                }
            },
        });
    }
    out.dropped = (0..old.len()).filter(|i| !used.contains(i)).map(|i| old[i].0.clone()).collect();
    (out, from)
}

/// Matches each State of `old` with those of `new`.
pub fn compare(old: &[Described], new: &[Described]) -> StateMigration {
    matched(old, &[], new).0
}

/// States that an edit dropped or reshaped, with their last values, until the next checkpoint.
#[derive(Default)]
pub struct DroppedStates {
    states: Vec<(Described, AnyUserData)>,
    /// For States of optimizers: the number of updates they have had.
    updates: BTreeMap<String, i64>,
}

impl DroppedStates {
    /// Stores the States of `old` that the next version does not continue with.
    pub fn add(&mut self, old: &Run, next: &StateMigration) -> Result<(), Failed> {
        let back: BTreeSet<&String> = next.parked.iter().collect();
        self.states.retain(|(s, _)| !back.contains(&s.0));
        let taken: BTreeSet<&String> = next.kept.iter().map(|(_, from)| from).collect();
        let updates = old.updates_of_states()?;
        for (path, state) in old.list_states()? {
            if !taken.contains(&path) {
                if let Some(n) = updates.get(&path) {
                    self.updates.insert(path.clone(), *n);
                }
                self.states.push((described(&old.host, path, &state)?, state));
            }
        }
        Ok(())
    }

    pub fn clear(&mut self) {
        self.states.clear();
        self.updates.clear();
    }
}

fn described(host: &Host, path: String, state: &AnyUserData) -> mlua::Result<Described> {
    let info = host.engine.borrow().state_info(id_of(state)?);
    let info = info.map_err(|e| mlua::Error::runtime(e.to_string()))?;
    Ok((path, info.dtype, info.shape))
}

pub(crate) fn id_of(u: &AnyUserData) -> mlua::Result<StateId> {
    match u.borrow::<Tensor>()?.what {
        Ref::State(id) => Ok(id),
        _ => Err(mlua::Error::runtime("this is a bug: a State is none")),
    }
}

/// A value to be transferred: a State, or a tensor of a checkpoint.
enum Held<'a> {
    State(&'a AnyUserData),
    Tensor(&'a HostTensor),
}

impl Held<'_> {
    fn lua(&self, lua: &Lua, host: &Rc<Host>) -> mlua::Result<AnyUserData> {
        match self {
            Held::State(u) => Ok((*u).clone()),
            Held::Tensor(t) => {
                let id = host.record(lua, |engine| Ok(engine.from_host((*t).clone())))?;
                lua.create_userdata(host.tensor(id))
            }
        }
    }
}

/// `native.unsaved(states)`: warns of States that the open step changes besides these, which checkpoints contain. Returns whether
/// there are any.
pub(crate) fn unsaved(lua: &Lua, known: Vec<AnyUserData>) -> mlua::Result<bool> {
    let host = crate::functions::host(lua)?;
    let known: BTreeSet<u64> = known.iter().map(|u| Ok(id_of(u)?.0)).collect::<mlua::Result<_>>()?;
    let mut engine = host.engine.borrow_mut();
    let lost = engine.changed_states().into_iter().filter(|(id, _)| !known.contains(&id.0));
    let places: BTreeSet<String> = lost.map(|(_, loc)| engine.recorder.source_map.show(loc)).collect();
    let any = !places.is_empty();
    for place in places {
        engine.diagnostics.notices.say(format!(
            "{place}: the step changes a State that checkpoints and edits do not carry over; make it part of the model, or name it: recipe.states = {{ name = state }}"
        ));
    }
    Ok(any)
}

impl Run {
    /// Returns path, dtype and shape of every State, in path order.
    pub fn describe_states(&self) -> Result<Vec<Described>, Failed> {
        let list = self.list_states()?;
        Ok(list.into_iter().map(|(path, s)| described(&self.host, path, &s)).collect::<mlua::Result<_>>()?)
    }

    /// Returns path and description of every State, in path order.
    pub fn state_infos(&self) -> Result<Vec<(String, StateInfo)>, Failed> {
        let list = self.list_states()?;
        let engine = self.host.engine.borrow();
        let info = |state: &AnyUserData| engine.state_info(id_of(state)?).map_err(mlua::Error::external);
        Ok(list.into_iter().map(|(path, s)| Ok((path, info(&s)?))).collect::<mlua::Result<_>>()?)
    }

    /// Returns path and line of every State, in path order; a State that the library made may have none.
    pub fn state_places(&self) -> Result<Vec<(String, Option<(String, u32)>)>, Failed> {
        let list = self.list_states()?;
        let engine = self.host.engine.borrow();
        let place = |state: &AnyUserData| {
            let loc = engine.state_loc(id_of(state)?);
            mlua::Result::Ok(engine.recorder.source_map.get(loc).map(|(file, line)| (file.to_string(), line)))
        };
        Ok(list.into_iter().map(|(path, s)| Ok((path, place(&s)?))).collect::<mlua::Result<_>>()?)
    }

    /// Calls `f` with path and value of every trainable State, in path order, and stores what it made of the value.
    pub fn edit_trainable(&self, mut f: impl FnMut(&str, &mut HostTensor)) -> Result<(), Failed> {
        let mut seen = BTreeSet::new();
        for (path, state) in self.list_states()? {
            let id = id_of(&state)?;
            let trainable = self.host.engine.borrow().state_info(id).map_err(mlua::Error::external)?.trainable;
            if !trainable || !seen.insert(id.0) {
                continue;
            }
            let mut value = crate::table::read(&self.lua, &*state.borrow::<Tensor>()?)?;
            f(&path, &mut value);
            self.host.record(&self.lua, |engine| Ok(engine.write_state(id, &value)?))?;
        }
        self.host.record(&self.lua, |engine| engine.end_implicit_step())?;
        Ok(())
    }

    /// Moves this newly built run to the position of `source`: matching States get their values, `recipe.migrate(old, new)` may
    /// fill others (both are tables from path to State), then the cursor is set. The random numbers are the caller's. The
    /// source is not changed.
    pub fn take_over(&self, source: Source<'_>, parked: &DroppedStates, how: Taking) -> Result<StateMigration, Failed> {
        let live;
        let (names, old): (Vec<Described>, Vec<Held<'_>>) = match source {
            Source::Run(run) => {
                live = run.list_states()?;
                let names = live.iter().map(|(path, s)| described(&self.host, path.clone(), s));
                (names.collect::<mlua::Result<_>>()?, live.iter().map(|s| Held::State(&s.1)).collect())
            }
            Source::Values { states, .. } => {
                let names = states.iter().map(|(path, t)| (path.clone(), t.dtype, t.shape));
                (names.collect(), states.iter().map(|s| Held::Tensor(&s.1)).collect())
            }
        };
        let mine = self.list_states()?;
        let aside: Vec<Described> = parked.states.iter().map(|p| p.0.clone()).collect();
        let (handover, from) = matched(&names, &aside, &self.describe_states()?);
        if how == Taking::Exact && !handover.exact() {
            return Ok(handover);
        }
        if how == Taking::Fitting
            && let Some(path) = crate::experts::without_order(&handover.kept, &handover.dropped)
        {
            let message = format!("{path} has no `rebalance` any more, and its experts may have changed rows");
            let hint = "keep it, with every = 0 if they should stay where they are".to_string();
            return Err(crate::errors::argument(&self.host, &self.lua, "nn.MoE", message, Some(hint)).into());
        }
        // How often the States of optimizers have been updated, if they do not continue those of the source: new moments never.
        let own = if how == Taking::Back { self.updates_of_states()? } else { BTreeMap::new() };
        let mut updates = BTreeMap::new();
        let mut initial = Vec::new();
        for ((path, state), from) in mine.iter().zip(from) {
            match from {
                From::Old(_) => {}
                From::Dropped(_) => updates.extend(parked.updates.get(path).map(|n| (path.clone(), *n))),
                From::Nowhere => initial.push((id_of(state)?, path)),
            }
            let value = match from {
                From::Old(i) => &old[i],
                From::Dropped(k) => &Held::State(&parked.states[k].1),
                From::Nowhere => continue,
            };
            let to = id_of(state)?;
            let value = match value {
                Held::State(u) => Some(u.borrow::<Tensor>()?),
                Held::Tensor(_) => None,
            }
            .ok_or(value);
            self.host.record(&self.lua, |engine| {
                match value {
                    Ok(state) => {
                        let node = state.node(engine)?;
                        engine.assign(to, node)?;
                    }
                    Err(Held::Tensor(t)) => engine.write_state(to, t)?,
                    Err(Held::State(_)) => {}
                }
                Ok(())
            })?;
        }
        let to_fill = !(handover.reshaped.is_empty() && handover.new.is_empty());
        if how == Taking::Fitting
            && to_fill
            && let Value::Function(migrate) = self.recipe.get::<Value>("migrate")?
        {
            let (before, after) = (self.lua.create_table()?, self.lua.create_table()?);
            for ((path, ..), value) in names.iter().zip(&old) {
                before.raw_set(path.as_str(), value.lua(&self.lua, &self.host)?)?;
            }
            for (path, state) in &mine {
                after.raw_set(path.as_str(), state)?;
            }
            migrate.call::<()>((before, after))?;
        }
        let engine = self.host.engine.borrow();
        initial.retain(|(id, _)| !engine.is_assigned(*id));
        drop(engine);
        updates.extend(initial.into_iter().map(|(_, path)| (path.clone(), own.get(path).copied().unwrap_or(0))));
        let ended = self.host.engine.borrow_mut().end_implicit_step();
        let loc = self.host.loc(&self.lua);
        ended.map_err(|e| crate::errors::raise(&self.host, crate::errors::Raise::Fault(e, loc)))?;
        match source {
            Source::Run(run) => self.seek(&run.cursor()?, updates)?,
            Source::Values { cursor, .. } => self.seek(cursor, updates)?,
        }
        self.host.record(&self.lua, |engine| engine.end_implicit_step())?;
        Ok(handover)
    }

    /// Adds to the States of a checkpoint of an older release those that it did not store: with a loss scaler, the counts of updates
    /// of each parameter, which were one count for all.
    pub fn add_counts(&self, states: &mut Vec<(String, HostTensor)>) -> Result<(), Failed> {
        let Some(all) = states.iter().find(|s| s.0 == "scaler.updates").map(|s| s.1.clone()) else { return Ok(()) };
        let counters: Vec<String> = self.table.get::<mlua::Function>("counters")?.call(&self.table)?;
        let stored: BTreeSet<&String> = states.iter().map(|s| &s.0).collect();
        let missing: Vec<String> = counters.into_iter().filter(|path| !stored.contains(path)).collect();
        states.extend(missing.into_iter().map(|path| (path, all.clone())));
        Ok(())
    }

    /// Records a step and one batch of an evaluation on the current States without running them. Errors about
    /// shapes, dtypes or names are raised now.
    pub fn dry_run(&self) -> Result<(), Failed> {
        self.dry_run_with(None).map(drop)
    }

    /// Does the same, and returns the kernels of the step.
    pub fn fingerprint(&self) -> Result<perilune_plan::Fingerprint, Failed> {
        Ok(self.dry_run_with(Some("kernels"))?.fingerprint.unwrap_or_default())
    }

    /// Does the same as `dry_run`, and starts to compile missing machine code of the step in the background. `None`: it lacks
    /// none that takes long to compile.
    pub fn prepare(&self) -> Result<Option<JoinHandle<()>>, Failed> {
        match self.dry_run_with(Some("code"))?.code {
            Code::Making(work) => Ok(Some(work)),
            _ => Ok(None),
        }
    }

    /// Computes every tensor of the next step, in the order in which the recipe records them, and takes no step. No State, counter or
    /// random number changes. A recomputation of two equal recordings on equal States has equal digests.
    pub fn step_tensors(&self) -> Result<Vec<TensorDigest>, Failed> {
        self.list_states()?; // sets the paths of States
        Ok(self.dry_run_with(Some("tensors"))?.tensors)
    }

    fn dry_run_with(&self, plan: Option<&str>) -> Result<Planned, Failed> {
        self.lua.set_app_data(Planned::default());
        let f: mlua::Function = self.table.get("dry_run")?;
        f.call::<()>((&self.table, plan))?;
        Ok(self.lua.remove_app_data().unwrap_or_default())
    }

    pub(crate) fn list_states(&self) -> Result<Vec<(String, AnyUserData)>, Failed> {
        let f: mlua::Function = self.table.get("states")?;
        let list: Table = f.call(&self.table)?;
        let mut out = Vec::new();
        for entry in list.sequence_values::<Table>() {
            let entry = entry?;
            out.push((entry.get("path")?, entry.get("state")?));
        }
        out.sort_by(|a: &(String, AnyUserData), b| a.0.cmp(&b.0));
        let mut engine = self.host.engine.borrow_mut();
        for (path, state) in &out {
            if let Ref::State(id) = state.borrow::<Tensor>()?.what {
                engine.set_state_path(id, path).map_err(mlua::Error::external)?;
            }
        }
        drop(engine);
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(path: &str, dims: &[usize]) -> Described {
        (path.into(), DType::F32, Shape::of(dims))
    }

    #[test]
    fn states_are_matched_by_path_and_shape() {
        let old =
            [state("model.a", &[2]), state("model.b", &[3]), state("model.c", &[1]), state("optim.adam.m.a", &[2])];
        assert!(compare(&old, &old).exact());
        let new =
            [state("model.a", &[2]), state("model.b", &[4]), state("model.d", &[1]), state("optim.adamw.m.a", &[2])];
        let h = compare(&old, &new);
        assert_eq!(h.reshaped, [("model.b".into(), "f32 {3}".into(), "f32 {4}".into())]);
        assert_eq!((h.new.join(" "), h.dropped.join(" ")), ("model.d".to_string(), "model.c".to_string()));
        assert_eq!(h.kept[1], ("optim.adamw.m.a".to_string(), "optim.adam.m.a".to_string()));
        let (h, from) =
            matched(&old[..1], &[state("model.b", &[3]), state("model.b", &[4]), state("model.b", &[3])], &old[..2]);
        assert_eq!(h.parked, ["model.b"]);
        assert!(from[1] == From::Dropped(2), "the last one put aside");
    }
}
