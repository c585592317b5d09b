//! Makes the trials of a sweep from its axes, and stores the plan in `sweep.json`.

use super::{Axis, MOST_TRIALS, SEED};
use crate::error::{Error, Result, disk};
use crate::run_lock::RunLock;
use perilune_policy::Directory;
use serde_json::{Value, json};
use std::io::Read;
use std::path::{Path, PathBuf};

/// The file with the plan of a sweep.
pub const SWEEP: &str = "sweep.json";
/// The version of its format.
const SCHEMA: u64 = 1;
/// The longest `sweep.json` that is read, in bytes.
const MOST_BYTES: u64 = 64 << 20;
/// The longest name of a run directory, in characters.
const LONGEST_NAME: usize = 96;

/// Points that are drawn instead of listed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Draws {
    pub count: u32,
    pub seed: u64,
}

/// One run of a sweep.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Trial {
    /// The name of its run directory.
    pub name: String,
    /// The values of the axes, in their order, the seed last.
    pub values: Vec<(String, String)>,
    /// Which combination of the values without the seed it belongs to, from 0.
    pub point: usize,
}

/// What a sweep does; the same plan makes the same runs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    pub recipe: PathBuf,
    /// The BLAKE3 hash of the recipe's text.
    pub hash: String,
    /// The directory where the sweep was started, from which relative paths start.
    pub directory: PathBuf,
    /// Values that all trials have, as `--set` gives them.
    pub fixed: Vec<(String, String)>,
    pub draws: Option<Draws>,
    /// The factor of successive halving, and the full number of steps.
    pub halving: Option<(u32, u64)>,
    /// The metric and its direction, as given; none for that of the runs.
    pub metric: Option<String>,
    /// Further options of `perilune run` for every trial.
    pub arguments: Vec<String>,
    pub trials: Vec<Trial>,
}

/// SplitMix64 (Steele et al. 2014): the draws of a seed are the same on every machine.
struct Rng(u64);

impl Rng {
    /// Returns a number in [0, 1) with 53 random bits.
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Makes the name of a run directory: the number of the trial and its values.
fn name(number: usize, digits: usize, values: &[(String, String)]) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "=.+-_".contains(c) { c } else { '_' };
    let mut out = format!("{number:0digits$}");
    for (key, value) in values {
        out += &format!("-{key}={value}").chars().map(plain).collect::<String>();
    }
    out.truncate(LONGEST_NAME);
    out.trim_end_matches('.').to_string()
}

fn too_many(count: &str) -> Error {
    Error::Usage(format!(
        "--set: {count} combinations are more than the {MOST_TRIALS} runs of a sweep\n  \
         hint: fewer values, or --random N, which draws N of them"
    ))
}

impl Plan {
    /// Makes the trials: all combinations of the values, or with `draws` drawn ones, each with every seed.
    ///
    /// # Errors
    /// A range cannot be listed, or there are too many combinations.
    pub fn trials(axes: &[Axis], draws: Option<Draws>) -> Result<Vec<Trial>> {
        let (seeds, others): (Vec<&Axis>, Vec<&Axis>) = axes.iter().partition(|axis| axis.name == SEED);
        let listed = if draws.is_some() { &seeds } else { &axes.iter().collect::<Vec<_>>() };
        let mut count = draws.map_or(1u64, |d| u64::from(d.count));
        for axis in listed {
            // A range that cannot be listed is the error, not its length.
            let Some(n) = axis.len() else {
                return Err(axis.list().err().unwrap_or_else(|| too_many("infinitely many")));
            };
            count = count.saturating_mul(n);
        }
        if count > MOST_TRIALS as u64 {
            return Err(too_many(&if count == u64::MAX { "more than 10^19".into() } else { count.to_string() }));
        }
        let mut points: Vec<Vec<(String, String)>> = vec![Vec::new()];
        match draws {
            Some(draws) => {
                let mut rng = Rng(draws.seed);
                let mut point = || others.iter().map(|axis| (axis.name.clone(), axis.draw(rng.unit()))).collect();
                points = (0..draws.count).map(|_| point()).collect();
            }
            None => {
                for axis in others {
                    let values = axis.list()?;
                    let with = |point: &Vec<(String, String)>, value: &String| {
                        let mut out = point.clone();
                        out.push((axis.name.clone(), value.clone()));
                        out
                    };
                    points =
                        points.iter().flat_map(|point| values.iter().map(move |value| with(point, value))).collect();
                }
            }
        }
        let seeds = seeds.first().map(|axis| axis.list()).transpose()?;
        let digits = points.len().saturating_mul(seeds.as_ref().map_or(1, Vec::len)).to_string().len();
        let mut out = Vec::new();
        for (k, point) in points.into_iter().enumerate() {
            for seed in seeds.clone().map_or(vec![None], |list| list.into_iter().map(Some).collect()) {
                let mut values = point.clone();
                values.extend(seed.map(|seed| (SEED.to_string(), seed)));
                out.push(Trial { name: name(out.len() + 1, digits, &values), values, point: k });
            }
        }
        Ok(out)
    }

