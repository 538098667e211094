//! Turns the statements of a kernel into instructions whose operands are numbers.

use std::collections::HashMap;

use crate::Error;
use crate::instruction::{Instruction, InstructionEffect, Kernel, MemoryOperand, Parameter, PlaceNumber, Space, Special};
use crate::ops::{atomic, convert, find};
use crate::statement::{Operand, Statement};
use crate::token::TokenReader;
use crate::types::{Type, ValueClass};

/// The body of a kernel, as far as it has been read.
pub(crate) struct Body<'t, 'p> {
    parameters: &'p [Parameter],
    registers: HashMap<String, (PlaceNumber, Type)>,
    shared: HashMap<&'t str, u64>,
    shared_end: u64,
    labels: HashMap<&'t str, usize>,
    /// The branches, whose targets are known only at the end: which instruction, and the label.
    branches: Vec<(usize, &'t str)>,
    /// The constants. Their places follow the registers, and are known only at the end: until then the first one has the last number.
    constants: Vec<u64>,
    code: Vec<Instruction>,
}

/// Why a statement is refused.
type Why = String;

const B32: Type = Type::new(ValueClass::Bits, 4);
const F32: Type = Type::new(ValueClass::Float, 4);
const U64: Type = Type::new(ValueClass::Unsigned, 8);

impl<'t, 'p> Body<'t, 'p> {
    pub(crate) fn new(parameters: &'p [Parameter]) -> Body<'t, 'p> {
        Body {
            parameters,
            registers: HashMap::new(),
            shared: HashMap::new(),
            shared_end: 0,
            labels: HashMap::new(),
            branches: Vec::new(),
            constants: Vec::new(),
            code: Vec::new(),
        }
    }

    pub(crate) fn registers(&self) -> usize {
        self.registers.len()
    }

    pub(crate) fn register(&mut self, name: String, of: Type) -> Result<(), Why> {
        let place = PlaceNumber::try_from(self.registers.len()).map_err(|_| "there are too many registers".to_owned())?;
        match self.registers.insert(name, (place, of)) {
            None => Ok(()),
            Some(_) => Err("this register is declared twice".to_owned()),
        }
    }

    pub(crate) fn shared(&mut self, name: &'t str, size: u64, align: u64, most: u64) -> Result<(), Why> {
        let start = self.shared_end.next_multiple_of(align);
        self.shared_end = start + size;
        match self.shared.insert(name, start) {
            Some(_) => Err(format!("{name} is declared twice")),
            None if self.shared_end > most => Err("the shared memory is too large".to_owned()),
            None => Ok(()),
        }
    }

    pub(crate) fn label(&mut self, name: &'t str) -> Result<(), Why> {
        match self.labels.insert(name, self.code.len()) {
            None => Ok(()),
            Some(_) => Err(format!("{name} is a label twice")),
        }
    }

    /// Return the place of a register of this type.
    fn place(&self, name: &str, of: Type) -> Result<PlaceNumber, Why> {
        let (place, declared) = self.registers.get(name).ok_or_else(|| format!("{name} is no register"))?;
        if declared.agrees(of) {
            Ok(*place)
        } else {
            Err(format!("{name} has another type than the instruction"))
        }
    }

    fn constant(&mut self, bits: u64) -> Result<PlaceNumber, Why> {
        let known = self.constants.iter().position(|known| *known == bits);
        let index = known.unwrap_or_else(|| {
            self.constants.push(bits);
            self.constants.len() - 1
        });
        let index = PlaceNumber::try_from(index).map_err(|_| "there are too many constants".to_owned())?;
        Ok(PlaceNumber::MAX - index)
    }

