//! `perilune tokens`: trains tokenizers, encodes corpora to token files, and shows the tokens of a text.

use crate::console_out::{ConsoleOut, Mode};
use crate::failure::{Failure, disk};
use crate::format::{bytes, clock, grouped, rate};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use perilune_core::error::did_you_mean;
use perilune_policy::{Directory, Opened, Opener, open_named};
use perilune_tokenizer::chat::{Chat, TrainOn, template_of};
use perilune_tokenizer::inputs::{Document, Inputs, training_texts};
use perilune_tokenizer::token_files::{Job, SHARD_TOKENS, write};
use perilune_tokenizer::train::{Model, Pattern, Train, train};
use perilune_tokenizer::{Encode, Tokenizer};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

#[derive(clap::Subcommand, Debug)]
pub enum TokensArgs {
    /// Train a vocabulary on texts: writes tokenizer.json and tokenizer_config.json
    Train(TrainArgs),
    /// Encode texts or conversations to token files with a manifest, for data.token_files; goes on where it was interrupted
    Encode(EncodeArgs),
    /// Show the tokens of a text with their ids
    Show {
        /// A folder with tokenizer.json, or that file
        tokenizer: PathBuf,
        text: String,
        /// Special tokens in the text become their ids, as in transformers
        #[arg(long)]
        parse_specials: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(clap::Args, Debug)]
pub struct TrainArgs {
    /// Text files (plain or .gz), or JSONL files with --field
    #[arg(required = true)]
    inputs: Vec<PathBuf>,
    /// The folder to write; created if it is not there
    #[arg(short, long)]
    out: PathBuf,
    /// Number of ids, special tokens included
    #[arg(long)]
    vocab: usize,
    /// bpe (byte-level), wordpiece or unigram
    #[arg(long, default_value = "bpe", value_parser = model)]
    model: Model,
    /// How text is split before byte-pair encoding: gpt2, llama3 or qwen2
    #[arg(long, default_value = "gpt2", value_parser = pattern)]
    pattern: Pattern,
    /// A special token; may be given several times. The first of a bpe vocabulary ends documents [default: <|endoftext|>]
    #[arg(long = "special", value_name = "TOKEN")]
    specials: Vec<String>,
    /// The field of a JSONL record that has the text
    #[arg(long, value_name = "NAME")]
    field: Option<String>,
    /// Print JSON events
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args, Debug)]
pub struct EncodeArgs {
    /// Text files (plain or .gz, a document each), or JSONL files with --field
    #[arg(required = true)]
    inputs: Vec<PathBuf>,
    /// A folder with tokenizer.json, or that file
    #[arg(long)]
    tokenizer: PathBuf,
    /// The folder to write; created if it is not there
    #[arg(short, long)]
    out: PathBuf,
    /// The field of a JSONL record that has the text, or the messages of a conversation
    #[arg(long, value_name = "NAME")]
    field: Option<String>,
    /// The token at the end of each text, or "none" [default: the tokenizer's eos_token]
    #[arg(long, value_name = "TOKEN")]
    eot: Option<String>,
    /// The turns of conversations that the loss trains: assistant, last or all
    #[arg(long, default_value = "assistant", value_parser = train_on)]
    train_on: TrainOn,
    /// Special tokens in texts become their ids, as in transformers
    #[arg(long)]
    parse_specials: bool,
    /// Tokens of a shard, about
    #[arg(long, value_name = "N", default_value_t = SHARD_TOKENS, hide_default_value = true, value_parser = clap::value_parser!(u64).range(1..1 << 32))]
    shard_tokens: u64,
    /// Print JSON events
    #[arg(long)]
    json: bool,
}