    /// Returns the number of points: combinations of values without the seed.
    pub fn points(&self) -> usize {
        self.trials.last().map_or(0, |trial| trial.point + 1)
    }

    fn json(&self) -> Value {
        let trials: Vec<Value> =
            self.trials.iter().map(|t| json!({ "name": t.name, "point": t.point, "values": t.values })).collect();
        json!({
            "schema": SCHEMA, "recipe": self.recipe.display().to_string(), "hash": self.hash,
            "directory": self.directory.display().to_string(), "fixed": self.fixed,
            "draws": self.draws.map(|d| json!({ "count": d.count, "seed": d.seed })),
            "halving": self.halving.map(|(eta, steps)| json!({ "eta": eta, "steps": steps })),
            "metric": self.metric, "arguments": self.arguments, "trials": trials,
        })
    }

    fn parse(text: &str) -> Option<Plan> {
        let v: Value = serde_json::from_str(text).ok()?;
        let pairs = |v: &Value| -> Option<Vec<(String, String)>> {
            let pair = |p: &Value| Some((p[0].as_str()?.to_string(), p[1].as_str()?.to_string()));
            v.as_array()?.iter().map(pair).collect()
        };
        let trial = |t: &Value| {
            let name =
                t["name"].as_str().filter(|name| !name.is_empty() && !name.contains(['/', '\0']) && *name != "..")?;
            let point = usize::try_from(t["point"].as_u64()?).ok()?;
            Some(Trial { name: name.into(), values: pairs(&t["values"])?, point })
        };
        let draws = match &v["draws"] {
            Value::Null => None,
            d => Some(Draws { count: u32::try_from(d["count"].as_u64()?).ok()?, seed: d["seed"].as_u64()? }),
        };
        let halving = match &v["halving"] {
            Value::Null => None,
            h => Some((u32::try_from(h["eta"].as_u64()?).ok().filter(|eta| *eta > 1)?, h["steps"].as_u64()?)),
        };
        (v["schema"].as_u64()? == SCHEMA).then_some(())?;
        Some(Plan {
            recipe: v["recipe"].as_str()?.into(),
            hash: v["hash"].as_str()?.into(),
            directory: v["directory"].as_str()?.into(),
            fixed: pairs(&v["fixed"])?,
            draws,
            halving,
            metric: v["metric"].as_str().map(String::from),
            arguments: v["arguments"]
                .as_array()?
                .iter()
                .map(|a| a.as_str().map(String::from))
                .collect::<Option<_>>()?,
            trials: v["trials"].as_array()?.iter().map(trial).collect::<Option<_>>()?,
        })
    }

    /// Names the first part in which two plans differ.
    fn difference(&self, other: &Plan) -> Option<&'static str> {
        let parts = [
            ("the recipe", self.recipe != other.recipe),
            ("the text of the recipe", self.hash != other.hash),
            ("the current directory", self.directory != other.directory),
            ("--set", self.fixed != other.fixed || self.trials != other.trials),
            ("--random or its seed", self.draws != other.draws),
            ("--halving, --eta or the number of steps", self.halving != other.halving),
            ("--metric", self.metric != other.metric),
            ("the options of the runs", self.arguments != other.arguments),
        ];
        parts.into_iter().find(|part| part.1).map(|part| part.0)
    }
}

/// The directory of a sweep that this process alone continues.
pub struct SweepDir {
    pub path: PathBuf,
    pub plan: Plan,
    /// Whether there was a plan already.
    pub resumed: bool,
    _lock: RunLock,
}

impl SweepDir {
    /// Stores a plan in a directory, or continues the same plan that is there. Without a path the directory is
    /// `runs/NAME-sweep-DATE-TIME`.
    ///
    /// # Errors
    /// The directory holds another sweep, or a run, or another process works on it.
    pub fn create(path: Option<&Path>, name: &str, plan: Plan) -> Result<SweepDir> {
        let path = match path {
            Some(path) => path.to_path_buf(),
            None => free(name)?,
        };
        std::fs::create_dir_all(&path).map_err(disk("create the directory", &path))?;
        let dir = Directory::open(&path)?;
        let shown = path.display();
        if dir.has("run.json")? {
            return Err(Error::Usage(format!(
                "--run-dir {shown}: it contains a run; a sweep has a directory of its own"
            )));
        }
        let lock = lock(&dir)?;
        if !dir.has(SWEEP)? {
            dir.replace(SWEEP, format!("{:#}\n", plan.json()).as_bytes())?;
            return Ok(SweepDir { path, plan, resumed: false, _lock: lock });
        }
        let found = read(&dir)?;
        if let Some(part) = found.difference(&plan) {
            return Err(Error::Usage(format!(
                "--run-dir {shown}: it contains another sweep, {part} differs\n  \
                 hint: perilune sweep --resume {shown} continues that one; choose another directory for a new one"
            )));
        }
        Ok(SweepDir { path, plan: found, resumed: true, _lock: lock })
    }

