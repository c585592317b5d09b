//! Parses `--mesh`: the axes of a mesh, and how States are divided on it.

use perilune_core::Mesh;
use perilune_core::byte_size::amount;
use perilune_core::error::{Error, Result, did_you_mean};
use perilune_core::mesh::Axis;
use perilune_plan::{KeyExchange, Schedule};
use std::fmt::{self, Display};

/// The last stage: 1 divides States, 2 gradients too, and 3 drops weights in between.
const MOST_ZERO: u8 = 3;

/// The axes whose devices have different samples, and so may share States.
const SAMPLES: [Axis; 3] = [Axis::Dp, Axis::Shard, Axis::Ep];

/// A mesh as the command line and recipes write it: `dp=8,zero=1` or `dp=8,bucket=25M`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MeshOptions {
    pub mesh: Mesh,
    /// The stage of ZeRO (Rajbhandari et al., arXiv:1910.02054), if it is given.
    pub zero: Option<u8>,
    /// The most bytes of a bucket of gradients that are combined in one call, if it is given; 0 for a call for each.
    pub bucket: Option<usize>,
    /// How attention gets its keys along cp.
    pub keys: KeyExchange,
    /// How the stages along pp take turns, if it is given: by name, with its chunks.
    pub schedule: Option<Schedule>,
}

/// The options beside the axes.
const OPTIONS: [&str; 5] = ["zero", "bucket", "keys", "schedule", "chunks"];

impl MeshOptions {
    /// Parses axes with their sizes, `zero`, `bucket`, `keys`, `schedule` and `chunks`, in any order. Empty text is one device.
    pub fn parse(text: &str) -> Result<MeshOptions> {
        let (mut zero, mut bucket, mut keys, mut axes) = (None, None, None, Vec::new());
        let (mut schedule, mut chunks): (Option<String>, Option<String>) = (None, None);
        for part in text.split(',').filter(|_| !text.trim().is_empty()) {
            match part.split_once('=').map(|(name, value)| (name.trim(), value.trim())) {
                Some(("zero", value)) => once("zero", &mut zero, stage(value)?)?,
                Some(("bucket", value)) => once("bucket", &mut bucket, bucket_bytes(value)?)?,
                Some(("keys", value)) => once("keys", &mut keys, key_exchange(value)?)?,
                Some(("schedule", value)) => once("schedule", &mut schedule, value.to_string())?,
                Some(("chunks", value)) => once("chunks", &mut chunks, value.to_string())?,
                Some((name, _)) if misspelt_option(name).is_some() => {
                    let hint = format!("did you mean {}?", misspelt_option(name).unwrap_or_default());
                    return Err(Error::argument("mesh", format!("there is no axis {name:?}")).hint(hint));
                }
                _ => axes.push(part),
            }
        }
        let mesh = Mesh::parse(&axes.join(","))?;
        let schedule = schedule_of(schedule, chunks, &mesh)?;
        let options = MeshOptions { mesh, zero, bucket, keys: keys.unwrap_or_default(), schedule };
        if options.keys != KeyExchange::Auto && mesh.size(Axis::Cp) == 1 {
            let message = format!(
                "keys={} says how attention gets keys along cp, which the mesh does not have",
                options.keys.name()
            );
            return Err(Error::argument("mesh", message).hint("leave `keys` out, or add cp, as in cp=2,keys=ring"));
        }
        if zero.is_some_and(|n| n > 0) && SAMPLES.iter().all(|axis| mesh.size(*axis) == 1) {
            let message =
                format!("zero={} divides States over dp, shard or ep, but the mesh has none", zero.unwrap_or(0));
            return Err(
                Error::argument("mesh", message).hint("write how many devices share the States, as in dp=8,zero=1")
            );
        }
        Ok(options)
    }
}

/// The option that a name resembles, if it is no axis and resembles none.
fn misspelt_option(name: &str) -> Option<&'static str> {
    let is_like_an_axis = did_you_mean(name, Axis::ALL.map(Axis::name)).is_some();
    let is_axis = Axis::ALL.into_iter().any(|axis| axis.name() == name);
    if is_axis || is_like_an_axis { None } else { did_you_mean(name, OPTIONS) }
}

/// Stores an option, which may be given once.
fn once<T>(name: &str, to: &mut Option<T>, value: T) -> Result<()> {
    match to.replace(value) {
        None => Ok(()),
        Some(_) => Err(Error::argument("mesh", format!("{name} is given twice"))),
    }
}

/// Parses a stage of ZeRO.
fn stage(text: &str) -> Result<u8> {
    text.parse::<u8>().ok().filter(|n| *n <= MOST_ZERO).ok_or_else(|| {
        Error::argument("mesh", format!("zero={text}: there is no such stage"))
            .hint("0 divides nothing, 1 optimizer States, 2 gradients too, 3 weights too")
    })
}