    /// Return the place of an operand that is read.
    fn source(&mut self, operand: &Operand<'t>, of: Type) -> Result<PlaceNumber, Why> {
        match operand {
            Operand::Name(name, None) => match self.shared.get(name) {
                Some(start) if of.bytes >= 4 && of.class != ValueClass::Float => self.constant(*start),
                _ => self.place(name, of),
            },
            Operand::Name(name, Some(dimension)) => Err(format!("{name}.{dimension} is only read by mov")),
            Operand::Address(..) | Operand::Vector(_) => Err("this operand is no register and no constant".to_owned()),
            constant => self.constant(constant.constant(of).map_err(|error| error.to_string())?),
        }
    }

    fn target(&self, operand: &Operand<'t>, of: Type) -> Result<PlaceNumber, Why> {
        match operand {
            Operand::Name(name, None) => self.place(name, of),
            _ => Err("the result needs a register".to_owned()),
        }
    }

    /// Add an instruction.
    pub(crate) fn add(&mut self, statement: &Statement<'t>) -> Result<(), Why> {
        let guard = match statement.guard {
            None => None,
            Some((name, wanted)) => Some((self.place(name, Type::PREDICATE)?, u64::from(wanted))),
        };
        let what = self.decode(statement)?;
        if guard.is_some() && matches!(what, InstructionEffect::Multiply { .. }) {
            return Err("a warp-wide instruction with a predicate is not known".to_owned());
        }
        self.code.push(Instruction {
            guard,
            what,
            line: statement.line,
        });
        Ok(())
    }

    fn decode(&mut self, statement: &Statement<'t>) -> Result<InstructionEffect, Why> {
        let Statement {
            opcode,
            modifiers,
            operands,
            ..
        } = statement;
        let unknown = || format!("the instruction {opcode}.{} is not known", modifiers.join("."));
        let count = |wanted: usize| {
            if operands.len() == wanted {
                Ok(())
            } else {
                Err(format!("{wanted} operands are expected"))
            }
        };
        match (*opcode, modifiers.as_slice()) {
            ("ret" | "exit", []) => count(0).map(|()| InstructionEffect::Return),
            ("bra", [] | ["uni"]) => {
                count(1)?;
                let Operand::Name(label, None) = operands[0] else {
                    return Err("a label is expected".to_owned());
                };
                self.branches.push((self.code.len(), label));
                Ok(InstructionEffect::Branch(0))
            }
            ("bar" | "barrier", ["sync"]) => match operands.as_slice() {
                [Operand::Integer(0)] => Ok(InstructionEffect::Barrier),
                _ => Err("only barrier 0 for all threads is known".to_owned()),
            },
            ("membar", ["cta" | "gl" | "sys"]) => count(0).map(|()| InstructionEffect::Nothing),
            ("ld", [rest @ .., kind]) => {
                count(2)?;
                self.load(rest, kind, operands)?.ok_or_else(unknown)
            }
            ("st", [rest @ .., kind]) => {
                count(2)?;
                let Some((space, count)) = memory(rest) else {
                    return Err(unknown());
                };
                let of = Type::parse(kind).ok_or_else(unknown)?;
                Ok(InstructionEffect::Store {
                    to: self.address(&operands[0], space, of, count)?,
                    from: self.values(&operands[1], of, count, true)?,
                })
            }
            ("red" | "atom", [space @ ("global" | "shared"), name, kind]) => {
                let of = Type::parse(kind).ok_or_else(unknown)?;
                self.atomic(*opcode == "atom", space, name, of, operands)?.ok_or_else(unknown)
            }
            ("mma", ["sync", "aligned", "m16n8k16", "row", "col", "f32", "bf16", "bf16", "f32"]) => {
                count(4)?;
                Ok(InstructionEffect::Multiply {
                    d: self.fragment(&operands[0], F32)?,
                    a: self.fragment(&operands[1], B32)?,
                    b: self.fragment(&operands[2], B32)?,
                    c: self.fragment(&operands[3], F32)?,
                })
            }
            ("mov", [kind]) => {
                count(2)?;
                let of = Type::parse(kind).ok_or_else(unknown)?;
                match &operands[1] {
                    Operand::Name(name, dimension) if !self.registers.contains_key(*name) && !self.shared.contains_key(name) => {
                        let (special, bytes) = special(name, *dimension).ok_or_else(|| format!("{name} is no register"))?;
                        if of.bytes != bytes || !matches!(of.class, ValueClass::Bits | ValueClass::Unsigned) {
                            return Err(format!("{name} has another type than the instruction"));
                        }
                        Ok(InstructionEffect::Special(special, self.target(&operands[0], of)?))
                    }
                    _ => self.compute("mov", of, operands),
                }
            }
            ("cvt", [rounding @ .., to, from]) if rounding.len() < 2 => {
                count(2)?;
                let (to, from) = (Type::parse(to).ok_or_else(unknown)?, Type::parse(from).ok_or_else(unknown)?);
                let operation = convert(rounding.first().copied(), to, from).ok_or_else(unknown)?;
                let result = self.target(&operands[0], to)?;
                Ok((operation.function, result, &[self.source(&operands[1], from)?][..]).into())
            }
            (_, [rest @ .., kind]) => {
                let name = [&[*opcode], rest].concat().join(".");
                let of = Type::parse(kind).ok_or_else(unknown)?;
                find(&name, of).ok_or_else(unknown)?;
                self.compute(&name, of, operands)
            }
            (_, []) => Err(unknown()),
        }
    }

