//! Holds the run of a recipe at the prompt, and reloads it from an edited file.

use super::Prompt;
use crate::console_out;
use crate::device::DeviceArgs;
use crate::failure::Failure;
use crate::format::{grouped, parameters};
use perilune_lua::{Console, Loaded, ParamValue, Recipe, Run, Runtime};
use perilune_train::{Control, Reloader, SavedRun, Source, StartOptions};
use std::path::PathBuf;

/// A recipe, and its run once it has been built.
pub struct Training<'a> {
    runtime: &'a Runtime,
    path: PathBuf,
    /// The checkpoint from which the run begins.
    saved: Option<SavedRun>,
    seed: Option<i64>,
    device: DeviceArgs,
    built: Option<Built<'a>>,
}

struct Built<'a> {
    run: Run,
    params: Vec<(String, ParamValue)>,
    reloader: Reloader<'a>,
}

impl<'a> Training<'a> {
    /// Creates the entry of a file that has not been loaded.
    pub fn new(runtime: &'a Runtime, path: PathBuf, seed: Option<i64>, device: DeviceArgs) -> Training<'a> {
        Training { runtime, path, saved: None, seed, device, built: None }
    }

    /// Creates the entry of a run at one of its checkpoints.
    pub fn saved(runtime: &'a Runtime, saved: SavedRun, device: DeviceArgs) -> Training<'a> {
        Training { runtime, path: saved.source().path.clone(), saved: Some(saved), seed: None, device, built: None }
    }

    /// Returns the path of the recipe.
    pub fn path(&self) -> PathBuf {
        self.path.clone()
    }

    /// Loads the file, builds the run and returns a line about it. A plain script has no run; it has been executed.
    pub fn build(&mut self, console: &Console) -> Result<String, Failure> {
        if let Some(saved) = self.saved.take() {
            let restored = self.restore(console, &saved);
            // Otherwise the checkpoint is no longer needed in memory.
            self.saved = restored.is_err().then_some(saved);
            return restored;
        }
        let source = Source::read(&self.path)?;
        let recipe = match source.load(self.runtime)? {
            Loaded::Recipe(recipe) => recipe,
            Loaded::Script => {
                return Ok(format!(
                    "{} is a plain script and was run; use :load to keep its globals",
                    self.path.display()
                ));
            }
        };
        let precision = self.device.precision.as_deref();
        let run = recipe.start(self.seed, precision, self.device.memory_budget)?;
        self.enter(console, &source, &recipe, run, self.seed, None)
    }

    /// Builds the run as its checkpoint has it.
    fn restore(&mut self, console: &Console, saved: &SavedRun) -> Result<String, Failure> {
        let start = StartOptions {
            precision: self.device.precision.clone(),
            memory_budget: self.device.memory_budget,
            ..StartOptions::default()
        };
        let (recipe, run) = saved.build(self.runtime, &start)?;
        for text in saved.compare_data(self.runtime, &|_, _| ())? {
            console_out::complain("warning", &text);
        }
        let at = format!("step {} of {}", grouped(run.count()), saved.dir().display());
        let seed = Some(run.seed());
        self.enter(console, saved.source(), &recipe, run, seed, Some(at))
    }

    /// Makes a run that has been built the run of the prompt, and returns a line about it. `at` names the checkpoint that it begins at.
    fn enter(
        &mut self,
        console: &Console,
        source: &Source,
        recipe: &Recipe,
        run: Run,
        seed: Option<i64>,
        at: Option<String>,
    ) -> Result<String, Failure> {
        let params = recipe.params()?;
        let start = StartOptions {
            seed,
            precision: Some(run.precision()),
            memory_budget: self.device.memory_budget,
            ..StartOptions::default()
        };
        let reloader = Reloader::new(self.runtime, source, start, Control::default(), None);
        console.set_run(&run)?;
        let mut parts: Vec<String> = std::iter::once(recipe.name()).chain(at).collect();
        parts.push(parameters(run.num_parameters(), run.num_frozen()));
        let sizes: Vec<String> =
            run.splits().iter().filter_map(|s| Some(format!("{} {s}", grouped(run.samples(s)?)))).collect();
        if !sizes.is_empty() {
            parts.push(sizes.join(" / "));
        }
        parts.push("run:step(n), run:evaluate(), run.model, run.batch".into());
        self.built = Some(Built { run, params, reloader });
        Ok(parts.join(" · "))
    }

    /// Reloads the recipe. On an error the run is unchanged.
    fn reload(&mut self, console: &Console) -> Result<String, Failure> {
        let Some(built) = &mut self.built else { return self.build(console) };
        let step = built.run.count();
        let Some(candidate) = built.reloader.changed(true, step) else {
            return Ok(format!("{} has not changed", self.path.display()));
        };
        let next = built.reloader.load(&candidate, &built.run, &built.params)?;
        built.reloader.accept(next.files, &built.params)?;
        (built.run, built.params) = (next.run, next.params);
        console.set_run(&built.run)?;
        let ms = next.begun.elapsed().as_secs_f64() * 1e3;
        let what = if next.changed.is_empty() { "no change of the text".into() } else { next.changed.join(", ") };
        Ok(format!("{what} · applied at step {step} · {ms:.0} ms"))
    }
}

impl Prompt<'_> {
    /// Returns the path of the recipe, if there is one.
    pub fn recipe_path(&self) -> Option<PathBuf> {
        self.training.as_ref().map(|t| t.borrow().path())
    }

    /// Reloads the recipe, or else the files of `:load`.
    pub fn reload(&self, console: &Console) -> Result<(), Failure> {
        let Some(training) = &self.training else {
            let files = self.loaded.borrow().clone();
            if files.is_empty() {
                return Err(Failure::Usage(if self.at_breakpoint {
                    "a recipe cannot be reloaded at a breakpoint; use :continue first".into()
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
