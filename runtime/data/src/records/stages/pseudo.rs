//! Mixes labelled records with records that a model has labelled (pseudo-labels).
//!
//! Which records have a label of the model is a [`Choice`], made between two steps. It holds from a place of the stream on. Each block of
//! places has the same number of chosen records; their order is a permutation by (seed, place where the choice begins, epoch), and labelled
//! records go on where they were. So the record of a place follows from the choice alone, which the States of a run store.

use super::mix_schedule::{BLOCK, Schedule};
use crate::error::{Error, Result};
use crate::records::{Dataset, Fingerprint, Origin, Record, Value, hash};
use crate::sample_order::{Permutation, Stream};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// The choices that are kept, so that the sample log can name the records of steps before the last choice.
const KEPT: usize = 4;
/// The fields that a record of the stream has besides its own.
pub const IS_PSEUDO: &str = "pseudo";
pub const CONFIDENCE: &str = "confidence";

/// A record that the model has labelled.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PseudoLabel {
    /// The row of the unlabelled dataset.
    pub row: u64,
    pub class: i64,
    /// The probability that the model gave the class.
    pub confidence: f32,
    /// The round that gave the row this label.
    pub round: u32,
}

/// The labels that hold from a place of the stream on.
struct Choice {
    first: u64,
    labels: Vec<PseudoLabel>,
    schedule: Schedule,
}

impl Choice {
    /// `share` is the number of places that chosen records get in a block; `taken` labelled records come before `first`.
    fn new(seed: u64, share: u64, first: u64, taken: u64, labels: Vec<PseudoLabel>) -> Choice {
        let share = if labels.is_empty() { 0 } else { share.min(BLOCK) };
        Choice { first, labels, schedule: Schedule::new(seed, first, vec![taken, 0], vec![BLOCK - share, share]) }
    }
}

/// What a place of the stream holds.
enum Place {
    Labelled(u64),
    Chosen(PseudoLabel),
}

/// Labelled records, and records that a model has labelled.
pub struct Pseudo {
    labelled: Arc<dyn Dataset>,
    unlabelled: Arc<dyn Dataset>,
    /// The field of the label.
    field: Arc<str>,
    /// The places of chosen records in a block.
    share: u64,
    seed: u64,
    choices: RwLock<Arc<VecDeque<Arc<Choice>>>>,
    version: AtomicU64,
}

impl Pseudo {
    /// Makes the stream of labelled records alone, until [`Pseudo::choose`]. `share` is that of chosen records in the stream, from 0 to 1.
    ///
    /// # Errors
    /// A dataset has no records, or the epochs of the unlabelled one differ.
    pub fn new(
        labelled: Arc<dyn Dataset>,
        unlabelled: Arc<dyn Dataset>,
        field: &str,
        share: f64,
        seed: u64,
    ) -> Result<Pseudo> {
        let empty = |what: &str, hint: &str| Err(Error::argument(what, "there are no records").hint(hint));
        if labelled.is_empty() {
            return empty("the labelled dataset", "look at the filters before it");
        }
        if unlabelled.is_empty() {
            return empty("the unlabelled dataset", "its records may all occur in the labelled or the held-out ones");
        }
        if unlabelled.varies() {
            return Err(Error::argument("the unlabelled dataset", "its records differ between epochs")
                .hint("give a dataset before its mixture; a shuffle is not needed"));
        }
        let share = (share.clamp(0.0, 1.0) * BLOCK as f64).round() as u64;
        let first = Arc::new(Choice::new(seed, share, 0, 0, Vec::new()));
        let choices = RwLock::new(Arc::new(VecDeque::from([first])));
        Ok(Pseudo { labelled, unlabelled, field: field.into(), share, seed, choices, version: AtomicU64::new(0) })
    }

    /// The number of rows that may be labelled.
    pub fn rows(&self) -> u64 {
        self.unlabelled.len()
    }

