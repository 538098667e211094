//! What the instructions compute that use only registers. Each one is a function of registers, which is chosen once when the text is read.

use crate::types::{Type, Value, ValueClass};

/// A function of one, two, or three registers.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RegisterFunction {
    One(fn(u64) -> u64),
    Two(fn(u64, u64) -> u64),
    Three(fn(u64, u64, u64) -> u64),
}

/// An instruction: the type of its result, those of its operands, and what it computes.
#[derive(Debug, Clone)]
pub(crate) struct Operation {
    pub(crate) result: Type,
    pub(crate) operands: Vec<Type>,
    pub(crate) function: RegisterFunction,
}

const U16: (ValueClass, u64) = (ValueClass::Unsigned, 2);
const U32: (ValueClass, u64) = (ValueClass::Unsigned, 4);
const U64: (ValueClass, u64) = (ValueClass::Unsigned, 8);
const S16: (ValueClass, u64) = (ValueClass::Signed, 2);
const S32: (ValueClass, u64) = (ValueClass::Signed, 4);
const S64: (ValueClass, u64) = (ValueClass::Signed, 8);
const B16: (ValueClass, u64) = (ValueClass::Bits, 2);
const B32: (ValueClass, u64) = (ValueClass::Bits, 4);
const B64: (ValueClass, u64) = (ValueClass::Bits, 8);
const F32: (ValueClass, u64) = (ValueClass::Float, 4);
const F64: (ValueClass, u64) = (ValueClass::Float, 8);
const PREDICATE: (ValueClass, u64) = (ValueClass::Predicate, 0);

/// Make a function of registers that have values of a type.
macro_rules! on {
    ($kind:ident, $rust:ty, (|$($argument:ident),+| $body:expr)) => {
        RegisterFunction::$kind(|$($argument),+| {
            $(let $argument = <$rust as Value>::of($argument);)+
            Value::register($body)
        })
    };
}

/// Choose a function by the type. Its body is compiled for each of the types.
macro_rules! choose {
    ($kind:ident, $type:expr, $function:tt, $($name:ident: $rust:ty),+) => {
        match ($type.class, $type.bytes) {
            $($name => Some(on!($kind, $rust, $function)),)+
            _ => None,
        }
    };
}

macro_rules! integers {
    ($kind:ident, $type:expr, $function:tt) => {
        choose!($kind, $type, $function, U16: u16, U32: u32, U64: u64, S16: i16, S32: i32, S64: i64)
    };
}

macro_rules! floats {
    ($kind:ident, $type:expr, $function:tt) => {
        choose!($kind, $type, $function, F32: f32, F64: f64)
    };
}

macro_rules! bits {
    ($kind:ident, $type:expr, $function:tt) => {
        choose!($kind, $type, $function, B16: u16, B32: u32, B64: u64, PREDICATE: bool)
    };
}

/// The high half of a product.
macro_rules! high {
    ($type:expr) => {
        match ($type.class, $type.bytes) {
            U32 => Some(RegisterFunction::Two(|a, b| (a * b) >> 32)),
            S32 => Some(RegisterFunction::Two(|a, b| {
                ((i64::from(i32::of(a)) * i64::from(i32::of(b))) >> 32) as u64 & 0xffff_ffff
            })),
            U64 => Some(RegisterFunction::Two(|a, b| ((u128::from(a) * u128::from(b)) >> 64) as u64)),
            S64 => Some(RegisterFunction::Two(|a, b| {
                ((i128::from(a as i64) * i128::from(b as i64)) >> 64) as u64
            })),
            _ => None,
        }
    };
}

