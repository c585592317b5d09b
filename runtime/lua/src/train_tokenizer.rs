//! Trains tokenizers for recipes: `perilune_tokenizer::train` on the texts of records or files, kept in the program's cache folder.

use crate::errors;
use crate::functions::host;
use crate::library_env;
use crate::recipe_files::{fail, matching, text_arg, writable};
use crate::records::RecordSet;
use crate::tokenizer;
use mlua::{AnyUserData, Function, Lua, Table, Value};
use perilune_core::cache_folder::cache_folder;
use perilune_core::{Interrupt, byte_size};
use perilune_data::cache::CachePart;
use perilune_data::records::{Dataset, Record, Value as Field};
use perilune_data::{Error, Result, file};
use perilune_policy::{Opened, Opener, Policy};
use perilune_tokenizer::inputs::{Inputs, parts, training_texts};
use perilune_tokenizer::train::{Model, Pattern, Train, Trained, VERSION, train};
use perilune_tokenizer::{Config, Tokenizer};
use std::collections::VecDeque;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

const OP: &str = "data.train_tokenizer";
/// The format of a trained tokenizer in the cache.
const MAGIC: &[u8] = b"perilune tokenizer 1";
/// The time between two looks at a training.
const LOOK: Duration = Duration::from_millis(50);
/// The time between two lines of progress.
const REPORT: Duration = Duration::from_secs(5);
/// Records that are read together.
const CHUNK: u64 = 256;

/// Where the texts are from.
enum Source {
    Records {
        dataset: Arc<dyn Dataset>,
        field: String,
    },
    /// Text files, a document each.
    Files(Vec<PathBuf>),
}

/// `native.train_tokenizer(source, options)`: `source` is a dataset of records or a list of paths of text files. Options: model, vocab,
/// field, pattern, special, min_frequency, out.
pub(crate) fn train_tokenizer(lua: &Lua, (source, o): (Value, Table)) -> mlua::Result<AnyUserData> {
    let host = host(lua)?;
    let word = |name: &str| o.get::<String>(name);
    let model = Model::parse(&word("model")?).unwrap_or_default();
    let pattern = Pattern::parse(&word("pattern")?).unwrap_or(Pattern::Gpt2);
    let options = Train {
        specials: o.get::<Option<Vec<String>>>("special")?.unwrap_or_default(),
        pattern,
        min_frequency: o.get("min_frequency")?,
        ..Train::new(model, o.get("vocab")?)
    };
    let source = match source {
        Value::UserData(records) => {
            Source::Records { dataset: records.borrow::<RecordSet>()?.0.clone(), field: o.get("field")? }
        }
        Value::Table(paths) => {
            let mut all = Vec::new();
            for path in paths.sequence_values::<Value>() {
                let name = text_arg(&host, lua, OP, "a path", &path?)?;
                all.extend(matching(&host, lua, OP, &name)?);
            }
            for path in &all {
                let opened = host.policy.open(path).map_err(|e| fail(&host, lua, OP, e.into()))?;
                host.policy.record_file(&path.to_string_lossy(), &opened);
            }
            Source::Files(all)
        }
        other => {
            let message = format!("the texts are {}", crate::args::show(&other));
            return Err(errors::argument(&host, lua, OP, message, None));
        }
    };
    // A place that may not be written is an error before the training, not after it.
    let staged = match o.get::<Value>("out")? {
        Value::Nil => None,
        path => Some(writable(&host, lua, OP, &text_arg(&host, lua, OP, "the path of `out`", &path)?, &["json"])?),
    };
    let print: Function = library_env::function(lua, "print")?;
    let say = |text: String| print.call::<()>(format!("{OP}: {text}"));
    let made = cached(&host.policy, source, options, &host.interrupt, &say)?.map_err(|e| fail(&host, lua, OP, e))?;
    let failed = |e| fail(&host, lua, OP, e);
    if let Some(staged) = staged {
        file::write_whole(staged, |out| file_text(out, &made.tokenizer)).map_err(failed)?;
    }
    let name = Path::new("tokenizer.json");
    let config = Config::read(Path::new("tokenizer_config.json"), made.config.as_bytes()).map_err(failed)?;
    tokenizer::new(lua, Tokenizer::from_json(name, made.tokenizer.as_bytes(), config).map_err(failed)?)
}

type Said = mlua::Result<Result<Trained>>;

