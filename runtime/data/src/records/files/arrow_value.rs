//! Converts elements of Arrow arrays to values of records, for Parquet and Arrow files alike.
//!
//! A column has the values that the same data has in JSONL, whatever its width: integers are `Int` (unsigned ones beyond 63 bits `Float`, as
//! in JSON), floats `Float`, decimals the nearest `Float`, strings `Text`, binary `Bytes`, lists `List`, structs `Map`, dictionaries
//! their values. Dates, times and timestamps are ISO 8601 text (`calendar`), and durations are integers in the unit of the file. A map
//! with text keys is a `Map`, another one a list of `{ key, value }`.

use super::MAX_UNIT;
use super::calendar::{self, Unit};
use crate::error::quote;
use crate::records::{Record, Value};
use arrow_array::cast::AsArray;
use arrow_array::types::*;
use arrow_array::{Array, ArrayRef, ArrowPrimitiveType, downcast_run_array};
use arrow_schema::{DataType, IntervalUnit, TimeUnit};
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// Converts one element. `Err` has the rule that it violates.
pub(crate) fn value(array: &dyn Array, row: usize) -> Result<Value, String> {
    convert(array, row, &mut Budget(MAX_UNIT))
}

/// The memory that the values of an element may still take. Views and dictionaries may name the same data many times, so its size in the
/// file is no bound.
struct Budget(u64);

impl Budget {
    fn spend(&mut self, bytes: usize) -> Result<(), String> {
        self.0 =
            self.0.checked_sub(bytes as u64).ok_or_else(|| format!("takes more than {MAX_UNIT} bytes in memory"))?;
        Ok(())
    }

    fn text(&mut self, text: &str) -> Result<Value, String> {
        self.spend(text.len())?;
        Ok(Value::Text(text.into()))
    }

    fn bytes(&mut self, bytes: &[u8]) -> Result<Value, String> {
        self.spend(bytes.len())?;
        Ok(Value::Bytes(bytes.into()))
    }
}

fn convert(array: &dyn Array, row: usize, budget: &mut Budget) -> Result<Value, String> {
    budget.spend(size_of::<Value>())?;
    if row >= array.len() {
        return Err(format!("has {} elements where row {row} is read", array.len()));
    }
    if array.is_null(row) {
        return Ok(Value::Null);
    }
    Ok(match array.data_type() {
        DataType::Null => Value::Null,
        DataType::Boolean => Value::Bool(array.as_boolean().value(row)),
        DataType::Int8 => int::<Int8Type>(array, row),
        DataType::Int16 => int::<Int16Type>(array, row),
        DataType::Int32 => int::<Int32Type>(array, row),
        DataType::Int64 => int::<Int64Type>(array, row),
        DataType::UInt8 => int::<UInt8Type>(array, row),
        DataType::UInt16 => int::<UInt16Type>(array, row),
        DataType::UInt32 => int::<UInt32Type>(array, row),
        DataType::UInt64 => {
            let v = array.as_primitive::<UInt64Type>().value(row);
            i64::try_from(v).map_or(Value::Float(v as f64), Value::Int)
        }
        DataType::Float16 => Value::Float(array.as_primitive::<Float16Type>().value(row).to_f64()),
        DataType::Float32 => Value::Float(f64::from(array.as_primitive::<Float32Type>().value(row))),
        DataType::Float64 => Value::Float(array.as_primitive::<Float64Type>().value(row)),
        DataType::Decimal32(..) => decimal(array.as_primitive::<Decimal32Type>().value_as_string(row))?,
        DataType::Decimal64(..) => decimal(array.as_primitive::<Decimal64Type>().value_as_string(row))?,
        DataType::Decimal128(..) => decimal(array.as_primitive::<Decimal128Type>().value_as_string(row))?,
        DataType::Decimal256(..) => decimal(array.as_primitive::<Decimal256Type>().value_as_string(row))?,
        DataType::Utf8 => budget.text(array.as_string::<i32>().value(row))?,
        DataType::LargeUtf8 => budget.text(array.as_string::<i64>().value(row))?,
        DataType::Utf8View => budget.text(array.as_string_view().value(row))?,
        DataType::Binary => budget.bytes(array.as_binary::<i32>().value(row))?,
        DataType::LargeBinary => budget.bytes(array.as_binary::<i64>().value(row))?,
        DataType::BinaryView => budget.bytes(array.as_binary_view().value(row))?,
        DataType::FixedSizeBinary(_) => budget.bytes(array.as_fixed_size_binary().value(row))?,
        DataType::Date32 => text(calendar::date(i64::from(array.as_primitive::<Date32Type>().value(row)))),
        DataType::Date64 => {
            // Milliseconds, which the format wants to be whole days.
            text(calendar::date(array.as_primitive::<Date64Type>().value(row).div_euclid(86_400_000)))
        }
        DataType::Time32(unit) => {
            let count = match unit {
                TimeUnit::Second => array.as_primitive::<Time32SecondType>().value(row),
                _ => array.as_primitive::<Time32MillisecondType>().value(row),
            };
            text(calendar::time(i64::from(count), unit_of(*unit)))
        }
        DataType::Time64(unit) => {
            let count = match unit {
                TimeUnit::Microsecond => array.as_primitive::<Time64MicrosecondType>().value(row),
                _ => array.as_primitive::<Time64NanosecondType>().value(row),
            };
            text(calendar::time(count, unit_of(*unit)))
        }
        DataType::Timestamp(unit, zone) => {
            let count = match unit {
                TimeUnit::Second => array.as_primitive::<TimestampSecondType>().value(row),
                TimeUnit::Millisecond => array.as_primitive::<TimestampMillisecondType>().value(row),
                TimeUnit::Microsecond => array.as_primitive::<TimestampMicrosecondType>().value(row),
                TimeUnit::Nanosecond => array.as_primitive::<TimestampNanosecondType>().value(row),
            };
            text(calendar::timestamp(count, unit_of(*unit), zone.is_some()))
        }
        DataType::Duration(unit) => match unit {
            TimeUnit::Second => int::<DurationSecondType>(array, row),
            TimeUnit::Millisecond => int::<DurationMillisecondType>(array, row),
            TimeUnit::Microsecond => int::<DurationMicrosecondType>(array, row),
            TimeUnit::Nanosecond => int::<DurationNanosecondType>(array, row),
        },
        DataType::Interval(IntervalUnit::YearMonth) => int::<IntervalYearMonthType>(array, row),
        DataType::List(_) => list(&array.as_list::<i32>().value(row), budget)?,
        DataType::LargeList(_) => list(&array.as_list::<i64>().value(row), budget)?,
        DataType::ListView(_) => list(&array.as_list_view::<i32>().value(row), budget)?,
        DataType::LargeListView(_) => list(&array.as_list_view::<i64>().value(row), budget)?,
        DataType::FixedSizeList(..) => list(&array.as_fixed_size_list().value(row), budget)?,
        DataType::Struct(fields) => {
            let columns = array.as_struct().columns();
            let mut pairs = Vec::with_capacity(columns.len());
            for (field, column) in fields.iter().zip(columns) {
                let value =
                    convert(column, row, budget).map_err(|rule| format!("field {} {rule}", quote(field.name())))?;
                pairs.push((Arc::from(field.name().as_str()), value));
            }
            Value::Map(distinct(pairs))
        }
        DataType::Map(..) => map(&array.as_map().value(row), budget)?,
        DataType::Dictionary(..) => {
            let dictionary = array.as_any_dictionary();
            // Slices keep the values whole, so the key of the row is its place among them.
            let key = dictionary.keys().slice(row, 1);
            match convert(&key, 0, budget)? {
                Value::Int(key) => {
                    let at = usize::try_from(key).map_err(|_| format!("has the dictionary key {key}"))?;
                    convert(dictionary.values(), at, budget)?
                }
                _ => return Err("has a dictionary key beyond 63 bits".into()),
            }
        }
        DataType::RunEndEncoded(..) => downcast_run_array! {
            array => convert(array.values(), array.get_physical_index(row), budget)?,
            other => return Err(format!("has the type {other}, which is not supported"))
        },
        DataType::Union(..) => convert(&array.as_union().value(row), 0, budget)?,
        other => return Err(format!("has the type {other}, which is not supported")),
    })
}

