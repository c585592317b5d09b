//! `perilune sample RUN [PROMPT]`: generates text with the recipe's `sample` from a checkpoint of a run.

use crate::console_out::{ConsoleOut, Mode};
use crate::failure::Failure;
use crate::saved::SavedArgs;
use serde_json::json;
use std::io::Read;
use std::rc::Rc;

#[derive(clap::Args, Debug)]
pub struct SampleArgs {
    #[command(flatten)]
    saved: SavedArgs,
    /// The prompt, whose words are joined by spaces; - reads it from stdin [default: the recipe chooses the beginning]
    prompt: Vec<String>,
    /// Generate N samples
    #[arg(long, short = 'n', value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    count: u32,
    /// The seed of the random numbers [default: those of the checkpoint, so that the samples are the same each time]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(0..))]
    seed: Option<i64>,
    /// Print one JSON object for each sample
    #[arg(long)]
    json: bool,
}

/// The largest prompt that is read from stdin, in bytes.
const MOST: u64 = 64 << 20;

impl SampleArgs {
    fn prompt(&self) -> Result<Option<String>, Failure> {
        if self.prompt.is_empty() {
            return Ok(None);
        }
        if self.prompt != ["-"] {
            return Ok(Some(self.prompt.join(" ")));
        }
        let mut text = String::new();
        let read = std::io::stdin().lock().take(MOST + 1).read_to_string(&mut text);
        let read = read
            .map_err(|e| Failure::Usage(format!("cannot read the prompt from stdin: {}", crate::failure::plain(&e))))?;
        if read as u64 > MOST {
            return Err(Failure::Usage(format!("the prompt on stdin has more than {MOST} bytes, the limit")));
        }
        // The newline at the end of a line is no part of the prompt.
        Ok(Some(text.strip_suffix('\n').map(String::from).unwrap_or(text)))
    }
}

/// Generates the samples and prints them.
pub fn sample(args: &SampleArgs) -> Result<(), Failure> {
    if args.saved.supervised()? {
        return Ok(());
    }
    let out = Rc::new(ConsoleOut::new(if args.json { Mode::Json } else { Mode::Human }));
    let prompt = args.prompt()?;
    let saved = args.saved.open()?;
    let (runtime, run) = args.saved.build(&saved, &out)?;
    if let Some(seed) = args.seed {
        run.set_rng((seed as u64, 0));
    }
    for k in 1..=args.count {
        if args.count > 1 {
            out.line(&out.dim(&format!("--- sample {k}")));
        }
        let text = run.generate(prompt.as_deref())?;
        if let Some(text) = &text {
            out.result(text);
        }
        let dir = saved.dir().display().to_string();
        out.event(&json!({ "event": "sample", "run_dir": dir, "step": saved.step(), "prompt": prompt, "text": text }));
    }
    runtime.host().take_notices().iter().for_each(|notice| out.warn(notice.trim_end()));
    Ok(())
}
