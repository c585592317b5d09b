//! Parses the notation of sample calls in the op registry.
//!
//! `"f(2,3), [0,2], keepdim=true"`: arguments in the order of the signature, options by name.
//!
//! - `f(2,3)`: a float tensor of that shape, about normal; `f(4;-3,3)` uniform between bounds; `p(…)` positive, in about
//!   [0.5, 3]; `u(…)` in (-0.9, 0.9);
//! - `i(hi;2,3)`: integers in [0, hi); `perm(3,2)`: integers that index the first tensor along `dim`, no two equal along it;
//! - `ends(hi;3)`: ascending integers in [0, hi];
//! - `u8(hi;2,3)`: bytes in [0, hi), u8 in every variant;
//! - `b(2,3)`: bools;
//! - `[…]`: a list of tensors or integers; numbers, `'words'`, `true`, `false`, `nil`.

use perilune_core::DType;
use perilune_core::graph::Number;
use perilune_core::ops::{Op, Param, Ty, Value, parse_signature};

/// The values of a sample tensor.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Kind {
    Normal,
    Uniform(f64, f64),
    Positive,
    /// In [0, hi).
    Int(i64),
    /// In [0, hi], ascending.
    Ends(i64),
    /// In [0, hi), always u8.
    Byte(i64),
    /// The first elements of a permutation along the call's `dim`.
    Perm,
    Bool,
}

impl Kind {
    pub fn is_float(self) -> bool {
        matches!(self, Kind::Normal | Kind::Uniform(..) | Kind::Positive)
    }
}

/// An argument as written.
#[derive(Clone, PartialEq, Debug)]
pub enum Expr {
    Tensor(Kind, Vec<usize>),
    List(Vec<Expr>),
    Number(Number),
    Word(String),
    Bool(bool),
    Nil,
}

/// A sample call: one expression for each parameter of the signature, `None` for a default.
#[derive(Clone, Debug)]
pub struct Sample {
    pub op: &'static Op,
    pub text: String,
    pub params: Vec<Param>,
    pub args: Vec<Option<Expr>>,
}

/// Parses a sample of `op`.
pub fn parse(op: &'static Op, text: &str) -> Result<Sample, String> {
    let params = parse_signature(op.sig)?;
    let mut args: Vec<Option<Expr>> = vec![None; params.len()];
    let mut p = Parser { text: text.as_bytes(), at: 0 };
    let mut next = 0;
    p.space();
    while !p.done() {
        let slot = match p.option_name() {
            Some(name) => params.iter().position(|q| q.name == name).ok_or(format!("no option '{name}'"))?,
            None => {
                next += 1;
                next - 1
            }
        };
        let e = p.expr()?;
        *args.get_mut(slot).ok_or("more arguments than parameters")? = Some(e);
        p.space();
        if !p.done() {
            p.expect(b',')?;
            p.space();
        }
    }
    Ok(Sample { op, text: text.to_string(), params, args })
}

struct Parser<'a> {
    text: &'a [u8],
    at: usize,
}