/// Finds a word in a table of names.
fn word<T: Copy>(known: &[(&'static str, T)], text: &str) -> Result<T, String> {
    let names: Vec<&str> = known.iter().map(|k| k.0).collect();
    known.iter().find(|k| k.0 == text).map(|k| k.1).ok_or_else(|| {
        let near =
            did_you_mean(text, names.iter().copied()).map(|n| format!(". Did you mean {n}?")).unwrap_or_default();
        format!("it must be one of {}{near}", names.join(", "))
    })
}

fn model(text: &str) -> Result<Model, String> {
    word(&Model::ALL, text)
}

fn train_on(text: &str) -> Result<TrainOn, String> {
    word(&TrainOn::ALL, text)
}

fn pattern(text: &str) -> Result<Pattern, String> {
    word(&Pattern::ALL, text)
}

/// Runs one of the commands.
pub fn tokens(args: TokensArgs) -> Result<(), Failure> {
    match args {
        TokensArgs::Train(args) => run_train(args),
        TokensArgs::Encode(args) => run_encode(args),
        TokensArgs::Show { tokenizer, text, parse_specials, json } => show(&tokenizer, &text, parse_specials, json),
    }
}

/// What is wrong with an input is wrong usage; disk and memory are not.
fn failed(e: perilune_data::Error) -> Failure {
    match e {
        perilune_data::Error::Io { ref source, .. } if source.kind() != std::io::ErrorKind::NotFound => {
            Failure::System(e.to_string())
        }
        other => Failure::Usage(other.to_string()),
    }
}

fn console(json: bool) -> ConsoleOut {
    ConsoleOut::new(if json { Mode::Json } else { Mode::Human })
}

/// Opens the files that the command line names.
#[derive(Debug)]
struct Named;

impl Opener for Named {
    fn open(&self, path: &Path) -> perilune_policy::Result<Opened> {
        open_named(path)
    }

    fn list(&self, dir: &Path) -> perilune_policy::Result<Vec<perilune_policy::Entry>> {
        Directory::open(dir)?.list(Path::new(""))
    }
}

fn open_tokenizer(path: &Path) -> Result<Tokenizer, Failure> {
    Tokenizer::open(&Named, path, &mut |_| ()).map_err(failed)
}

/// The folder to write.
fn folder(path: &Path) -> Result<Directory, Failure> {
    std::fs::create_dir_all(path).map_err(disk("create", path))?;
    Directory::open(path).map_err(|e| failed(e.into()))
}

/// The input files, their bytes in all, and what identifies them.
fn open_inputs(paths: &[PathBuf], field: Option<&str>) -> Result<(Inputs, u64, String), Failure> {
    let (mut files, mut total, mut identity) = (Vec::new(), 0, String::new());
    for path in paths {
        let file = open_named(path).map_err(|e| failed(e.into()))?;
        total += file.len();
        identity.push_str(&format!("{} {} {:?} ", path.display(), file.len(), file.modified()));
        files.push(file);
    }
    identity.push_str(field.unwrap_or_default());
    Ok((Inputs::new(files, field.map(str::to_string)).map_err(failed)?, total, identity))
}

/// The bar of bytes that have been read.
fn bar(console: &ConsoleOut, total: u64) -> Option<ProgressBar> {
    let bar = console.live.then(|| {
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stdout_with_hz(10));
        let color = if console.color { ".cyan" } else { "" };
        let template = format!("{{bytes:>10}}/{{total_bytes}} {{bar:20{color}}} {{msg}}");
        let style = ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar());
        bar.with_style(style.progress_chars("█▉▊▋▌▍▎▏ "))
    });
    console.set_bar(bar.clone());
    bar
}

fn run_train(args: TrainArgs) -> Result<(), Failure> {
    let console = console(args.json);
    let started = Instant::now();
    let (inputs, total, _) = open_inputs(&args.inputs, args.field.as_deref())?;
    let options = Train { specials: args.specials, pattern: args.pattern, ..Train::new(args.model, args.vocab) };
    let (bar, read) = (bar(&console, total), inputs.read());
    let watched = watch(training_texts(inputs), bar.clone(), read);
    let made = train(watched, &options);
    if let Some(bar) = &bar {
        bar.finish_and_clear();
    }
    console.set_bar(None);
    let made = made.map_err(failed)?;
    let dir = folder(&args.out)?;
    for (name, text) in [("tokenizer.json", &made.tokenizer), ("tokenizer_config.json", &made.config)] {
        dir.replace(name, format!("{text}\n").as_bytes()).map_err(|e| failed(e.into()))?;
    }
    let size = open_tokenizer(&args.out)?.size();
    let seconds = started.elapsed().as_secs_f64();
    console
        .event(&json!({ "event": "trained", "out": args.out, "vocabulary": size, "bytes": total, "seconds": seconds }));
    console.result(&format!(
        "{}: {} tokens from {} in {}",
        args.out.join("tokenizer.json").display(),
        grouped(size as u64),
        bytes(total as usize),
        clock(seconds)
    ));
    Ok(())
}