/// Parses the most bytes of a bucket.
fn bucket_bytes(text: &str) -> Result<usize> {
    if text == "0" {
        return Ok(0);
    }
    amount(text).map_err(|_| {
        Error::argument("mesh", format!("bucket={text}: it is not an amount of memory"))
            .hint("write the most bytes of gradients in one call, as bucket=25M; 0 sends each gradient alone")
    })
}

/// Parses the name of a schedule with its chunks.
fn schedule_of(name: Option<String>, chunks: Option<String>, mesh: &Mesh) -> Result<Option<Schedule>> {
    let text = match (name, chunks) {
        (None, None) => return Ok(None),
        (None, Some(chunks)) => {
            return Err(Error::argument("mesh", format!("chunks={chunks}, and no schedule"))
                .hint("name the one that has chunks, as in pp=2,schedule=interleaved,chunks=2"));
        }
        (Some(name), None) => name,
        (Some(name), Some(chunks)) => format!("{name},chunks={chunks}"),
    };
    if mesh.size(Axis::Pp) == 1 {
        let message = format!("schedule={text} says how stages along pp take turns, which the mesh does not have");
        return Err(Error::argument("mesh", message).hint("leave it out, or add pp, as in pp=2,schedule=zb-h1"));
    }
    Schedule::parse(&text).map(Some).map_err(|e| Error { op: "mesh".into(), ..e })
}

fn key_exchange(name: &str) -> Result<KeyExchange> {
    let names = || KeyExchange::ALL.map(KeyExchange::name);
    KeyExchange::ALL.into_iter().find(|keys| keys.name() == name).ok_or_else(|| {
        let hint = match did_you_mean(name, names()) {
            Some(near) => format!("did you mean {near}?"),
            None => format!("keys is one of {}", names().join(", ")),
        };
        Error::argument("mesh", format!("keys={name}: attention has no such way to get keys")).hint(hint)
    })
}

impl Display for MeshOptions {
    /// As [`MeshOptions::parse`] reads it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mesh = Some(self.mesh.to_string()).filter(|text| !text.is_empty());
        let zero = self.zero.map(|zero| format!("zero={zero}"));
        let bucket = self.bucket.map(|bucket| format!("bucket={bucket}"));
        let keys = (self.keys != KeyExchange::Auto).then(|| format!("keys={}", self.keys.name()));
        let schedule = self.schedule.as_ref().map(|schedule| match schedule {
            Schedule::Interleaved(chunks) => format!("schedule={},chunks={chunks}", schedule.name()),
            _ => format!("schedule={}", schedule.name()),
        });
        f.write_str(
            &mesh.into_iter().chain(zero).chain(bucket).chain(keys).chain(schedule).collect::<Vec<_>>().join(","),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mesh_with_a_stage_round_trips() {
        for text in [
            "dp=8,zero=1",
            "dp=2,shard=4,zero=3",
            "dp=2",
            "",
            "dp=2,tp=4,zero=0",
            "dp=2,cp=2,zero=3,keys=ring",
            "pp=4,dp=2,zero=1",
            "ep=2,zero=3",
            "pp=4,dp=2,schedule=zb-h1",
            "pp=2,schedule=interleaved,chunks=4",
        ] {
            assert_eq!(MeshOptions::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(MeshOptions::parse("bucket=4M,dp=2").unwrap().to_string(), "dp=2,bucket=4194304");
        assert_eq!(MeshOptions::parse("dp=2,bucket=0").unwrap().bucket, Some(0));
        assert_eq!(MeshOptions::parse(" zero = 2 , dp=4 ").unwrap().to_string(), "dp=4,zero=2");
    }

    #[test]
    fn errors_name_the_stage_and_the_cure() {
        for (text, message) in [
            ("dp=2,zero=4", "zero=4: there is no such stage"),
            ("dp=2,zero=x", "zero=x: there is no such stage"),
            ("zero=1,dp=2,zero=1", "zero is given twice"),
            ("dp=2,bucket=25Q", "bucket=25Q: it is not an amount of memory"),
            ("dp=2,bucket=1M,bucket=2M", "bucket is given twice"),
            ("tp=2,zero=1", "zero=1 divides States over dp, shard or ep, but the mesh has none"),
            ("dp=2,zer=1", "there is no axis \"zer\""),
            ("cp=2,keys=rings", "keys=rings: attention has no such way to get keys"),
            ("cp=2,keys=ring,keys=ring", "keys is given twice"),
            ("dp=2,schedule=zbv", "schedule=zbv says how stages along pp take turns, which the mesh does not have"),
            ("pp=2,schedule=zbw", "there is no schedule \"zbw\""),
            ("pp=2,chunks=2", "chunks=2, and no schedule"),
            ("pp=2,schedule=zbv,chunks=2", "schedule zbv has a fixed number of stages a device, and no chunks"),
            ("dp=2,keys=ring", "keys=ring says how attention gets keys along cp, which the mesh does not have"),
        ] {
            assert_eq!(MeshOptions::parse(text).unwrap_err().message, message, "{text}");
        }
    }
}