    /// Opens the sweep in a directory, to continue it.
    ///
    /// # Errors
    /// There is none, or another process works on it.
    pub fn open(path: &Path) -> Result<SweepDir> {
        let dir = match path.is_dir() {
            true => Directory::open(path)?,
            false => return Err(none(path)),
        };
        if !dir.has(SWEEP)? {
            return Err(none(path));
        }
        let lock = lock(&dir)?;
        Ok(SweepDir { path: path.to_path_buf(), plan: read(&dir)?, resumed: true, _lock: lock })
    }

    /// Returns the run directory of a trial.
    pub fn run_dir(&self, trial: &Trial) -> PathBuf {
        self.path.join(&trial.name)
    }
}

fn none(path: &Path) -> Error {
    let shown = path.display();
    Error::Usage(format!(
        "--resume {shown}: there is no sweep (a directory with {SWEEP}); --run-dir {shown} starts one"
    ))
}

fn lock(dir: &Directory) -> Result<RunLock> {
    RunLock::take(dir).map_err(|e| match e {
        Error::Usage(text) | Error::Refused(text) | Error::System(text) => {
            Error::System(format!("the sweep cannot be locked: {text}"))
        }
        e => e,
    })
}

fn read(dir: &Directory) -> Result<Plan> {
    let path = dir.path().join(SWEEP);
    let mut text = String::new();
    let file = dir.open_unlinked(Path::new(SWEEP))?;
    file.take(MOST_BYTES).read_to_string(&mut text).map_err(disk("read", &path))?;
    let rule = || Error::Refused(format!("{} is not the plan of a sweep of this version", path.display()));
    Plan::parse(&text).ok_or_else(rule)
}

/// Returns a directory below `runs/` that is not there yet.
fn free(name: &str) -> Result<PathBuf> {
    let stem = format!("{}-sweep-{}", crate::run_files::file_name(name), jiff::Zoned::now().strftime("%Y%m%d-%H%M%S"));
    let candidates = (1..10_000).map(|k| if k == 1 { stem.clone() } else { format!("{stem}-{k}") });
    let path = candidates.map(|name| Path::new(crate::runs::RUNS).join(name)).find(|path| !path.exists());
    path.ok_or_else(|| Error::System("cannot find a free name for the directory of the sweep".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axes(given: &[(&str, &str)]) -> Vec<Axis> {
        given.iter().map(|(name, text)| Axis::parse(name, text).expect("an axis")).collect()
    }

    fn plan(trials: Vec<Trial>) -> Plan {
        Plan {
            recipe: "a.lua".into(),
            hash: "h".into(),
            directory: "/".into(),
            fixed: vec![("width".into(), "8".into())],
            draws: Some(Draws { count: 2, seed: u64::MAX }),
            halving: Some((3, 90)),
            metric: Some("valid/loss".into()),
            arguments: vec!["--device".into(), "cpu".into()],
            trials,
        }
    }

    #[test]
    fn a_grid_has_all_combinations_and_seeds_belong_to_one_point() {
        let trials =
            Plan::trials(&axes(&[("seed", "1..2"), ("lr", "1e-3,3e-3"), ("net", "a/b,c")]), None).expect("trials");
        assert_eq!(trials.len(), 8);
        assert_eq!((trials[1].point, trials[1].name.as_str()), (0, "2-lr=1e-3-net=a_b-seed=2"));
        assert_eq!(trials[7].point, 3);
    }

    #[test]
    fn draws_depend_on_their_seed_only_and_have_every_seed_of_the_runs() {
        let of = |seed| {
            let axes = axes(&[("lr", "log:1e-4..1e-2"), ("width", "16..64"), ("seed", "1..3")]);
            Plan::trials(&axes, Some(Draws { count: 4, seed })).expect("trials")
        };
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
        assert_eq!((of(1).len(), of(1)[11].point), (12, 3));
        assert!(of(1).iter().all(|t| t.values[1].1.parse::<i64>().is_ok_and(|w| (16..=64).contains(&w))));
    }

    #[test]
    fn too_many_combinations_are_refused_before_they_are_made() {
        let huge = Plan::trials(&axes(&[("a", "1..1000000000")]), None).expect_err("refused").to_string();
        assert!(huge.contains("1000000000 combinations") && huge.contains("--random"), "{huge}");
        let text = Plan::trials(&axes(&[("lr", "0.1..0.5")]), None).expect_err("refused").to_string();
        assert!(text.contains("--random"), "{text}");
    }

    #[test]
    fn a_plan_is_read_back_and_compared() {
        let plan = plan(Plan::trials(&axes(&[("lr", "1,2")]), None).expect("trials"));
        assert_eq!(Plan::parse(&plan.json().to_string()), Some(plan.clone()));
        assert_eq!(plan.difference(&plan), None);
        assert_eq!(plan.difference(&Plan { metric: None, ..plan.clone() }), Some("--metric"));
        let outside = plan.json().to_string().replace("1-lr=1", "../x");
        assert_eq!(Plan::parse(&outside), None);
        assert_eq!(Plan::parse("{}"), None);
    }
}
