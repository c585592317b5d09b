//! Converts values of every kind to Lua and back, and values that records do not hold.

use super::*;
use perilune_core::{HostTensor, Shape};
use std::sync::Arc;

fn eval(lua: &Lua, text: &str) -> LuaValue {
    lua.load(text).eval().unwrap_or_else(|e| panic!("{text}: {e}"))
}

fn fields(fields: &[(&str, Value)]) -> Record {
    Record { fields: fields.iter().map(|(name, value)| ((*name).into(), value.clone())).collect() }
}

/// A map in a map in a list, and so on, `depth` tables in all.
fn nested(depth: usize) -> String {
    format!("return {}1{}", "{".repeat(depth), "}".repeat(depth))
}

#[test]
fn values_come_back_as_they_were() {
    let lua = Lua::new();
    let text = |s: &str| Value::Text(s.into());
    let many: Vec<_> = (0..300).map(|k| (format!("k{k:03}"), Value::Int(k))).collect();
    let many: Vec<_> = many.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    for value in [
        Value::Null,
        Value::Bool(true),
        Value::Int(i64::MIN),
        Value::Float(-0.5),
        text(""),
        text("zero\0inside, Köln"),
        Value::Bytes([255u8, 0, 128][..].into()),
        Value::List(vec![Value::Int(1), Value::Null, text("x"), Value::List(vec![Value::Bool(false)])]),
        Value::Map(fields(&[("a", Value::Int(1)), ("b", Value::Map(fields(&[("c", text("d"))])))])),
        Value::Map(fields(&many)),
    ] {
        let there = to_lua(&lua, &value).expect("memory");
        assert_eq!(from_lua(&lua, &there).expect("memory").expect("a value"), value);
    }
    // Null is an absent field of a map, an array a list of lists, and an empty list a map.
    let array = HostTensor::from_i64(Shape::new(&[2, 2]).expect("a shape"), &[1, 2, 3, 4]);
    let value = Value::Map(fields(&[
        ("none", Value::Null),
        ("numbers", Value::Array(Arc::new(array))),
        ("empty", Value::List(Vec::new())),
    ]));
    let there = to_lua(&lua, &value).expect("memory");
    lua.globals().set("r", &there).expect("memory");
    let seen = "return r.none == nil and #r.numbers == 2 and r.numbers[2][1] == 3 and next(r.empty) == nil";
    assert!(eval(&lua, seen).as_boolean().expect("a boolean"));
    let pair = |a, b| Value::List(vec![Value::Int(a), Value::Int(b)]);
    let numbers = Value::List(vec![pair(1, 2), pair(3, 4)]);
    let back = Value::Map(fields(&[("empty", Value::Map(Record::default())), ("numbers", numbers)]));
    assert_eq!(from_lua(&lua, &there).expect("memory").expect("a record"), back);
}

#[test]
fn what_records_do_not_hold_is_named_with_its_path() {
    let lua = Lua::new();
    for (text, message) in [
        ("return print", "it is a function"),
        ("return { a = { 1, { b = print } } }", "'a[2].b' is a function"),
        ("return { a = coroutine.create(print) }", "'a' is a thread"),
        ("return { { x = 1 }, { [true] = 1 } }", "'[2][true]' is a key that is no string"),
        ("return { [2.5] = 1 }", "'[2.5]' is a key that is no string"),
        ("return { a = { 1, 2, x = 3 } }", "'a.x' is a key of a table that is also a list from 1 to n"),
        ("local t = {} t.t = t return { 1, t }", "is a table in too many others (64)"),
        (&nested(65), "is a table in too many others (64)"),
    ] {
        let refused = from_lua(&lua, &eval(&lua, text)).expect("memory").expect_err(text);
        assert!(refused.message().ends_with(message), "{text}: {}", refused.message());
    }
    assert!(from_lua(&lua, &eval(&lua, &nested(64))).expect("memory").is_ok());
    let refused = record(&lua, &eval(&lua, "return { 1 }")).expect("memory").expect_err("a list");
    assert_eq!(refused.message(), "it is a list");
}

#[test]
fn a_reader_goes_on_after_refusals_and_errors() {
    let lua = Lua::new();
    let mut reader = Reader::default();
    let text = "local n, more = ...
                if n.k == 1 then return { a = { b = { print } } } end
                if n.k == 2 then error { 'of the function' } end
                return { k = n.k, more = more and more(n.k) }";
    let function = lua.load(text).into_function().expect("a function");
    let double = lua.load("return 2 * ...").into_function().expect("a function");
    for round in 0..3 {
        let mut call = |numbers: &[i64], more| {
            let records: Vec<_> = numbers.iter().map(|k| fields(&[("k", Value::Int(*k))])).collect();
            let (arguments, mut out) = (records.iter().map(Argument::Record), Vec::new());
            let result = call_each(&lua, &mut reader, &function, more, arguments, &mut out);
            (result, out)
        };
        let of = |k| Value::Map(fields(&[("k", Value::Int(k))]));
        // Results before the one that is refused or fails stay, and those behind it are not computed.
        let (result, out) = call(&[3, 4, 1, 2], None);
        let refused = result.expect("it returns").expect("a function");
        assert_eq!(refused.message(), "'a.b[1]' is a function", "round {round}");
        assert_eq!(out, [of(3), of(4)]);
        let (result, out) = call(&[5, 2, 1], None);
        assert!(result.is_err());
        assert_eq!(out, [of(5)]);
        let (result, out) = call(&[3, 6], Some(&double));
        assert!(result.expect("it returns").is_none());
        let with = |k, more| Value::Map(fields(&[("k", Value::Int(k)), ("more", Value::Int(more))]));
        assert_eq!(out, [with(3, 6), with(6, 12)]);
        let (result, out) = call(&[], None);
        assert!(result.expect("it returns").is_none() && out.is_empty());
    }
    let number = lua.load("return { n = ... }").into_function().expect("a function");
    let mut out = Vec::new();
    let arguments = [7, 8].into_iter().map(Argument::Number);
    let refused = call_each(&lua, &mut reader, &number, None, arguments, &mut out).expect("it returns");
    assert!(refused.is_none());
    assert_eq!(out, [7, 8].map(|n| Value::Map(fields(&[("n", Value::Int(n))]))));
}

/// Lua's allocator refuses what is above the limit, at any moment of a conversion.
#[test]
fn exhausted_memory_is_an_error() {
    let lua = Lua::new();
    let big = Value::Text("x".repeat(1 << 20).into());
    let value = Value::List(vec![big; 64]);
    lua.set_memory_limit(8 << 20).expect("mlua's allocator");
    assert!(matches!(to_lua(&lua, &value), Err(mlua::Error::MemoryError(_))));
    assert!(matches!(table(&lua, &fields(&[("a", value)])), Err(mlua::Error::MemoryError(_))));
    let small = to_lua(&lua, &Value::Text("x".into())).expect("memory");
    assert_eq!(from_lua(&lua, &small).expect("memory").expect("a text"), Value::Text("x".into()));
}
