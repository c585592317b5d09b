//! Makes columns of labels from the fields of a list: class ids, numbers, or lists of them.

use crate::error::{Error, Result, quote};
use crate::records::Value;
use crate::records::batch::numbers;
use crate::source::Column;
use perilune_core::error::did_you_mean;
use perilune_core::{Category, DType, HostTensor, Shape};
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// The labels of all images in one column of a batch.
#[derive(Debug)]
pub struct Labels {
    name: String,
    column: Column,
    classes: Vec<String>,
    data: Data,
}

#[derive(Debug)]
enum Data {
    /// The bytes of each image, one after another.
    Rows(Vec<u8>),
    /// Ids of the classes of each image, and where those of each end: a column of zeros and ones.
    Sets { ids: Vec<u32>, ends: Vec<usize> },
}

impl Labels {
    /// Class ids, i64.
    pub(super) fn of_classes(name: &str, ids: &[u32], classes: Vec<String>) -> Labels {
        let bytes = ids.iter().flat_map(|id| i64::from(*id).to_le_bytes()).collect();
        let column = Column { dtype: DType::I64, shape: Shape::SCALAR };
        Labels { name: name.into(), column, classes, data: Data::Rows(bytes) }
    }

    /// The name of the column in a batch.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The dtype and shape of one image's label.
    pub fn column(&self) -> Column {
        self.column
    }

    /// The names of the classes in the order of their ids; none where labels are numbers.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// Appends the label of image `i`.
    pub fn write(&self, i: usize, to: &mut Vec<u8>) {
        match &self.data {
            Data::Rows(bytes) => {
                let size = self.column.shape.numel() * self.column.dtype.size();
                to.extend_from_slice(&bytes[i * size..(i + 1) * size]);
            }
            Data::Sets { .. } => {
                let start = to.len();
                to.resize(start + self.classes.len() * size_of::<f32>(), 0);
                for id in self.ids(i) {
                    let at = start + id as usize * size_of::<f32>();
                    to[at..at + size_of::<f32>()].copy_from_slice(&1f32.to_le_bytes());
                }
            }
        }
    }

    /// The class ids of image `i`; none where labels are numbers without names.
    pub fn ids(&self, i: usize) -> Vec<u32> {
        match &self.data {
            _ if self.classes.is_empty() => Vec::new(),
            Data::Sets { ids, ends } => ids[if i == 0 { 0 } else { ends[i - 1] }..ends[i]].to_vec(),
            Data::Rows(bytes) => {
                let size = self.column.shape.numel() * size_of::<i64>();
                let of = |b: &[u8; 8]| u32::try_from(i64::from_le_bytes(*b)).unwrap_or(u32::MAX);
                bytes[i * size..(i + 1) * size].as_chunks::<8>().0.iter().map(of).collect()
            }
        }
    }
}

/// Collects the labels of one field in the order of the images. The first label decides what the field has.
pub(super) struct Builder<'a> {
    name: &'a str,
    field: &'a str,
    /// The classes that the recipe names.
    given: Option<&'a [String]>,
    /// The classes that occurred, in that order, and their places.
    found: Vec<Arc<str>>,
    places: FxHashMap<Arc<str>, u32>,
    state: State,
}

enum State {
    /// So many images with empty lists, which may be of anything.
    Empty(usize),
    Names(Vec<u32>),
    Sets {
        ids: Vec<u32>,
        ends: Vec<usize>,
    },
    Numbers(HostTensor),
}

impl State {
    fn what(&self) -> String {
        match self {
            State::Empty(_) => "an empty list".into(),
            State::Names(_) => "the name of a class".into(),
            State::Sets { .. } => "a list of names of classes".into(),
            State::Numbers(t) if t.shape.rank() == 1 => format!("one {}", t.dtype.name()),
            State::Numbers(t) => format!("{} {}", dims(&t.shape.dims()[1..]), t.dtype.name()),
        }
    }
}