/// The tokenizer of the cache, or one that is trained now. `say` prints progress.
fn cached(
    policy: &Arc<Policy>,
    source: Source,
    options: Train,
    interrupt: &Interrupt,
    say: &dyn Fn(String) -> mlua::Result<()>,
) -> Said {
    let name = match key(policy, &source, &options, interrupt) {
        Ok(key) => format!("{key}.json"),
        Err(e) => return Ok(Err(e)),
    };
    let part = CachePart::open(cache_folder().as_deref(), "tokenizers");
    let find = || part.as_ref().and_then(|part| unpacked(&part.load(&name, MAGIC, "a tokenizer")?));
    if let Some(found) = find() {
        return Ok(Ok(found));
    }
    let _lock = match part.as_ref().map(|part| part.lock(&name, interrupt)).transpose() {
        Ok(lock) => lock,
        Err(e) => return Ok(Err(e)),
    };
    if let Some(found) = find() {
        return Ok(Ok(found));
    }
    let made = match run(policy, source, options, interrupt, say)? {
        Ok(made) => made,
        Err(e) => return Ok(Err(e)),
    };
    if let Some(part) = part {
        // The tokenizer is right without a copy of it.
        let _ = part.store(&name, MAGIC, &packed(&made));
    }
    Ok(Ok(made))
}

/// The hash of the options and of the texts.
fn key(policy: &Arc<Policy>, source: &Source, options: &Train, interrupt: &Interrupt) -> Result<String> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(MAGIC).update(format!("{VERSION} {options:?}").as_bytes());
    match source {
        Source::Records { dataset, field } => {
            hasher.update(b"records").update(&dataset.fingerprint()).update(field.as_bytes());
        }
        Source::Files(paths) => {
            for path in paths {
                let opened = policy.open(path)?;
                hasher.update(b"file").update(&opened.len().to_le_bytes());
                hash_file(&mut hasher, opened, interrupt)?;
            }
        }
    }
    Ok(hasher.finalize().to_hex().to_string())
}

fn hash_file(hasher: &mut blake3::Hasher, opened: Opened, interrupt: &Interrupt) -> Result<()> {
    use std::io::Read;
    let (path, mut buffer) = (opened.path().to_path_buf(), vec![0; 1 << 20]);
    let mut file = opened.into_file();
    loop {
        if interrupt.is_requested() {
            return Err(Error::Interrupted);
        }
        match file.read(&mut buffer).map_err(|e| Error::io(&path, "read", e))? {
            0 => return Ok(()),
            count => {
                hasher.update(&buffer[..count]);
            }
        }
    }
}

/// Both texts, the first one with its length before it.
fn packed(made: &Trained) -> Vec<u8> {
    let mut out = (made.tokenizer.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(made.tokenizer.as_bytes());
    out.extend_from_slice(made.config.as_bytes());
    out
}

fn unpacked(bytes: &[u8]) -> Option<Trained> {
    let (len, rest) = bytes.split_first_chunk::<8>()?;
    let (tokenizer, config) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).ok();
    Some(Trained { tokenizer: text(tokenizer)?, config: text(config)? })
}

