//! Kernels as they are run. An operand is the number of a place: a register, or a constant that has a place behind the registers.

use crate::ops::RegisterFunction;

/// The number of a place.
pub(crate) type PlaceNumber = u16;

/// A kernel.
#[derive(Debug)]
pub struct Kernel {
    pub(crate) name: String,
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) shared: u64,
    /// The bits that each register has.
    pub(crate) masks: Vec<u64>,
    /// The constants, whose places are behind the registers.
    pub(crate) constants: Vec<u64>,
    pub(crate) code: Vec<Instruction>,
}

/// A parameter of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// The name.
    pub name: String,
    /// The type, such as `u64`.
    pub kind: String,
    /// Where it begins in the bytes of all parameters.
    pub offset: usize,
    /// Its size in bytes.
    pub bytes: usize,
}

impl Kernel {
    /// Return the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Return the parameters in order.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Return the size of all parameters in bytes.
    pub fn parameter_bytes(&self) -> usize {
        self.parameters.last().map_or(0, |last| last.offset + last.bytes)
    }
}

/// An instruction.
#[derive(Debug, Clone)]
pub(crate) struct Instruction {
    /// The predicate, and the value for which the instruction is executed.
    pub(crate) guard: Option<(PlaceNumber, u64)>,
    pub(crate) what: InstructionEffect,
    pub(crate) line: usize,
}

/// A state space of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    Global,
    Shared,
}

/// A place in memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemoryOperand {
    pub(crate) space: Space,
    pub(crate) base: PlaceNumber,
    pub(crate) offset: u64,
    /// The size of one value.
    pub(crate) bytes: u64,
    /// How many values.
    pub(crate) count: usize,
}

/// What an instruction does.
#[derive(Debug, Clone)]
pub(crate) enum InstructionEffect {
    One(fn(u64) -> u64, PlaceNumber, PlaceNumber),
    Two(fn(u64, u64) -> u64, PlaceNumber, PlaceNumber, PlaceNumber),
    Three(fn(u64, u64, u64) -> u64, PlaceNumber, PlaceNumber, PlaceNumber, PlaceNumber),
    Special(Special, PlaceNumber),
    Parameter {
        to: PlaceNumber,
        offset: usize,
        bytes: usize,
    },
    Load {
        from: MemoryOperand,
        to: [PlaceNumber; 4],
        /// The bits that a value is shifted to the left and back to extend its sign; 0 for none.
        sign: u32,
        /// The bits of the registers.
        mask: u64,
    },
    Store {
        to: MemoryOperand,
        from: [PlaceNumber; 4],
    },
    Atomic {
        at: MemoryOperand,
        function: fn(u64, u64) -> u64,
        operand: PlaceNumber,
        /// Where the old value goes; none for `red`.
        to: Option<PlaceNumber>,
    },
    /// Compare, and swap if they are equal.
    Swap {
        at: MemoryOperand,
        compare: PlaceNumber,
        new: PlaceNumber,
        to: PlaceNumber,
    },
    Branch(usize),
    Barrier,
    /// A warp multiplies bf16 matrices: `mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32`.
    Multiply {
        d: [PlaceNumber; 4],
        a: [PlaceNumber; 4],
        b: [PlaceNumber; 2],
        c: [PlaceNumber; 4],
    },
    Return,
    /// An instruction for the order of memory accesses, which are always in order here.
    Nothing,
}

/// A special register.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Special {
    Thread(usize),
    Block(usize),
    BlockSize(usize),
    GridSize(usize),
    Lane,
    Warp,
    Timer,
    Clock32,
    Clock64,
    Multiprocessor,
}

impl From<(RegisterFunction, PlaceNumber, &[PlaceNumber])> for InstructionEffect {
    fn from((function, to, from): (RegisterFunction, PlaceNumber, &[PlaceNumber])) -> InstructionEffect {
        match function {
            RegisterFunction::One(function) => InstructionEffect::One(function, to, from[0]),
            RegisterFunction::Two(function) => InstructionEffect::Two(function, to, from[0], from[1]),
            RegisterFunction::Three(function) => InstructionEffect::Three(function, to, from[0], from[1], from[2]),
        }
    }
}