    /// The places of chosen records in a block of 1,024, once there are any.
    pub fn share(&self) -> u64 {
        self.share
    }

    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Changes with each choice: batches that were made ahead under another one are void.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    fn choices(&self) -> Arc<VecDeque<Arc<Choice>>> {
        self.choices.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns how many labelled records the places before `index` take.
    pub fn taken(&self, index: u64) -> u64 {
        let choices = self.choices();
        let at = choices.iter().rev().find(|c| c.first <= index).or(choices.front());
        at.map_or(0, |choice| choice.schedule.taken(index)[0])
    }

    /// The same for a choice that began at `first`, of another seed and share. For a run that goes on with other options.
    pub fn taken_by(seed: u64, share: u64, first: u64, taken: u64, chosen: bool, index: u64) -> u64 {
        let share = if chosen { share.min(BLOCK) } else { 0 };
        Schedule::new(seed, first, vec![taken, 0], vec![BLOCK - share, share]).taken(index.max(first))[0]
    }

    /// Gives the places from `first` on these labels, which replace all others. `taken` labelled records come before.
    ///
    /// # Errors
    /// A row is beyond the unlabelled dataset.
    pub fn choose(&self, first: u64, taken: u64, labels: Vec<PseudoLabel>) -> Result<()> {
        if let Some(beyond) = labels.iter().find(|l| l.row >= self.rows()) {
            let rule = format!("row {} of {} unlabelled records has a label", beyond.row, self.rows());
            return Err(Error::argument("data.pseudo", rule).hint("use the checkpoint with the data that it is of"));
        }
        let mut choices = VecDeque::clone(&self.choices());
        choices.retain(|c| c.first < first);
        choices.push_back(Arc::new(Choice::new(self.seed, self.share, first, taken, labels)));
        if choices.len() > KEPT {
            choices.pop_front();
        }
        *self.choices.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(choices);
        self.version.fetch_add(1, Ordering::Release);
        Ok(())
    }

    fn at(&self, index: u64) -> Result<Place> {
        let choices = self.choices();
        let found = choices.iter().rev().find(|c| c.first <= index);
        let place = found.and_then(|choice| Some((choice, choice.schedule.at(index)?)));
        let Some((choice, (dataset, number))) = place else {
            let rule = format!("record {index} was taken before the labels were chosen anew");
            return Err(Error::argument("data.pseudo", rule).hint("read records that came later"));
        };
        let n = choice.labels.len() as u64;
        if dataset == 0 || n == 0 {
            return Ok(Place::Labelled(number));
        }
        let order = Permutation::new(n, self.seed, choice.first.wrapping_add(number / n), Stream::Pseudo);
        Ok(Place::Chosen(choice.labels[order.at(number % n) as usize]))
    }

    /// Returns the label of the model that a record of the stream has, if it has one.
    ///
    /// # Errors
    /// The place is before the choices that are known.
    pub fn label(&self, index: u64) -> Result<Option<PseudoLabel>> {
        Ok(match self.at(index)? {
            Place::Labelled(_) => None,
            Place::Chosen(label) => Some(label),
        })
    }

    fn add(&self, record: &mut Record, confidence: f32, pseudo: bool) -> Result<()> {
        for name in [IS_PSEUDO, CONFIDENCE] {
            if record.get(name).is_some() {
                let error = Error::function(format!("the record has a field '{name}', which data.pseudo adds"));
                return Err(error.hint("rename it before: :rename { confidence = \"certainty\" }"));
            }
        }
        record.set(IS_PSEUDO, Value::Bool(pseudo));
        record.set(CONFIDENCE, Value::Float(f64::from(confidence)));
        Ok(())
    }
}

impl Dataset for Pseudo {
    fn len(&self) -> u64 {
        self.labelled.len() + self.unlabelled.len()
    }

    fn get(&self, index: u64) -> Result<Record> {
        match self.at(index)? {
            Place::Labelled(number) => {
                let mut record = self.labelled.get(number)?;
                let made = match record.get(&self.field) {
                    Some(Value::Int(_)) => self.add(&mut record, 1.0, false),
                    other => {
                        let found = other.map_or("missing", Value::type_name);
                        let rule = format!("the label '{}' is {found}; it must be the number of a class", self.field);
                        Err(Error::function(rule).hint("name it by the option `label`, and number classes from 0"))
                    }
                };
                made.map_err(|e| super::located(&*self.labelled, number, e))?;
                Ok(record)
            }
            Place::Chosen(label) => {
                let mut record = self.unlabelled.get(label.row)?;
                record.set(&self.field, Value::Int(label.class));
                self.add(&mut record, label.confidence, true)
                    .map_err(|e| super::located(&*self.unlabelled, label.row, e))?;
                Ok(record)
            }
        }
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        match self.at(index)? {
            Place::Labelled(number) => self.labelled.origins(number),
            Place::Chosen(label) => self.unlabelled.origins(label.row),
        }
    }