/// Find an instruction by its name and modifiers without the type, such as `mul.wide`.
pub(crate) fn find(name: &str, of: Type) -> Option<Operation> {
    let same = |count: usize, function: Option<RegisterFunction>| {
        Some(Operation {
            result: of,
            operands: vec![of; count],
            function: function?,
        })
    };
    let wide = Type::new(of.class, of.bytes * 2);
    let shift = Type::new(ValueClass::Unsigned, 4);
    match name {
        "add" => same(
            2,
            integers!(Two, of, (|a, b| a.wrapping_add(b))).or_else(|| floats!(Two, of, (|a, b| a + b))),
        ),
        "add.rn" => same(2, floats!(Two, of, (|a, b| a + b))),
        "sub" => same(
            2,
            integers!(Two, of, (|a, b| a.wrapping_sub(b))).or_else(|| floats!(Two, of, (|a, b| a - b))),
        ),
        "sub.rn" => same(2, floats!(Two, of, (|a, b| a - b))),
        "mul" | "mul.rn" => same(2, floats!(Two, of, (|a, b| a * b))),
        "mul.lo" => same(2, integers!(Two, of, (|a, b| a.wrapping_mul(b)))),
        "mul.hi" => same(2, high!(of)),
        "mul.wide" => Some(Operation {
            result: wide,
            operands: vec![of; 2],
            function: match (of.class, of.bytes) {
                U16 | U32 => RegisterFunction::Two(|a, b| a * b),
                S16 => RegisterFunction::Two(|a, b| (i32::from(i16::of(a)) * i32::from(i16::of(b))).register()),
                S32 => RegisterFunction::Two(|a, b| (i64::from(i32::of(a)) * i64::from(i32::of(b))).register()),
                _ => return None,
            },
        }),
        "mad.lo" => same(3, integers!(Three, of, (|a, b, c| a.wrapping_mul(b).wrapping_add(c)))),
        "mad.wide" => Some(Operation {
            result: wide,
            operands: vec![of, of, wide],
            function: match (of.class, of.bytes) {
                U16 => RegisterFunction::Three(|a, b, c| u32::of(a * b).wrapping_add(u32::of(c)).register()),
                U32 => RegisterFunction::Three(|a, b, c| (a * b).wrapping_add(c)),
                S32 => RegisterFunction::Three(|a, b, c| {
                    (i64::from(i32::of(a)) * i64::from(i32::of(b)))
                        .wrapping_add(i64::of(c))
                        .register()
                }),
                _ => return None,
            },
        }),
        "fma.rn" => same(3, floats!(Three, of, (|a, b, c| a.mul_add(b, c)))),
        // "Division by zero yields an unspecified, machine-specific value": here it is all ones, which no test should rely on.
        "div" => same(2, integers!(Two, of, (|a, b| if b == 0 { !0 } else { a.wrapping_div(b) }))),
        "rem" => same(2, integers!(Two, of, (|a, b| if b == 0 { !0 } else { a.wrapping_rem(b) }))),
        "div.rn" => same(2, floats!(Two, of, (|a, b| a / b))),
        "sqrt.rn" => same(1, floats!(One, of, (|a| a.sqrt()))),
        "min" => same(
            2,
            integers!(Two, of, (|a, b| a.min(b))).or_else(|| floats!(Two, of, (|a, b| a.min(b)))),
        ),
        "max" => same(
            2,
            integers!(Two, of, (|a, b| a.max(b))).or_else(|| floats!(Two, of, (|a, b| a.max(b)))),
        ),
        "abs" => same(
            1,
            choose!(One, of, (|a| a.wrapping_abs()), S16: i16, S32: i32, S64: i64).or_else(|| floats!(One, of, (|a| a.abs()))),
        ),
        "neg" => same(
            1,
            choose!(One, of, (|a| a.wrapping_neg()), S16: i16, S32: i32, S64: i64).or_else(|| floats!(One, of, (|a| -a))),
        ),
        "and" => same(2, bits!(Two, of, (|a, b| a & b))),
        "or" => same(2, bits!(Two, of, (|a, b| a | b))),
        "xor" => same(2, bits!(Two, of, (|a, b| a ^ b))),
        "not" => same(1, bits!(One, of, (|a| !a))),
        // "Shift amounts greater than the register width N are clamped to N."
        "shl" => Some(Operation {
            result: of,
            operands: vec![of, shift],
            function: match (of.class, of.bytes) {
                B16 => RegisterFunction::Two(|a, by| (a << by.min(16)) & 0xffff),
                B32 => RegisterFunction::Two(|a, by| (a << by.min(32)) & 0xffff_ffff),
                B64 => RegisterFunction::Two(|a, by| a.checked_shl(by as u32).unwrap_or(0)),
                _ => return None,
            },
        }),
        "shr" => Some(Operation {
            result: of,
            operands: vec![of, shift],
            function: match (of.class, of.bytes) {
                B16 | U16 | B32 | U32 | B64 | U64 => RegisterFunction::Two(|a, by| a.checked_shr(by as u32).unwrap_or(0)),
                S16 => RegisterFunction::Two(|a, by| (i16::of(a) >> by.min(15)).register()),
                S32 => RegisterFunction::Two(|a, by| (i32::of(a) >> by.min(31)).register()),
                S64 => RegisterFunction::Two(|a, by| (i64::of(a) >> by.min(63)).register()),
                _ => return None,
            },
        }),
        // A move keeps the bits, and a global address is its generic address.
        "mov" => same(1, Some(RegisterFunction::One(|a| a))),
        "cvta.to.global" | "cvta.global" if (of.class, of.bytes) == U64 => same(1, Some(RegisterFunction::One(|a| a))),
        "selp" if of.bytes > 1 => Some(Operation {
            result: of,
            operands: vec![of, of, Type::PREDICATE],
            function: RegisterFunction::Three(|a, b, which| if which & 1 != 0 { a } else { b }),
        }),
        _ => compare(name.strip_prefix("setp.")?, of),
    }
}