fn dims(dims: &[usize]) -> String {
    dims.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ")
}

impl<'a> Builder<'a> {
    /// Labels from `field` for the column `name`. `classes` fixes the names of classes and their ids.
    ///
    /// # Errors
    /// A class is given twice.
    pub fn new(name: &'a str, field: &'a str, classes: Option<&'a [String]>) -> Result<Builder<'a>> {
        let (mut found, mut places) = (Vec::new(), FxHashMap::default());
        for class in classes.unwrap_or_default() {
            let class: Arc<str> = class.as_str().into();
            if places.insert(class.clone(), found.len() as u32).is_some() {
                return Err(Error::argument("classes", format!("have {} twice", quote(&class))).hint("name each once"));
            }
            found.push(class);
        }
        Ok(Builder { name, field, given: classes, found, places, state: State::Empty(0) })
    }

    /// Adds the label of the next image.
    ///
    /// # Errors
    /// The value is no label, or another kind of label than the first one.
    pub fn push(&mut self, value: &Value) -> Result<()> {
        let empty = |v: &Value| {
            matches!(v, Value::List(l) if l.is_empty()) || matches!(v, Value::Map(m) if m.fields.is_empty())
        };
        match (value, &mut self.state) {
            (Value::Text(name), State::Empty(0)) => {
                let id = self.id(name)?;
                self.state = State::Names(vec![id]);
            }
            (Value::Text(name), State::Names(_)) => {
                let id = self.id(name)?;
                if let State::Names(ids) = &mut self.state {
                    ids.push(id);
                }
            }
            (v, State::Empty(n)) if empty(v) => *n += 1,
            (v, State::Sets { ids, ends }) if empty(v) => ends.push(ids.len()),
            (Value::List(list), State::Empty(_) | State::Sets { .. })
                if matches!(list.first(), Some(Value::Text(_))) =>
            {
                let mut new = Vec::with_capacity(list.len());
                for item in list {
                    let Value::Text(name) = item else {
                        let rule = format!("the label '{}' lists names and {}", self.field, item.type_name());
                        return Err(Error::function(rule).hint("list names only"));
                    };
                    new.push(self.id(name)?);
                }
                new.sort_unstable();
                new.dedup();
                if let State::Empty(n) = self.state {
                    self.state = State::Sets { ids: Vec::new(), ends: vec![0; n] };
                }
                if let State::Sets { ids, ends } = &mut self.state {
                    ids.extend(new);
                    ends.push(ids.len());
                }
            }
            (Value::Text(_) | Value::Bytes(_) | Value::Null, _) => return Err(self.other(value.type_name().into())),
            (_, State::Empty(n)) if *n > 0 => return Err(self.other(value.type_name().into())),
            (_, State::Empty(_) | State::Numbers(_)) => self.number(value)?,
            _ => return Err(self.other(value.type_name().into())),
        }
        Ok(())
    }

    fn other(&self, found: String) -> Error {
        let rule = match &self.state {
            State::Empty(0) => format!("the label '{}' is {found}", self.field),
            state => format!("the label '{}' is {found}, and {} in the first record", self.field, state.what()),
        };
        Error::function(rule).hint(
            "labels are integers, numbers, booleans, names of classes, or lists of one of these, alike in all records",
        )
    }

    fn number(&mut self, value: &Value) -> Result<()> {
        let mut new = numbers(self.field, value).map_err(|_| self.other(value.type_name().into()))?;
        if new.dtype.category() == Category::Int {
            new = new.cast(DType::I64);
        }
        if let Some(classes) = self.given {
            let outside = (0..new.numel()).map(|k| new.get_i64(k)).find(|id| !(0..classes.len() as i64).contains(id));
            if new.dtype.category() != Category::Int {
                let rule = format!("the label '{}' is {} {}", self.field, new.dtype.name(), "and no class");
                return Err(Error::function(rule).hint("leave out the option `classes`"));
            }
            if let Some(id) = outside {
                let rule = format!("the label '{}' is {id}, and there are {} classes", self.field, classes.len());
                return Err(Error::function(rule).hint("class ids count from 0"));
            }
        }
        let room = |rank: usize| -> Result<Shape> {
            let dims: Vec<usize> = std::iter::once(rank).chain(new.shape.dims().iter().copied()).collect();
            Shape::new(&dims).map_err(|e| Error::function(format!("the label '{}': {}", self.field, e.message)))
        };
        let State::Numbers(all) = &mut self.state else {
            self.state = State::Numbers(HostTensor::new(new.dtype, room(1)?, new.bytes));
            return Ok(());
        };
        let alike =
            all.dtype.category() == new.dtype.category() || (all.dtype != DType::Bool && new.dtype != DType::Bool);
        if !alike || all.shape.dims()[1..] != *new.shape.dims() {
            let found = match new.shape.dims() {
                [] => new.dtype.name().to_string(),
                shape => format!("{} {}", dims(shape), new.dtype.name()),
            };
            return Err(self.other(found));
        }
        // Integers become numbers once a fraction occurs.
        if all.dtype != new.dtype && all.dtype == DType::I64 {
            *all = all.cast(DType::F32);
        }
        let new_bytes = if all.dtype == new.dtype { new.bytes.clone() } else { new.cast(all.dtype).bytes };
        let count = all.shape.dims()[0] + 1;
        all.shape = room(count)?;
        all.bytes.extend_from_slice(&new_bytes);
        Ok(())
    }

    /// The place of a class.
    fn id(&mut self, name: &Arc<str>) -> Result<u32> {
        if let Some(id) = self.places.get(name) {
            return Ok(*id);
        }
        if let Some(classes) = self.given {
            let rule = format!("the class {} is none of the {} classes asked for", quote(name), classes.len());
            let near = did_you_mean(name, classes.iter().map(String::as_str));
            let cure =
                near.map_or("give both lists the same classes".into(), |c| format!("did you mean {}?", quote(c)));
            return Err(Error::function(rule).hint(cure));
        }
        let id = u32::try_from(self.found.len()).map_err(|_| Error::function("there are more than 2^32 classes"))?;
        self.found.push(name.clone());
        self.places.insert(name.clone(), id);
        Ok(id)
    }

    /// Ends the column. Without given classes the ids are the places of the sorted names.
    ///
    /// # Errors
    /// All labels are empty lists, which say nothing of their kind.
    pub fn finish(self) -> Result<Labels> {
        let mut order: Vec<u32> = (0..self.found.len() as u32).collect();
        if self.given.is_none() {
            order.sort_by(|a, b| self.found[*a as usize].cmp(&self.found[*b as usize]));
        }
        let mut ranks = vec![0; order.len()];
        order.iter().zip(0..).for_each(|(old, new)| ranks[*old as usize] = new);
        let classes: Vec<String> = order.iter().map(|old| self.found[*old as usize].to_string()).collect();
        let rank = |id: &mut u32| *id = ranks[*id as usize];
        Ok(match self.state {
            State::Names(mut ids) => {
                ids.iter_mut().for_each(rank);
                Labels::of_classes(self.name, &ids, classes)
            }
            State::Sets { mut ids, ends } => {
                ids.iter_mut().for_each(rank);
                let shape = Shape::of(&[classes.len()]);
                let column = Column { dtype: DType::F32, shape };
                Labels { name: self.name.into(), column, classes, data: Data::Sets { ids, ends } }
            }
            State::Numbers(all) => {
                let shape = Shape::of(&all.shape.dims()[1..]);
                let column = Column { dtype: all.dtype, shape };
                Labels { name: self.name.into(), column, classes, data: Data::Rows(all.bytes) }
            }
            State::Empty(_) => {
                let rule = format!("'{}' is an empty list in every record", self.field);
                return Err(Error::argument("label", rule).hint("leave out the label"));
            }
        })
    }
}