impl Parser<'_> {
    fn done(&self) -> bool {
        self.at >= self.text.len()
    }

    fn peek(&self) -> u8 {
        self.text.get(self.at).copied().unwrap_or(0)
    }

    fn space(&mut self) {
        while self.peek() == b' ' {
            self.at += 1;
        }
    }

    fn expect(&mut self, c: u8) -> Result<(), String> {
        self.space();
        if self.peek() != c {
            return Err(format!("'{}' expected at {} of {:?}", c as char, self.at, String::from_utf8_lossy(self.text)));
        }
        self.at += 1;
        Ok(())
    }

    fn word(&mut self) -> String {
        let start = self.at;
        while self.peek().is_ascii_alphanumeric() || self.peek() == b'_' {
            self.at += 1;
        }
        String::from_utf8_lossy(&self.text[start..self.at]).into_owned()
    }

    /// Returns the name before a `=`, if an option comes next.
    fn option_name(&mut self) -> Option<String> {
        let start = self.at;
        let word = self.word();
        if !word.is_empty() && self.peek() == b'=' {
            self.at += 1;
            return Some(word);
        }
        self.at = start;
        None
    }

    fn number(&mut self) -> Result<Number, String> {
        self.space();
        let start = self.at;
        while matches!(self.peek(), b'0'..=b'9' | b'.' | b'-' | b'+' | b'e' | b'i' | b'n' | b'f') {
            self.at += 1;
        }
        let text = std::str::from_utf8(&self.text[start..self.at]).map_err(|e| e.to_string())?;
        match text.parse() {
            Ok(i) => Ok(Number::Int(i)),
            Err(_) => text.parse().map(Number::Float).map_err(|_| format!("'{text}' is not a number")),
        }
    }

    fn numbers(&mut self, end: u8) -> Result<Vec<Number>, String> {
        let mut out = Vec::new();
        self.space();
        while self.peek() != end {
            out.push(self.number()?);
            self.space();
            if self.peek() == b',' {
                self.at += 1;
                self.space();
            } else if self.peek() != end {
                return Err(format!("'{}' expected at {}", end as char, self.at));
            }
        }
        self.at += 1;
        Ok(out)
    }

    fn expr(&mut self) -> Result<Expr, String> {
        self.space();
        match self.peek() {
            b'[' => {
                self.at += 1;
                let mut items = Vec::new();
                self.space();
                while self.peek() != b']' {
                    items.push(self.expr()?);
                    self.space();
                    if self.peek() == b',' {
                        self.at += 1;
                        self.space();
                    }
                }
                self.at += 1;
                Ok(Expr::List(items))
            }
            b'\'' => {
                self.at += 1;
                let start = self.at;
                while self.peek() != b'\'' && !self.done() {
                    self.at += 1;
                }
                let word = String::from_utf8_lossy(&self.text[start..self.at]).into_owned();
                self.expect(b'\'')?;
                Ok(Expr::Word(word))
            }
            b'0'..=b'9' | b'-' | b'.' => self.number().map(Expr::Number),
            _ => {
                let word = self.word();
                match word.as_str() {
                    "true" => return Ok(Expr::Bool(true)),
                    "false" => return Ok(Expr::Bool(false)),
                    "nil" => return Ok(Expr::Nil),
                    "inf" => return Ok(Expr::Number(Number::Float(f64::INFINITY))),
                    _ => {}
                }
                self.expect(b'(')?;
                self.tensor(&word)
            }
        }
    }

    fn tensor(&mut self, kind: &str) -> Result<Expr, String> {
        let close = self.text[self.at..].iter().position(|c| *c == b')').ok_or("no ')'")? + self.at;
        let split = self.text[self.at..close].iter().position(|c| *c == b';').map(|i| i + self.at);
        let (mut first, mut second) = (Vec::new(), Vec::new());
        if split.is_some() {
            first = self.numbers(b';')?;
            second = self.numbers(b')')?;
        } else {
            second.extend(self.numbers(b')')?);
        }
        let dims = |ns: &[Number]| ns.iter().map(|n| n.as_f64() as usize).collect::<Vec<_>>();
        Ok(match (kind, split.is_some()) {
            ("f", false) => Expr::Tensor(Kind::Normal, dims(&second)),
            ("f", true) => Expr::Tensor(Kind::Uniform(second[0].as_f64(), second[1].as_f64()), dims(&first)),
            ("p", false) => Expr::Tensor(Kind::Positive, dims(&second)),
            ("u", false) => Expr::Tensor(Kind::Uniform(-0.9, 0.9), dims(&second)),
            ("i", true) => Expr::Tensor(Kind::Int(first[0].as_f64() as i64), dims(&second)),
            ("ends", true) => Expr::Tensor(Kind::Ends(first[0].as_f64() as i64), dims(&second)),
            ("u8", true) => Expr::Tensor(Kind::Byte(first[0].as_f64() as i64), dims(&second)),
            ("b", false) => Expr::Tensor(Kind::Bool, dims(&second)),
            ("perm", false) => Expr::Tensor(Kind::Perm, dims(&second)),
            _ => return Err(format!("'{kind}' is not a kind of tensor")),
        })
    }
}

/// Converts a non-tensor argument to a value of the parameter's type.
pub fn value(param: &Param, e: &Expr) -> Result<Value, String> {
    let wrong = || format!("{e:?} does not fit {}: {:?}", param.name, param.ty);
    Ok(match (&param.ty, e) {
        (_, Expr::Nil) => Value::None,
        (Ty::Int, Expr::Number(Number::Int(i))) => Value::Number(Number::Int(*i)),
        (Ty::Float, Expr::Number(n)) => Value::Number(Number::Float(n.as_f64())),
        (Ty::Number | Ty::Operand, Expr::Number(n)) => Value::Number(*n),
        (Ty::Bool, Expr::Bool(b)) => Value::Bool(*b),
        (Ty::Ints | Ty::IntsOr(_), Expr::Number(Number::Int(i))) => Value::Ints(smallvec::smallvec![*i]),
        (Ty::Ints | Ty::IntsOr(_), Expr::List(items)) => Value::Ints(
            items
                .iter()
                .map(|e| if let Expr::Number(Number::Int(i)) = e { Ok(*i) } else { Err(wrong()) })
                .collect::<Result<_, _>>()?,
        ),
        (Ty::DType, Expr::Word(w)) => Value::DType(DType::parse(w).ok_or_else(wrong)?),
        (Ty::Str(_) | Ty::IntsOr(_), Expr::Word(w)) => Value::Str(w.clone()),
        _ => return Err(wrong()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use perilune_core::ops;

    #[test]
    fn every_sample_of_the_registry_parses() {
        let mut n = 0;
        for op in ops::all() {
            for text in op.samples {
                let s = parse(op, text).unwrap_or_else(|e| panic!("{}({text}): {e}", op.name));
                for (p, e) in s.params.iter().zip(&s.args) {
                    match e {
                        None => assert!(p.optional, "{}({text}): {} is missing", op.name, p.name),
                        Some(Expr::Tensor(..)) => {
                            assert!(
                                matches!(p.ty, Ty::Tensor | Ty::Operand),
                                "{}({text}): {} is not a tensor",
                                op.name,
                                p.name
                            );
                        }
                        Some(Expr::List(l)) if matches!(l.first(), Some(Expr::Tensor(..))) => {
                            assert_eq!(p.ty, Ty::Tensors)
                        }
                        Some(e) => drop(value(p, e).unwrap_or_else(|m| panic!("{}({text}): {m}", op.name))),
                    }
                }
                n += 1;
            }
        }
        assert!(n > 400, "only {n} samples");
    }
}