/// Moves the bar with the bytes that were read; then the trainer has no measure of what is left.
fn watch<T: Send>(
    texts: impl Iterator<Item = T> + Send,
    bar: Option<ProgressBar>,
    read: Arc<AtomicU64>,
) -> impl Iterator<Item = T> + Send {
    let at_end = bar.clone();
    let rest = std::iter::from_fn(move || {
        if let Some(bar) = &at_end {
            bar.set_message("merging");
        }
        None
    });
    let counted = texts.inspect(move |_| {
        if let Some(bar) = &bar {
            bar.set_position(read.load(Ordering::Relaxed));
        }
    });
    counted.chain(rest)
}

fn run_encode(args: EncodeArgs) -> Result<(), Failure> {
    let console = console(args.json);
    let tokenizer = open_tokenizer(&args.tokenizer)?;
    let (inputs, total, identity) = open_inputs(&args.inputs, args.field.as_deref())?;
    let eot = match (args.eot.as_deref(), &tokenizer.config().eos_token) {
        (Some("none"), _) | (None, None) => None,
        (Some(token), _) => Some(tokenizer.id(token).ok_or_else(|| {
            Failure::Usage(format!("--eot {token}: the vocabulary has no such token; \"none\" leaves it out"))
        })?),
        (None, Some(token)) => tokenizer.id(token),
    };
    let read = inputs.read();
    let mut documents = inputs.peekable();
    let conversations = matches!(
        documents.peek(),
        Some(Ok(Document { content: perilune_tokenizer::inputs::Content::Messages(_), .. }))
    );
    let template = conversations.then(|| template_of(&tokenizer)).transpose().map_err(failed)?;
    let chat = Chat { train_on: args.train_on, parse_specials: args.parse_specials, ..Chat::default() };
    let job = Job {
        tokenizer: &tokenizer,
        encode: Encode { parse_specials: args.parse_specials, add_specials: false },
        eot,
        chat: template.as_ref().map(|template| (template, chat)),
        shard_tokens: args.shard_tokens,
        inputs: identity,
    };
    let dir = folder(&args.out)?;
    let (started, mut first) = (Instant::now(), None);
    let bar = bar(&console, total);
    let (mut plain, mut last) = (Instant::now(), Default::default());
    let made = write(&dir, &job, documents, &mut |p| {
        let before = *first.get_or_insert(p);
        last = p;
        let seconds = started.elapsed().as_secs_f64();
        let speed = (p.tokens - before.tokens) as f64 / seconds.max(1e-9);
        let text =
            format!("{} documents · {} tokens · {} tokens/s", grouped(p.documents), grouped(p.tokens), rate(speed));
        match &bar {
            Some(bar) => {
                bar.set_position(read.load(Ordering::Relaxed));
                bar.set_message(text);
            }
            None if plain.elapsed().as_secs() >= 5 => {
                plain = Instant::now();
                console.line(&text);
                console.event(&json!({ "event": "progress", "documents": p.documents, "tokens": p.tokens }));
            }
            None => {}
        }
    });
    if let Some(bar) = &bar {
        bar.finish_and_clear();
    }
    console.set_bar(None);
    let made = made.map_err(failed)?;
    let seconds = started.elapsed().as_secs_f64();
    let manifest = args.out.join("manifest.json");
    let shards = made.shards.len();
    console.event(&json!({
        "event": "encoded", "manifest": manifest, "documents": last.documents, "tokens": last.tokens, "shards": shards,
        "dtype": made.dtype, "masked": made.mask, "seconds": seconds,
    }));
    console.result(&format!(
        "{}: {} tokens of {} documents in {shards} {} of {}, {}",
        manifest.display(),
        grouped(last.tokens),
        grouped(last.documents),
        if shards == 1 { "shard" } else { "shards" },
        made.dtype,
        clock(seconds)
    ));
    Ok(())
}

fn show(path: &Path, text: &str, parse_specials: bool, json: bool) -> Result<(), Failure> {
    let (console, tokenizer) = (console(json), open_tokenizer(path)?);
    let made = tokenizer.encode_spans(text, Encode { parse_specials, add_specials: false }).map_err(failed)?;
    for (id, span) in made.ids.iter().zip(&made.spans) {
        let token = tokenizer.token(*id).unwrap_or_default();
        let special = tokenizer.is_special(*id);
        console.event(&json!({ "id": id, "token": token, "text": &text[span.clone()], "start": span.start, "end": span.end, "special": special }));
        let shown = format!("{:?}", &text[span.clone()]);
        console.result(&format!("{id:>7}  {}", if special { console.bold(&shown) } else { shown }));
    }
    console.result(&format!("{} tokens of {} bytes", grouped(made.ids.len() as u64), grouped(text.len() as u64)));
    Ok(())
}