/// Find a comparison. Those of floating-point numbers are false for NaN, except `ne`, which is also false then (PTX ISA, "setp").
fn compare(name: &str, of: Type) -> Option<Operation> {
    macro_rules! ordered {
        ($function:tt) => {
            integers!(Two, of, $function).or_else(|| floats!(Two, of, $function))
        };
    }
    let function = match name {
        "eq" => ordered!((|a, b| a == b)).or_else(|| choose!(Two, of, (|a, b| a == b), B16: u16, B32: u32, B64: u64)),
        "ne" => integers!(Two, of, (|a, b| a != b))
            .or_else(|| choose!(Two, of, (|a, b| a != b), B16: u16, B32: u32, B64: u64))
            .or(floats!(
                Two,
                of,
                (|a, b| a.partial_cmp(&b).is_some_and(|order| order.is_ne()))
            )),
        "lt" => ordered!((|a, b| a < b)),
        "le" => ordered!((|a, b| a <= b)),
        "gt" => ordered!((|a, b| a > b)),
        "ge" => ordered!((|a, b| a >= b)),
        _ => None,
    }?;
    Some(Operation {
        result: Type::PREDICATE,
        operands: vec![of; 2],
        function,
    })
}

/// Find a conversion. `rounding` is `rn` for a result that is a floating-point number, and `rni` or `rzi` for one that is an integer.
pub(crate) fn convert(rounding: Option<&str>, to: Type, from: Type) -> Option<Operation> {
    macro_rules! from_integer {
        ($to:ty) => {
            match (from.class, from.bytes) {
                U16 => RegisterFunction::One(|a| Value::register(u16::of(a) as $to)),
                U32 => RegisterFunction::One(|a| Value::register(u32::of(a) as $to)),
                U64 => RegisterFunction::One(|a| Value::register(u64::of(a) as $to)),
                S16 => RegisterFunction::One(|a| Value::register(i16::of(a) as $to)),
                S32 => RegisterFunction::One(|a| Value::register(i32::of(a) as $to)),
                S64 => RegisterFunction::One(|a| Value::register(i64::of(a) as $to)),
                _ => return None,
            }
        };
    }
    // Rust's `as` saturates, as the instruction does.
    macro_rules! from_float {
        ($to:ty, $round:ident) => {
            match (from.class, from.bytes) {
                F32 => RegisterFunction::One(|a| Value::register(f32::of(a).$round() as $to)),
                F64 => RegisterFunction::One(|a| Value::register(f64::of(a).$round() as $to)),
                _ => return None,
            }
        };
    }
    macro_rules! to_integer {
        ($to:ty) => {
            match (rounding, from.class) {
                (None, ValueClass::Unsigned | ValueClass::Signed) => from_integer!($to),
                (Some("rzi"), ValueClass::Float) => from_float!($to, trunc),
                (Some("rni"), ValueClass::Float) => from_float!($to, round_ties_even),
                _ => return None,
            }
        };
    }
    let function = match (to.class, to.bytes) {
        U16 => to_integer!(u16),
        U32 => to_integer!(u32),
        U64 => to_integer!(u64),
        S16 => to_integer!(i16),
        S32 => to_integer!(i32),
        S64 => to_integer!(i64),
        F32 if from.class == ValueClass::Float => match (rounding, from.bytes) {
            (Some("rn"), 8) => RegisterFunction::One(|a| (f64::of(a) as f32).register()),
            (None, 4) => RegisterFunction::One(|a| a),
            _ => return None,
        },
        F64 if from.class == ValueClass::Float => match (rounding, from.bytes) {
            (None, 4) => RegisterFunction::One(|a| f64::from(f32::of(a)).register()),
            (None, 8) => RegisterFunction::One(|a| a),
            _ => return None,
        },
        F32 if rounding == Some("rn") => from_integer!(f32),
        F64 if rounding == Some("rn") => from_integer!(f64),
        _ => return None,
    };
    Some(Operation {
        result: to,
        operands: vec![from],
        function,
    })
}

/// Find what an atomic instruction makes of the old value and its operand: the new value. `cas` is not here, because it has two operands.
pub(crate) fn atomic(name: &str, of: Type) -> Option<fn(u64, u64) -> u64> {
    let function = match (name, of.class) {
        ("add" | "min" | "max", ValueClass::Unsigned | ValueClass::Signed) if of.bytes >= 4 => find(name, of)?.function,
        ("add", ValueClass::Float) => find(name, of)?.function,
        ("and" | "or" | "xor", ValueClass::Bits) if of.bytes >= 4 => find(name, of)?.function,
        ("exch", ValueClass::Bits) if of.bytes >= 4 => RegisterFunction::Two(|_, new| new),
        _ => return None,
    };
    match function {
        RegisterFunction::Two(function) => Some(function),
        RegisterFunction::One(_) | RegisterFunction::Three(_) => None,
    }
}
