//! Binds the feed-forward layers of experts (`core/src/ops/experts.rs`) and their placement for nn.MoE.

use crate::args::{Operand, RefGuard, show};
use crate::errors;
use crate::functions::host;
use crate::tensor::Tensor;
use mlua::{FromLua, Lua, Table, Value};
use perilune_core::ops::experts::{self, EXPERT_MLP};
use perilune_dist::ExpertPlacement;

/// `native.expert_mlp(x, expert, up, down, gate, tanh)`: x (N, C) through the experts (N, K) of each token: (N, K, D). The gate may be
/// nil; then `tanh` chooses the form of GELU.
fn expert_mlp(
    lua: &Lua,
    (x, expert, up, down, gate, tanh): (Value, Value, Value, Value, Value, bool),
) -> mlua::Result<Tensor> {
    let host = host(lua)?;
    let tensor = |v: Value| -> mlua::Result<RefGuard> {
        match Operand::from_lua(v.clone(), lua)? {
            Operand::Tensor(_, r) => Ok(r),
            _ => {
                Err(errors::argument(&host, lua, EXPERT_MLP.name, format!("it needs a tensor, not {}", show(&v)), None))
            }
        }
    };
    let gate = if gate.is_nil() { None } else { Some(tensor(gate)?) };
    let all = [tensor(x)?, tensor(expert)?, tensor(up)?, tensor(down)?];
    let id = host.record(lua, |engine| {
        let [x, expert, up, down] =
            [all[0].node(engine)?, all[1].node(engine)?, all[2].node(engine)?, all[3].node(engine)?];
        let gate = gate.map(|r| r.node(engine)).transpose()?;
        let g = &mut engine.recorder.graph;
        let before = g.len();
        let made = experts::expert_mlp(g, x, expert, [up, down], gate, tanh);
        Ok(made.inspect_err(|_| engine.recorder.graph.truncate(before))?)
    })?;
    Ok(host.tensor(id))
}

/// The State that has the row of each expert (`stdlib/nn/expert_placement.lua`), below that of a mixture.
const ROWS: &str = ".placement.rows";
const UP: &str = ".up";

/// Finds weights of experts that a version of a run would keep although it drops the State that says in which order they are.
pub(crate) fn without_order<'a>(kept: &[(String, String)], dropped: &'a [String]) -> Option<&'a str> {
    let mixtures = dropped.iter().filter_map(|path| path.strip_suffix(ROWS));
    let mut of_model = mixtures.filter(|path| path.starts_with("model."));
    of_model.find(|path| kept.iter().any(|(_, from)| from.strip_suffix(UP) == Some(path)))
}

/// `native.place_experts(loads, primaries, replicas, devices)`: finds a placement of experts for their loads, or the one that is given if none
/// is better: { changed =, primaries =, replicas =, before =, after = }, the last two the load of the busiest device relative to the mean.
fn place_experts(
    lua: &Lua,
    (loads, primaries, replicas, devices): (Vec<i64>, Vec<usize>, Vec<usize>, usize),
) -> mlua::Result<Table> {
    let host = host(lua)?;
    let fail = |e: perilune_core::Error| errors::argument(&host, lua, "nn.rebalance_experts", e.message, e.hint);
    let loads: Vec<u64> = loads.into_iter().map(|load| u64::try_from(load).unwrap_or(0)).collect();
    let now = ExpertPlacement { primaries, replicas };
    let before = now.imbalance(&loads, devices).map_err(fail)?;
    let found = now.improved(&loads, devices).map_err(fail)?;
    let t = lua.create_table()?;
    t.set("changed", found.is_some())?;
    let new = found.unwrap_or(now);
    t.set("before", before)?;
    t.set("after", new.imbalance(&loads, devices).map_err(fail)?)?;
    t.set("primaries", new.primaries)?;
    t.set("replicas", new.replicas)?;
    Ok(t)
}

pub fn install(lua: &Lua, native: &Table) -> mlua::Result<()> {
    let lua = &crate::boundary::Guarded(lua);
    native.set("place_experts", lua.create_function(place_experts)?)?;
    native.set("expert_mlp", lua.create_function(expert_mlp)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_stay_with_the_state_that_orders_them() {
        let kept: Vec<_> = ["model.a.up", "model.b.down"].map(|path| (path.to_string(), path.to_string())).into();
        let lost = |paths: &[&str]| {
            let paths: Vec<String> = paths.iter().map(|path| path.to_string()).collect();
            without_order(&kept, &paths).map(String::from)
        };
        assert_eq!(lost(&["model.a.placement.load", "model.a.placement.rows"]).as_deref(), Some("model.a"));
        assert_eq!(lost(&["model.b.placement.rows", "ema.a.placement.rows", "model.a.placement.load"]), None);
        assert_eq!(lost(&[]), None);
    }
}