/// Trains on a thread, so that an interrupt ends the wait: the trainer cannot be stopped, and its thread ends with the process.
fn run(
    policy: &Arc<Policy>,
    source: Source,
    options: Train,
    interrupt: &Interrupt,
    say: &dyn Fn(String) -> mlua::Result<()>,
) -> Said {
    let (started, read) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    let texts = match texts(policy, source, read.clone(), interrupt.clone()) {
        Ok(texts) => texts,
        Err(e) => return Ok(Err(e)),
    };
    let (send, made) = channel();
    let work = move || drop(send.send(train(texts, &options)));
    if let Err(e) = std::thread::Builder::new().name("tokenizer".into()).spawn(work) {
        return Ok(Err(Error::argument("training", format!("its thread cannot be started: {e}"))));
    }
    let (mut reported, mut before) = (Instant::now(), u64::MAX);
    let bytes = || read.load(Ordering::Relaxed);
    loop {
        match made.recv_timeout(LOOK) {
            Ok(Ok(made)) => {
                let seconds = started.elapsed().as_secs_f64();
                let shown = byte_size::show(usize::try_from(bytes()).unwrap_or(usize::MAX));
                say(format!("trained {} tokens on {shown} in {seconds:.1} s", vocabulary(&made)))?;
                return Ok(Ok(made));
            }
            Ok(Err(e)) => return Ok(Err(e)),
            Err(RecvTimeoutError::Disconnected) => {
                return Ok(Err(Error::argument("training", "the trainer broke down on these texts")));
            }
            Err(RecvTimeoutError::Timeout) if interrupt.is_requested() => return Ok(Err(Error::Interrupted)),
            Err(RecvTimeoutError::Timeout) if reported.elapsed() >= REPORT => {
                let (now, seconds) = (bytes(), started.elapsed().as_secs());
                let shown = byte_size::show(usize::try_from(now).unwrap_or(usize::MAX));
                say(match now == before {
                    true => format!("{shown} read, merging for {seconds} s"),
                    false => format!("{shown} read after {seconds} s"),
                })?;
                (reported, before) = (Instant::now(), now);
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

fn vocabulary(made: &Trained) -> usize {
    let json: serde_json::Value = serde_json::from_str(&made.tokenizer).unwrap_or_default();
    let vocab = &json["model"]["vocab"];
    vocab.as_object().map(serde_json::Map::len).or_else(|| vocab.as_array().map(Vec::len)).unwrap_or(0)
}

type Texts = Box<dyn Iterator<Item = Result<String>> + Send>;

fn texts(policy: &Arc<Policy>, source: Source, read: Arc<AtomicU64>, interrupt: Interrupt) -> Result<Texts> {
    let count = move |text: Result<String>| {
        if interrupt.is_requested() {
            return Err(Error::Interrupted);
        }
        text.inspect(|text| {
            read.fetch_add(text.len() as u64, Ordering::Relaxed);
        })
    };
    Ok(match source {
        Source::Records { dataset, field } => {
            Box::new(RecordTexts { dataset, field, at: 0, ready: VecDeque::new() }.map(count))
        }
        Source::Files(paths) => {
            let files = paths.iter().map(|path| policy.open(path)).collect::<std::result::Result<Vec<_>, _>>()?;
            Box::new(training_texts(Inputs::new(files, None)?).map(count))
        }
    })
}

/// The texts of a field of all records of an epoch.
struct RecordTexts {
    dataset: Arc<dyn Dataset>,
    field: String,
    at: u64,
    ready: VecDeque<Result<String>>,
}

impl RecordTexts {
    /// The texts of a record: a text, or what the turns of a conversation say.
    fn texts(&self, record: &Record) -> Result<Vec<String>> {
        let hint = |error: Error| error.hint("name the field that has the text: { field = \"text\" }");
        match record.get(&self.field) {
            Some(Field::Text(text)) => Ok(parts(text.to_string())),
            Some(Field::List(list)) => {
                let content = |item: &Field| match item {
                    Field::Map(message) => Some(match message.get("content") {
                        Some(Field::Text(text)) => text.to_string(),
                        _ => String::new(),
                    }),
                    _ => None,
                };
                list.iter().map(content).collect::<Option<Vec<_>>>().ok_or_else(|| {
                    hint(Error::function(format!("'{}' is a list, and not one of messages", self.field)))
                })
            }
            Some(other) => Err(hint(Error::function(format!("'{}' is {}", self.field, other.type_name())))),
            None => {
                let names = record.names().collect::<Vec<_>>().join(", ");
                Err(hint(Error::function(format!("the record has no field '{}' (fields: {names})", self.field))))
            }
        }
    }

    fn read(&mut self) {
        let rows: Vec<u64> = (self.at..self.dataset.len().min(self.at.saturating_add(CHUNK))).collect();
        self.at += rows.len() as u64;
        let records = match self.dataset.get_many(&rows) {
            Ok(records) => records,
            Err(e) => return self.ready.push_back(Err(e)),
        };
        for (row, record) in rows.into_iter().zip(records) {
            match self.texts(&record) {
                Ok(texts) => self.ready.extend(texts.into_iter().map(Ok)),
                Err(e) => self.ready.push_back(Err(perilune_data::records::stages::located(&*self.dataset, row, e))),
            }
        }
    }
}

impl Iterator for RecordTexts {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Result<String>> {
        while self.ready.is_empty() && self.at < self.dataset.len() {
            self.read();
        }
        self.ready.pop_front()
    }
}

fn file_text(out: &mut impl Write, text: &str) -> Result<()> {
    let failed = |e| Error::io(Path::new("tokenizer.json"), "write", e);
    out.write_all(text.as_bytes()).and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush()).map_err(failed)
}
