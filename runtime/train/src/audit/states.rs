//! Compares the States of a run with those of a checkpoint, element by element.

use super::Difference;
use crate::error::Result;
use crate::resume::states_of;
use perilune_checkpoint::Snapshot;
use perilune_core::HostTensor;
use perilune_lua::Run;
use std::collections::BTreeMap;

/// Returns the first State, in path order, that differs from the checkpoint.
pub(super) fn difference(run: &Run, recorded: &Snapshot) -> Result<Option<Difference>> {
    let mut states = states_of(recorded);
    run.add_counts(&mut states)?;
    let mut left: BTreeMap<String, HostTensor> = states.into_iter().collect();
    let mut first: Option<(String, String, String)> = None;
    run.each_state(|path, now| {
        let was = left.remove(&path);
        if first.is_none() {
            first = match was {
                Some(was) => values(&was, &now).map(|(was, now)| (path, was, now)),
                None => Some((path, "none".into(), shape(&now))),
            };
        }
    })?;
    if let Some((path, was)) = left.pop_first()
        && first.as_ref().is_none_or(|f| path < f.0)
    {
        first = Some((path, shape(&was), "none".into()));
    }
    let Some((path, recorded_value, found)) = first else { return Ok(None) };
    let place = run.state_places()?.into_iter().find(|p| p.0 == path).and_then(|p| p.1);
    let what = format!("State {path}");
    Ok(Some(Difference { step: recorded.step, what, recorded: recorded_value, found, place }))
}

fn shape(t: &HostTensor) -> String {
    format!("{} {}", t.dtype, t.shape)
}

/// Describes how two values of a State differ: the first element, and how many others do.
fn values(was: &HostTensor, now: &HostTensor) -> Option<(String, String)> {
    if (was.dtype, was.shape) != (now.dtype, now.shape) {
        return Some((shape(was), shape(now)));
    }
    if was.bytes == now.bytes {
        return None;
    }
    let size = was.dtype.size();
    let pairs = was.bytes.chunks_exact(size).zip(now.bytes.chunks_exact(size));
    let mut differ = pairs.enumerate().filter(|(_, (a, b))| a != b).map(|(k, _)| k);
    let first = differ.next()?;
    let more = match differ.count() {
        0 => String::new(),
        1 => ", and 1 more element differs".into(),
        n => format!(", and {n} more elements differ"),
    };
    let show = |t: &HostTensor| match t.dtype.is_float() {
        true => format!("{:?}", t.get_f64(first)),
        false => t.get_i64(first).to_string(),
    };
    Some((format!("{} at element {first}", show(was)), format!("{}{more}", show(now))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use perilune_core::{DType, Shape};

    #[test]
    fn the_first_element_is_named() {
        let t = |v: &[f32]| HostTensor::from_f32(Shape::of(&[v.len()]), v);
        assert_eq!(values(&t(&[1.0, 2.0]), &t(&[1.0, 2.0])), None);
        // Bits decide: zeros of both signs differ.
        let zeros = values(&t(&[0.0, 2.0]), &t(&[-0.0, 2.0]));
        assert_eq!(zeros, Some(("0.0 at element 0".into(), "-0.0".into())));
        let many = values(&t(&[1.0, 2.0, 3.0]), &t(&[1.0, 2.5, 4.0]));
        assert_eq!(many, Some(("2.0 at element 1".into(), "2.5, and 1 more element differs".into())));
        let whole = values(&t(&[1.0]), &HostTensor::from_f64(DType::F16, Shape::of(&[1]), &[1.0]));
        assert!(whole.is_some_and(|(was, now)| was.contains("f32") && now.contains("f16")));
    }
}
