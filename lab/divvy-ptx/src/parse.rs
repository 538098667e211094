//! Reads a module: directives, the heads of entries, and the statements of their bodies.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::decode::Body;
use crate::instruction::{Kernel, Parameter};
use crate::statement::{Operand, Statement};
use crate::token::{Token, TokenReader};
use crate::types::Type;
use crate::{EntryCode, Error, Module, PtxVersion};

/// More registers than a thread of a GPU has, and few enough for the numbers of places.
const MOST_REGISTERS: usize = 4096;
/// The shared memory that a kernel can declare (PTX ISA, ".shared"; CUDA C Programming Guide, "Compute Capabilities").
const MOST_SHARED: u64 = 48 << 10;

/// Read a module.
pub(crate) fn module(text: &str, unread: &dyn Fn(&str) -> bool) -> Result<Module, Error> {
    let mut reader = TokenReader::new(text)?;
    reader.directive("version")?;
    let Some(Token::Version((major, minor))) = reader.peek() else {
        return Err(reader.error("a version such as 6.0 is expected"));
    };
    let version = PtxVersion { major, minor };
    reader.next()?;
    reader.directive("target")?;
    let line = reader.line();
    let target = reader.name()?;
    let target = target.strip_prefix("sm_").and_then(|number| number.parse().ok());
    let target = target.ok_or_else(|| reader.error_at(line, "a target such as sm_30 is expected"))?;
    reader.directive("address_size")?;
    if reader.integer()? != 64 {
        return Err(reader.error("addresses must have 64 bits"));
    }
    let mut entries = BTreeMap::new();
    while reader.peek().is_some() {
        let mut directive = reader.dot()?;
        if directive == "visible" {
            directive = reader.dot()?;
        }
        match directive {
            "entry" => {
                let line = reader.line();
                let name = reader.name()?;
                let parameters = parameters(&mut reader)?;
                let code = if unread(name) {
                    skip_body(&mut reader)?;
                    EntryCode::Unread
                } else {
                    EntryCode::Kernel(Arc::new(kernel(&mut reader, name, parameters)?))
                };
                if entries.insert(name.to_owned(), code).is_some() {
                    return Err(reader.error_at(line, format!("{name} is defined twice")));
                }
            }
            // A variable of the module. An instruction that names it is refused.
            "global" => while reader.next()? != Token::Mark(';') {},
            other => return Err(reader.error(format!("the directive .{other} is not known"))),
        }
    }
    Ok(Module {
        version,
        target,
        entries,
    })
}

fn parameters(reader: &mut TokenReader<'_>) -> Result<Vec<Parameter>, Error> {
    let mut parameters: Vec<Parameter> = Vec::new();
    if !reader.takes('(')? {
        return Ok(parameters);
    }
    if reader.takes(')')? {
        return Ok(parameters);
    }
    loop {
        reader.directive("param")?;
        let kind = reader.dot()?;
        let of = Type::parse(kind).filter(|of| of.bytes > 0);
        let bytes = of
            .ok_or_else(|| reader.error(format!(".{kind} is no type of a parameter")))?
            .bytes as usize;
        let name = reader.name()?;
        let end = parameters.last().map_or(0, |last| last.offset + last.bytes);
        parameters.push(Parameter {
            name: name.to_owned(),
            kind: kind.to_owned(),
            offset: end.next_multiple_of(bytes),
            bytes,
        });
        if !reader.takes(',')? {
            break;
        }
    }
    reader.mark(')')?;
    Ok(parameters)
}

fn skip_body(reader: &mut TokenReader<'_>) -> Result<(), Error> {
    reader.mark('{')?;
    let mut open = 1;
    while open > 0 {
        match reader.next()? {
            Token::Mark('{') => open += 1,
            Token::Mark('}') => open -= 1,
            _ => {}
        }
    }
    Ok(())
}

fn kernel(reader: &mut TokenReader<'_>, name: &str, parameters: Vec<Parameter>) -> Result<Kernel, Error> {
    let mut body = Body::new(&parameters);
    reader.mark('{')?;
    loop {
        match reader.peek() {
            Some(Token::Mark('}')) => break,
            Some(Token::Dot("reg")) => registers(reader, &mut body)?,
            Some(Token::Dot("shared")) => shared(reader, &mut body)?,
            Some(Token::Dot(other)) => return Err(reader.error(format!("the directive .{other} is not known"))),
            _ => statement(reader, &mut body)?,
        }
    }
    let decoded = body.finish(reader)?;
    reader.mark('}')?;
    Ok(Kernel {
        name: name.to_owned(),
        parameters,
        ..decoded
    })
}