fn text(text: String) -> Value {
    Value::Text(text.into())
}

fn int<T: ArrowPrimitiveType>(array: &dyn Array, row: usize) -> Value
where
    T::Native: Into<i64>,
{
    Value::Int(array.as_primitive::<T>().value(row).into())
}

/// The nearest 64-bit float of a decimal.
fn decimal(digits: String) -> Result<Value, String> {
    digits.parse().map(Value::Float).map_err(|_| format!("has the decimal {}, which is no number", quote(&digits)))
}

fn unit_of(unit: TimeUnit) -> Unit {
    match unit {
        TimeUnit::Second => Unit::Second,
        TimeUnit::Millisecond => Unit::Millisecond,
        TimeUnit::Microsecond => Unit::Microsecond,
        TimeUnit::Nanosecond => Unit::Nanosecond,
    }
}

fn list(items: &ArrayRef, budget: &mut Budget) -> Result<Value, String> {
    (0..items.len()).map(|k| convert(items, k, budget)).collect::<Result<_, _>>().map(Value::List)
}

fn map(entries: &arrow_array::StructArray, budget: &mut Budget) -> Result<Value, String> {
    let [keys, values] = entries.columns() else { return Err("is a map without keys and values".into()) };
    let (mut named, mut others) = (Vec::new(), Vec::new());
    for k in 0..entries.len() {
        match (convert(keys, k, budget)?, convert(values, k, budget)?) {
            (Value::Text(name), value) => named.push((name, value)),
            (key, value) => {
                let fields = vec![(Arc::from("key"), key), (Arc::from("value"), value)];
                others.push(Value::Map(Record { fields }));
            }
        }
    }
    Ok(if others.is_empty() { Value::Map(distinct(named)) } else { Value::List(others) })
}

/// A record of fields, of which the last of a repeated name counts, as in JSON.
fn distinct(mut fields: Vec<(Arc<str>, Value)>) -> Record {
    let mut last: FxHashMap<Arc<str>, usize> = FxHashMap::default();
    last.extend(fields.iter().enumerate().map(|(k, (name, _))| (name.clone(), k)));
    if last.len() < fields.len() {
        let mut at = 0;
        fields.retain(|(name, _)| {
            at += 1;
            last.get(name) == Some(&(at - 1))
        });
    }
    Record { fields }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::{Int8Array, ListViewArray};
    use arrow_buffer::ScalarBuffer;
    use arrow_schema::Field;

    /// Lists of lists of lists, all of which name the same range: 2^36 values of 4 KiB of data.
    #[test]
    fn values_that_repeat_their_data_are_bounded() {
        let mut array: ArrayRef = Arc::new(Int8Array::from(vec![1; 4096]));
        for _ in 0..3 {
            let field = Arc::new(Field::new("item", array.data_type().clone(), true));
            let (offsets, sizes) = (ScalarBuffer::from(vec![0i32; 4096]), ScalarBuffer::from(vec![4096i32; 4096]));
            array = Arc::new(ListViewArray::new(field, offsets, sizes, array, None));
        }
        let e = convert(&array, 7, &mut Budget(1 << 20)).expect_err("too large");
        assert!(e.contains("takes more than 2147483648 bytes in memory"), "{e}");
    }
}
