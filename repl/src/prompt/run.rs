//! A recipe at the prompt: its run, and how an edited recipe takes its place.

use super::Prompt;
use crate::device::DeviceArgs;
use crate::failure::Failure;
use crate::format::grouped;
use crate::source::Source;
use crate::watch::Watch;
use perilune_lua::{Console, Loaded, ParamValue, Run, Runtime};
use std::path::PathBuf;

/// The recipe's run, once it could be built.
pub struct Training<'a> {
    runtime: &'a Runtime,
    path: PathBuf,
    seed: Option<i64>,
    device: DeviceArgs,
    built: Option<Built<'a>>,
}

struct Built<'a> {
    run: Run,
    params: Vec<(String, ParamValue)>,
    watch: Watch<'a>,
}

impl<'a> Training<'a> {
    pub fn new(runtime: &'a Runtime, path: PathBuf, seed: Option<i64>, device: DeviceArgs) -> Training<'a> {
        Training { runtime, path, seed, device, built: None }
    }

    pub fn path(&self) -> PathBuf {
        self.path.clone()
    }

    /// Loads the file and builds the run; a line about it. A plain script has run then, and there is none.
    pub fn build(&mut self, console: &Console) -> Result<String, Failure> {
        let source = Source::read(&self.path)?;
        let recipe = match source.load(self.runtime)? {
            Loaded::Recipe(recipe) => recipe,
            Loaded::Script => {
                return Ok(format!(
                    "{} is a plain script and has run; :load would keep its globals",
                    self.path.display()
                ));
            }
        };
        let params = recipe.params()?;
        let precision = self.device.precision.as_deref();
        let run = recipe.start(self.seed, precision, self.device.memory_budget)?;
        let precision = Some(run.precision());
        let watch = Watch::new(self.runtime, &source, self.seed, precision, None, self.device.memory_budget, None);
        console.set_run(&run)?;
        let mut parts = vec![recipe.name(), format!("{} parameters", grouped(run.num_parameters()))];
        let sizes: Vec<String> =
            run.splits().iter().filter_map(|s| Some(format!("{} {s}", grouped(run.samples(s)?)))).collect();
        if !sizes.is_empty() {
            parts.push(sizes.join(" / "));
        }
        parts.push("run:step(n), run:evaluate(), run.model, run.batch".into());
        self.built = Some(Built { run, params, watch });
        Ok(parts.join(" · "))
    }

    /// Reads the recipe again. On an error the run is as it was.
    fn reload(&mut self, console: &Console) -> Result<String, Failure> {
        let Some(built) = &mut self.built else { return self.build(console) };
        let step = built.run.count();
        let Some(candidate) = built.watch.changed(true, step) else {
            return Ok(format!("{} has not changed", self.path.display()));
        };
        let next = built.watch.load(&candidate, &built.run, &built.params)?;
        built.watch.accept(next.files, &built.params)?;
        (built.run, built.params) = (next.run, next.params);
        console.set_run(&built.run)?;
        let ms = next.begun.elapsed().as_secs_f64() * 1e3;
        let what = if next.changed.is_empty() { "no change of the text".into() } else { next.changed.join(", ") };
        Ok(format!("{what} · applied at step {step} · {ms:.0} ms"))
    }
}

impl Prompt<'_> {
    pub fn recipe_path(&self) -> Option<PathBuf> {
        self.training.as_ref().map(|t| t.borrow().path())
    }

    /// The recipe anew, or else the files that were loaded.
    pub fn reload(&self, console: &Console) -> Result<(), Failure> {
        let Some(training) = &self.training else {
            let files = self.loaded.borrow().clone();
            if files.is_empty() {
                return Err(Failure::Usage(if self.at_breakpoint {
                    "a recipe that waits at a breakpoint cannot be reloaded; :continue first".into()
                } else {
                    "there is nothing to reload: no recipe, and no file was loaded".into()
                }));
            }
            console.forget_required()?;
            for path in files {
                self.show(console.load(&path)?);
            }
            return Ok(());
        };
        let said = training.borrow_mut().reload(console)?;
        self.say(&said);
        Ok(())
    }
}