/// Read a declaration such as `.reg .b32 %a, %b<4>;`.
fn registers<'t>(reader: &mut TokenReader<'t>, body: &mut Body<'t, '_>) -> Result<(), Error> {
    reader.directive("reg")?;
    let kind = reader.dot()?;
    let of = Type::parse(kind).filter(|of| of.bytes != 1);
    let of = of.ok_or_else(|| reader.error(format!(".{kind} is no type of a register")))?;
    loop {
        let line = reader.line();
        let name = reader.name()?;
        let names: Vec<String> = if reader.takes('<')? {
            let count = reader.integer()?;
            reader.mark('>')?;
            let count = usize::try_from(count).ok().filter(|count| *count <= MOST_REGISTERS);
            let count = count.ok_or_else(|| reader.error_at(line, "these are too many registers"))?;
            (0..count).map(|number| format!("{name}{number}")).collect()
        } else {
            vec![name.to_owned()]
        };
        for name in names {
            body.register(name, of).map_err(|why| reader.error_at(line, why))?;
        }
        if body.registers() > MOST_REGISTERS {
            return Err(reader.error_at(line, "these are too many registers"));
        }
        if !reader.takes(',')? {
            return reader.mark(';');
        }
    }
}

/// Read a declaration such as `.shared .align 4 .b8 tile[1024];`.
fn shared<'t>(reader: &mut TokenReader<'t>, body: &mut Body<'t, '_>) -> Result<(), Error> {
    reader.directive("shared")?;
    let line = reader.line();
    let mut align = None;
    let mut kind = reader.dot()?;
    if kind == "align" {
        align = Some(reader.integer()?);
        kind = reader.dot()?;
    }
    let of = Type::parse(kind).filter(|of| of.bytes > 0);
    let bytes = of
        .ok_or_else(|| reader.error(format!(".{kind} is no type of a variable")))?
        .bytes;
    let name = reader.name()?;
    let count = if reader.takes('[')? {
        let count = reader.integer()?;
        reader.mark(']')?;
        count
    } else {
        1
    };
    reader.mark(';')?;
    let align = align.unwrap_or(bytes);
    let size = bytes.checked_mul(count).filter(|size| *size > 0 && *size <= MOST_SHARED);
    match size {
        Some(size) if align.is_power_of_two() && align <= 128 => body
            .shared(name, size, align, MOST_SHARED)
            .map_err(|why| reader.error_at(line, why)),
        _ => Err(reader.error_at(line, "shared memory of this size or alignment is not possible")),
    }
}

/// Read a label or an instruction.
fn statement<'t>(reader: &mut TokenReader<'t>, body: &mut Body<'t, '_>) -> Result<(), Error> {
    let line = reader.line();
    let guard = if reader.takes('@')? {
        let wanted = !reader.takes('!')?;
        Some((reader.name()?, wanted))
    } else {
        None
    };
    let opcode = reader.name()?;
    if guard.is_none() && reader.takes(':')? {
        return body.label(opcode).map_err(|why| reader.error_at(line, why));
    }
    let mut modifiers = Vec::new();
    while let Some(Token::Dot(modifier)) = reader.peek() {
        modifiers.push(modifier);
        reader.next()?;
    }
    let mut operands = Vec::new();
    if !reader.takes(';')? {
        loop {
            operands.push(operand(reader)?);
            if !reader.takes(',')? {
                break;
            }
        }
        reader.mark(';')?;
    }
    let statement = Statement {
        line,
        guard,
        opcode,
        modifiers,
        operands,
    };
    body.add(&statement).map_err(|why| reader.error_at(line, why))
}

fn operand<'t>(reader: &mut TokenReader<'t>) -> Result<Operand<'t>, Error> {
    if reader.takes('[')? {
        let base = reader.name()?;
        let offset = match reader.peek() {
            Some(Token::Mark('+')) => {
                reader.next()?;
                signed(reader)?
            }
            Some(Token::Mark('-')) => signed(reader)?,
            _ => 0,
        };
        reader.mark(']')?;
        let offset = i64::try_from(offset).map_err(|_| reader.error("this offset is too large"))?;
        return Ok(Operand::Address(base, offset));
    }
    if reader.takes('{')? {
        let mut names = vec![reader.name()?];
        while reader.takes(',')? {
            names.push(reader.name()?);
        }
        reader.mark('}')?;
        return Ok(Operand::Vector(names));
    }
    match reader.peek() {
        Some(Token::Float(bits)) => {
            reader.next()?;
            Ok(Operand::Float(bits))
        }
        Some(Token::Double(bits)) => {
            reader.next()?;
            Ok(Operand::Double(bits))
        }
        Some(Token::Integer(_) | Token::Mark('-')) => Ok(Operand::Integer(signed(reader)?)),
        _ => {
            let name = reader.name()?;
            let Some(Token::Dot(dimension)) = reader.peek() else {
                return Ok(Operand::Name(name, None));
            };
            reader.next()?;
            Ok(Operand::Name(name, Some(dimension)))
        }
    }
}

fn signed(reader: &mut TokenReader<'_>) -> Result<i128, Error> {
    let negative = reader.takes('-')?;
    let number = i128::from(reader.integer()?);
    Ok(if negative { -number } else { number })
}
