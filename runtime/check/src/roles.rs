//! Guesses what the fields of records are for, from a sample, where the options do not name them.

use crate::field::Category;
use crate::scan::Options;
use perilune_data::records::{Record, Value};
use rustc_hash::FxHashSet;
use std::sync::Arc;

/// What a field is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Text that duplicates are looked for in.
    Text,
    /// A list of turns with a role and a content.
    Conversation,
    /// What a model predicts: few values.
    Label,
    /// Few values, of an unknown purpose.
    Category,
    /// Distinct words that number the records.
    Identifier,
    Other,
}

impl Role {
    pub fn name(self) -> &'static str {
        match self {
            Role::Text => "text",
            Role::Conversation => "conversation",
            Role::Label => "label",
            Role::Category => "category",
            Role::Identifier => "identifier",
            Role::Other => "",
        }
    }
}

/// The roles of fields, by name.
#[derive(Clone, Default, Debug)]
pub struct Roles {
    pub fields: Vec<(Arc<str>, Role)>,
    /// The labels that were guessed.
    pub guessed: Vec<Arc<str>>,
}

/// Names that labels have.
const LABELS: [&str; 7] = ["label", "labels", "class", "target", "category", "y", "sentiment"];

/// Names that numbers of records have.
const NUMBERS: [&str; 6] = ["id", "ids", "row", "index", "idx", "uid"];
/// Distinct numbers with a fractional type up to which they may be labels: more are the targets of a regression.
const FLOAT_LABELS: usize = 20;

impl Roles {
    pub fn of(&self, name: &str) -> Role {
        self.fields.iter().find(|f| *f.0 == *name).map_or(Role::Other, |f| f.1)
    }

    /// Whether some field has texts.
    pub fn has_text(&self) -> bool {
        self.fields.iter().any(|f| matches!(f.1, Role::Text | Role::Conversation))
    }

    /// Guesses the roles of the fields of some records.
    pub fn guess(records: &[Record], options: &Options) -> Roles {
        let mut out = Roles::default();
        let mut names: Vec<Arc<str>> = Vec::new();
        for record in records {
            for (name, _) in &record.fields {
                if names.len() < 256 && !names.contains(name) {
                    names.push(name.clone());
                }
            }
        }
        for name in names {
            let values: Vec<&Value> =
                records.iter().filter_map(|r| r.get(&name)).filter(|v| !matches!(v, Value::Null)).collect();
            let chosen = options.text.iter().any(|t| **t == *name);
            let role = match () {
                () if options.labels.iter().any(|l| **l == *name) => Role::Label,
                () if chosen && !values.iter().any(|v| is_conversation(v)) => Role::Text,
                () => role(&name, &values),
            };
            let role = match role {
                Role::Text | Role::Conversation if !options.text.is_empty() && !chosen => Role::Other,
                role => role,
            };
            if role == Role::Label && !options.labels.iter().any(|l| **l == *name) {
                out.guessed.push(name.clone());
            }
            out.fields.push((name, role));
        }
        out
    }
}

fn is_conversation(value: &Value) -> bool {
    matches!(value, Value::List(turns) if turns.iter().all(|t| crate::chat::turn(t).is_some()) && !turns.is_empty())
}

fn role(name: &str, values: &[&Value]) -> Role {
    if values.iter().filter(|v| is_conversation(v)).count() * 2 > values.len() {
        return Role::Conversation;
    }
    let distinct: FxHashSet<Category> = values.iter().filter_map(|v| Category::of(v)).collect();
    let categorical = values.iter().filter(|v| Category::of(v).is_some()).count();
    let texts: Vec<&str> =
        values.iter().filter_map(|v| if let Value::Text(t) = v { Some(&**t) } else { None }).collect();
    let is_text = texts.len() * 2 > values.len();
    let few = |most: usize, share: usize| {
        categorical * 20 >= values.len() * 19 && distinct.len() <= most && distinct.len() * share <= values.len()
    };
    let short = !is_text || texts.iter().map(|t| t.len()).sum::<usize>() <= 32 * texts.len();
    let named = LABELS.contains(&name.to_lowercase().as_str());
    // A float with fractions is no category.
    let discrete = !values.iter().any(|v| matches!(v, Value::Float(x) if x.is_finite() && x.fract() != 0.0));
    let most = if values.iter().any(|v| matches!(v, Value::Float(_))) { FLOAT_LABELS } else { 1000 };
    if short && discrete && named && few(most, 2) {
        return Role::Label;
    }
    if short && discrete && few(50, 10) {
        return Role::Category;
    }
    let numbers = NUMBERS.contains(&name.to_lowercase().as_str()) && values.iter().all(|v| matches!(v, Value::Int(_)));
    if numbers && values.len() >= 20 && distinct.len() == values.len() {
        return Role::Identifier;
    }
    if !is_text {
        return Role::Other;
    }
    let word = |t: &&str| t.len() <= 64 && !t.contains(char::is_whitespace) && t.is_ascii();
    if texts.len() >= 20 && distinct.len() == texts.len() && texts.iter().all(word) {
        return Role::Identifier;
    }
    Role::Text
}
