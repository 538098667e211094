//! Instructions as they are written.

use crate::types::{Type, ValueClass};

/// An operand as it is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Operand<'t> {
    /// A register, a shared variable, a label, or a special register with its dimension.
    Name(&'t str, Option<&'t str>),
    Integer(i128),
    Float(u32),
    Double(u64),
    /// A base and an offset in brackets.
    Address(&'t str, i64),
    Vector(Vec<&'t str>),
}

/// An instruction as it is written.
#[derive(Debug)]
pub(crate) struct Statement<'t> {
    pub(crate) line: usize,
    /// The register of the predicate, and the value for which the instruction is executed.
    pub(crate) guard: Option<(&'t str, bool)>,
    pub(crate) opcode: &'t str,
    pub(crate) modifiers: Vec<&'t str>,
    pub(crate) operands: Vec<Operand<'t>>,
}

/// Why an operand is no constant of a type.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotAConstant {
    #[error("{number} does not have {bits} bits")]
    TooLarge { number: i128, bits: u32 },
    #[error("a constant of this kind is no operand of this type")]
    OtherKind,
}

impl Operand<'_> {
    /// Return the bits of a constant of a type.
    pub(crate) fn constant(&self, of: Type) -> Result<u64, NotAConstant> {
        match (self, of.class, of.bytes) {
            (Operand::Float(bits), ValueClass::Float | ValueClass::Bits, 4) => Ok(u64::from(*bits)),
            (Operand::Double(bits), ValueClass::Float | ValueClass::Bits, 8) => Ok(*bits),
            (Operand::Integer(number), ValueClass::Bits | ValueClass::Unsigned | ValueClass::Signed, bytes @ 1..) => {
                let bits = 8 * bytes as u32;
                if *number < 1 << bits && *number >= -(1 << (bits - 1)) {
                    Ok(*number as u64 & of.mask())
                } else {
                    Err(NotAConstant::TooLarge { number: *number, bits })
                }
            }
            _ => Err(NotAConstant::OtherKind),
        }
    }
}
