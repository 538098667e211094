//! The words of a PTX text.

use logos::{Lexer, Logos};

use crate::Error;

/// A word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Logos)]
#[logos(skip r"[ \t\r\n\f]+")]
#[logos(skip(r"//[^\n]*", allow_greedy = true))]
#[logos(skip r"/\*([^*]|\*+[^*/])*\*+/")]
pub(crate) enum Token<'t> {
    /// A name, such as `add`, `LOOP`, or `%x`.
    #[regex(r"[A-Za-z_$%][A-Za-z0-9_$]*")]
    Name(&'t str),
    /// A directive or a modifier, without its dot.
    #[regex(r"\.[A-Za-z_][A-Za-z0-9_]*", |word| &word.slice()[1..])]
    Dot(&'t str),
    /// The bits of a number of 32 bits in hexadecimal digits, such as `0f3F800000`.
    #[regex(r"0[fF][0-9a-fA-F]{8}", |word| u32::from_str_radix(&word.slice()[2..], 16).ok())]
    Float(u32),
    /// The same of 64 bits.
    #[regex(r"0[dD][0-9a-fA-F]{16}", |word| u64::from_str_radix(&word.slice()[2..], 16).ok())]
    Double(u64),
    /// An integer.
    #[regex(r"0[xX][0-9a-fA-F]+U?", |word| u64::from_str_radix(word.slice()[2..].trim_end_matches('U'), 16).ok())]
    #[regex(r"[0-9]+U?", |word| word.slice().trim_end_matches('U').parse().ok())]
    Integer(u64),
    /// A version, such as `6.0`.
    #[regex(r"[0-9]+\.[0-9]+", |word| version(word.slice()))]
    Version((u32, u32)),
    /// Anything else has one character.
    #[regex(r"[{}()\[\]<>,;:@!+\-|]", |word| word.slice().chars().next())]
    Mark(char),
}

fn version(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Reads words, and knows where it is.
pub(crate) struct TokenReader<'t> {
    text: &'t str,
    lexer: Lexer<'t, Token<'t>>,
    ahead: Option<Token<'t>>,
}

impl<'t> TokenReader<'t> {
    pub(crate) fn new(text: &'t str) -> Result<TokenReader<'t>, Error> {
        let mut reader = TokenReader {
            text,
            lexer: Token::lexer(text),
            ahead: None,
        };
        reader.step()?;
        Ok(reader)
    }

    /// Return an error at the next word.
    pub(crate) fn error(&self, why: impl Into<String>) -> Error {
        self.error_at(self.line(), why)
    }

    /// Return the error that the next word is not what must follow.
    fn expected(&self, what: &str) -> Error {
        match self.ahead {
            Some(_) => self.error(format!("{what} is expected")),
            None => self.error(format!("{what} is expected, but the text ends too early")),
        }
    }

    pub(crate) fn error_at(&self, line: usize, why: impl Into<String>) -> Error {
        Error {
            line,
            why: why.into(),
            text: self.text.lines().nth(line - 1).unwrap_or("").trim().to_owned(),
        }
    }

    /// Return the line of the next word.
    pub(crate) fn line(&self) -> usize {
        let at = self.lexer.span().start.min(self.text.len());
        self.text[..at].matches('\n').count() + 1
    }

    fn step(&mut self) -> Result<(), Error> {
        self.ahead = match self.lexer.next() {
            Some(Ok(token)) => Some(token),
            Some(Err(())) => return Err(self.error(format!("{:?} is no word of PTX", self.lexer.slice()))),
            None => None,
        };
        Ok(())
    }

    /// Return the next word, and stay before it.
    pub(crate) fn peek(&self) -> Option<Token<'t>> {
        self.ahead
    }

    /// Return the next word.
    pub(crate) fn next(&mut self) -> Result<Token<'t>, Error> {
        let token = self.ahead.ok_or_else(|| self.error("the text ends too early"))?;
        self.step()?;
        Ok(token)
    }

    /// Skip the next word if it is this mark.
    pub(crate) fn takes(&mut self, mark: char) -> Result<bool, Error> {
        let is = self.ahead == Some(Token::Mark(mark));
        if is {
            self.step()?;
        }
        Ok(is)
    }

    /// Skip the next word, which must be this mark.
    pub(crate) fn mark(&mut self, mark: char) -> Result<(), Error> {
        if self.takes(mark)? {
            Ok(())
        } else {
            Err(self.expected(&format!("{mark:?}")))
        }
    }

    pub(crate) fn name(&mut self) -> Result<&'t str, Error> {
        match self.ahead {
            Some(Token::Name(name)) => {
                self.step()?;
                Ok(name)
            }
            _ => Err(self.expected("a name")),
        }
    }

    pub(crate) fn dot(&mut self) -> Result<&'t str, Error> {
        match self.ahead {
            Some(Token::Dot(name)) => {
                self.step()?;
                Ok(name)
            }
            _ => Err(self.expected("a word with a dot")),
        }
    }

    /// Skip the next word, which must be this one with a dot.
    pub(crate) fn directive(&mut self, wanted: &str) -> Result<(), Error> {
        if self.ahead == Some(Token::Dot(wanted)) {
            self.step()
        } else {
            Err(self.expected(&format!(".{wanted}")))
        }
    }

    pub(crate) fn integer(&mut self) -> Result<u64, Error> {
        match self.ahead {
            Some(Token::Integer(number)) => {
                self.step()?;
                Ok(number)
            }
            _ => Err(self.expected("an integer")),
        }
    }
}
