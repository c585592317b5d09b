//! Declares the element types and the promotion rules between them.
//!
//! The lattice is PyTorch's: bool < u8 < i32 < i64 < {f16, bf16} < f32 < f64, where f16 and bf16 promote to f32. A
//! tensor of rank 0 takes the dtype of a tensor with dims, unless its category (bool, integer, float) is higher. A Lua
//! number is *weak*: it takes the tensor's dtype unless its category (bool, integer, float) is higher, and then the
//! default dtype of that category (i64 or f32).

use std::fmt;

/// An element type. The discriminants are stable, because plan keys and caches store them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
#[repr(u8)]
pub enum DType {
    Bool = 0,
    U8 = 1,
    I32 = 2,
    I64 = 3,
    F16 = 4,
    BF16 = 5,
    F32 = 6,
    F64 = 7,
}

/// The category of a dtype, for promotion with weak numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord)]
pub enum Category {
    Bool,
    Int,
    Float,
}

impl DType {
    pub const ALL: [DType; 8] =
        [DType::F64, DType::F32, DType::BF16, DType::F16, DType::I64, DType::I32, DType::U8, DType::Bool];

    pub const fn name(self) -> &'static str {
        match self {
            DType::Bool => "bool",
            DType::U8 => "u8",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F32 => "f32",
            DType::F64 => "f64",
        }
    }

    /// Returns the dtype with that name; PyTorch's long names are accepted too.
    pub fn parse(name: &str) -> Option<DType> {
        Some(match name {
            "bool" => DType::Bool,
            "u8" | "uint8" => DType::U8,
            "i32" | "int32" | "int" => DType::I32,
            "i64" | "int64" | "long" => DType::I64,
            "f16" | "fp16" | "float16" | "half" => DType::F16,
            "bf16" | "bfloat16" => DType::BF16,
            "f32" | "fp32" | "float32" | "float" => DType::F32,
            "f64" | "fp64" | "float64" | "double" => DType::F64,
            _ => return None,
        })
    }

    pub const fn from_code(code: u8) -> Option<DType> {
        Some(match code {
            0 => DType::Bool,
            1 => DType::U8,
            2 => DType::I32,
            3 => DType::I64,
            4 => DType::F16,
            5 => DType::BF16,
            6 => DType::F32,
            7 => DType::F64,
            _ => return None,
        })
    }

    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            DType::Bool | DType::U8 => 1,
            DType::F16 | DType::BF16 => 2,
            DType::I32 | DType::F32 => 4,
            DType::I64 | DType::F64 => 8,
        }
    }

    pub const fn category(self) -> Category {
        match self {
            DType::Bool => Category::Bool,
            DType::U8 | DType::I32 | DType::I64 => Category::Int,
            _ => Category::Float,
        }
    }

    pub const fn is_float(self) -> bool {
        matches!(self.category(), Category::Float)
    }

    pub const fn is_int(self) -> bool {
        matches!(self.category(), Category::Int)
    }

    /// Whether this is a 16-bit float: arithmetic on it runs in f32 and is rounded after every op.
    pub const fn is_half(self) -> bool {
        matches!(self, DType::F16 | DType::BF16)
    }

    /// The dtype in which arithmetic on `self` runs.
    pub const fn compute(self) -> DType {
        if self.is_half() { DType::F32 } else { self }
    }

    /// The dtype of sums of `self`: integers and bools widen to i64, floats keep their dtype.
    pub const fn sum(self) -> DType {
        match self.category() {
            Category::Float => self,
            _ => DType::I64,
        }
    }

    /// The dtype of a float result computed from `self` (`exp` of an integer is f32).
    pub const fn to_float(self) -> DType {
        if self.is_float() { self } else { DType::F32 }
    }

    /// The common dtype of two tensors.
    pub fn promote(a: DType, b: DType) -> DType {
        if a == b {
            return a;
        }
        let (low, high) = if a < b { (a, b) } else { (b, a) };
        match (low, high) {
            (DType::F16, DType::BF16) => DType::F32,
            _ => high,
        }
    }

    /// The common dtype of a tensor of dtype `self` with dims and one of rank 0.
    pub fn promote_scalar(self, scalar: DType) -> DType {
        if scalar.category() <= self.category() { self } else { DType::promote(self, scalar) }
    }

    /// The dtype of a weak number of category `number` combined with a tensor of dtype `self`.
    pub fn promote_number(self, number: Category) -> DType {
        if number <= self.category() {
            return self;
        }
        match number {
            Category::Bool => DType::Bool,
            Category::Int => DType::I64,
            Category::Float => DType::F32,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promotion_is_commutative_and_idempotent() {
        for a in DType::ALL {
            assert_eq!(DType::promote(a, a), a);
            for b in DType::ALL {
                assert_eq!(DType::promote(a, b), DType::promote(b, a));
            }
        }
        assert_eq!(DType::promote(DType::F16, DType::BF16), DType::F32);
        assert_eq!(DType::promote(DType::I64, DType::F16), DType::F16);
        assert_eq!(DType::I32.promote_number(Category::Float), DType::F32);
        assert_eq!(DType::BF16.promote_number(Category::Float), DType::BF16);
        assert_eq!(DType::Bool.promote_number(Category::Int), DType::I64);
    }

    #[test]
    fn names_and_codes_round_trip() {
        for d in DType::ALL {
            assert_eq!(DType::parse(d.name()), Some(d));
            assert_eq!(DType::from_code(d as u8), Some(d));
        }
    }
}