    /// Decode an instruction that uses only registers.
    fn compute(&mut self, name: &str, of: Type, operands: &[Operand<'t>]) -> Result<InstructionEffect, Why> {
        let operation = find(name, of).ok_or_else(|| format!("{name} is not known for this type"))?;
        let [to, from @ ..] = operands else {
            return Err("operands are expected".to_owned());
        };
        if from.len() != operation.operands.len() {
            return Err(format!("{} operands are expected", operation.operands.len() + 1));
        }
        let to = self.target(to, operation.result)?;
        let sources = from.iter().zip(&operation.operands);
        let sources: Vec<PlaceNumber> = sources
            .map(|(operand, of)| self.source(operand, *of))
            .collect::<Result<_, _>>()?;
        Ok((operation.function, to, sources.as_slice()).into())
    }

    /// Return the registers of a load or a store, which may be wider than the type if they are integers.
    fn values(&mut self, operand: &Operand<'t>, of: Type, count: usize, read: bool) -> Result<[PlaceNumber; 4], Why> {
        let mut places = [0; 4];
        match (operand, count) {
            (Operand::Vector(names), count) if names.len() == count && count > 1 => {
                for (place, name) in places.iter_mut().zip(names) {
                    *place = self.wide(name, of)?;
                }
            }
            (Operand::Name(name, None), 1) => places[0] = self.wide(name, of)?,
            (constant, 1) if read => places[0] = self.source(constant, of)?,
            _ => return Err("other registers are expected".to_owned()),
        }
        Ok(places)
    }

    fn wide(&self, name: &str, of: Type) -> Result<PlaceNumber, Why> {
        let (_, declared) = *self.registers.get(name).ok_or_else(|| format!("{name} is no register"))?;
        let wider = Type {
            bytes: declared.bytes,
            ..of
        };
        if declared.bytes > of.bytes && of.class != ValueClass::Float && declared.class != ValueClass::Float {
            self.place(name, wider)
        } else {
            self.place(name, of)
        }
    }

    /// Decode a load. `None` if it is not known.
    fn load(&mut self, modifiers: &[&str], kind: &str, operands: &[Operand<'t>]) -> Result<Option<InstructionEffect>, Why> {
        let Some(of) = Type::parse(kind) else { return Ok(None) };
        if modifiers == ["param"] {
            let Operand::Address(name, 0) = operands[1] else {
                return Err("the name of a parameter is expected".to_owned());
            };
            let parameter = self.parameters.iter().find(|parameter| parameter.name == name);
            let parameter = parameter.ok_or_else(|| format!("{name} is no parameter"))?;
            if parameter.bytes as u64 != of.bytes {
                return Err(format!("{name} has another size"));
            }
            return Ok(Some(InstructionEffect::Parameter {
                to: self.target(&operands[0], of)?,
                offset: parameter.offset,
                bytes: parameter.bytes,
            }));
        }
        let Some((space, count)) = memory(modifiers) else {
            return Ok(None);
        };
        let to = self.values(&operands[0], of, count, false)?;
        let widths = match &operands[0] {
            Operand::Name(name, None) => self.registers[*name].1.bytes,
            _ => of.bytes,
        };
        Ok(Some(InstructionEffect::Load {
            from: self.address(&operands[1], space, of, count)?,
            to,
            sign: match of.class {
                ValueClass::Signed => 64 - 8 * of.bytes as u32,
                _ => 0,
            },
            mask: Type { bytes: widths, ..of }.mask(),
        }))
    }

    fn address(&mut self, operand: &Operand<'t>, space: Space, of: Type, count: usize) -> Result<MemoryOperand, Why> {
        let Operand::Address(base, offset) = *operand else {
            return Err("an address in brackets is expected".to_owned());
        };
        if of.bytes == 0 {
            return Err("a predicate cannot be in memory".to_owned());
        }
        let base = match (space, self.shared.get(base)) {
            (Space::Shared, Some(start)) => self.constant(*start)?,
            (Space::Shared, None) => self.place(base, B32).or_else(|_| self.place(base, U64))?,
            (Space::Global, _) => self.place(base, U64)?,
        };
        Ok(MemoryOperand {
            space,
            base,
            offset: offset as u64,
            bytes: of.bytes,
            count,
        })
    }

    /// Decode an atomic instruction. `None` if it is not known.
    fn atomic(
        &mut self,
        returns: bool,
        space: &str,
        name: &str,
        of: Type,
        operands: &[Operand<'t>],
    ) -> Result<Option<InstructionEffect>, Why> {
        let space = if space == "global" { Space::Global } else { Space::Shared };
        let (to, rest) = match (returns, operands) {
            (true, [to, rest @ ..]) => (Some(self.target(to, of)?), rest),
            (_, rest) => (None, rest),
        };
        match (name, to, rest) {
            ("cas", Some(to), [at, compare, new]) if of.class == ValueClass::Bits && of.bytes >= 4 => {
                Ok(Some(InstructionEffect::Swap {
                    at: self.address(at, space, of, 1)?,
                    compare: self.source(compare, of)?,
                    new: self.source(new, of)?,
                    to,
                }))
            }
            (_, to, [at, operand]) => {
                let Some(function) = atomic(name, of) else { return Ok(None) };
                // `red` has no exchange.
                if name == "exch" && !returns {
                    return Ok(None);
                }
                Ok(Some(InstructionEffect::Atomic {
                    at: self.address(at, space, of, 1)?,
                    function,
                    operand: self.source(operand, of)?,
                    to,
                }))
            }
            _ => Ok(None),
        }
    }

    /// Return the registers of a part of a matrix.
    fn fragment<const N: usize>(&self, operand: &Operand<'t>, of: Type) -> Result<[PlaceNumber; N], Why> {
        let Operand::Vector(names) = operand else {
            return Err("registers in braces are expected".to_owned());
        };
        let places = names.iter().map(|name| self.place(name, of)).collect::<Result<Vec<_>, _>>()?;
        places.try_into().map_err(|_| format!("{N} registers are expected"))
    }

    /// Resolve branches and constants.
    pub(crate) fn finish(mut self, reader: &TokenReader<'t>) -> Result<Kernel, Error> {
        for (at, label) in std::mem::take(&mut self.branches) {
            let line = self.code[at].line;
            let target = self.labels.get(label);
            let target = target.ok_or_else(|| reader.error_at(line, format!("{label} is no label")))?;
            self.code[at].what = InstructionEffect::Branch(*target);
        }
        // The end of the body is the end of the thread.
        self.code.push(Instruction {
            guard: None,
            what: InstructionEffect::Return,
            line: reader.line(),
        });
        let registers = self.registers.len();
        let first = registers as PlaceNumber;
        let lowest = PlaceNumber::MAX - self.constants.len() as PlaceNumber;
        let resolve = |place: &mut PlaceNumber| {
            if *place > lowest {
                *place = first + (PlaceNumber::MAX - *place);
            }
        };
        for instruction in &mut self.code {
            instruction.what.places(resolve);
        }
        let mut masks = vec![0; registers];
        for (place, of) in self.registers.values() {
            masks[*place as usize] = of.mask();
        }
        Ok(Kernel {
            name: String::new(),
            parameters: Vec::new(),
            shared: self.shared_end,
            masks,
            constants: self.constants,
            code: self.code,
        })
    }
}

/// Read the modifiers of a load or a store before the type. Return the state space, and how many values it has.
fn memory(modifiers: &[&str]) -> Option<(Space, usize)> {
    let modifiers = match modifiers {
        ["volatile", rest @ ..] => rest,
        all => all,
    };
    let (space, rest) = modifiers.split_first()?;
    let space = match *space {
        "global" => Space::Global,
        "shared" => Space::Shared,
        _ => return None,
    };
    match rest {
        [] => Some((space, 1)),
        ["v2"] => Some((space, 2)),
        ["v4"] => Some((space, 4)),
        _ => None,
    }
}

/// Find a special register. Return its size, too.
fn special(name: &str, dimension: Option<&str>) -> Option<(Special, u64)> {
    let Some(dimension) = dimension else {
        return Some(match name {
            "%laneid" => (Special::Lane, 4),
            "%warpid" => (Special::Warp, 4),
            "%smid" => (Special::Multiprocessor, 4),
            "%globaltimer" => (Special::Timer, 8),
            "%clock" => (Special::Clock32, 4),
            "%clock64" => (Special::Clock64, 8),
            _ => return None,
        });
    };
    let dimension = ["x", "y", "z"].iter().position(|known| *known == dimension)?;
    Some(match name {
        "%tid" => (Special::Thread(dimension), 4),
        "%ntid" => (Special::BlockSize(dimension), 4),
        "%ctaid" => (Special::Block(dimension), 4),
        "%nctaid" => (Special::GridSize(dimension), 4),
        _ => return None,
    })
}

impl InstructionEffect {
    /// Change each place.
    fn places(&mut self, mut change: impl FnMut(&mut PlaceNumber)) {
        match self {
            InstructionEffect::One(_, to, a) => [to, a].into_iter().for_each(change),
            InstructionEffect::Two(_, to, a, b) => [to, a, b].into_iter().for_each(change),
            InstructionEffect::Three(_, to, a, b, c) => [to, a, b, c].into_iter().for_each(change),
            InstructionEffect::Special(_, to) | InstructionEffect::Parameter { to, .. } => change(to),
            InstructionEffect::Load { from, to, .. } => {
                change(&mut from.base);
                to.iter_mut().take(from.count).for_each(change);
            }
            InstructionEffect::Store { to, from } => {
                change(&mut to.base);
                from.iter_mut().take(to.count).for_each(change);
            }
            InstructionEffect::Atomic { at, operand, to, .. } => {
                change(&mut at.base);
                change(operand);
                to.iter_mut().for_each(change);
            }
            InstructionEffect::Swap { at, compare, new, to } => [&mut at.base, compare, new, to].into_iter().for_each(change),
            InstructionEffect::Multiply { d, a, b, c } => {
                let all = d.iter_mut().chain(a).chain(b).chain(c);
                all.for_each(change);
            }
            InstructionEffect::Branch(_)
            | InstructionEffect::Barrier
            | InstructionEffect::Return
            | InstructionEffect::Nothing => {}
        }
    }
}
