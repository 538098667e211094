//! The fundamental types of PTX, and how a register of 64 bits holds their values: the unused high bits are zero.

/// What the bits of a value mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ValueClass {
    Bits,
    Unsigned,
    Signed,
    Float,
    Predicate,
}

/// A type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Type {
    pub(crate) class: ValueClass,
    /// The size in bytes; 0 for a predicate.
    pub(crate) bytes: u64,
}

impl Type {
    pub(crate) const PREDICATE: Type = Type {
        class: ValueClass::Predicate,
        bytes: 0,
    };

    pub(crate) const fn new(class: ValueClass, bytes: u64) -> Type {
        Type { class, bytes }
    }

    /// Read a name such as `u32`.
    pub(crate) fn parse(name: &str) -> Option<Type> {
        if name == "pred" {
            return Some(Type::PREDICATE);
        }
        let class = match name.chars().next()? {
            'b' => ValueClass::Bits,
            'u' => ValueClass::Unsigned,
            's' => ValueClass::Signed,
            'f' => ValueClass::Float,
            _ => return None,
        };
        let bytes = match (class, &name[1..]) {
            (ValueClass::Bits | ValueClass::Unsigned | ValueClass::Signed, "8") => 1,
            (ValueClass::Bits | ValueClass::Unsigned | ValueClass::Signed, "16") => 2,
            (_, "32") => 4,
            (_, "64") => 8,
            _ => return None,
        };
        Some(Type { class, bytes })
    }

    /// Report whether a variable of this type may be an operand of an instruction with another type (PTX ISA, "Type Checking Rules").
    pub(crate) fn agrees(self, instruction: Type) -> bool {
        let integer = |class| matches!(class, ValueClass::Unsigned | ValueClass::Signed);
        self.bytes == instruction.bytes
            && match (self.class, instruction.class) {
                (ValueClass::Predicate, other) | (other, ValueClass::Predicate) => other == ValueClass::Predicate,
                (ValueClass::Bits, _) | (_, ValueClass::Bits) => true,
                (mine, other) => mine == other || integer(mine) && integer(other),
            }
    }

    /// The bits that a value of this type has.
    pub(crate) fn mask(self) -> u64 {
        match self.bytes {
            0 => 1,
            8 => u64::MAX,
            bytes => (1 << (8 * bytes)) - 1,
        }
    }
}

/// A value that a register can hold.
pub(crate) trait Value {
    fn of(register: u64) -> Self;
    fn register(self) -> u64;
}

macro_rules! values {
    ($($type:ty: $unsigned:ty),*) => {
        $(impl Value for $type {
            fn of(register: u64) -> $type {
                register as $type
            }
            fn register(self) -> u64 {
                u64::from(self as $unsigned)
            }
        })*
    };
}

values!(u8: u8, u16: u16, u32: u32, u64: u64, i8: u8, i16: u16, i32: u32, i64: u64);

impl Value for f32 {
    fn of(register: u64) -> f32 {
        f32::from_bits(register as u32)
    }
    fn register(self) -> u64 {
        u64::from(self.to_bits())
    }
}

impl Value for f64 {
    fn of(register: u64) -> f64 {
        f64::from_bits(register)
    }
    fn register(self) -> u64 {
        self.to_bits()
    }
}

impl Value for bool {
    fn of(register: u64) -> bool {
        register & 1 != 0
    }
    fn register(self) -> u64 {
        u64::from(self)
    }
}