    /// That of the stream as it was made.
    fn fingerprint(&self) -> Fingerprint {
        let (share, seed) = (self.share.to_le_bytes(), self.seed.to_le_bytes());
        hash::stage("pseudo/1", &[self.field.as_bytes(), &share, &seed], &[&*self.labelled, &*self.unlabelled])
    }

    fn varies(&self) -> bool {
        true
    }

    fn pseudo(&self) -> Option<&Pseudo> {
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::List;

    fn list(n: i64, from: i64) -> Arc<dyn Dataset> {
        let record = |i| Record { fields: vec![("x".into(), Value::Int(from + i)), ("y".into(), Value::Int(i % 3))] };
        Arc::new(List::new("list", (0..n).map(record).collect()))
    }

    fn field(record: &Record, name: &str) -> i64 {
        match record.get(name) {
            Some(Value::Int(i)) => *i,
            Some(Value::Bool(b)) => i64::from(*b),
            other => panic!("{name} is {other:?}"),
        }
    }

    fn label(row: u64, class: i64) -> PseudoLabel {
        PseudoLabel { row, class, confidence: 0.5, round: 1 }
    }

    /// Labelled records come in their order over all choices; each chosen one comes once in an epoch of the chosen, with its label.
    #[test]
    fn choices_anywhere_repeat_and_skip_no_labelled_record() {
        let set = Pseudo::new(list(50, 0), list(200, 1000), "y", 0.25, 7).unwrap();
        let mut expected = 0;
        let mut first = 0;
        for (k, (length, rows)) in [(300, 0), (2048, 10), (777, 150), (1024, 0), (3000, 33)].into_iter().enumerate() {
            let labels: Vec<PseudoLabel> = (0..rows).map(|r| label(r * 200 / rows, 5 + k as i64)).collect();
            set.choose(first, set.taken(first), labels.clone()).unwrap();
            assert_eq!(set.version(), k as u64 + 1);
            let mut seen = Vec::new();
            for index in first..first + length {
                let record = set.get(index).unwrap();
                if field(&record, "pseudo") == 0 {
                    assert_eq!((field(&record, "x"), set.taken(index)), (expected % 50, expected as u64));
                    expected += 1;
                    assert_eq!(set.label(index).unwrap(), None);
                } else {
                    assert_eq!(field(&record, "y"), 5 + k as i64);
                    let row = field(&record, "x") as u64 - 1000;
                    assert_eq!(set.origins(index).unwrap()[0].row, row);
                    assert_eq!(set.label(index).unwrap().map(|l| l.row), Some(row));
                    seen.push(row);
                }
            }
            let want: Vec<u64> = labels.iter().map(|l| l.row).collect();
            for epoch in seen.chunks_exact(want.len().max(1)) {
                let mut epoch = epoch.to_vec();
                epoch.sort_unstable();
                assert_eq!(epoch, want);
            }
            if length % BLOCK == 0 && rows > 0 {
                assert_eq!(seen.len() as u64 * 4, length);
            }
            // Another stream with this choice alone has the same records.
            let again = Pseudo::new(list(50, 0), list(200, 1000), "y", 0.25, 7).unwrap();
            let before = set.taken(first);
            again.choose(first, before, labels).unwrap();
            for index in first..first + length {
                assert_eq!(again.get(index).unwrap(), set.get(index).unwrap());
            }
            let by = Pseudo::taken_by(7, set.share(), first, before, rows > 0, first + length);
            assert_eq!(by, set.taken(first + length));
            first += length;
        }
        // The choices before the last four are not known any more.
        assert!(set.get(first - 4000).is_ok() && set.get(10).is_err());
    }

    #[test]
    fn faults_are_named() {
        let message = |made: Result<Record>| made.expect_err("refused").to_string();
        let set = Pseudo::new(list(5, 0), list(5, 10), "label", 0.5, 0).unwrap();
        assert!(message(set.get(3)).contains("list: record 3: the label 'label' is missing"));
        assert!(set.choose(0, 0, vec![label(5, 0)]).is_err());
        assert!(Pseudo::new(list(5, 0), list(0, 0), "y", 0.5, 0).is_err());
        let own = Record { fields: vec![("y".into(), Value::Int(0)), ("pseudo".into(), Value::Int(0))] };
        let set = Pseudo::new(Arc::new(List::new("list", vec![own])), list(5, 10), "y", 0.5, 0).unwrap();
        assert!(message(set.get(0)).contains("which data.pseudo adds"));
    }
}
